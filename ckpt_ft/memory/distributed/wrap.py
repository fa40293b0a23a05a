"""Wraps a model as its launch does, on fake tensors: accelerate's own FSDP2 code, DDP's buckets, ZeRO's partitions."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ckpt_ft.compat.distributed import flatten
from ckpt_ft.compat.libraries import attention_of
from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import no_modes
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins.float8 import Float8Linear

from . import sequence_parallel
from .ddp import Buckets
from .fsdp2 import IN_HOST_MEMORY
from .streams import Streams
from .zero import Zero, host_optimizer
from .zero3 import Zero3, linear_saves_parameters

_SHARED = "_ckpt_ft_shared"  # attribute of the model with our model of DDP's reducer or DeepSpeed's engine
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp8": torch.bfloat16}


def share(model: nn.Module, launch: Launch, mesh: DeviceMesh, undo: ExitStack) -> list[torch.Tensor]:
    """Wrap `model` in place as `accelerate launch` does; returns the tensors that communication holds from then on.

    DeepSpeed also needs `initialize`. `undo` gets what must be put back besides the modules' own attributes.

    Raises:
        UserError: accelerate refuses it.
    """
    sequence_parallel.check(model, launch)
    if launch.cp > 1:
        sequence_parallel.without_masks(model)
    if launch.by_transformers:
        by_transformers(model, launch, mesh, undo)
    if launch.stage or launch.by_transformers:
        return []
    if launch.strategy == "ddp":
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        buckets = Buckets(trained, mesh.get_group(), as_view=launch.gradient_as_bucket_view)
        setattr(model, _SHARED, buckets)
        return [bucket.flat for bucket in buckets.buckets]
    _fsdp2(model, launch, sharding_mesh(mesh, launch))
    return []


def initialize(
    model: nn.Module, optimizer: Any, launch: Launch, mesh: DeviceMesh, streams: Streams, recorder: Recorder
) -> Zero | Zero3:
    """Like `deepspeed.initialize`: the model in the launch's precision, the optimizer over this rank's part of it.

    Tensors that the model does not hold are labelled in `recorder`.

    Raises:
        UserError: there is no optimizer, or it trains nothing.
    """
    if optimizer is None:
        raise UserError(f"launch {launch.strategy}: it shards the states of an optimizer, and there is none")
    if not any(p.requires_grad for group in optimizer.param_groups for p in group["params"]):
        raise UserError(f"launch {launch.strategy}: no parameter is trained, so there is nothing to shard")
    if dtype := _DTYPES.get(launch.mixed_precision):
        for parameter in model.parameters():
            if parameter.is_floating_point():
                parameter.data = parameter.data.to(dtype)
    config = getattr(model, "config", None)
    config = config if hasattr(config, "hidden_size") else getattr(config, "text_config", config)
    sizes = getattr(config, "hidden_sizes", None)
    hidden = getattr(config, "hidden_size", max(sizes) if sizes else None)
    launch = replace(launch, zero=launch.zero.filled(launch.stage, hidden))
    group: Any = mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD
    more = launch, group, streams, recorder
    if launch.zero.offload_optimizer:
        optimizer = host_optimizer(optimizer)
    zero = Zero3(model, optimizer, *more) if launch.stage == 3 else Zero(optimizer, *more)
    setattr(model, _SHARED, zero)
    return zero


@contextmanager
def library_patches(model: Any, launch: Launch, mesh: DeviceMesh) -> Iterator[None]:
    """Patches torch and transformers as the launch's libraries do while `model` trains."""
    with ExitStack() as stack:
        if launch.stage == 3:
            stack.enter_context(linear_saves_parameters())
        if launch.by_transformers:  # torch's remarks on transformers' code, which a run prints too
            stack.enter_context(warnings.catch_warnings())
            warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
            stack.enter_context(patched(redistribution_log=True))
        if launch.ep > 1:
            stack.enter_context(patched(exchange_tokens=_exchanged))
        if launch.cp > 1:
            stack.enter_context(sequence_parallel.ring_attention(mesh["cp"], launch.rotation))
        if launch.sp > 1:
            implementation = attention_of(model.config.get_text_config())
            stack.enter_context(sequence_parallel.ulysses(mesh["sp"], implementation))
        yield


def _exchanged(given: torch.Tensor, receives: list[int], sends: list[int], group: Any) -> torch.Tensor:
    """all_to_all_single_autograd, waited for: a fake tensor that waits at its first use loses its gradient."""
    ops = torch.ops._c10d_functional
    received: torch.Tensor = ops.wait_tensor(ops.all_to_all_single(given, receives, sends, group.group_name))
    return received


def by_transformers(model: Any, launch: Launch, mesh: DeviceMesh, undo: ExitStack) -> None:
    """Divide weights over "tp", experts over "ep" and all over the other ranks, as transformers does when it loads.

    accelerate 1.15 cannot shard such a model itself: it imports `ReplicateParallel`, which transformers 5.23 does not
    have (accelerator.py: _prepare_tp).

    Raises:
        UserError: transformers refuses it.
    """
    from transformers.distributed.configuration_utils import DistributedConfig
    from transformers.distributed.expert_parallel import apply_expert_parallelism
    from transformers.distributed.fsdp import apply_fully_sharded_data_parallelism
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from ckpt_ft.compat.libraries import parallel_plans

    model = model.get_base_model() if hasattr(model, "peft_config") else model  # which has the plans
    others = launch.processes // launch.tp
    config = DistributedConfig(
        tp_size=launch.tp, fsdp_size=others // launch.dp_replicate, dp_replicate_size=launch.dp_replicate,
        ep_size=launch.ep, fsdp_mixed_precision=launch.mixed_precision == "bf16",
    )  # fmt: skip
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:  # transformers ties them afterwards
        head.weight = nn.Parameter(head.weight.detach(), head.weight.requires_grad)
    tp_plan, ep_plan, fsdp_plan = parallel_plans(model, config)
    if launch.tp > 1:
        with _below_policies(model, undo):
            apply_tensor_parallelism(model, mesh["tp"], tp_plan)
    experts = None
    if launch.ep > 1:
        kind, names = mesh.device_type, ("dp_replicate", "efsdp", "ep")
        with no_modes():  # a mesh reads its own ranks
            experts = init_device_mesh(kind, (launch.dp_replicate, config.efsdp_size, launch.ep), mesh_dim_names=names)
            alone = mesh
            if launch.tp == 1:
                alone = init_device_mesh(kind, (launch.processes, 1), mesh_dim_names=("dp", "tp"))
        try:
            apply_expert_parallelism(model, experts["ep"], alone["tp"], ep_plan)
        except ValueError as error:
            raise UserError(f"launch ep {launch.ep}: {one_line(error)}") from error
    model.tie_weights()
    if others > 1:

        def get_mesh(names: Any) -> DeviceMesh:
            return experts[names] if experts is not None and "efsdp" in names else sharding_mesh(mesh, launch)

        model.config.distributed_config = config
        try:
            apply_fully_sharded_data_parallelism(model, SimpleNamespace(get_mesh=get_mesh), fsdp_plan, ep_plan)
        finally:
            del model.config.distributed_config


@contextmanager
def _below_policies(model: nn.Module, undo: ExitStack) -> Iterator[None]:
    """Forwards that are replaced meanwhile are the models' own, below those of a policy, which a run applies later."""
    policies: list[tuple[Any, Any, Any]] = []
    for module in model.modules():
        outer: Any = vars(module).get("forward")
        inner = outer
        while getattr(getattr(inner, "forward", None), "module", None) is module:
            inner = inner.forward
        if getattr(outer, "module", None) is module:
            policies.append((module, outer, inner))
            undo.callback(setattr, inner, "forward", inner.forward)
            module.forward = inner.forward
    yield
    for module, outer, inner in policies:
        inner.forward, module.forward = module.forward, outer


def _by_mesh(parameters: Iterable[Any]) -> list[list[Any]]:
    """Groups tensors by the device mesh that they are divided over, plain ones together."""
    groups: dict[Any, list[Any]] = {}
    for parameter in parameters:
        groups.setdefault(getattr(parameter, "device_mesh", None), []).append(parameter)
    return list(groups.values())


def separate_meshes(optimizer: Any) -> None:
    """Give each device mesh a parameter group of its own, as Trainer does: fused and foreach kernels take one mesh."""
    if isinstance(optimizer, torch.optim.Optimizer):
        optimizer.param_groups[:] = [
            {**group, "params": alike} for group in optimizer.param_groups for alike in _by_mesh(group["params"])
        ]


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float) -> torch.Tensor:
    """Clip gradients on several device meshes, by one norm for each, as Trainer does (_mixed_mesh_grad_norm)."""
    groups = _by_mesh(parameter for parameter in parameters if parameter.grad is not None)
    if len(groups) < 2:
        return torch.nn.utils.clip_grad_norm_([p for group in groups for p in group], max_norm)
    norms: list[Any] = [torch.nn.utils.get_total_norm([p.grad for p in group]) for group in groups]
    total = torch.linalg.vector_norm(
        torch.stack([norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms])
    )
    for group in groups:
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def sharding_mesh(mesh: DeviceMesh, launch: Launch) -> DeviceMesh:
    """The part of `mesh` over which FSDP2 shards: its "dp_shard" and "cp" as one dimension, beside "dp_replicate"."""
    if launch.cp == launch.tp == 1:
        return mesh
    names: tuple[str, ...] = tuple(name for name in ("dp_shard", "cp") if name in launch.mesh)
    if len(names) == 2:
        with no_modes():  # a mesh reads its own ranks
            flatten(mesh[names])("dp_shard_cp")
        names = ("dp_shard_cp",)
    with warnings.catch_warnings():  # accelerate slices a flattened mesh as well
        warnings.filterwarnings("ignore", "Slicing a flattened dim")
        return mesh[("dp_replicate", *names) if launch.dp_replicate > 1 else names]


@contextmanager
def without_synchronisation(model: nn.Module) -> Iterator[None]:
    """Disables gradient synchronisation inside (DDP's and FSDP2's `no_sync`)."""
    _set_synchronisation(model, False)
    try:
        yield
    finally:
        _set_synchronisation(model, True)


def _set_synchronisation(model: nn.Module, on: bool) -> None:
    shared = getattr(model, _SHARED, None)
    if shared is not None:
        shared.synchronises = on
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(on)
    elif isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = on


def _fsdp2(model: nn.Module, launch: Launch, mesh: DeviceMesh) -> None:
    from accelerate.utils import FullyShardedDataParallelPlugin
    from accelerate.utils.fsdp_utils import fsdp2_prepare_model
    from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

    dtype = _DTYPES.get(launch.mixed_precision)
    with patch.dict(os.environ, {"FSDP_VERSION": "2"}):
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=launch.reshard_after_forward,
            auto_wrap_policy="no_wrap" if launch.wrap is None else "transformer_based_wrap",
            transformer_cls_names_to_wrap=list(launch.wrap or ()) or None,
            cpu_ram_efficient_loading=False,
        )
    for layer in [m for m in model.modules() if isinstance(m, Float8Linear)]:
        layer.gathers = launch.float8_gather
        if layer.gathers and launch.offload_params:
            raise UserError(
                "launch: parameters in host memory are predicted to be gathered in bf16; set "
                "enable_fsdp_float8_all_gather: false in fp8_config"
            )
    linears = [module for module in model.modules() if isinstance(module, nn.Linear)]
    packed = [m for m in linears if m.weight.numel() < m.in_features * m.out_features]  # several weights an element
    # bitsandbytes packs into uint8 by default, which accelerate does not shard
    plugin.ignored_modules = [m for m in packed if not m.weight.is_floating_point()] or None
    plugin.cpu_offload = IN_HOST_MEMORY if launch.offload_params else OffloadPolicy()
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        device=torch.device("cpu"),
        mixed_precision="no" if packed else launch.mixed_precision,  # otherwise trained parameters are cast to fp32
        is_main_process=False,
    )
    try:
        fsdp2_prepare_model(accelerator, model)
    except ValueError as error:
        raise UserError(
            f"launch: FSDP2 cannot wrap {type(model).__name__}: {one_line(error).rstrip('.')}; name the classes of "
            "its own blocks as fsdp_transformer_layer_cls_to_wrap in the launch's file"
        ) from error
