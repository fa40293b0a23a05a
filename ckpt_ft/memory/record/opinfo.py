"""What one dispatched op costs: flops, bytes moved, CUDA kernels. The figures that cost.py turns into seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type
from torch.utils.flop_counter import flop_registry

from .shapes import EMBEDDING_KERNELS, shape_of, sort_passes, sorts_rows
from .sizes import TF32

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
# What ops read, where it is not all of their arguments.
_MOVES = {
    # As much as they write: rows of their first argument.
    **dict.fromkeys(("embedding", "index_select", "gather", "index", "nll_loss_forward", "sparse_mask"), "written"),
    # Next to nothing: the loss' gradient is zero but at the labels.
    **dict.fromkeys(("nll_loss_backward", "embedding_dense_backward"), "none"),
    # What they are given twice: once more when it is copied to its place among zeros.
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd"), "zeros"),
    # Their own part of a buffer for all ranks.
    "all_gather_copy_in": "own",
}
# To add sparse values of fp32 to a dense half, PyTorch makes an fp32 copy of it, a copy of that, adds to it by index,
# and copies the result back: 6, 8 and 6 bytes of each element, in units of 4 (SparseCUDATensorMath.cu).
_ADDED_SPARSE = 5
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


def convolution_backward_flops(
    grad: torch.Tensor, given: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any
) -> int:
    """Of a convolution's backward: as many as forward towards the input, and towards the weight."""
    transposed, mask = args[4], args[7]
    return 2 * (given if transposed else grad).numel() * weight.shape[1:].numel() * sum(mask[:2])


# torch's own formulas refuse grouped heads (fewer of the key than of the query) in torch 2.11, and count the gradient
# of a grouped convolution's weight as if it were not grouped.
_FLOPS: dict[Any, Callable[..., int]] = {
    aten.convolution_backward: convolution_backward_flops,
    aten._scaled_dot_product_flash_attention: attention_flops,
    aten._scaled_dot_product_efficient_attention: attention_flops,
    aten._scaled_dot_product_cudnn_attention: attention_flops,
    aten._scaled_dot_product_flash_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_efficient_attention_backward: attention_backward_flops,
    aten._scaled_dot_product_cudnn_attention_backward: attention_backward_flops,
}


@cache
def describe(func: OpOverload) -> tuple[str, bool, str, Callable[..., int] | None]:
    """Name, whether it launches nothing, what it reads as many bytes as it has, and its flop formula."""
    short = func._schema.name.partition("::")[2]
    silent = func.is_view or short in _NO_KERNEL
    formula = _FLOPS.get(func._overloadpacket) or flop_registry.get(func._overloadpacket)
    return str(func), silent, _MOVES.get(short, "read"), formula


@cache
def causal_at(func: OpOverload) -> int | None:
    """Where an attention op's `is_causal` stands among its arguments."""
    names = [argument.name for argument in func._schema.arguments]
    return names.index("is_causal") if "is_causal" in names else None


@cache
def mutated(func: OpOverload) -> tuple[int, ...]:
    """Which arguments an op writes to; those that work on lists in place return nothing."""
    arguments = enumerate(func._schema.arguments)
    return tuple(at for at, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def tensors(values: Any) -> Iterator[torch.Tensor]:
    """The tensors in an op's arguments or result: at most a list in a tuple deep."""
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


_is_wrapper = cache(is_traceable_wrapper_subclass_type)


def wraps(types: Sequence[type]) -> bool:
    """Whether an op is called on tensors that wrap others."""
    for kind in types:  # noqa: SIM110  no generator: once for every op
        if _is_wrapper(kind):
            return True
    return False


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as it lies in memory: of a DTensor its shard, of any wrapper what it wraps, a sparse one's two."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # DTensor names its mesh too
                yield from plain(part)
    elif tensor.is_sparse:
        with torch._C._DisableTorchDispatch():  # no op of the step
            yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


@dataclass(frozen=True, eq=False, slots=True)
class Handling:
    """What a tracker does about an operator, worked out when it is first called.

    Each call looks it up once: there are tens of thousands, and OpOverload's hash is Python.
    """

    name: str
    rule: Rule | None = None  # to call in its place
    after: After | None = None  # to call once its results are recorded
    collective: bool = False
    silent: bool = False  # record_function: no tensor, no work


_ON_LISTS = ("aten::_foreach", "aten::_fused_ad")


class Work(NamedTuple):
    """What one call asks of a GPU."""

    flops: int = 0  # real multiplications and additions
    nbytes: int = 0  # read and written; an expanded tensor counts as it lies in memory
    dtype: str = ""  # of the main operand
    kernels: int = 0
    shape: tuple[int, ...] = ()  # see shapes.py


def measure(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """What one call asks of a GPU; all 0 for what launches nothing."""
    _, silent, moves, formula = describe(func)
    if silent:
        return Work()
    written = list(tensors((out,))) or [tensor for at in mutated(func) for tensor in tensors(args[at : at + 1])]
    written = written or list(tensors((kwargs.get("out"),)))
    read = list(tensors(args))
    main = next((t for t in read if t.is_floating_point() or t.is_complex()), next(iter(read + written), None))
    if moves == "own":
        read = written = list(tensors(args[:1]))
    moved = {"written": written, "none": [], "zeros": read * 2}.get(moves, read)
    nbytes = sum(map(footprint, moved)) + sum(map(footprint, written))
    if _adds_sparse(func, args):
        nbytes = _ADDED_SPARSE * args[0].numel() * 4
    flops = int(formula(*args, **kwargs, out_val=out)) if formula is not None else 0
    if flops and causal_at(func) is not None and args[causal_at(func) :][:1] == (True,):
        flops //= 2  # what the mask hides is not computed, and the formula counts it
    if flops and main is not None and main.is_complex():
        flops *= 4
    dtype = "" if main is None else str(main.dtype)[6:]
    if flops and dtype == "float32" and _rounds_to_tf32(func):
        dtype = TF32
    return Work(flops, nbytes, dtype, _kernels(func, args), shape_of(func, args, out))


def _kernels(func: OpOverload, args: tuple[Any, ...]) -> int:
    """How many kernels one call launches."""
    name = func._schema.name
    if args and isinstance(args[0], (tuple, list)):
        if name.startswith(_ON_LISTS):
            return _launches(args[0])
        if name == "aten::block_diag":  # zeros, and a copy for each block (ATen/native/TensorShape.cpp)
            return 1 + len(args[0])
    if name == "aten::embedding_dense_backward":
        return EMBEDDING_KERNELS if sorts_rows(args[1]) else 2
    if name == "aten::sort":
        return sort_passes(args) + 2 if sort_passes(args) else 1
    return 2 if describe(func)[2] == "zeros" else 1


def _adds_sparse(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a sparse tensor is added to a dense one in half precision."""
    if func._schema.name not in ("aten::add", "aten::add_"):
        return False
    dense, other = args[:2]
    return isinstance(other, torch.Tensor) and other.is_sparse and dense.itemsize < other.itemsize


def _rounds_to_tf32(func: OpOverload) -> bool:
    """Whether torch lets this op's fp32 operands be rounded where a card has TF32: by default a convolution's."""
    flags = torch.backends.cudnn if "convolution" in func._schema.name else torch.backends.cuda.matmul
    return bool(flags.allow_tf32)


def footprint(tensor: torch.Tensor) -> int:
    """Bytes of a tensor that lie in memory: an expanded dimension is read from there once."""
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.itemsize


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
