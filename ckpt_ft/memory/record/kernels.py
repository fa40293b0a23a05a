"""Seconds that the kernels of one op keep a GPU busy: the longest of what they ask of its parts.

Arithmetic, memory traffic, and where threads take elements one by one their instructions; whichever takes longest
(roofline: Williams et al. 2009), and the gap to the next kernel. Each rule has its source; the constants were read off
single kernels (benchmarks/kernels.py), none off a model's step.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from ckpt_ft.memory.gpus import GPU

from .events import Op
from .matmuls import cube, matmul_seconds, winograd_seconds
from .sizes import CAST, CHANNELS_FIRST, INDEXED, STRIDED, TF32, WINDOW, Shape

# Seconds: a kernel's blocks start and its last loads and stores end, and the gap to the next (see Host.per_launch).
KERNEL_RAMP, KERNEL_GAP = 2.5e-6, 0.9e-6

# Shares of a large matmul's rate, forward and backward, heads of 128 (FlashAttention-2, arXiv:2307.08691, figures 4 to
# 6: on an A100 about 215 and 180 TFLOP/s against cuBLAS's 260, and 100 for CUTLASS's memory-efficient attention).
# On Hopper it has the older matrix instruction, 62 % as fast as the new one (FlashAttention-3, arXiv:2407.08608).
_ATTENTION = {"flash": (0.82, 0.69), "cudnn": (0.82, 0.69), "efficient": (0.5, 0.33)}
_SIMT_ATTENTION = (0.65, 0.55)
_OLD_INSTRUCTION = 0.62
_NARROW_HEAD = 0.88  # heads of 64 and fewer (the same figures)
# Queries and keys of a block: a ViT's 197 tokens take as long as 256 (facebookresearch/xformers#467: backward in fp32
# of 384 x 197 x 88 in 2.3 ms on an A100, as these shares give).
_BLOCK = 64

# A thread that works out the address of each element, or casts it, keeps its SM busy for so many cycles; one that
# fetches or adds to rows by index for twice as many (A100: RoPE, RMSNorm and embedding in hf_op_latencies.csv); for
# each value under a window of a depthwise convolution a fifth (A100, 3 x 3: pytorch/pytorch#18631).
_CYCLES = {STRIDED: 0.9, CAST: 0.9, INDEXED: 2.0, WINDOW: 0.2}
_BLOCKS = {"softmax": 1024, "norm": 128}  # threads that work on a row (ATen's SoftMax.cu, layer_norm_kernel.cu)
# Rows in work over the bytes of the caches that keep them: where they begin to be read from memory again, and where
# all are. Softmax reads a row three times on end, from the SM's own cache too; a norm from L2.
_MISSES = {"softmax": (0.11, 0.28), "norm": (0.35, 0.95)}
# A norm's block goes over its row in steps of four elements a thread, and an SM passes so many bytes a cycle through
# such blocks, read and written (A100: 768 to 3,072 elements; on H100 so too: hf_op_latencies.csv).
_NORM_STEP, _NORM_BYTES_PER_CYCLE = 4 * 128, 10
_L1 = {(7, 5): 64, (8, 0): 192, (9, 0): 256, (10, 0): 256}  # KiB of an SM's own cache, elsewhere 128 (CUDA guide)
_ROW_NORMS = ("aten.native_layer_norm.", "aten._fused_rms_norm.")
_IN_PASSES = ("aten._fft", "aten.sort.")
_L2_BYTES_PER_CYCLE = 20  # of each SM (T4, V100, A100, RTX 4090: 16 to 31, arXiv:1903.07486, chipsandcheese.com)
_NLL_ROWS, _NLL_SECONDS = 32, 0.75e-6  # one block of 32 threads goes over all rows (ATen/native/cuda/Loss.cu)


@lru_cache(maxsize=200_000)
def _seconds(
    name: str, flops: int, nbytes: int, dtype: str, kernels: int, shape: Shape, gpu: GPU, memory_left: float
) -> float:
    memory = _traffic(name, nbytes, shape, gpu) / memory_left
    windows = len(shape) == 2 and shape[1] == WINDOW and flops > 0
    arithmetic = _arithmetic(name, flops, nbytes, dtype, shape, gpu) if flops and not windows else 0.0
    elements = 0.0
    if windows or (len(shape) == 2 and shape[1] in _CYCLES and not flops):
        elements = shape[0] * _CYCLES[shape[1]] / (gpu.sms * gpu.clock)
    elif "nll_loss" in name and len(shape) == 1:
        elements = shape[0] / _NLL_ROWS * _NLL_SECONDS
    elif len(shape) == 2 and name.startswith(_ROW_NORMS):
        step = _NORM_STEP * (2 if dtype in ("float16", "bfloat16") else 4)
        if shape[1] > step:  # shorter rows were not timed
            elements = 2 * shape[0] * -(-shape[1] // step) * step / (_NORM_BYTES_PER_CYCLE * gpu.sms * gpu.clock)
    return max(memory, arithmetic, elements) + kernels * (KERNEL_RAMP + KERNEL_GAP)


def device_seconds(op: Op, gpu: GPU, memory_left: float = 1.0) -> float:
    """Seconds that the kernels of one op keep `gpu` busy. memory_left: the share of its bandwidth that they have."""
    return _seconds(op.name, op.flops, op.nbytes, op.dtype, op.kernels, op.shape, gpu, memory_left)


def _traffic(name: str, nbytes: int, shape: Shape, gpu: GPU) -> float:
    """Seconds of the memory traffic: from the L2 cache what fits there, from memory the rest."""
    if "softmax" in name or ("norm" in name and "linalg" not in name):
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
    """Bytes that are read again from memory because the rows in work do not fit into the cache.

    Softmax finds the maximum, the sum, then the result, its backward a sum and the result; norms the statistics, then
    the result.
    """
    kind = "softmax" if "softmax" in name else "norm"
    if len(shape) != 2:  # batch and group norms: a channel's planes, or a group
        return nbytes // 2 if nbytes > gpu.l2 else 0
    rows, width = shape
    again = 2 if kind == "softmax" and "backward" not in name else 1
    if not gpu.l2:
        return rows * width * again
    in_work = gpu.sms * max(gpu.threads // _BLOCKS[kind], 1) * width
    caches = gpu.l2 + (gpu.sms * _L1.get(gpu.arch, 128) * 1024 if kind == "softmax" else 0)
    begin, end = _MISSES[kind]
    missed = min(max((in_work / caches - begin) / (end - begin), 0.0), 1.0)
    return int(rows * width * again * missed)


def _arithmetic(name: str, flops: int, nbytes: int, dtype: str, shape: Shape, gpu: GPU) -> float:
    """Seconds of an op that multiplies matrices."""
    tf32 = dtype == TF32
    dtype = "float32" if tf32 else dtype
    rate, tensor_cores = gpu.matmul_rate(dtype, tf32=tf32) * gpu.sustained, gpu.has_tensor_cores(dtype, tf32=tf32)
    if "attention" in name:
        padded = prod(-(-n // _BLOCK) * _BLOCK / max(n, 1) for n in shape[1:3])
        return flops * padded / (rate * _attention_share(name, shape, gpu, tensor_cores))
    shape = shape or cube(flops)
    alone = 2 * shape[0] * shape[1] * shape[2] * shape[3]
    seconds = matmul_seconds(shape, rate, tensor_cores, gpu)
    if not tensor_cores:
        seconds = min(seconds, winograd_seconds(shape, rate, gpu))
    seconds *= max(flops / max(alone, 1), 1.0)
    if tensor_cores and shape[4] & CHANNELS_FIRST:  # read and written, before or after the convolution
        seconds += 2 * nbytes / (gpu.bandwidth * gpu.bandwidth_efficiency)
    return seconds


def _attention_share(name: str, shape: Shape, gpu: GPU, tensor_cores: bool) -> float:
    backward = "backward" in name
    kind = next((kind for kind in _ATTENTION if kind in name), None)
    if kind is None:
        return 1.0
    share = (_ATTENTION[kind] if tensor_cores else _SIMT_ATTENTION)[backward]
    if gpu.arch[0] == 9 and kind != "cudnn":
        share *= _OLD_INSTRUCTION
    if shape and shape[3] <= 64:
        share *= _NARROW_HEAD
    return share
