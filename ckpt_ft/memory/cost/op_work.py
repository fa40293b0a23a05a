"""The work of one dispatched op: flops, bytes moved, CUDA kernels, and the sizes that its kernels' time depends on.

kernels.py turns the work into seconds. Only this module needs torch: the seconds of a recorded trace do not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from math import ceil, exp, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from ckpt_ft.compat.distributed import world_of
from ckpt_ft.compat.tensors import OpOverload, is_traceable_wrapper_subclass, no_dispatch, schema_of

from .kernels import ACROSS, CAST, DIRECT, EXACT, INDEXED, STRIDED, TF32, UNEVEN, WINDOW, WINOGRAD, Shape

aten = torch.ops.aten

# Ops that launch no kernel: views that their schema does not mark as views, and ops that touch no data.
# `tensor.data = other` asks for the last one.
_NO_KERNEL = {
    "detach", "alias", "lift_fresh", "_unsafe_view", "wait_tensor", "_reshape_alias", "set_", "resize_", "empty",
    "empty_like", "empty_strided", "new_empty", "new_empty_strided", "device", "_has_compatible_shallow_copy_type",
}  # fmt: skip
# What an op reads, if that is not all of its arguments.
_READS = {
    # Rows of the first argument: as many bytes as the op writes.
    **dict.fromkeys(("embedding", "index_select", "gather", "index", "nll_loss_forward", "sparse_mask"), "written"),
    # Almost nothing: the gradient of the loss is zero except at the labels.
    **dict.fromkeys(("nll_loss_backward", "embedding_dense_backward"), "none"),
    # The argument twice: it is also copied into a tensor of zeros.
    **dict.fromkeys(("slice_backward", "select_backward", "constant_pad_nd"), "zeros"),
    # This rank's part of a buffer for all ranks.
    "all_gather_copy_in": "own",
}
# To add sparse fp32 values to a dense half-precision tensor, PyTorch makes an fp32 copy, copies that, adds by index
# and copies the result back: 6 + 8 + 6 bytes per element, in units of 4 (SparseCUDATensorMath.cu).
_ADDED_SPARSE = 5
_ADDS = (aten.add, aten.add_)
# Limits of one multi-tensor kernel: tensors, chunks, and elements of a chunk (ATen/native/cuda/MultiTensorApply.cuh).
_TENSORS_PER_LAUNCH, _CHUNKS_PER_LAUNCH, _CHUNK = 36, 320, 65536

_ShapeRule = Callable[[tuple[Any, ...], Any], Shape]  # (args, result) -> shape
VECTOR = 16  # bytes that a thread loads at once
# Time of PyTorch's own depthwise kernels per value under a window, relative to cuDNN's. Forward takes as long. The
# gradient of the input finds the windows over each value; in that of the weight, each value is one block's sum over
# all images (ATen/native/cuda/DepthwiseConv2d.cu; timings: pytorch/pytorch#3265, #18631, 3 x 3 with stride 1 and 2).
OWN_INPUT, OWN_WEIGHT = 5, 9
ALONE = 5  # times as long where channels in channels last are read one by one (timm's steps that are seen: 5.0 to 5.6)
PIXEL = 6  # values under a window that take as long as a pixel's address and store (timm's steps that are seen)
# cuDNN's kernels on tensor cores for grouped convolutions in channels last: groups of a multiple of this, of at most
# as many channels. Others run directly (RTX 3090: ResNeXt and RegNet-Z with 32 to 192 groups of 4 to 32 channels are
# fast, groups of 8 to 160 channels in other numbers slow; pytorch/pytorch#70954 and, on a V100, #34977).
TOGETHER = 32
FFT_IN_ONE_PASS = 4096  # points that one thread block transforms in shared memory
SORT_IN_ONE_PASS = 4096  # elements that one thread block sorts in shared memory (ATen/native/cuda/Sort.cpp)
# Gradients of an embedding: from this many tokens on they are sorted by row, the gradients of a row are summed in
# pieces of ten, and the pieces are summed (ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu). In units of an
# element that is fetched by index, a token's element costs 0.5 and a piece's 2 (A100: embedding in
# hf_op_latencies.csv). 20 kernels and fills sort 64 bits (CUB's onesweep: two for each of eight passes, four before
# them), 14 do the rest.
EMBEDDING_SORTED, EMBEDDING_PIECE, EMBEDDING_KERNELS = 3072, 10, 34
_ON_LISTS = ("aten::_foreach", "aten::_fused_ad")  # multi-tensor ops


class Work(NamedTuple):
    """The work that one call gives a GPU."""

    flops: int = 0  # real multiplications and additions
    nbytes: int = 0  # read and written; an expanded dimension counts once
    dtype: str = ""  # of the main operand
    kernels: int = 0
    shape: tuple[int, ...] = ()  # see kernels.py
    on_host: bool = False  # the host's own cores do it


def measure(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Work:
    """The work of one call; all 0 if it launches no kernel."""
    rule = work_rule(func)
    if rule.no_kernel:
        return Work()
    written = list(tensors((out,))) or [tensor for at in mutated(func) for tensor in tensors(args[at : at + 1])]
    written = written or list(tensors((kwargs.get("out"),)))
    read = list(tensors(args))
    main = next((t for t in read if t.is_floating_point() or t.is_complex()), next(iter(read + written), None))
    if rule.reads == "own":
        read = written = list(tensors(args[:1]))
    moved = {"written": written, "none": [], "zeros": read * 2}.get(rule.reads, read)
    nbytes = sum(map(footprint, moved)) + sum(map(footprint, written))
    dtype = "" if main is None else str(main.dtype)[6:]
    if any(tensor.layout is not torch.strided for tensor in read):
        if func.overloadpacket in _ADDS and read[0].itemsize < read[-1].itemsize:
            nbytes = _ADDED_SPARSE * read[0].numel() * 4
        return Work(0, nbytes, dtype, _kernels(func, args))  # a sparse matrix: few of the products of its shape
    flops = 0 if rule.flops is None else int(rule.flops(*args, **kwargs, out_val=out))
    causal = _position(func, "is_causal") if flops else None
    if causal is not None and args[causal : causal + 1] == (True,):
        flops //= 2  # the formula counts the masked half, which is not computed
    if flops and main is not None and main.is_complex():
        flops *= 4
    if flops and dtype == "float32" and _rounds_to_tf32(func):
        dtype = TF32
    return Work(flops, nbytes, dtype, _kernels(func, args), _shape_rule(func)(args, out))


def _kernels(func: OpOverload, args: tuple[Any, ...]) -> int:
    name = schema_of(func).name
    if args and isinstance(args[0], (tuple, list)):
        if name.startswith(_ON_LISTS):
            chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in args[0])
            return max(-(-len(args[0]) // _TENSORS_PER_LAUNCH), -(-chunks // _CHUNKS_PER_LAUNCH))
        if name == "aten::block_diag":  # zeros, and a copy for each block (ATen/native/TensorShape.cpp)
            return 1 + len(args[0])
    if name == "aten::embedding_dense_backward":
        return EMBEDDING_KERNELS if args[1].numel() > EMBEDDING_SORTED else 2
    if name == "aten::sort":
        return sort_passes(args) + 2 if sort_passes(args) else 1
    return 2 if work_rule(func).reads == "zeros" else 1


def _rounds_to_tf32(func: OpOverload) -> bool:
    """Whether torch may round this op's fp32 operands to TF32: by default only in convolutions."""
    flags = torch.backends.cudnn if "convolution" in schema_of(func).name else torch.backends.cuda.matmul
    return bool(flags.allow_tf32)


def footprint(tensor: Tensor) -> int:
    """Bytes that a tensor occupies in memory; an expanded dimension counts once."""
    if tensor.layout is not torch.strided:
        return sum(map(footprint, plain(tensor)))
    count = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride else min(size, 1)
    return count * tensor.itemsize


def attention_flops(*args: Any, backward: bool = False, **kwargs: Any) -> int:
    """Flops of attention, for every head of the query; in `backward`, the gradient of its output comes before it.

    Forward computes the scores and the values weighted by them. Backward computes the scores again and their gradient,
    and the gradients of query, key and value.
    """
    query, key, value = args[1:4] if backward else args[:3]
    width = 3 * query.size(-1) + 2 * value.size(-1) if backward else query.size(-1) + value.size(-1)
    return 2 * query.shape[:-1].numel() * key.size(-2) * width


def convolution_backward_flops(grad: Tensor, given: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> int:
    """Flops of a convolution's backward: those of forward for the input and again for the weight."""
    transposed, mask = args[4], args[7]
    return 2 * (given if transposed else grad).numel() * weight.shape[1:].numel() * sum(mask[:2])


def addmm_flops(added: Tensor | None, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> int:
    """Flops of matrix products that are added to a tensor; torch's own formulas refuse an `out_dtype`."""
    return 2 * a.numel() * b.size(-1)


def grouped_matmul_flops(left: Tensor, right: Tensor, *args: Any, times: int = 1, **kwargs: Any) -> int:
    """Flops of a product per expert: each token meets one expert's matrix, however many experts there are."""
    return times * 2 * left[0 if left.dim() == 3 else slice(None)].numel() * right.size(-1)


_ATTENTION = [
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")
]
# In torch 2.11, torch's own formulas refuse grouped heads (fewer of the key than of the query) and count the gradient
# of a grouped convolution's weight as if it were not grouped.
_FLOPS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("addmm", "baddbmm"), addmm_flops),
    "bmm": partial(addmm_flops, None),
    "_grouped_mm": grouped_matmul_flops,
    "grouped_mm_fallback": grouped_matmul_flops,  # transformers/integrations/moe.py
    "grouped_mm_fallback_backward": partial(grouped_matmul_flops, times=2),  # both gradients
    "convolution_backward": convolution_backward_flops,
    **dict.fromkeys(_ATTENTION, attention_flops),
    **{f"{name}_backward": partial(attention_flops, backward=True) for name in _ATTENTION},
}


class WorkRule(NamedTuple):
    """How the work of an op's calls follows from their arguments."""

    no_kernel: bool
    reads: str  # see `_READS`; "all" without an entry there
    flops: Callable[..., int] | None


@cache
def work_rule(func: OpOverload) -> WorkRule:
    op = schema_of(func).name.partition("::")[2]
    formula = _FLOPS.get(op) or flop_registry.get(func.overloadpacket)
    return WorkRule(func.is_view or op in _NO_KERNEL, _READS.get(op, "all"), formula)


@cache
def mutated(func: OpOverload) -> tuple[int, ...]:
    """The positions of the arguments that an op writes to; in-place ops on lists return nothing.

    A fused optimizer writes to gradients only if it unscales them (ATen/native/cuda/fused_adam_utils.cuh).
    """
    arguments = [(at, argument) for at, argument in enumerate(schema_of(func).arguments) if argument.name != "grads"]
    return tuple(at for at, argument in arguments if argument.alias_info is not None and argument.alias_info.is_write)


def tensors(values: Any) -> Iterator[Tensor]:
    """The tensors in an op's arguments or result, also in nested lists and tuples."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from tensors(value)


PARTS = "_ckpt_ft_parts"  # in the attributes of a fake tensor that has lost them
_ROWS = aten.crow_indices, aten.col_indices, aten.values
_COLUMNS = aten.ccol_indices, aten.row_indices, aten.values
_PARTS = {  # of tensors that are not strided; those of other libraries' layouts are not known
    torch.sparse_coo: (aten._indices, aten._values),
    torch.sparse_csr: _ROWS, torch.sparse_bsr: _ROWS, torch.sparse_csc: _COLUMNS, torch.sparse_bsc: _COLUMNS,
}  # fmt: skip


def plain(tensor: Tensor) -> Iterator[Tensor]:
    """The tensors that lie in memory: a DTensor's shard, a wrapper's parts, a sparse tensor's indices and values."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, Tensor):  # DTensor names its mesh too
                yield from plain(part)
    elif tensor.layout is torch.strided:
        yield tensor
    elif PARTS in vars(tensor):
        yield from vars(tensor)[PARTS]
    else:
        with no_dispatch():  # no op of the step
            yield from [part(tensor) for part in _PARTS.get(tensor.layout, ())]


@cache
def _position(func: OpOverload, name: str) -> int | None:
    """The position of the argument `name` of an op; None if it has no such argument."""
    names = [argument.name for argument in schema_of(func).arguments]
    return names.index(name) if name in names else None


@cache
def is_collective(func: OpOverload) -> bool:
    """Whether an op communicates: an op of c10d, or of DTensor, which are functional and waited for separately."""
    return func.namespace == "c10d" or (func.namespace == "_c10d_functional" and not is_wait(func))


def is_wait(func: OpOverload) -> bool:
    """Whether an op makes the current stream wait for a functional collective."""
    return schema_of(func).name == "_c10d_functional::wait_tensor"


def is_asynchronous(func: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether a collective runs beside the stream that issues it, until a wait for it."""
    if func.namespace == "_c10d_functional":
        return True
    at = _position(func, "async_op")
    return at is not None and (len(args) <= at or args[at])  # the default is true, and defaults are not passed on


def collective_bytes(func: OpOverload, args: tuple[Any, ...]) -> int:
    """Bytes that each rank sends in a ring collective; at least 1.

    All-gather and reduce-scatter send the difference between input and output; an all-reduce does one after the other.
    An all-to-all sends all but the rank's own part; if it passes everything on to one rank, all of it.
    """
    name = schema_of(func).name
    given = [t.nbytes for t in tensors(args[:2])]
    ranks = group_of(func, args)[0]
    if func.namespace == "c10d" and ("reduce_scatter" in name or "allgather" in name):
        return max(max(given) - min(given), 1)
    if "allreduce" in name or "all_reduce" in name:
        return max(2 * (ranks - 1) * given[0] // ranks, 1)
    if "all_gather" in name:
        return max((ranks - 1) * given[0], 1)
    if "reduce_scatter" in name or ("all" in name and "to" in name and not _passes_on(args)):
        return max((ranks - 1) * given[0] // ranks, 1)
    return max(*given, 1)


def _passes_on(args: tuple[Any, ...]) -> bool:
    """Whether an all-to-all sends everything to one rank, as a step around a ring does."""
    splits = next((arg for arg in reversed(args) if isinstance(arg, (list, tuple)) and arg), ())
    return sum(1 for split in splits if isinstance(split, int) and split) == 1


def group_of(func: OpOverload, args: tuple[Any, ...]) -> tuple[int, int]:
    """The number of ranks of a collective, and the distance between them; zeros if the op does not say."""
    functional = func.namespace == "_c10d_functional"
    at = _position(func, "group_name" if functional else "process_group")
    if at is None:
        return 0, 0
    own = args[at] if functional else torch.distributed.ProcessGroup.unbox(args[at]).group_name
    # by name: a group from C++ may be another Python object
    known = world_of(torch.distributed.distributed_c10d).pg_group_ranks.items()
    ranks = next((list(ranks) for made, ranks in known if getattr(made, "group_name", None) == own), [])
    return len(ranks), ranks[1] - ranks[0] if len(ranks) > 1 else 1


# Shapes: the sizes that a kernel's time depends on (see kernels.py), for each kind of op.


@cache
def _shape_rule(func: OpOverload) -> _ShapeRule:
    op = schema_of(func).name.partition("::")[2]
    if op in _SHAPE_RULES:
        return _SHAPE_RULES[op]
    if "attention" in op:
        return partial(_attention, 1 if "backward" in op else 0)
    if op in _COPIES or torch.Tag.pointwise in func.tags:
        return _elementwise
    return lambda args, out: ()


def _matmul(first: int, args: tuple[Any, ...], out: Any) -> Shape:
    """Two matrices, or two batches of them, from argument `first` on."""
    left, right = args[first : first + 2]
    *batch, rows, terms = left.shape
    flag = UNEVEN if any(_row_bytes(t) % VECTOR for t in (left, right)) else 0
    along = left.stride(-1) == 1 and right.stride(-2) == 1
    return prod(batch), rows, right.shape[-1], terms, flag + (0 if along else ACROSS)


def _scaled_matmul(args: tuple[Any, ...], out: Any) -> Shape:
    """A product of 8-bit matrices, with or without `use_fast_accum`."""
    *sizes, flag = _matmul(0, args, out)
    return *sizes, flag + (0 if args[7:8] == (True,) else EXACT)


def _grouped_matmul(args: tuple[Any, ...], out: Any) -> Shape:
    """A product for each expert, of its share of the tokens: experts with few tokens fill tiles partly."""
    left, right = args[:2]
    out = out if isinstance(out, Tensor) else args[3]  # both gradients: products of the same sizes
    if right.dim() == 2 and left.dim() == 2:  # the weights' gradient: (columns, tokens) by (tokens, columns)
        groups, rows, columns = out.shape
        terms = -(-left.shape[1] // groups)
    else:
        groups, columns, terms = max(left, right, key=Tensor.dim).shape[0], out.shape[-1], left.shape[-1]
        rows = -(-out.shape[-2] // (groups if out.dim() == 2 else 1))
    return groups, rows, columns, terms, UNEVEN if any(_row_bytes(t) % VECTOR for t in (left, right)) else 0


def _row_bytes(matrix: Tensor) -> int:
    """Bytes from one row in memory to the next; of a transposed matrix, from one column to the next."""
    steps = [step for size, step in zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True) if size > 1]
    return max(steps, default=VECTOR) * matrix.itemsize


def _convolution(args: tuple[Any, ...], out: Any) -> Shape:
    given, weight = args[:2]
    if _depthwise(given, weight, args[8]):
        return _windows(out, given, weight), WINDOW
    return _as_matmul(given, weight, out, args[3:9], 1)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Shape:
    """The shape of the gradient of the input; that of the weight has as many flops."""
    gradient, given, weight = args[:3]
    if _depthwise(given, weight, args[9]):
        to_input, to_weight = args[10][:2]
        if _cudnn_depthwise(given, weight, args[4]):
            return (to_input + to_weight) * _windows(gradient, given, weight), WINDOW
        input, gradients = (_windows(images, given, weight) for images in (given, gradient))
        return to_input * OWN_INPUT * input + to_weight * OWN_WEIGHT * gradients, WINDOW
    return _as_matmul(given, weight, gradient, args[4:10], sum(args[10][:2]))


def _depthwise(given: Tensor, weight: Tensor, groups: int) -> bool:
    return groups > 1 and groups == given.shape[1] and weight.shape[1] == 1


def _windows(result: Tensor, given: Tensor, weight: Tensor) -> int:
    """The number of values under the windows of all pixels of a result, and what a pixel costs in values.

    cuDNN's kernels for channels last take vectors of channels; channels that fill none are read one by one.
    """
    alone = _channels_last(given) and given.shape[1] * given.itemsize % VECTOR
    return result.numel() * (PIXEL + prod(weight.shape[2:])) * (ALONE if alone else 1)


def _cudnn_depthwise(given: Tensor, weight: Tensor, stride: Any) -> bool:
    """Whether cuDNN computes it: channels last, or small windows in half precision (use_cudnn_depthwise)."""
    if _channels_last(given):
        return True
    window = tuple(weight.shape[2:])
    square = len(window) == 2 and window[0] == window[1] in (1, 3, 5) and stride[0] in (1, 2)
    return given.itemsize == 2 and given.shape[1] >= 32 and (square or (len(window) == 1 and stride[0] == 1))


def _channels_last(given: Tensor) -> bool:
    return given.shape[1] > 1 and given.stride(1) == 1 and not given.is_contiguous()


def _as_matmul(given: Tensor, weight: Tensor, result: Tensor, how: tuple[Any, ...], passes: int) -> Shape:
    """The matmul of a convolution: pixels of the result by its channels, over the values under the window.

    Tensor cores read and write channels last, in vectors of 16 bytes. cuDNN transposes images of another layout in
    each of the `passes` (the result, or the gradients of input and weight), also for a window of one pixel
    (docs.nvidia.com/deeplearning/performance/dl-performance-convolutional).
    """
    stride, _, dilation, transposed, _, groups = how
    pixels, channels = (given, weight.shape[1]) if transposed else (result, weight.shape[0] // groups)
    terms = (given.shape[1] // groups if transposed else weight.shape[1]) * prod(weight.shape[2:])
    is_plain = groups == 1 and not transposed and all(step == 1 for step in (*stride, *dilation))
    flag = WINOGRAD if is_plain and tuple(weight.shape[2:]) == (3, 3) else 0
    if any(image.shape[1] * image.itemsize % VECTOR for image in (given, result)):
        flag += UNEVEN
    last = _channels_last(given)
    together = groups == 1 or (groups % TOGETHER == 0 and max(weight.shape[1], channels) <= TOGETHER)
    if last and given.itemsize == 2 and not together:
        flag += DIRECT
    first = 0 if last else passes * (given.nbytes + result.nbytes)
    return groups, prod(pixels.shape) // pixels.shape[1], channels, terms, flag, first


def _attention(first: int, args: tuple[Any, ...], out: Any) -> Shape:
    query, key = args[first : first + 2]
    return prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]


def _indexed(at: int | None, args: tuple[Any, ...], out: Any) -> Shape:
    """Rows that are fetched by index, or to which the tensor at argument `at` is added."""
    moved = out if at is None else args[at]
    return (moved.numel() if isinstance(moved, Tensor) else 0), INDEXED


def _embedding_backward(args: tuple[Any, ...], out: Any) -> Shape:
    """Assumes tokens that are drawn evenly: a trace does not know how many distinct rows they use."""
    gradient, indices, rows = args[:3]
    tokens, width = indices.numel(), gradient.shape[-1]
    if tokens <= EMBEDDING_SORTED:
        return tokens * width, INDEXED
    met = rows * (1 - exp(-tokens / rows))
    pieces = met * ceil(tokens / met / EMBEDDING_PIECE)
    return round(width * (tokens / 2 + 2 * pieces)), INDEXED


def sort_passes(args: tuple[Any, ...]) -> int:
    """Passes of a radix sort over its keys, 8 bits each (CUB); 0 if one thread block sorts a row."""
    given, rest = args[0], [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    dim = rest[0] if rest else -1
    return given.itemsize if given.dim() and given.shape[dim] > SORT_IN_ONE_PASS else 0


def _sort(args: tuple[Any, ...], out: Any) -> Shape:
    """Each pass reads and writes keys and indices: 1.5 times the bytes of the op's input and output."""
    passes = sort_passes(args)
    return (3 * passes,) if passes else ()


def _rows(at: int, args: tuple[Any, ...], out: Any) -> Shape:
    return (args[at].shape[0] if args[at].dim() > 1 else 1,)


def _softmax(at: int, args: tuple[Any, ...], out: Any) -> Shape:
    given = args[0]
    size = given.shape[args[at]] if given.dim() else 1
    return given.numel() // max(size, 1), size * given.itemsize


def _norm(first: int, args: tuple[Any, ...], out: Any) -> Shape:
    given, length = args[first], prod(args[first + 1])
    return given.numel() // max(length, 1), length * given.itemsize


def _fft(args: tuple[Any, ...], out: Any) -> Shape:
    """One pass per dimension, two for a long one, one to make the input contiguous and one to scale the result.

    A transform of real numbers computes half of its result; the other half is a conjugate copy
    (ATen/native/cuda/SpectralOps.cpp).
    """
    given, dims, normalization, last = args[:4]
    passes = sum(1 if given.shape[dim] <= FFT_IN_ONE_PASS else 2 for dim in dims)
    passes += bool(normalization) + (not given.is_contiguous())
    return (2 * passes + (not given.is_complex() and not last),)


def _elementwise(args: tuple[Any, ...], out: Any) -> Shape:
    """The elements, if an operand has another layout than the result (transposed or broadcast) or another dtype.

    Casts from fp32 to a narrower dtype have vectorised kernels of their own (ATen/native/cuda/Copy.cu).
    """
    result = out if isinstance(out, Tensor) else args[0]
    if not isinstance(result, Tensor):
        return ()
    strides, cast = _steps(result), False
    for operand in args:
        if isinstance(operand, Tensor) and operand.dim():
            if _steps(operand) != strides:
                return max(result.numel(), operand.numel()), STRIDED
            cast = cast or (operand.dtype != result.dtype and operand.itemsize <= result.itemsize)
    return (result.numel(), CAST) if cast else ()


def _steps(tensor: Tensor) -> list[tuple[int, int]]:
    return [(size, step) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]


_COPIES = ("clone", "copy_", "_to_copy", "contiguous")
_SHAPE_RULES: dict[str, _ShapeRule] = {
    **dict.fromkeys(("mm", "bmm"), partial(_matmul, 0)),
    "_scaled_mm": _scaled_matmul,
    **dict.fromkeys(("addmm", "baddbmm"), partial(_matmul, 1)),
    **dict.fromkeys(("_grouped_mm", "grouped_mm_fallback", "grouped_mm_fallback_backward"), _grouped_matmul),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_softmax", "_log_softmax"), partial(_softmax, 1)),
    **dict.fromkeys(("_softmax_backward_data", "_log_softmax_backward_data"), partial(_softmax, 2)),
    **dict.fromkeys(("native_layer_norm", "_fused_rms_norm"), partial(_norm, 0)),
    **dict.fromkeys(("native_layer_norm_backward", "_fused_rms_norm_backward"), partial(_norm, 1)),
    **dict.fromkeys(("embedding", "index_select", "index", "gather"), partial(_indexed, None)),
    **dict.fromkeys(("index_put", "index_put_", "scatter", "scatter_"), partial(_indexed, 2)),
    **dict.fromkeys(("index_add", "scatter_add", "scatter_add_"), partial(_indexed, 3)),
    "embedding_dense_backward": _embedding_backward,
    "nll_loss_forward": partial(_rows, 0),
    "nll_loss_backward": partial(_rows, 1),
    "sort": _sort,
    **dict.fromkeys(("_fft_c2c", "_fft_r2c", "_fft_c2r"), _fft),
}
