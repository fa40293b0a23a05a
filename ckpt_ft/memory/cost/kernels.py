"""Seconds that the kernels of one op keep a GPU busy: the longest of arithmetic, memory traffic and instructions.

This is a roofline (Williams et al. 2009) with a third roof: the instructions of threads that handle elements one by
one. The time to the next kernel is added. Each rule has its source. The constants come from single kernels
(benchmarks/kernels.py), none but the conditions of `_ONE` from the step of a model.

Matmuls: a thread block computes one tile of the result. An SM computes one tile after the other, and the last wave of
tiles leaves SMs idle (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication). A small tile
needs more loads for each product; a tile begins with loads and ends with stores that nothing hides; a result of few
tiles is split along its sums, and the parts are added up. cuBLAS does not document which tile it takes; the fastest is
assumed. The constants come from 5,500 fp32 matmuls on six cards; those of tensor cores follow from how much more they
multiply for each byte that is loaded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache, lru_cache
from itertools import repeat
from math import prod
from typing import TYPE_CHECKING

from ckpt_ft.memory.gpus import GPU

if TYPE_CHECKING:
    from ckpt_ft.memory.record.events import Op

# `Op.shape`: the sizes that a kernel's time depends on besides its flops and bytes, as few integers as possible.
#   matmul: (batch, rows, columns, terms of each sum, flags): UNEVEN if rows in memory are no multiple of 16 bytes,
#       ACROSS unless the terms of a sum are adjacent in both operands, as in the forward of a linear layer, EXACT if
#       8-bit operands are summed without cuBLAS's fast accumulation
#   convolution: the shape of the equivalent matmul with groups as batch. The fifth entry is the sum of UNEVEN, for
#       pixels whose channels are no multiple of 16 bytes, WINOGRAD, for a 3 x 3 window of stride 1, and DIRECT, for
#       groups in channels last that cuDNN multiplies without tensor cores. The sixth is the bytes of images in
#       channels first, which tensor cores can neither read nor write
#   depthwise convolution: (values under all windows and pixels, WINDOW); they count more often if a kernel is slower
#   attention: (batch x heads, queries, keys, head size)
#   norm, softmax: (rows, bytes of a row)
#   transform, sort: (half passes over the data,)
#   elementwise: (elements, CAST) or (elements, STRIDED) if a thread handles elements one by one, () if it loads 16
#       bytes at once; (elements, INDEXED) for elements that are fetched or added to by index
#   nll loss: (rows,)
Shape = tuple[int, ...]
UNEVEN, WINOGRAD, ACROSS, DIRECT, EXACT = 1, 2, 4, 8, 16
CAST, STRIDED, INDEXED, WINDOW = 1, 2, 3, 4
TF32 = "tf32"  # `Op.dtype` of fp32 operands that may be rounded to TF32

# Seconds: a kernel's blocks start and its last loads and stores end, and the gap to the next (see Host.per_launch).
KERNEL_RAMP, KERNEL_GAP = 2.5e-6, 0.9e-6

# Shares of a large matmul's rate, forward and backward, heads of 128 (FlashAttention-2, arXiv:2307.08691, figures 4 to
# 6: on an A100 about 215 and 180 TFLOP/s against cuBLAS's 260, and 100 for CUTLASS's memory-efficient attention).
# On Hopper it uses the older matrix instruction, 62 % as fast as the new one (FlashAttention-3, arXiv:2407.08608,
# figures 5 and 6, heads of 128, 16,384 tokens: FlashAttention-2 370 and 322 TFLOP/s, cuDNN 595 and 516,
# FlashAttention-3 648 and 561).
_ATTENTION = {
    "flash_attn_3": (0.89, 0.75), "flash": (0.82, 0.69), "cudnn": (0.82, 0.69), "efficient": (0.5, 0.33)
}  # fmt: skip
_SIMT_ATTENTION = (0.65, 0.55)
_OLD_INSTRUCTION = 0.62
_NARROW_HEAD = 0.88  # heads of 64 and fewer (the same figures)
# Queries and keys of a block: the 197 tokens of a ViT take as long as 256 (facebookresearch/xformers#467: backward in
# fp32 of 384 x 197 x 88 takes 2.3 ms on an A100, as these shares give).
_BLOCK = 64

# Cycles of an SM for each element whose address a thread computes, or which it casts; twice as many for an element
# that is fetched or added to by index (A100: RoPE, RMSNorm and embedding in hf_op_latencies.csv); for each value under
# a window of a depthwise convolution, 1.8 for a pixel of 3 x 3 (A100: pytorch/pytorch#18631).
_CYCLES = {STRIDED: 0.9, CAST: 0.9, INDEXED: 2.0, WINDOW: 0.12}
_BLOCKS = {"softmax": 1024, "norm": 128}  # threads that work on a row (ATen's SoftMax.cu, layer_norm_kernel.cu)
# Bytes of the rows in work over the bytes of the caches that hold them: from the first value on some rows are read
# from memory again, from the second on all. Softmax reads a row three times in succession, also from the SM's own
# cache; a norm reads it from L2.
_MISSES = {"softmax": (0.11, 0.28), "norm": (0.35, 0.95)}
# A norm's block processes its row in steps of four elements per thread. An SM passes this many bytes per cycle, read
# and written, through such blocks (A100: 768 to 3,072 elements; H100 agrees: hf_op_latencies.csv).
_NORM_STEP, _NORM_BYTES_PER_CYCLE = 4 * 128, 10
_L1 = {(7, 5): 64, (8, 0): 192, (9, 0): 256, (10, 0): 256}  # KiB of an SM's own cache, elsewhere 128 (CUDA guide)
_ROW_NORMS = ("aten.native_layer_norm.", "aten._fused_rms_norm.")
_IN_PASSES = ("aten._fft", "aten.sort.")
_L2_BYTES_PER_CYCLE = 20  # of each SM (T4, V100, A100, RTX 4090: 16 to 31, arXiv:1903.07486, chipsandcheese.com)
_NLL_ROWS, _NLL_SECONDS = 32, 0.75e-6  # one block of 32 threads processes all rows (ATen/native/cuda/Loss.cu)

# Cost of a small tile's loads, times the sum of 1 / edge. Without tensor cores it depends on the bytes that an SM's
# shared memory gives each lane per cycle: 2 on V100 and A100, 1 on a T4 (arXiv:1903.07486: 108 and 59 bytes per cycle
# for 64 lanes) and on SMs with 128 lanes (CUDA C++ programming guide).
_LOADS, _LOADS_TENSOR = {2: 8.0, 1: 16.0}, 30.0
# Tensor cores? -> seconds to fill a tile's pipeline from memory, and the terms it holds: with them 3 to 5 times 32, as
# the names of kernels say (ampere_..._128x128_32x5).
_FILL = {False: (0.5e-6, 1), True: (1.5e-6, 128)}
# Lanes of an SM -> share of the time to store the result that no other tile's arithmetic hides: twice the lanes finish
# a tile in half the time. Tensor cores (0) are used well where sums are long enough to hide it.
_STORES = {64: 0.3, 128: 0.65, 0: 0.0}
# The only tile of cuBLAS's fp32 matmuls on Ampere and Ada unless the terms of each sum are adjacent in both operands
# (all 1,500 that were timed, each of them batched). That single ones on Hopper, which runs Ampere's kernels, have no
# other either is an assumption, made with the BERT steps of an A100 and an H100 in view
# (benchmarks/data/fp32_steps.csv).
_ONE = 128, 128
_WIDE = 512  # narrower results, as adapters have, are split or have narrow tiles: an assumption, as above
_SPLITS, _MORE_SPLITS = (1, 2, 4, 8, 16), (32, 64, 128)  # the latter on tensor cores
_UNEVEN_SHARE = 0.6  # share of the rate if rows in memory are no multiple of 16 bytes
# Share of the rate without fast accumulation, on Hopper only: it takes 1.1 to 1.2 times as long (pytorch/ao#2377).
_EXACT_SHARE = 1 / 1.15
# Share of the fp32 rate that cuDNN's direct kernel for grouped convolutions reaches, which it still runs on an H200
# (tile-ai/TileOPs#1568); from timm's steps on an RTX 3090 that are seen (benchmarks/timm_steps.py).
_DIRECT_SHARE = 0.16


def as_issued(ops: Iterable[Op], gpu: GPU) -> Iterator[Op]:
    """The ops that the host issues: one matmul for each group of a grouped product if the card has no kernel for all.

    Before them it reads how many rows each group has. torch has such kernels for bfloat16 on compute capability 9 and
    10. [ATen/native/cuda/GroupedBlas.cpp, _grouped_mm_cuda; ATen/native/GroupedMMUtils.h, _grouped_mm_fallback]
    """
    for op in ops:
        if "grouped_mm" not in op.name or gpu.is_cpu or (op.dtype == "bfloat16" and gpu.arch[0] in (9, 10)):
            yield op
            continue
        groups = op.shape[0] * (2 if "backward" in op.name else 1)
        yield replace(op, name="aten._local_scalar_dense.default", flops=0, nbytes=4 * op.shape[0], shape=())
        share = op.flops // groups, op.nbytes // groups
        yield from repeat(replace(op, flops=share[0], nbytes=share[1], shape=(1, *op.shape[1:])), groups)


def device_seconds(op: Op, gpu: GPU, memory_left: float = 1.0) -> float:
    """Seconds that the kernels of one op keep `gpu` busy with the share `memory_left` of its memory bandwidth."""
    return _seconds(op.name, op.flops, op.nbytes, op.dtype, op.kernels, op.shape, gpu, memory_left)


@lru_cache(maxsize=200_000)
def _seconds(
    name: str, flops: int, nbytes: int, dtype: str, kernels: int, shape: Shape, gpu: GPU, memory_left: float
) -> float:
    if gpu.is_cpu:
        if "attention" in name and shape:
            flops = round(flops * (1 + _EXPONENTIAL / shape[3]))
        turns = in_turn(name, shape, gpu)
        return turns * _own_seconds(name, dtype, shape, max(flops / gpu.fp32, nbytes / gpu.bandwidth) / turns, gpu)
    memory = _traffic(name, nbytes, shape, gpu) / memory_left
    windows = len(shape) == 2 and shape[1] == WINDOW and flops > 0
    arithmetic = _arithmetic(name, flops, dtype, shape, gpu) if flops and not windows else 0.0
    elements = 0.0
    if windows or (len(shape) == 2 and shape[1] in _CYCLES and not flops):
        elements = shape[0] * _CYCLES[shape[1]] / (gpu.sms * gpu.clock)
    elif "nll_loss" in name and len(shape) == 1:
        elements = shape[0] / _NLL_ROWS * _NLL_SECONDS
    elif len(shape) == 2 and name.startswith(_ROW_NORMS):
        step = _NORM_STEP * (2 if dtype in ("float16", "bfloat16") else 4)
        if shape[1] > step:  # shorter rows were not timed
            elements = 2 * shape[0] * -(-shape[1] // step) * step / (_NORM_BYTES_PER_CYCLE * gpu.sms * gpu.clock)
    seconds = max(memory, arithmetic, elements) + kernels * (KERNEL_RAMP + KERNEL_GAP)
    return _own_seconds(name, dtype, shape, seconds, gpu)


def in_turn(name: str, shape: Shape, gpu: GPU) -> int:
    """Equal parts of an op that run one after another: the heads of attention on a CPU."""
    return shape[0] if gpu.is_cpu and "attention" in name and shape else 1


def _own_seconds(name: str, dtype: str, shape: Shape, seconds: float, gpu: GPU) -> float:
    """The seconds as this kind of op was measured on the card, if it was calibrated."""
    if gpu.calibration is None or not gpu.calibration.curves:
        return seconds
    measured = dtype if dtype in _MEASURED_DTYPES else "float32"
    return gpu.calibration.corrected(seconds, [f"{kind_of(name, shape)} {measured}", f"pointwise {measured}"])


# Multiplications that take as long as the exponential of one score of attention on a CPU: an assumption, chosen from
# the curves of one machine. Calibration corrects what is left.
_EXPONENTIAL = 64
_MEASURED_DTYPES = ("float32", "float16", "bfloat16", TF32)
_PRODUCTS = {"mm": "matmul", "addmm": "matmul", "bmm": "batched matmul", "baddbmm": "batched matmul"}
_NARROW = 16  # rows, columns or terms of a product that is timed apart, as of adapters: memory and overhead decide
# Parts of an op's name -> its kind; the first that is found decides.
_KINDS = {
    "bernoulli": "random", "dropout": "random", "rand": "random", "normal_": "random", "uniform": "random",
    "attention": "attention", "convolution": "convolution", "batch_norm": "batch norm", "group_norm": "group norm",
    "norm": "norm", "embedding_dense": "embedding", "embedding": "index", "index": "index", "gather": "index",
    "softmax": "softmax", "pool": "pool", "upsample": "pool", "foreach": "optimizer", "fused_ad": "optimizer",
    "gelu": "transcendental", "silu": "transcendental", "tanh": "transcendental", "erf": "transcendental",
    "sigmoid": "transcendental", "exp": "transcendental", "pow": "transcendental", "sin": "transcendental",
    "cos": "transcendental", "mean": "reduction", "sum": "reduction", "amax": "reduction", "max.": "reduction",
}  # fmt: skip


@cache
def kind_of(name: str, shape: Shape) -> str:
    """The kind of an op whose seconds are measured together: "matmul", "norm backward", "strided", ..."""
    short = name.partition(".")[2]
    product = _PRODUCTS.get(short.partition(".")[0])
    if product:
        return "narrow matmul" if len(shape) > 3 and min(shape[1:4]) <= _NARROW else product
    backward = " backward" if "backward" in short else ""
    found = next((kind for part, kind in _KINDS.items() if part in short), "")
    if found == "convolution":
        alone = len(shape) == 2 and shape[1] == WINDOW
        return ("depthwise" if alone else "grouped" if len(shape) > 2 and shape[0] > 1 else found) + backward
    if found in ("attention", "batch norm", "group norm", "norm", "softmax", "pool", "transcendental"):
        return found + backward
    if not found and len(shape) == 2 and shape[1] in (CAST, STRIDED):
        return "cast" if shape[1] == CAST else "strided"
    return found or "pointwise"


_READ_ONCE = ("aten.linalg", "ckpt_ft.")  # norms of matrices; fused kernels, which hold a row in registers


def _traffic(name: str, nbytes: int, shape: Shape, gpu: GPU) -> float:
    """Seconds of the memory traffic; what fits into the L2 cache moves at its rate."""
    if "softmax" in name or ("norm" in name and not name.startswith(_READ_ONCE)):
        nbytes += _reread(name, nbytes, shape, gpu)
    elif name.startswith(_IN_PASSES) and shape:
        nbytes = nbytes * shape[0] // 2
    hit = min(max(1.5 - nbytes / gpu.l2, 0.0), 1.0) if gpu.l2 else 0.0
    rate = gpu.bandwidth * gpu.bandwidth_efficiency
    if not hit:
        return nbytes / rate
    cached = _L2_BYTES_PER_CYCLE * gpu.sms * gpu.clock
    return nbytes * (hit / cached + (1 - hit) / rate)


def _reread(name: str, nbytes: int, shape: Shape, gpu: GPU) -> int:
    """Bytes that are read again from memory because the rows in work do not fit into the caches.

    Softmax reads a row for the maximum, the sum and the result; its backward for a sum and the result; a norm for the
    statistics and the result.
    """
    kind, backward = "softmax" if "softmax" in name else "norm", "backward" in name
    if len(shape) != 2:  # batch and group norms: a channel's planes, or a group; backward reads two tensors for one
        return nbytes * (4 if backward else 3) // 6 if nbytes > gpu.l2 else 0
    rows, width = shape
    again = 2 if kind == "softmax" and not backward else 1
    if not gpu.l2:
        return rows * width * again
    in_work = gpu.sms * max(gpu.threads // _BLOCKS[kind], 1) * width
    caches = gpu.l2 + (gpu.sms * _L1.get(gpu.arch, 128) * 1024 if kind == "softmax" else 0)
    begin, end = _MISSES[kind]
    missed = min(max((in_work / caches - begin) / (end - begin), 0.0), 1.0)
    return int(rows * width * again * missed)


def _arithmetic(name: str, flops: int, dtype: str, shape: Shape, gpu: GPU) -> float:
    """Seconds of the arithmetic of a matmul, a convolution or attention."""
    tf32 = dtype == TF32
    dtype = "float32" if tf32 else dtype
    rate, tensor_cores = gpu.matmul_rate(dtype, tf32=tf32) * gpu.sustained, bool(gpu.tensor_rate(dtype, tf32))
    if "attention" in name:
        padded = prod(-(-n // _BLOCK) * _BLOCK / max(n, 1) for n in shape[1:3])
        return flops * padded / (rate * _attention_share(name, shape, gpu, tensor_cores))
    if not shape:
        return flops / rate
    if tensor_cores and len(shape) > 5 and shape[4] & DIRECT:
        return flops / (gpu.matmul_rate("float32") * gpu.sustained * _DIRECT_SHARE)
    if len(shape) == 5 and shape[4] & EXACT and gpu.arch[0] == 9:
        rate *= _EXACT_SHARE
    alone = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    seconds = matmul_seconds(shape[:5], rate, tensor_cores, gpu, 1.0 if tensor_cores else gpu.power_share)
    if not tensor_cores:
        seconds = min(seconds, winograd_seconds(shape[:5], rate, gpu))
    seconds *= max(flops / max(alone, 1), 1.0)
    if tensor_cores and len(shape) > 5:  # transposed by kernels of their own, which read and write them
        seconds += 2 * shape[5] / (gpu.bandwidth * gpu.bandwidth_efficiency)
    return seconds


def _attention_share(name: str, shape: Shape, gpu: GPU, tensor_cores: bool) -> float:
    backward = "backward" in name
    kind = next((kind for kind in _ATTENTION if kind in name), None)
    if kind is None:
        return 1.0
    hopper = gpu.arch[0] == 9
    kind = "flash" if kind == "flash_attn_3" and not hopper else kind
    share = (_ATTENTION[kind] if tensor_cores else _SIMT_ATTENTION)[backward]
    if hopper and kind in ("flash", "efficient"):
        share *= _OLD_INSTRUCTION
    if shape and shape[3] <= 64:
        share *= _NARROW_HEAD
    return share


@lru_cache(maxsize=100_000)
def matmul_seconds(shape: Shape, rate: float, tensor_cores: bool, gpu: GPU, power: float = 1.0) -> float:
    """Seconds of the arithmetic of a matmul of this `shape`; `rate` is the FLOP/s of large matmuls.

    A power cap limits the products of all SMs together: SMs that are idle in the last wave leave their power to
    others, up to the clock of a card without a cap. `power`: share of that clock at `rate`.
    """
    batch, rows, columns, terms, flag = shape
    each = rate / power / gpu.sms * (_UNEVEN_SHARE if flag & UNEVEN and tensor_cores else 1.0)
    loads = _LOADS_TENSOR if tensor_cores else _LOADS[1 if gpu.lanes == 128 or gpu.arch == (7, 5) else 2]
    choice = _tiles(tensor_cores, tensor_cores or gpu.lanes == 128)
    full, splits = sum(1 / edge for edge in choice[0]), _SPLITS + _MORE_SPLITS * tensor_cores
    memory, (fill, held) = gpu.bandwidth * gpu.bandwidth_efficiency, _FILL[tensor_cores]
    one = not tensor_cores and gpu.arch[0] == 8 and batch > 1
    if batch == 1 and not tensor_cores and flag & ACROSS and gpu.arch[0] in (8, 9):
        one = min(rows, columns) >= _WIDE
    best = float("inf")
    for high, wide in [_ONE] if one else choice:
        tiles = batch * -(-rows // high) * -(-columns // wide)
        share = 1 / (1 + loads * max(1 / high + 1 / wide - full, 0.0))
        for split in splits if batch == 1 and not one else (1,):
            if split > 1 and not tensor_cores and tiles * split > gpu.sms:
                break
            waves = max(-(-tiles * split // gpu.sms), tiles * split / gpu.sms / power)
            sums = -(-terms // split)
            seconds = waves * (2 * high * wide * sums / (each * share) + fill * min(sums / held, 1.0))
            if split > 1:  # the parts are written and read in fp32
                seconds += 2 * 4 * rows * columns * split / memory
            best = min(best, seconds)
    return best + _STORES[0 if tensor_cores else gpu.lanes] * 4 * batch * rows * columns / memory


def winograd_seconds(shape: Shape, rate: float, gpu: GPU) -> float:
    """Seconds of a 3 x 3 convolution in fp32 by Winograd's F(4x4, 3x3); infinite for other shapes.

    36 products replace the 144 of each 4 x 4 pixels; inputs and results are transformed through memory (Lavin and Gray
    2016, arXiv:1509.09308; rules/cuda.py has the same scratch).
    """
    if not shape[4] & WINOGRAD:
        return float("inf")
    _, pixels, columns, terms, _ = shape
    tiles, channels = -(-pixels // 16), terms // 9
    moved = 2 * 36 * 4 * (channels * columns + tiles * (channels + columns))
    multiply = matmul_seconds((36, tiles, columns, channels, 0), rate, False, gpu)
    return multiply + moved / (gpu.bandwidth * gpu.bandwidth_efficiency)


@lru_cache(maxsize=8)
def _tiles(tensor_cores: bool, large: bool) -> list[tuple[int, int]]:
    """The tiles to choose from; the first one reaches the full rate.

    Tiles are large for tensor cores and on SMs of 128 lanes (according to the kernels' names in the timings: up to
    256 x 128 on L4 and H100, 128 x 128 on T4, V100 and A100).
    """
    edges = [256, 128, 64, 32][0 if large else 1 : 3 if tensor_cores else 4]
    most = 128 * (256 if large else 128)
    tiles = [(high, wide) for high in edges for wide in edges if high * wide <= most]
    return sorted(tiles, key=lambda tile: 1 / tile[0] + 1 / tile[1])
