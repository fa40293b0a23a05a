"""Seconds of a matmul from its shape: tiles of the result, waves of tiles over the SMs, splits of long sums.

A thread block computes one tile of the result; an SM takes one tile after the other, and the last wave of them leaves
SMs idle (docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication). A small tile needs more loads
for each product; a tile begins with loads and ends with stores that nothing hides; a result of few tiles is split
along its sums, and the parts are added up. Which tile cuBLAS takes is not documented: the fastest is taken here.

The constants are read off 5,500 fp32 matmuls on six cards (benchmarks/kernels.py); those of tensor cores follow
from how much more they multiply for each byte that is loaded.
"""

from __future__ import annotations

from functools import lru_cache

from ckpt_ft.memory.gpus import GPU

from .sizes import UNEVEN, WINOGRAD, Shape

# How much a small tile's loads cost, times the sum of 1 / edge. Without tensor cores by the bytes that an SM's shared
# memory gives each of its lanes in a cycle: 2 on V100 and A100, 1 on a T4 (arXiv:1903.07486: 108 and 59 bytes a cycle
# for 64 lanes) and where an SM has 128 lanes (CUDA C++ programming guide).
_LOADS, _LOADS_TENSOR = {2: 8.0, 1: 16.0}, 30.0
# Tensor cores? -> seconds to fill a tile's pipeline from memory.
_TILE_SECONDS = {False: 0.5e-6, True: 1.5e-6}
# Lanes of an SM -> share of the time to store the result that no other tile's arithmetic hides: twice the lanes are
# through with a tile in half the time. Tensor cores (0) are used well where sums are long enough to hide it.
_STORES = {64: 0.3, 128: 0.65, 0: 0.0}
_ONE = 128, 128  # the only tile of cuBLAS's batched fp32 matmuls on Ampere and Ada (all 1,500 that were timed)
_SPLITS = (1, 2, 4, 8, 16)
_UNEVEN_SHARE = 0.6  # share of the rate where rows in memory are no multiple of 16 bytes


def cube(flops: int) -> Shape:
    """The shape of a matmul of which nothing but the flops is known: rows, columns and terms alike."""
    edge = max(round((flops / 2) ** (1 / 3)), 1)
    return 1, edge, edge, edge, 0


@lru_cache(maxsize=100_000)
def matmul_seconds(shape: Shape, rate: float, tensor_cores: bool, gpu: GPU) -> float:
    """Seconds of the arithmetic of a matmul (see shapes.py) at `rate` FLOP/s for large ones."""
    batch, rows, columns, terms, flag = shape
    each = rate / gpu.sms * (_UNEVEN_SHARE if flag == UNEVEN and tensor_cores else 1.0)
    narrow = gpu.lanes == 128 or gpu.arch == (7, 5)
    loads = _LOADS_TENSOR if tensor_cores else _LOADS[1 if narrow else 2]
    choice = _tiles(tensor_cores, tensor_cores or gpu.lanes == 128)
    full = sum(1 / edge for edge in choice[0])
    memory = gpu.bandwidth * gpu.bandwidth_efficiency
    best = float("inf")
    for high, wide in [_ONE] if batch > 1 and gpu.arch[0] == 8 and not tensor_cores else choice:
        tiles = batch * -(-rows // high) * -(-columns // wide)
        share = 1 / (1 + loads * max(1 / high + 1 / wide - full, 0.0))
        for split in _SPLITS if batch == 1 else (1,):
            if split > 1 and not tensor_cores and tiles * split > gpu.sms:
                break
            waves = -(-tiles * split // gpu.sms)
            seconds = waves * (2 * high * wide * -(-terms // split) / (each * share) + _TILE_SECONDS[tensor_cores])
            if split > 1:  # the parts are written and read in fp32
                seconds += 2 * 4 * rows * columns * split / memory
            best = min(best, seconds)
    return best + _STORES[0 if tensor_cores else gpu.lanes] * 4 * batch * rows * columns / memory


def winograd_seconds(shape: Shape, rate: float, gpu: GPU) -> float:
    """Seconds of a 3 x 3 convolution in fp32 by Winograd's F(4x4, 3x3), infinite where `shape` is none.

    36 products stand for the 144 of each 4 x 4 pixels; inputs and results are transformed, by way of memory
    (Lavin and Gray 2016, arXiv:1509.09308; rules/cudnn.py has the same scratch).
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
    """Tiles to choose from, the one that reaches the full rate first.

    Large ones for tensor cores, and without them on SMs of 128 lanes (the kernels' names in those timings: up to
    256 x 128 on L4 and H100, 128 x 128 on T4, V100 and A100).
    """
    edges = [256, 128, 64, 32][0 if large else 1 : 3 if tensor_cores else 4]
    most = 128 * (256 if large else 128)
    tiles = [(high, wide) for high in edges for wide in edges if high * wide <= most]
    return sorted(tiles, key=lambda tile: 1 / tile[0] + 1 / tile[1])
