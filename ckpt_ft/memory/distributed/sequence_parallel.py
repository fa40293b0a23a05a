"""Sequences shared by several ranks: torch's ring attention (context parallelism), and DeepSpeed's Ulysses.

Ring attention runs torch's own code (torch/distributed/tensor/experimental/_context_parallel/_attention.py), on fake
tensors too: F.scaled_dot_product_attention gets DTensors that are sharded along the sequence. torch knows rings of the
CUDA kernels only; `_RINGS` adds the CPU's flash kernel.

Ulysses (arXiv:2309.14509) follows deepspeed/runtime/sequence_parallel/ulysses_sp.py (0.19.8), whose module needs a
process group of deepspeed.comm: an all-to-all gives each rank all tokens of its share of the heads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.experimental import context_parallel

from ckpt_ft.compat.distributed import ring_options, rings, rings_backward
from ckpt_ft.compat.libraries import DIVIDES_EXPERTS, attention_of
from ckpt_ft.compat.patches import patched, ring
from ckpt_ft.compat.tensors import no_modes
from ckpt_ft.errors import UserError
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins.flash_attention import overridden

aten = torch.ops.aten
_FLASH_ON_CPU = aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_ON_CPU_BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def check(model: nn.Module, launch: Launch) -> None:
    """Raises UserError if the libraries refuse to share the sequences or heads of `model` as `launch` does."""
    config = getattr(model, "config", None)
    split = next((name for name in ("cp", "sp", "tp", "ep") if getattr(launch, name) > 1), "")
    if not split:
        return
    from ckpt_ft.compat.libraries import parallel_plans

    size = getattr(launch, split)
    if config is None or not hasattr(config, "get_text_config"):
        raise UserError(f"launch {split} {size}: {type(model).__name__} is no language model of transformers")
    text = config.get_text_config()
    heads, implementation = getattr(text, "num_attention_heads", 0), attention_of(text)
    of_keys = getattr(text, "num_key_value_heads", None) or heads
    adapted = hasattr(model, "peft_config")
    cp, sp, tp, ep = (getattr(launch, name) > 1 for name in ("cp", "sp", "tp", "ep"))
    windowed, experts = _windowed(text), experts_of(model)
    kind, heads_of_both = type(model).__name__, f"{heads} heads and {of_keys} key-value heads"
    problems = {  # the first that applies is named
        "the batches hold no sequences of tokens": (cp or sp) and getattr(model, "main_input_name", "") != "input_ids",
        "Trainer takes context parallelism with sdpa attention only; set attn_implementation: sdpa":
            cp and implementation != "sdpa",
        "DeepSpeed takes no eager attention; set attn_implementation: sdpa or flash_attention_2":
            sp and implementation == "eager",
        f"{heads_of_both}: DeepSpeed needs multiples of {launch.sp}":
            heads % launch.sp or (of_keys % launch.sp and launch.sp % of_keys),
        f"{heads_of_both} are no multiples of {launch.tp}": heads % launch.tp or of_keys % launch.tp,
        "tensor parallelism of adapters is not predicted": tp and adapted,
        "expert parallelism of adapters in experts is not predicted":
            ep and adapted and any(p.requires_grad and ".experts." in name for name, p in model.named_parameters()),
        "tensor and expert parallelism need transformers 5.23 or newer":
            launch.by_transformers and parallel_plans is None,
        f"transformers has no expert-parallel plan for {kind}": ep and not getattr(model, "ep_plan", None),
        f"{experts} experts are no multiple of {launch.ep}": experts % launch.ep,
        f"transformers has no tensor-parallel plan for {kind}": tp and not getattr(model, "tp_plan", None),
        "layers that carry a state along the sequence: accelerate refuses them":
            (cp or sp) and carries_state(text),
        f"context parallelism does not support attention layers of type {', '.join(windowed)}": cp and windowed,
    }  # fmt: skip
    if problem := next((problem for problem, applies in problems.items() if applies), ""):
        other = {"attn_implementation": "sdpa"} if "attention" in problem and (cp or sp) else {}
        raise UserError(f"launch {split} {size}: {problem}", **other)


def carries_state(config: Any) -> bool:
    """Whether the configuration's model has layers that carry a state along the sequence."""
    return any(kind in ("linear_attention", "mamba") for kind in getattr(config, "layer_types", None) or ())


def _windowed(config: Any) -> list[str]:
    """The kinds of attention layers that do not see all earlier tokens."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:  # a model that has one kind of layers
        kinds = ["sliding_attention"] if getattr(config, "sliding_window", None) else []
    return sorted({*kinds} - {"full_attention"})


def experts_of(model: nn.Module) -> int:
    """The number of experts of the model's blocks; 1 if it has none that transformers divides."""
    found: Any = (module for module in model.modules() if hasattr(module, DIVIDES_EXPERTS))
    return next((int(module.num_experts) for module in found), 1)


def of_one_rank(batch: dict[str, Any], launch: Launch, attention: str | None = "sdpa") -> dict[str, Any]:
    """The rank's part of a micro-batch: tokens of each sequence, as context parallelism and Ulysses divide it.

    Context parallelism shrinks whole tensors in place, so their storages stay (torch's `context_parallel`).

    Args:
        attention: the model's attention implementation in transformers. Flash attention finds packed rows by their
            positions, the others need a mask.

    Raises:
        UserError: packed sequences, or lengths that cannot be divided.
    """
    ranks = launch.cp * launch.sp
    if ranks == 1 or batch.keys() == {"args", "kwargs"}:  # what a rank's model was called with is its part already
        return batch
    name = f"launch {'cp' if launch.cp > 1 else 'sp'} {ranks}"
    if "input_ids" not in batch:
        raise UserError(f"{name}: the batches hold no sequences of tokens")
    length = batch["input_ids"].shape[1]
    needs_mask = attention in (None, "eager", "sdpa", "flex_attention")
    if needs_mask and "position_ids" in batch and bool((batch["position_ids"].diff() != 1).any()):
        fix = "leave packing out" + (", or set attn_implementation: flash_attention_2" if launch.sp > 1 else "")
        raise UserError(
            f"{name}: packed rows need a mask, and masks are dropped where ranks share a sequence; {fix}", rows="alike"
        )
    parts = 2 * launch.cp if launch.cp > 1 else launch.sp  # a ring divides evenly in pieces from both ends
    if length % parts:
        raise UserError(f"{name}: sequences of {length} tokens; give a multiple of {parts}")

    def part(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dim() < 2 or value.shape[1] != length:
            return value
        own = value[:, : length // ranks]
        return own if launch.cp > 1 else own.clone()

    return {name: part(value) for name, value in batch.items()}


# -- context parallelism ----------------------------------------------------------------------------------------------


def without_masks(model: nn.Module) -> None:
    """Make attention causal without a mask, as accelerate does under context parallelism (big_modeling.py)."""

    def drop_mask(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        if "attention_mask" in kwargs:
            kwargs.update(attention_mask=None, is_causal=True)
        return args, kwargs

    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(drop_mask, with_kwargs=True, prepend=True)


@contextmanager
def ring_attention(mesh: DeviceMesh, rotation: str) -> Iterator[None]:
    """Runs F.scaled_dot_product_attention as a ring over `mesh`, as inside torch's `context_parallel`."""

    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            return ring(*args, **kwargs)
        except RuntimeError as error:
            if "broadcast" not in str(error):
                raise
            raise UserError(
                f"launch cp {mesh.size()}: torch merges memory-efficient attention, which float32 takes, only if the "
                f"sequence is a multiple of {64 * mesh.size()} tokens"
            ) from error

    rotated = ring_options.rotate_method
    whole = torch.empty(2 * mesh.size(), device="cpu")  # torch asks for a tensor to divide
    sharing = context_parallel(mesh, buffers=[whole], buffer_seq_dims=[0], no_restore_buffers={whole})
    rings.set_rotate_method(rotation)
    with patched(ring=checked), rings_on_cpu(), ExitStack() as stack:
        with no_modes():
            sharing.__enter__()
        stack.callback(sharing.__exit__, None, None, None)  # torch 2.11 would not restore attention after an error
        try:
            yield
        except RuntimeError as error:
            if "mixed torch.Tensor and DTensor" not in str(error):
                raise
            raise UserError(
                f"launch cp {mesh.size()}: this model's attention in float32 runs as separate products, which torch "
                "does not share between GPUs; --dtype bfloat16 or --bf16 runs it as one kernel"
            ) from error
        finally:
            ring_options.rotate_method = rotated


@contextmanager
def rings_on_cpu() -> Iterator[None]:
    """Adds rings of the CPU's flash attention to those that torch's `context_parallel` knows."""
    with patched(ring_kernels=_RINGS):
        yield


def _forward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    query, key, value, dropout, causal = (*args, 0.0, False)[:5]
    kwargs.pop("attn_mask", None)  # accelerate has dropped it
    local = {"query": query, "key": key, "value": value}
    found = ring(
        query.device_mesh.get_group(), 2, op, **{name: t.to_local() for name, t in local.items()},
        is_causal=causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _sharded_like(query, found)


def _backward(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    gradient, query, key, value, out, logsumexp, dropout, causal = args
    kwargs.pop("attn_mask", None)
    local = {"query": query, "key": key, "value": value, "out": out, "logsumexp": logsumexp, "grad_out": gradient}
    found = rings_backward(
        query.device_mesh.get_group(), 2, op, **{name: t.to_local() for name, t in local.items()},
        grad_out_name="grad_out", is_causal=causal, dropout_p=dropout, **kwargs,
    )  # fmt: skip
    return _sharded_like(query, found)


def _sharded_like(query: DTensor, found: tuple[Tensor, ...]) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(t, query.device_mesh, query.placements, run_check=False) for t in found)


_RINGS: dict[Any, Callable[..., Any]] = {_FLASH_ON_CPU: _forward, _FLASH_ON_CPU_BACKWARD: _backward}


# -- Ulysses ----------------------------------------------------------------------------------------------------------


class _AllToAll(torch.autograd.Function):
    """Part i of dimension 0 goes to rank i of the group (deepspeed/sequence/layer.py: _dim_zero_all_to_all)."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        given = given.contiguous()
        out = torch.empty_like(given)
        dist.all_to_all_single(out, given, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AllToAll.apply(gradient, ctx.group), None


@contextmanager
def ulysses(mesh: DeviceMesh, implementation: str) -> Iterator[None]:
    """Makes transformers' attention `implementation` run on all tokens of a share of the heads."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as FUNCTIONS

    group, attention = mesh.get_group(), FUNCTIONS[implementation]
    ranks = group.size()

    def all_tokens(given: Tensor) -> Tensor:
        """(batch, heads, own tokens, size) -> (batch, own heads, tokens, size)"""
        batch, heads, tokens, size = given.shape
        given = given.permute(2, 0, 1, 3)
        if heads < ranks:
            given, heads = given.repeat_interleave(ranks // heads, dim=2), ranks
        parts = given.reshape(tokens, batch, ranks, heads // ranks, size).permute(2, 0, 1, 3, 4).contiguous()
        exchanged = _AllToAll.apply(parts, group).reshape(ranks * tokens, batch, heads // ranks, size).contiguous()
        return exchanged.permute(1, 2, 0, 3).contiguous()

    def own_tokens(context: Tensor) -> Tensor:
        """(batch, tokens, own heads, size) -> (batch, own tokens, heads * size)"""
        batch, tokens, heads, size = context.shape
        context = context.permute(1, 0, 2, 3).reshape(tokens, batch, -1)
        parts = context.reshape(ranks, tokens // ranks, batch, heads * size).contiguous()
        exchanged = _AllToAll.apply(parts, group).permute(1, 2, 0, 3)
        whole = exchanged.reshape(tokens // ranks, batch, -1).contiguous()
        return whole.permute(1, 0, 2).reshape(batch, tokens // ranks, -1)

    def run(
        module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Any]:
        if not module.training:
            return attention(module, query, key, value, attention_mask, *args, **kwargs)
        if kwargs.get("position_ids") is not None:
            own = kwargs["position_ids"]
            found = [torch.empty_like(own) for _ in range(ranks)]
            dist.all_gather(found, own, group=group)
            kwargs["position_ids"] = torch.cat(found, dim=1)
        query, key, value = all_tokens(query), all_tokens(key), all_tokens(value)
        groups = query.shape[1] // key.shape[1]
        with patch.object(module, "num_key_value_groups", groups) if hasattr(module, _GROUPS) else ExitStack():
            context, weights = attention(module, query, key, value, None, *args, **kwargs)
        return own_tokens(context), weights

    with overridden(FUNCTIONS, {implementation: run}):
        yield


_GROUPS = "num_key_value_groups"
