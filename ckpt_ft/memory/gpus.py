"""The GPUs that a step can be sized for, and the one at hand.

Sources, by field:
- arch, sms, bandwidth and the rates: NVIDIA's datasheet or architecture whitepaper of the card, dense (no sparsity),
  half precision with fp32 accumulation. B200's bandwidth is what its bus and clock give (pytorch/ao#4002).
- memory: "GPU 0 has a total capacity of ..." in PyTorch's out-of-memory messages, as quoted in public issue trackers:
  what the driver leaves of the board's memory. It differs by up to 1 % between drivers.
- context: the same messages' "memory in use" less what PyTorch allocated and reserved: CUDA context, loaded kernels,
  library handles. For v100, h100 and rtx-4090 no clean message was found: a card of the same size is taken.
- efficiency: the share of the datasheet's rate that large square torch.matmul calls reach, in fp32 and in bf16 (fp16
  before Ampere), from github.com/zzc0721/torch-performance-test-data, at most 1 (GeForce cards boost past their
  datasheet); A100, H100 and B200 agree with the table of maximum achievable matmul FLOPS in
  github.com/stas00/ml-engineering. L4 as throttled at 8192 x 8192. A T4 under continuous half-precision load is held
  at 24 TFLOP/s by its 70 W power cap (forums.developer.nvidia.com/t/264462).
- bandwidth_efficiency: 0.69 on a T4 (arXiv:1903.07486); 0.89 is A100's copy (1379 of 1555 GB/s,
  github.com/xytpai/nvbench), within 3 % of what A800 (0.89) and RTX 4090 (0.91) show.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass, replace

from ckpt_ft.errors import UserError
from ckpt_ft.units import GIB


@dataclass(frozen=True)
class GPU:
    """One GPU. Bytes, bytes per second and FLOP/s; a rate of 0 means the card has no such units."""

    name: str
    arch: tuple[int, int]  # compute capability: (7, 5) is sm_75
    sms: int
    memory: int  # bytes that CUDA reports as the device's total
    context: int  # bytes of it that a training process takes outside the caching allocator
    bandwidth: float
    fp32: float
    tf32: float
    fp16: float
    bf16: float
    fp8: float
    efficiency_fp32: float = 0.75  # share of `fp32` that large matmuls reach
    efficiency: float = 0.8  # share of the tensor cores' rates that large matmuls reach
    bandwidth_efficiency: float = 0.89  # share of `bandwidth` that elementwise kernels reach

    def __post_init__(self) -> None:
        object.__setattr__(self, "arch", tuple(self.arch))  # JSON knows only lists

    @property
    def usable(self) -> int:
        """Bytes that the caching allocator can reserve."""
        return self.memory - self.context

    @property
    def host_bandwidth(self) -> float:
        """Bytes a second between host and card: an x16 slot of the PCIe generation of its compute capability.

        3.0, 4.0 and 5.0 move 15.75, 31.5 and 63 GB/s by the specification; 80 % of it is an assumption.
        """
        major = self.arch[0]
        return 0.8 * (15.75e9 if major < 8 else 31.5e9 if major == 8 else 63e9)

    def matmul_rate(self, dtype: str, tf32: bool = False) -> float:
        """FLOP/s that large matmuls of `dtype` ("float16", ...) reach; `tf32`: fp32 operands may be rounded to TF32.

        What has no tensor cores on this card runs at fp32's rate, as cuBLAS emulates bf16 on older ones.
        """
        rates = {"float16": self.fp16, "bfloat16": self.bf16, "float32": self.tf32 if tf32 else 0.0}
        rate = self.fp8 if dtype.startswith("float8") else rates.get(dtype, 0.0)
        return rate * self.efficiency or self.fp32 * self.efficiency_fp32


def _gpu(
    name: str,
    arch: tuple[int, int],
    sms: int,
    memory: float,
    context: float,
    bandwidth: float,
    rates: tuple[float, float, float, float, float],
    efficiency: tuple[float, float],
    bandwidth_efficiency: float = 0.89,
) -> GPU:
    """A row of the table below: GiB, GB/s and TFLOP/s in, bytes and FLOP/s out."""
    fp32, tf32, fp16, bf16, fp8 = (rate * 1e12 for rate in rates)
    total, outside = round(memory * GIB), round(context * GIB)
    return GPU(
        name,
        arch,
        sms,
        total,
        outside,
        bandwidth * 1e9,
        fp32,
        tf32,
        fp16,
        bf16,
        fp8,
        *efficiency,
        bandwidth_efficiency,
    )


# fmt: off
GPUS: dict[str, GPU] = {gpu.name: gpu for gpu in (
    #    name        arch      SMs  GiB     context GB/s  fp32   tf32   fp16  bf16  fp8   TFLOP/s  efficiency
    _gpu("t4",        (7, 5),  40,  14.56,  0.13,   320, (8.1,   0,     65,   0,    0),            (0.53, 0.37),
         bandwidth_efficiency=0.69),
    _gpu("v100-16gb", (7, 0),  80,  15.77,  0.40,   900, (15.7,  0,     125,  0,    0),            (0.92, 0.78)),
    _gpu("v100-32gb", (7, 0),  80,  31.73,  0.40,   900, (15.7,  0,     125,  0,    0),            (0.92, 0.78)),
    _gpu("a10g",      (8, 6),  80,  22.06,  0.42,   600, (35,    35,    70,   70,   0),            (0.66, 0.94)),
    _gpu("l4",        (8, 9),  58,  22.03,  0.25,   300, (30.3,  60,    121,  121,  242),          (0.35, 0.47)),
    _gpu("l40s",      (8, 9),  142, 44.39,  0.41,   864, (91.6,  183,   362,  362,  733),          (0.51, 0.74)),
    _gpu("rtx-3090",  (8, 6),  82,  23.56,  0.60,   936, (35.6,  35.6,  71,   71,   0),            (0.70, 1.00)),
    _gpu("rtx-4090",  (8, 9),  128, 23.64,  0.60,  1008, (82.6,  82.6,  165,  165,  330),          (0.66, 1.00)),
    _gpu("rtx-5090",  (12, 0), 170, 31.36,  0.58,  1792, (104.8, 104.8, 209,  209,  419),          (0.65, 1.00)),
    _gpu("a100-40gb", (8, 0),  108, 39.49,  0.40,  1555, (19.5,  156,   312,  312,  0),            (0.93, 0.79)),
    _gpu("a100-80gb", (8, 0),  108, 79.25,  0.40,  2039, (19.5,  156,   312,  312,  0),            (0.98, 0.85)),
    _gpu("h100",      (9, 0),  132, 79.11,  0.65,  3350, (67,    494.7, 989,  989,  1979),         (0.78, 0.79)),
    _gpu("h200",      (9, 0),  132, 139.80, 0.65,  4800, (67,    494.7, 989,  989,  1979),         (0.77, 0.80)),
    _gpu("b200",      (10, 0), 148, 178.35, 0.70,  7670, (75,    1125,  2250, 2250, 4500),         (0.88, 0.75)),
)}
# fmt: on

_ALIASES = {
    "a100": "a100-40gb",
    "a10040g": "a100-40gb",
    "a10080g": "a100-80gb",
    "v100": "v100-16gb",
    "v10016g": "v100-16gb",
    "v10032g": "v100-32gb",
    "3090": "rtx-3090",
    "4090": "rtx-4090",
    "5090": "rtx-5090",
    "h10080gb": "h100",
    "h200141gb": "h200",
    "b200180gb": "b200",
}


def _plain(name: str) -> str:
    """`name` without maker, form factor and punctuation: "NVIDIA A100-SXM4-40GB" is "a10040gb"."""
    return re.sub(r"nvidia|tesla|geforce|sxm\d?|pcie|hbm\d?e?|[^a-z0-9]", "", name.lower())


def gpu_of(device: str | GPU) -> GPU | None:
    """The GPU that a step runs on: by name, or as given; None for "cpu"."""
    if isinstance(device, GPU):
        return device
    return None if device == "cpu" else find_gpu(device)


def find_gpu(name: str) -> GPU:
    """The GPU called `name`: any case and punctuation, with or without its maker; "a100" means the smaller one.

    Raises:
        UserError: no such GPU; names the closest and all of them.
    """
    known = {_plain(gpu): gpu for gpu in GPUS} | _ALIASES
    plain = _plain(name)
    if plain in known:
        return GPUS[known[plain]]
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(plain, known, n=3, cutoff=0.7))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    raise UserError(f"no GPU '{name}'{hint} ({', '.join(GPUS)}; for another, pass a ckpt_ft.memory.gpus.GPU)")


def current_gpu(index: int | None = None) -> GPU | None:
    """The CUDA device at hand (or device `index`) with the memory and SM count that it reports; None without one.

    A card outside the table is the table's most similar one, its rates and bandwidth scaled by SM count: an estimate.
    """
    import torch

    if not torch.cuda.is_available():
        return None
    return match_device(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index))


def match_device(properties: object) -> GPU:
    """The GPU that CUDA device `properties` (torch.cuda.get_device_properties) describe."""
    name, arch = properties.name, (properties.major, properties.minor)  # type: ignore[attr-defined]
    sms, memory = properties.multi_processor_count, properties.total_memory  # type: ignore[attr-defined]
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    same = [gpu for gpu in GPUS.values() if gpu.name.removeprefix("rtx-").split("-")[0] in words and gpu.sms == sms]
    if same:
        return replace(min(same, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)
    near = min(GPUS.values(), key=lambda gpu: (gpu.arch > arch, _distance(gpu.arch, arch), abs(gpu.sms - sms)))
    share = sms / near.sms
    rates = {rate: getattr(near, rate) * share for rate in ("bandwidth", "fp32", "tf32", "fp16", "bf16", "fp8")}
    return replace(near, name=name, arch=arch, sms=sms, memory=memory, **rates)


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    return abs(one[0] * 10 + one[1] - other[0] * 10 - other[1])
