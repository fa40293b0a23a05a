"""Reads the sizes that a kernel's time depends on (sizes.py) off a call."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import ceil, exp, prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from .sizes import CAST, CHANNELS_FIRST, INDEXED, STRIDED, UNEVEN, WINDOW, WINOGRAD, Shape

Rule = Callable[[tuple[Any, ...], Any], Shape]
VECTOR = 16  # bytes that a thread loads at once
# What PyTorch's own depthwise kernels take for a value under a window: forward as long as cuDNN's; the gradient of the
# input, which works out for each value which windows lie on it, and that of the weight, of which each value is one
# block's sum over all images (ATen/native/cuda/DepthwiseConv2d.cu), so many times as long (pytorch/pytorch#3265,
# #18631: forward and backward of 3 x 3 windows, moving by 1 and by 2).
OWN_INPUT, OWN_WEIGHT = 5, 9
FFT_IN_ONE_PASS = 4096  # points that one thread block transforms in shared memory
SORT_IN_ONE_PASS = 4096  # elements that one thread block sorts in shared memory (ATen/native/cuda/Sort.cpp)
# Gradients of an embedding: from so many tokens on they are sorted by row, each row's summed in pieces of ten, and the
# pieces summed (ATen/native/cuda/Embedding.cu, EmbeddingBackwardKernel.cu). In units of what one element costs that is
# fetched by index: half of one for a token's, two for a piece's (A100: embedding in hf_op_latencies.csv). 20 kernels
# and fills sort 64 bits (CUB's onesweep: two for each of eight passes, four before them), 14 do the rest.
EMBEDDING_SORTED, EMBEDDING_PIECE, EMBEDDING_KERNELS = 3072, 10, 34


def shape_of(func: OpOverload, args: tuple[Any, ...], out: Any) -> Shape:
    """The sizes of one call."""
    return _rule(func)(args, out)


@cache
def _rule(func: OpOverload) -> Rule:
    op = func._schema.name.partition("::")[2]
    if op in _RULES:
        return _RULES[op]
    if "attention" in op:
        return _attention_backward if "backward" in op else _attention
    if op in _COPIES or torch.Tag.pointwise in func.tags:
        return _elementwise
    return _nothing


def _matmul(first: int) -> Rule:
    """Of two matrices, or two batches of them, that stand at `first` among the arguments."""

    def shape(args: tuple[Any, ...], out: Any) -> Shape:
        left, right = args[first], args[first + 1]
        *batch, rows, terms = left.shape
        uneven = any(_row_bytes(t) % VECTOR for t in (left, right))
        return prod(batch), rows, right.shape[-1], terms, UNEVEN if uneven else 0

    return shape


def _row_bytes(matrix: Tensor) -> int:
    """Bytes from one row in memory to the next (of a transposed matrix, one column to the next)."""
    steps = [step for size, step in zip(matrix.shape[-2:], matrix.stride()[-2:], strict=True) if size > 1]
    return max(steps, default=VECTOR) * matrix.itemsize


def _convolution(args: tuple[Any, ...], out: Any) -> Shape:
    given, weight, transposed = args[0], args[1], args[6]
    if _depthwise(given, weight, args[8]):
        return _windows(out, weight), WINDOW
    return _as_matmul(given, weight, out, args[3], args[5], args[8], transposed)


def _convolution_backward(args: tuple[Any, ...], out: Any) -> Shape:
    """Of the half towards the input; the one towards the weight has as many flops."""
    gradient, given, weight = args[:3]
    if _depthwise(given, weight, args[9]):
        to_input, to_weight = args[10][:2]
        if _cudnn_depthwise(given, weight, args[4]):
            return (to_input + to_weight) * _windows(gradient, weight), WINDOW
        own = to_input * OWN_INPUT * _windows(given, weight) + to_weight * OWN_WEIGHT * _windows(gradient, weight)
        return own, WINDOW
    return _as_matmul(given, weight, gradient, args[4], args[6], args[9], args[7])


def _depthwise(given: Tensor, weight: Tensor, groups: int) -> bool:
    """Whether each channel is convolved alone."""
    return groups > 1 and groups == given.shape[1] and weight.shape[1] == 1


def _windows(result: Tensor, weight: Tensor) -> int:
    """Values under the windows of all of a result's pixels."""
    return result.numel() * prod(weight.shape[2:])


def _cudnn_depthwise(given: Tensor, weight: Tensor, stride: Any) -> bool:
    """Whether cuDNN does it (ConvParams::use_cudnn_depthwise): channels last, or small windows in half precision."""
    if _channels_last(given):
        return True
    window = tuple(weight.shape[2:])
    square = len(window) == 2 and window[0] == window[1] in (1, 3, 5) and stride[0] in (1, 2)
    return given.itemsize == 2 and given.shape[1] >= 32 and (square or (len(window) == 1 and stride[0] == 1))


def _channels_last(given: Tensor) -> bool:
    """Whether a pixel's channels lie beside each other."""
    return given.shape[1] > 1 and given.stride(1) == 1 and not given.is_contiguous()


def _as_matmul(
    given: Tensor, weight: Tensor, result: Tensor, stride: Any, dilation: Any, groups: int, transposed: bool
) -> Shape:
    """The matmul of a convolution: pixels of the result by its channels, over the values under the window.

    Tensor cores convolve channels last; what lies otherwise is transposed for them, but for a window of one pixel,
    which is a matmul as it lies (docs.nvidia.com/deeplearning/performance/dl-performance-convolutional).
    """
    pixels, channels = (given, weight.shape[1]) if transposed else (result, weight.shape[0] // groups)
    window = prod(weight.shape[2:])
    terms = (given.shape[1] // groups if transposed else weight.shape[1]) * window
    moved_by_one = all(step == 1 for step in stride)
    plain = groups == 1 and not transposed and moved_by_one and all(step == 1 for step in dilation)
    flag = WINOGRAD if plain and tuple(weight.shape[2:]) == (3, 3) else 0
    if not _channels_last(given) and not (window == 1 and moved_by_one):
        flag += CHANNELS_FIRST
    return groups, prod(pixels.shape) // pixels.shape[1], channels, terms, flag


def _attention(args: tuple[Any, ...], out: Any) -> Shape:
    query, key = args[0], args[1]
    return prod(query.shape[:-2]), query.shape[-2], key.shape[-2], query.shape[-1]


def _attention_backward(args: tuple[Any, ...], out: Any) -> Shape:
    return _attention(args[1:], out)


def _nothing(args: tuple[Any, ...], out: Any) -> Shape:
    return ()


def _indexed(args: tuple[Any, ...], out: Any) -> Shape:
    return (out.numel() if isinstance(out, Tensor) else 0), INDEXED


def _indexed_from(at: int) -> Rule:
    """Of what adds the tensor at `at` among the arguments to rows by index."""
    return lambda args, out: (args[at].numel() if isinstance(args[at], Tensor) else 0, INDEXED)


def sorts_rows(indices: Tensor) -> bool:
    """Whether an embedding's backward sorts its tokens first."""
    return indices.numel() > EMBEDDING_SORTED


def _embedding_backward(args: tuple[Any, ...], out: Any) -> Shape:
    """Of tokens that are drawn evenly: how many rows they meet is not known in a trace."""
    gradient, indices, rows = args[:3]
    tokens, width = indices.numel(), gradient.shape[-1]
    if not sorts_rows(indices):
        return tokens * width, INDEXED
    met = rows * (1 - exp(-tokens / rows))
    pieces = met * ceil(tokens / met / EMBEDDING_PIECE)
    return round(width * (tokens / 2 + 2 * pieces)), INDEXED


def sort_passes(args: tuple[Any, ...]) -> int:
    """Passes of a radix sort over its keys, 8 bits each (CUB); 0 where a thread block sorts a row by itself."""
    given, rest = args[0], [value for value in args[1:] if isinstance(value, int) and not isinstance(value, bool)]
    dim = rest[0] if rest else -1
    return given.itemsize if given.dim() and given.shape[dim] > SORT_IN_ONE_PASS else 0


def _sort(args: tuple[Any, ...], out: Any) -> Shape:
    """Each pass reads and writes keys and places, half as much again as what the op is given and returns."""
    passes = sort_passes(args)
    return (3 * passes,) if passes else ()


def _rows(at: int) -> Rule:
    return lambda args, out: (args[at].shape[0] if args[at].dim() > 1 else 1,)


def _softmax(at: int) -> Rule:
    """Of a softmax over the dimension that stands at `at`."""

    def shape(args: tuple[Any, ...], out: Any) -> Shape:
        given = args[0]
        size = given.shape[args[at]] if given.dim() else 1
        return given.numel() // max(size, 1), size * given.itemsize

    return shape


def _norm(first: int) -> Rule:
    """Of a norm over the sizes that stand at `first + 1`, its input at `first`."""

    def shape(args: tuple[Any, ...], out: Any) -> Shape:
        given, sizes = args[first], args[first + 1]
        length = prod(sizes)
        return given.numel() // max(length, 1), length * given.itemsize

    return shape


def _fft(args: tuple[Any, ...], out: Any) -> Shape:
    """A pass for each dimension, two for a long one, one to make the input contiguous and one to scale the result.

    A transform of real numbers makes half of its result, the other half is copied from it, conjugate
    (ATen/native/cuda/SpectralOps.cpp).
    """
    given, dims, normalization, last = args[:4]
    passes = sum(1 if given.shape[dim] <= FFT_IN_ONE_PASS else 2 for dim in dims)
    passes += bool(normalization) + (not given.is_contiguous())
    return (2 * passes + (not given.is_complex() and not last),)


def _elementwise(args: tuple[Any, ...], out: Any) -> Shape:
    """Elements, where an operand does not lie as the result does (transposed or broadcast), or is of another type.

    What narrows fp32 has kernels of its own that need no cast (ATen/native/cuda/Copy.cu).
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
_RULES: dict[str, Rule] = {
    "mm": _matmul(0),
    "bmm": _matmul(0),
    "addmm": _matmul(1),
    "baddbmm": _matmul(1),
    "_grouped_mm": _matmul(0),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "_softmax": _softmax(1),
    "_log_softmax": _softmax(1),
    "_softmax_backward_data": _softmax(2),
    "_log_softmax_backward_data": _softmax(2),
    "native_layer_norm": _norm(0),
    "native_layer_norm_backward": _norm(1),
    "_fused_rms_norm": _norm(0),
    "_fused_rms_norm_backward": _norm(1),
    "embedding": _indexed,
    "index_select": _indexed,
    "index": _indexed,
    "gather": _indexed,
    "embedding_dense_backward": _embedding_backward,
    "index_add": _indexed_from(3),
    "index_put": _indexed_from(2),
    "index_put_": _indexed_from(2),
    "scatter": _indexed_from(2),
    "scatter_": _indexed_from(2),
    "scatter_add": _indexed_from(3),
    "scatter_add_": _indexed_from(3),
    "nll_loss_forward": _rows(0),
    "nll_loss_backward": _rows(1),
    "sort": _sort,
    "_fft_c2c": _fft,
    "_fft_r2c": _fft,
    "_fft_c2r": _fft,
}
