"""What one dispatched op costs: flops, bytes moved, CUDA kernels. The figures that cost.py turns into seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (op, args, kwargs) -> result
After = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], Any], None]  # (tracker, op, args, kwargs, result)

# Views by meaning, whatever their schema says, and ops that touch no data.
_NO_KERNEL = {
    "detach",
    "alias",
    "lift_fresh",
    "_unsafe_view",
    "_reshape_alias",
    "set_",
    "resize_",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "device",
    "_has_compatible_shallow_copy_type",  # asked by `tensor.data = other`
}
# Ops that read rows of their first argument, not all of it: they move what they write, twice.
_GATHERS = {"embedding", "index_select", "gather", "index"}
# A multi-tensor kernel takes at most so many tensors, and 320 chunks of 65,536 elements
# (ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH, _CHUNKS_PER_LAUNCH, _CHUNK = 36, 320, 65536


def attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> int:
    """Of attention's forward: the scores, and the values weighted by them, for every head of the query."""
    return 2 * _scores(query, key) * (query.size(-1) + value.size(-1))


def attention_backward_flops(
    grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    """Of its backward: the scores again and their gradient, and the gradients of query, key and value."""
    return 2 * _scores(query, key) * (3 * query.size(-1) + 2 * value.size(-1))


def _scores(query: torch.Tensor, key: torch.Tensor) -> int:
    return query.shape[:-1].numel() * key.size(-2)


# torch's own formulas refuse grouped heads (fewer of the key than of the query) in torch 2.11.
_FLOPS: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention: attention_flops,
    aten._scaled_dot_product_efficient_attention: attention_flops,
    aten._scaled_dot_product_cudnn_attention: attention_flops,
    aten._scaled_dot_product_flash_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: attention_backward_flops,
}


@cache
def describe(func: OpOverload) -> tuple[str, bool, bool, Callable[..., int] | None]:
    """Name, whether it launches nothing, whether it gathers, and its flop formula."""
    short = func._schema.name.partition("::")[2]
    silent = func.is_view or short in _NO_KERNEL
    formula = _FLOPS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    return str(func), silent, short in _GATHERS, formula


@cache
def causal_at(func: OpOverload) -> int | None:
    """Where an attention op's `is_causal` stands among its arguments."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an op's arguments or result: at most a list in a tuple deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as it lies in memory: of a DTensor its shard, of any wrapper subclass what it wraps."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # DTensor names its mesh too
                yield from plain(part)
    else:
        yield tensor


def measure(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> tuple[int, int, str, int]:
    """Flops, bytes read and written, dtype of the main operand, kernels of one call."""
    _, silent, gathers, formula = describe(func)
    if silent:
        return 0, 0, "", 0
    written = list(tensors((out,)))
    read = list(tensors(args))
    main = next((t for t in read if t.is_floating_point()), next(iter(read + written), None))
    moved = written if gathers else read
    nbytes = sum(t.numel() * t.itemsize for t in moved) + sum(t.numel() * t.itemsize for t in written)
    flops = formula(*args, **kwargs, out_val=out) if formula is not None else 0
    if flops and causal_at(func) is not None and args[causal_at(func) :][:1] == (True,):
        flops //= 2  # what the mask hides is not computed, and the formula counts it
    kernels = (
        _launches(args[0]) if args and isinstance(args[0], (tuple, list)) and "_foreach" in func._schema.name else 1
    )
    return int(flops), nbytes, "" if main is None else str(main.dtype)[6:], kernels


def _launches(group: Sequence[torch.Tensor]) -> int:
    chunks = sum(-(-t.numel() // _CHUNK) for t in group)
    return max(-(-len(group) // _TENSORS_PER_LAUNCH), -(-chunks // _CHUNKS_PER_LAUNCH))


@cache
def _asynchronous_at(func: OpOverload) -> int | None:
    names = [argument.name for argument in func._schema.arguments]
    return names.index("async_op") if "async_op" in names else None


def is_asynchronous(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a collective (op of c10d) runs beside the stream that it is issued from, until somebody waits for it."""
    at = _asynchronous_at(func)
    return at is not None and (len(args) <= at or args[at])  # true by default, and then not handed on


def collective_bytes(func: OpOverload, args: tuple[Any, ...]) -> int:
    """Bytes that each rank sends in a collective by ring; at least 1.

    All-gather and reduce-scatter send what they add or take away, an all-reduce both in turn.
    """
    given = [t.nbytes for t in tensors(args[:2])]
    if "reduce_scatter" in func._schema.name or "allgather" in func._schema.name:
        return max(max(given) - min(given), 1)
    if func._schema.name == "c10d::allreduce_":
        ranks = torch.distributed.ProcessGroup.unbox(args[1]).size()
        return max(2 * (ranks - 1) * given[0] // ranks, 1)
    return max(*given, 1)
