"""The GPUs that a step can be predicted for, and the one in this machine.

Sources, by field:
- arch, sms, bandwidth and the rates: NVIDIA's datasheet or architecture whitepaper of the card, dense (no sparsity),
  half precision with fp32 accumulation. B200's bandwidth is what its bus and clock give (pytorch/ao#4002).
- memory: "GPU 0 has a total capacity of ..." in PyTorch's out-of-memory messages, as quoted in public issue trackers:
  the part of the board's memory that the driver leaves. It differs by up to 1 % between drivers.
- context: "memory in use" of the same messages minus the memory that PyTorch allocated and reserved: CUDA context,
  loaded kernels, library handles. No clean message was found for v100, h100 and rtx-4090, which have the value of a
  card of the same size.
- efficiency: the shares of the datasheet's rates that large kernels reach, of three kinds.
  fp32 matmuls: T4, V100, L4, A100 and H100 from 3,000 single ones (the test set of github.com/sitar-lab/NeuSight;
  `python benchmarks/kernels.py`); the others from github.com/zzc0721/torch-performance-test-data.
  bf16 matmuls (fp16 before Ampere): the latter, limited to 1 (GeForce cards boost past their datasheet); A100, H100
  and B200 agree with the table of maximum achievable matmul FLOPS in github.com/stas00/ml-engineering. Its 70 W power
  cap holds a T4 at 24 TFLOP/s under half-precision load (forums.developer.nvidia.com/t/264462). H100 PCIe and NVL,
  H20, the workstation cards, B300 and GB200 have the shares of the nearest measured card, the RTX 20 cards 0.75 and
  0.8. AMD's are from that table; MI250's are for one of its two dies, each of which is a device.
  Memory: T4, V100, L4 and A100 from 3,400 single elementwise kernels of the same test set; L40 and L40S like L4, which
  has the same GDDR6 with ECC; RTX 4090 0.91 and A100 0.89 from github.com/xytpai/nvbench; the others are assumed to be
  similar.
- l2: the datasheets; 70 % of it on A100, H100 and B200, whose two halves keep copies of each other's data (from layer
  norms over rows of 2,048 to 4,096 in that set, whose second read comes from memory).
- sustained: the share that is left after a second of load. T4 and L4 from the fp32 matmuls of that set whose repeated
  calls ran longer (0.47 of the datasheet instead of 0.52 to 0.55, 0.29 instead of 0.32); L40 and L40S like L4.

`GPU_VARIANTS` are GPUs that differ from a measured card of their generation in size only: other SMs, memory, bandwidth
and clock. Within a generation, the rates of tensor cores are the same multiple of fp32's (NVIDIA's whitepapers of
Turing, GA102, Ada, Hopper and RTX Blackwell), and so are the measured shares of these rates. The columns:
- SMs, GB/s, fp32 TFLOP/s at boost: the datasheet. For a laptop, at the highest boost clock that NVIDIA lists, which
  the laptop's power limit may not allow for long.
- GiB: as CUDA reports it, quoted in public issue trackers; ~ marks cards without such a message, which have the value
  of a card of the same size and generation.
Half of the CUDA context is assumed to grow with the SMs (the local memory of their resident threads).
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from dataclasses import dataclass, replace

from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import DEFAULT_GPU
from ckpt_ft.units import GIB, MIB, format_bytes, parse_budget

LAPTOP_NOTE = "a laptop's rates are those of its highest boost clock, which its power limit may not let it hold"

# fmt: off
GPU_VARIANTS: tuple[tuple[str, str, int, float, float, float], ...] = (
    # name                like                 SMs  GiB     GB/s    fp32
    ("rtx-2060",          "rtx-2080-ti",       30,  5.79,   336,    6.5),
    ("rtx-2060-super",    "rtx-2080-ti",       34,  7.79,   448,    7.2),
    ("rtx-2070",          "rtx-2080-ti",       36,  7.79,   448,    7.5),
    ("rtx-2070-super",    "rtx-2080-ti",       40,  7.79,   448,    9.1),
    ("rtx-2080",          "rtx-2080-ti",       46,  7.79,   448,    10.1),
    ("rtx-2080-super",    "rtx-2080-ti",       48,  7.79,   496,    11.2),
    ("quadro-rtx-5000",   "quadro-rtx-8000",   48,  15.75,  448,    11.2),  # ~
    ("quadro-rtx-6000",   "quadro-rtx-8000",   72,  23.65,  672,    16.3),
    ("titan-rtx",         "quadro-rtx-8000",   72,  23.65,  672,    16.3),
    ("rtx-3050",          "rtx-3090",          20,  7.79,   224,    9.1),
    ("rtx-3060",          "rtx-3090",          28,  11.76,  360,    12.7),
    ("rtx-3060-ti",       "rtx-3090",          38,  7.79,   448,    16.2),
    ("rtx-3070",          "rtx-3090",          46,  7.79,   448,    20.3),
    ("rtx-3070-ti",       "rtx-3090",          48,  7.79,   608,    21.7),
    ("rtx-3080",          "rtx-3090",          68,  9.78,   760,    29.8),
    ("rtx-3080-12gb",     "rtx-3090",          70,  11.77,  912,    30.6),
    ("rtx-3080-ti",       "rtx-3090",          80,  11.77,  912,    34.1),
    ("rtx-3090-ti",       "rtx-3090",          84,  23.69,  1008,   40.0),
    ("rtx-3060-laptop",   "rtx-3090",          30,  5.81,   336,    13.1),
    ("rtx-3070-laptop",   "rtx-3090",          40,  7.79,   448,    16.6),
    ("rtx-3080-laptop",   "rtx-3090",          48,  15.74,  448,    21.0),
    ("rtx-3080-ti-laptop", "rtx-3090",         58,  15.74,  512,    23.6),  # ~
    ("a2000",             "a6000",             26,  11.75,  288,    8.0),   # ~
    ("a4000",             "a6000",             48,  15.73,  448,    19.2),
    ("a4500",             "a6000",             56,  19.68,  640,    23.7),  # ~
    ("a5000",             "a6000",             64,  23.68,  768,    27.8),
    ("a5500",             "a6000",             80,  23.68,  768,    34.1),  # ~
    ("a10",               "a6000",             72,  22.06,  600,    31.2),
    ("a40",               "a6000",             84,  44.56,  696,    37.4),
    ("a2",                "a6000",             10,  14.62,  200,    4.5),   # ~
    ("rtx-4060",          "rtx-4090",          24,  7.75,   272,    15.1),
    ("rtx-4060-ti-8gb",   "rtx-4090",          34,  7.75,   288,    22.1),
    ("rtx-4060-ti-16gb",  "rtx-4090",          34,  15.60,  288,    22.1),  # ~
    ("rtx-4070",          "rtx-4090",          46,  11.72,  504,    29.1),
    ("rtx-4070-super",    "rtx-4090",          56,  11.72,  504,    35.5),
    ("rtx-4070-ti",       "rtx-4090",          60,  11.72,  504,    40.1),
    ("rtx-4070-ti-super", "rtx-4090",          66,  15.70,  672,    44.1),
    ("rtx-4080",          "rtx-4090",          76,  15.70,  716.8,  48.7),
    ("rtx-4080-super",    "rtx-4090",          80,  15.70,  736,    52.2),
    ("rtx-4090-d",        "rtx-4090",          114, 23.64,  1008,   73.5),
    ("rtx-4050-laptop",   "rtx-4090",          20,  5.77,   192,    12.1),
    ("rtx-4060-laptop",   "rtx-4090",          24,  7.75,   256,    14.6),
    ("rtx-4070-laptop",   "rtx-4090",          36,  7.75,   256,    20.0),
    ("rtx-4080-laptop",   "rtx-4090",          58,  11.72,  432,    33.9),  # ~
    ("rtx-4090-laptop",   "rtx-4090",          76,  15.70,  576,    39.7),
    ("rtx-2000-ada",      "rtx-6000-ada",      22,  15.60,  224,    12.0),  # ~
    ("rtx-4000-ada",      "rtx-6000-ada",      48,  19.55,  360,    26.7),  # ~
    ("rtx-4500-ada",      "rtx-6000-ada",      60,  23.52,  432,    39.6),  # ~
    ("rtx-5000-ada",      "rtx-6000-ada",      100, 31.49,  576,    65.3),  # ~
    ("l20",               "l40",               92,  44.39,  864,    59.8),  # ~
    ("a800-80gb",         "a100-80gb",         108, 79.25,  2039,   19.5),
    ("h800",              "h100",              132, 79.11,  3350,   67.0),
    ("gh200",             "h100",              132, 94.50,  4000,   67.0),
    ("rtx-5050",          "rtx-5090",          20,  7.65,   320,    13.2),  # ~
    ("rtx-5060",          "rtx-5090",          30,  7.65,   448,    19.2),  # ~
    ("rtx-5060-ti-8gb",   "rtx-5090",          36,  7.65,   448,    23.7),  # ~
    ("rtx-5060-ti-16gb",  "rtx-5090",          36,  15.45,  448,    23.7),
    ("rtx-5070",          "rtx-5090",          48,  11.50,  672,    30.9),  # ~
    ("rtx-5070-ti",       "rtx-5090",          70,  15.46,  896,    43.9),
    ("rtx-5080",          "rtx-5090",          84,  15.47,  960,    56.3),
    ("rtx-5060-laptop",   "rtx-5090",          26,  7.65,   384,    16.6),  # ~
    ("rtx-5070-laptop",   "rtx-5090",          36,  7.65,   384,    21.6),  # ~
    ("rtx-5070-ti-laptop", "rtx-5090",         46,  11.50,  672,    26.1),  # ~
    ("rtx-5080-laptop",   "rtx-5090",          60,  15.45,  896,    35.1),  # ~
    ("rtx-5090-laptop",   "rtx-5090",          82,  23.42,  896,    45.3),
    ("rtx-pro-4000",      "rtx-pro-6000",      70,  23.42,  672,    46.9),  # ~
    ("rtx-pro-4500",      "rtx-pro-6000",      82,  31.36,  896,    54.9),  # ~
    ("rtx-pro-5000",      "rtx-pro-6000",      110, 47.40,  1344,   73.7),  # ~
)
# fmt: on


@dataclass(frozen=True)
class GPU:
    """One GPU. Units are bytes, bytes per second and FLOP/s; a rate of 0 means that the card has no such units."""

    name: str
    arch: tuple[int, int]  # compute capability: (7, 5) is sm_75
    sms: int
    memory: int  # bytes that CUDA reports as the device's total
    context: int  # bytes of `memory` that a training process uses outside the caching allocator
    bandwidth: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp8: float
    efficiency_fp32: float = 0.75  # share of `fp32` that large matmuls reach
    efficiency: float = 0.8  # share of the tensor cores' rates that large matmuls reach
    bandwidth_efficiency: float = 0.89  # share of `bandwidth` that elementwise kernels reach
    note: str = ""  # an assumption of every estimate for this card, as a sentence
    l2: int = 0  # bytes of its L2 cache; 0 for none
    sustained: float = 1.0  # share of the arithmetic rates that is left after a second of load

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", tuple(self.arch))  # JSON knows only lists

    @property
    def usable(self) -> int:
        """Bytes that the caching allocator can reserve."""
        return self.memory - self.context

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between host and card: an x16 slot of the PCIe generation of its compute capability.

        PCIe 3.0, 4.0 and 5.0 specify 15.75, 31.5 and 63 GB/s; that 80 % are reached is an assumption.
        """
        major = self.arch[0]
        return 0.8 * (15.75e9 if major < 8 else 31.5e9 if major == 8 else 63e9)

    @property
    def clock(self) -> float:
        """Cycles per second of an SM under load: the boost clock from the fp32 rate, reduced by the power cap."""
        # The share of the rate that fp32 matmuls reach without a power cap: V100, A100; H100; RTX 3090, 4090.
        reached = 0.92 if self.lanes == 64 else 0.82 if self.arch[0] in (9, 10) else 0.68
        return self.fp32 / (2 * self.lanes * self.sms) * min(self.efficiency_fp32 / reached, 1.0) * self.sustained

    @property
    def lanes(self) -> int:
        """fp32 lanes of an SM (NVIDIA's architecture whitepapers)."""
        return 64 if self.arch <= (8, 0) else 128

    @property
    def threads(self) -> int:
        """Resident threads of an SM (CUDA C++ programming guide, technical specifications)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.arch, 2048)

    def has_tensor_cores(self, dtype: str, tf32: bool = False) -> bool:
        """Whether matmuls of `dtype` run on tensor cores; `tf32` as in `matmul_rate`."""
        return bool(self._tensor_rate(dtype, tf32))

    def _tensor_rate(self, dtype: str, tf32: bool) -> float:
        whole = 2 * self.fp16 if self.arch >= (7, 5) else 0.0  # int8: at least twice the rate of half precision
        rates = {"float16": self.fp16, "bfloat16": self.bf16, "float32": self.tf32 if tf32 else 0.0, "int8": whole}
        return self.fp8 if dtype.startswith("float8") else rates.get(dtype, 0.0)

    def matmul_rate(self, dtype: str, tf32: bool = False) -> float:
        """FLOP/s that large matmuls of `dtype` ("float16", ...) reach; `tf32`: fp32 operands may be rounded to TF32.

        A dtype without tensor cores on this card runs at the rate of fp32: cuBLAS emulates bf16 on older cards.
        """
        return self._tensor_rate(dtype, tf32) * self.efficiency or self.fp32 * self.efficiency_fp32


def _gpu(
    name: str,
    arch: tuple[int, int],
    sms: int,
    memory: float,
    context: float,
    bandwidth: float,
    rates: tuple[float, float, float, float, float],
    efficiency: tuple[float, float],
    bandwidth_efficiency: float,
    l2: float,
    sustained: float = 1.0,
    note: str = "",
) -> GPU:
    """A GPU from a row of the table below, which is in GiB, GB/s, TFLOP/s and MiB."""
    fp32, tf32, fp16, bf16, fp8 = (rate * 1e12 for rate in rates)
    total, outside, l2_bytes = round(memory * GIB), round(context * GIB), round(l2 * MIB)
    measured = *efficiency, bandwidth_efficiency, note, l2_bytes, sustained
    return GPU(name, arch, sms, total, outside, bandwidth * 1e9, fp32, tf32, fp16, bf16, fp8, *measured)


def _variant(name: str, like: GPU, sms: int, memory: float, bandwidth: float, fp32: float) -> GPU:
    """A card of the generation of `like`, with the units of `_gpu`."""
    share = fp32 * 1e12 / like.fp32
    rates = {rate: getattr(like, rate) * share for rate in ("fp32", "tf32", "fp16", "bf16", "fp8")}
    note = LAPTOP_NOTE if name.endswith("-laptop") else ""
    nbytes, context = round(memory * GIB), round(like.context * (1 + sms / like.sms) / 2)
    own = {"name": name, "sms": sms, "memory": nbytes, "context": context, "bandwidth": bandwidth * 1e9, "note": note}
    return replace(like, **own, **rates, l2=round(like.l2 * sms / like.sms))  # type: ignore[arg-type]


_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA, Tegra, WSL, AMD
_AMD = (
    "an AMD card's kernels are not known: scratch and workspaces are those of CUDA's libraries, the context is an "
    "H100's, collectives need a rate of their own; what PyTorch itself allocates is the same on both"
)
# fmt: off
GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in (
    #    name        arch      SMs  GiB     context GB/s  fp32   tf32   fp16  bf16  fp8   TFLOP/s  efficiencies, L2
    _gpu("t4",        (7, 5),  40,  14.56,  0.13,   320, (8.1,   0,     65,   0,    0), (0.54, 0.37), 0.75, 4, 0.88),
    _gpu("v100-16gb", (7, 0),  80,  15.77,  0.40,   900, (15.7,  0,     125,  0,    0), (0.89, 0.78), 0.92, 6),
    _gpu("v100-32gb", (7, 0),  80,  31.73,  0.40,   900, (15.7,  0,     125,  0,    0), (0.89, 0.78), 0.92, 6),
    _gpu("a10g",      (8, 6),  80,  22.06,  0.42,   600, (35,    35,    70,   70,   0), (0.66, 0.94), 0.89, 6),
    _gpu("l4",        (8, 9),  58,  22.03,  0.25,   300, (30.3,  60,   121,  121,  242), (0.32, 0.47), 0.78, 48, 0.92),
    _gpu("l40s",      (8, 9),  142, 44.39,  0.41,   864, (91.6,  183,  362,  362,  733), (0.51, 0.74), 0.78, 96, 0.92),
    _gpu("rtx-3090",  (8, 6),  82,  23.56,  0.60,   936, (35.6,  35.6,  71,   71,   0), (0.70, 1.00), 0.91, 6),
    _gpu("rtx-4090",  (8, 9),  128, 23.64,  0.60,  1008, (82.6,  82.6,  165,  165,  330), (0.66, 1.00), 0.91, 72),
    _gpu("rtx-5090",  (12, 0), 170, 31.36,  0.58,  1792, (104.8, 104.8, 209,  209,  419), (0.65, 1.00), 0.91, 96),
    _gpu("a100-40gb", (8, 0),  108, 39.49,  0.40,  1555, (19.5,  156,   312,  312,  0), (0.86, 0.79), 0.88, 28),
    _gpu("a100-80gb", (8, 0),  108, 79.25,  0.40,  2039, (19.5,  156,   312,  312,  0), (0.94, 0.84), 0.87, 28),
    _gpu("h100",      (9, 0),  132, 79.11,  0.65,  3350, (67,    494.7, 989,  989,  1979), (0.78, 0.79), 0.90, 35),
    _gpu("h200",      (9, 0),  132, 139.80, 0.65,  4800, (67,    494.7, 989,  989,  1979), (0.78, 0.80), 0.90, 35),
    _gpu("b200",      (10, 0), 148, 178.35, 0.70,  7670, (75,    1125,  2250, 2250, 4500), (0.88, 0.75), 0.90, 88),
    _gpu("p100",      (6, 0),  56,  15.89,  0.40,   732, (9.3,   0,     18.7, 0,    0), (0.75, 0.75), 0.89, 4),
    _gpu("rtx-2080-ti", (7, 5), 68, 10.76,  0.60,   616, (13.4,  0,     53.8, 0,    0), (0.75, 0.80), 0.89, 5.5),
    _gpu("quadro-rtx-8000", (7, 5), 72, 47.46, 0.60, 672, (16.3, 0,     130.5, 0,   0), (0.75, 0.80), 0.89, 6),
    _gpu("a6000",     (8, 6),  84,  47.54,  0.60,   768, (38.7,  77.4,  154.8, 154.8, 0), (0.70, 0.94), 0.89, 6),
    _gpu("rtx-6000-ada", (8, 9), 142, 47.51, 0.60,  960, (91.1, 182.1, 364.2, 364.2, 728), (0.51, 0.74), 0.89, 96),
    _gpu("l40",       (8, 9),  142, 44.52,  0.41,   864, (90.5, 90.5,  181,  181,  362), (0.51, 0.74), 0.78, 96, 0.92),
    _gpu("rtx-pro-6000", (12, 0), 188, 94.97, 0.58, 1792, (125, 252, 503.8, 503.8, 1008), (0.65, 0.75), 0.89, 128),
    _gpu("a30",       (8, 0),  56,  23.50,  0.40,   933, (10.3,  82,    165,  165,  0), (0.92, 0.79), 0.89, 17),
    _gpu("h100-pcie", (9, 0),  114, 79.11,  0.65,  2000, (51,    378,   756,  756,  1513), (0.78, 0.79), 0.90, 35),
    _gpu("h100-nvl",  (9, 0),  132, 93.10,  0.65,  3938, (60,    417.5, 835,  835,  1671), (0.78, 0.79), 0.90, 35),
    _gpu("h20",       (9, 0),  78,  95.00,  0.65,  4000, (44,    74,    148,  148,  296), (0.78, 0.79), 0.90, 42),
    _gpu("gb200",     (10, 0), 152, 184.30, 0.70,  7670, (80,    1250,  2500, 2500, 5000), (0.88, 0.73), 0.90, 88),
    _gpu("b300",      (10, 3), 148, 267.90, 0.70,  7670, (80,    1125,  2250, 2250, 4500), (0.88, 0.79), 0.90, 88),
    _gpu("mi250",     (9, 0),  104, 63.98,  0.65,  1638, (45.3,  0,     181,  181,  0), (0.75, 0.77), 0.89, 8,
         note=_AMD),
    _gpu("mi300x",    (9, 4),  304, 191.98, 0.65,  5300, (163.4, 653.7, 1300, 1300, 2610), (0.75, 0.51), 0.89, 256,
         note=_AMD),
    _gpu("mi325x",    (9, 4),  304, 255.98, 0.65,  6000, (163.4, 653.7, 1300, 1300, 2610), (0.75, 0.60), 0.89, 256,
         note=_AMD),
    _gpu("mi355x",    (9, 5),  256, 287.98, 0.65,  8000, (157.3, 0,     2500, 2500, 5000), (0.75, 0.63), 0.89, 256,
         note=_AMD),
)}
# fmt: on
GPUS |= {row[0]: _variant(row[0], GPUS[row[1]], *row[2:]) for row in GPU_VARIANTS}


# The H100 of Meta's training clusters (pytorch/torchtitan, docs: "H100 95.0 GiB HBM2e 2.4 TB/s 500 W"). Large matmuls
# in bf16 reach 0.6 of its rate and pointwise kernels 0.92 of its bandwidth (pytorch/ao of 2024,
# float8/roofline_utils.py; later versions have 0.78).
GPUS["h100-500w"] = replace(
    GPUS["h100"],
    name="h100-500w",
    memory=round(95.0 * GIB),
    bandwidth=2.4e12,
    bandwidth_efficiency=0.92,
    efficiency=0.6,
    efficiency_fp32=GPUS["h100"].efficiency_fp32 * 0.6 / GPUS["h100"].efficiency,
)

_ALIASES = {
    "a100": "a100-40gb",
    "a10040g": "a100-40gb",
    "a10080g": "a100-80gb",
    "v100": "v100-16gb",
    "v10016g": "v100-16gb",
    "v10032g": "v100-32gb",
    "p10016gb": "p100",
    "b300ac": "b300",
    "a800": "a800-80gb",
    "4060ti": "rtx-4060-ti-16gb",
    "5060ti": "rtx-5060-ti-16gb",
    "rtx8000": "quadro-rtx-8000",
    "h10080gb": "h100",
    "h10096gb": "h100-nvl",
    "h200141gb": "h200",
    "b200180gb": "b200",
    "gh200480gb": "gh200",
    "gh20096gb": "gh200",
    "instinctmi300x": "mi300x",
}


def _plain(name: str) -> str:
    """`name` without vendor, form factor and punctuation: "NVIDIA A100-SXM4-40GB" is "a10040gb"."""
    words = r"nvidia|amd|instinct|tesla|geforce|sxm\d?|hbm\d?e?|laptop gpu$|ada generation|blackwell.*|[^a-z0-9]"
    kept = {"laptop gpu": "laptop", "ada generation": "ada"}
    plain = re.sub(words, lambda match: kept.get(match[0], ""), name.lower())
    return plain if plain == "h100pcie" else plain.replace("pcie", "")


def _names() -> dict[str, str]:
    """The plain names of all cards, with and without the prefix "rtx"."""
    plain = {_plain(name): name for name in GPUS}
    bare = {name.removeprefix("rtx"): card for name, card in plain.items()}
    work = {f"rtx{name}": card for name, card in plain.items() if re.fullmatch(r"a\d{4}", name)}
    return bare | work | plain | _ALIASES


def gpu_of(device: str | GPU) -> GPU | None:
    """The GPU of `device`, which is a name or a GPU; None for "cpu"."""
    if isinstance(device, GPU):
        return device
    return None if device == "cpu" else find_gpu(device)


def find_gpu(name: str) -> GPU:
    """The GPU called `name`, in any case and punctuation, with or without the vendor; "a100" is the smaller one.

    Raises:
        UserError: there is no such GPU; the message names similar ones.
    """
    known = _names()
    plain = _plain(name)
    if plain in known:
        return GPUS[known[plain]]
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(plain, known, n=3, cutoff=0.7))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    other = "for another card, give its capacity and the name of a similar one"
    raise UserError(f"no GPU '{name}'{hint} (`ckpt-ft gpus` lists them; {other})")


def asked_gpu(device: str = "", gpu_memory: str = "", gpu_like: str = "") -> GPU | None:
    """The GPU that is asked for: by name, the one at hand where nothing is named, or one that is in no table.

    Args:
        device: a GPU's name, or "cpu".
        gpu_memory: memory of a GPU that is in no table, "24GiB" or a bare number of GiB.
        gpu_like: the GPU in the table that is as fast as that one.

    Returns:
        None for the CPU.

    Raises:
        UserError: no such GPU, or one of the last two without the other.
    """
    if not gpu_memory and not gpu_like:
        return gpu_of(device) if device else current_gpu() or find_gpu(DEFAULT_GPU)
    if not gpu_memory or not gpu_like or device:
        given = [("--device", device), ("--gpu-memory", gpu_memory), ("--gpu-like", gpu_like)]
        said = " ".join(f"{option} {value}" for option, value in given if value)
        raise UserError(
            f"{said}: a card that is in no table is --gpu-memory 24GiB with --gpu-like rtx-4090, one that is --device"
        )
    nbytes, like = parse_budget(gpu_memory), find_gpu(gpu_like)
    if nbytes <= like.context:
        raise UserError(f"--gpu-memory {gpu_memory}: the CUDA context alone takes {format_bytes(like.context)}")
    return replace(like, name=f"{like.name} with {format_bytes(nbytes)}", memory=nbytes)


def current_gpu(index: int | None = None) -> GPU | None:
    """The current CUDA device (or device `index`) with the memory and SM count that it reports; None without one.

    A card outside the table has the rates and bandwidth of the most similar one, scaled by SM count: an estimate.
    """
    if "torch" not in sys.modules and sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        return None  # needs no torch, which takes a second to import
    import torch

    if not torch.cuda.is_available():
        return None
    return match_device(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index))


def match_device(properties: object) -> GPU:
    """The GPU with these properties (torch.cuda.get_device_properties)."""
    name, arch = properties.name, (properties.major, properties.minor)  # type: ignore[attr-defined]
    sms, memory = properties.multi_processor_count, properties.total_memory  # type: ignore[attr-defined]
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    same = [gpu for gpu in GPUS.values() if gpu.name.removeprefix("rtx-").split("-")[0] in words and gpu.sms == sms]
    if same:
        return replace(min(same, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)
    amd = bool(words & {"amd", "instinct", "radeon"})
    made = [gpu for gpu in GPUS.values() if (gpu.note == _AMD) == amd]
    sm = 10 * arch[0] + arch[1]
    near = min(made, key=lambda gpu: (gpu.arch > arch, abs(10 * gpu.arch[0] + gpu.arch[1] - sm), abs(gpu.sms - sms)))
    share = sms / near.sms
    rates = {rate: getattr(near, rate) * share for rate in ("bandwidth", "fp32", "tf32", "fp16", "bf16", "fp8")}
    return replace(near, name=name, arch=arch, sms=sms, memory=memory, **rates)
