"""Wraps a model as its launch does, on fake tensors: accelerate's own FSDP2 code, DDP's buckets, ZeRO's partitions."""

from __future__ import annotations

import operator
import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch

from .ddp import Buckets
from .streams import Streams
from .zero import Label, Zero
from .zero3 import Zero3, linear_saves_parameters

_SHARED = "_ckpt_ft_shared"  # attribute of the model with our model of DDP's reducer or DeepSpeed's engine
_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_CONTAINERS = (dict, OrderedDict, set)  # types of the containers of a module's parameters, buffers and hooks


def share(model: nn.Module, launch: Launch, mesh: DeviceMesh) -> list[torch.Tensor]:
    """Wrap `model` in place as `accelerate launch` does; returns the tensors that communication holds from then on.

    DeepSpeed needs the optimizer too: see `initialize`.

    Raises:
        UserError: accelerate refuses it.
    """
    if launch.stage:
        return []
    if launch.strategy == "ddp":
        buckets = Buckets(model, mesh.get_group(), as_view=launch.gradient_as_bucket_view)
        setattr(model, _SHARED, buckets)
        return [bucket.flat for bucket in buckets.buckets]
    _fsdp2(model, launch, mesh)
    return []


def initialize(
    model: nn.Module, optimizer: Any, launch: Launch, mesh: DeviceMesh, streams: Streams, label: Label
) -> Zero | Zero3:
    """Like `deepspeed.initialize`: the model in the launch's precision, the optimizer over this rank's part of it.

    label: called with tensors that the model does not hold, and their category.

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
    sizes = getattr(config, "hidden_sizes", None)
    hidden = getattr(config, "hidden_size", max(sizes) if sizes else None)
    launch = replace(launch, zero=launch.zero.filled(launch.stage, hidden))
    more = launch, mesh.get_group(), streams, label
    zero = Zero3(model, optimizer, *more) if launch.stage == 3 else Zero(optimizer, *more)
    setattr(model, _SHARED, zero)
    return zero


@contextmanager
def library_patches(launch: Launch | None) -> Iterator[None]:
    """Patches torch as the launch's library does."""
    with linear_saves_parameters() if launch is not None and launch.stage == 3 else nullcontext():
        yield


@contextmanager
def whole_again(model: nn.Module) -> Iterator[None]:
    """Restores the wrapping of `model` on exit: its modules get back their classes, hooks and attributes."""
    before = [(module, type(module), dict(vars(module)), _contents(module)) for module in model.modules()]
    states = [_module_state_mapping.get(module) for module, *_ in before]
    try:
        yield
    finally:
        after = [_module_state_mapping.get(module) for module, *_ in before]
        shared = hasattr(model, _SHARED) or any(map(operator.is_not, states, after))
        for (module, kind, attributes, contents), state in zip(before, states, strict=True) if shared else ():
            module.__class__ = kind
            for name in [name for name in vars(module) if name not in attributes]:
                del module.__dict__[name]
            for name, value in attributes.items():
                if type(value) in _CONTAINERS:
                    value.clear()
                    value.update(contents.get(name, ()))
                module.__dict__[name] = value
            _module_state_mapping.pop(module, None)
            if state is not None:
                _module_state_mapping[module] = state


@contextmanager
def without_synchronisation(model: nn.Module) -> Iterator[None]:
    """Disables gradient synchronisation inside (DDP's and FSDP2's `no_sync`)."""
    shared = getattr(model, _SHARED, None)
    if shared is not None:
        shared.synchronises = False
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
    elif isinstance(model, DistributedDataParallel):
        model.require_backward_grad_sync = False
    try:
        yield
    finally:
        if shared is not None:
            shared.synchronises = True
        elif isinstance(model, FSDPModule):
            model.set_requires_gradient_sync(True)
        elif isinstance(model, DistributedDataParallel):
            model.require_backward_grad_sync = True


def _contents(module: nn.Module) -> dict[str, Any]:
    """Copies of the non-empty containers of `module`, which has ten of them."""
    return {name: value.copy() for name, value in vars(module).items() if type(value) in _CONTAINERS and value}


def _is_packed(layer: nn.Linear) -> bool:
    """Whether one element of its weight packs several weights, as in 4 bits."""
    return layer.weight.numel() < layer.in_features * layer.out_features


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
    packed: list[nn.Linear] = [m for m in model.modules() if isinstance(m, nn.Linear) and _is_packed(m)]
    # bitsandbytes packs into uint8 by default, which accelerate does not shard
    plugin.ignored_modules = [m for m in packed if not m.weight.is_floating_point()] or None
    plugin.cpu_offload = OffloadPolicy()
    plugin.mixed_precision_policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=("dp_shard",)),
        device=torch.device("cpu"),
        mixed_precision="no" if packed else launch.mixed_precision,  # otherwise trained parameters are cast to fp32
        is_main_process=False,
    )
    try:
        fsdp2_prepare_model(accelerator, model)
    except ValueError as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise UserError(
            f"launch: FSDP2 cannot wrap {type(model).__name__}: {reason}; name the classes of its own blocks as "
            "fsdp_transformer_layer_cls_to_wrap in the launch's file"
        ) from error
