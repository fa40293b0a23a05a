"""The GPUs that a step can be predicted for, and the one in this machine.

gpus.csv holds the measured cards and the source of each column; gpu_variants.csv those that differ from them in size.
"""

from __future__ import annotations

import csv
import difflib
import json
import os
import re
import sys
from bisect import bisect
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from math import exp, log
from pathlib import Path

from ckpt_ft import files
from ckpt_ft.errors import UserError
from ckpt_ft.spec.defaults import DEFAULT_GPU
from ckpt_ft.units import GIB, MIB, format_bytes, parse_budget

CPU = (0, 0)  # its compute capability
HERE = "here"  # as a device: the card of this machine that `ckpt-ft calibrate` has written

Curve = tuple[tuple[float, float], ...]  # predicted seconds of an op, rising, and measured seconds over them


@dataclass(frozen=True)
class Calibration:
    """What `ckpt-ft calibrate` has measured on this machine (memory/measure/calibrate.py).

    Attributes:
        date: when, "2026-11-23".
        per_op, per_launch: seconds of the host, as in cost/schedule.py; 0 if they were not measured.
        host_bandwidth, link: bytes per second between host and card, and between two cards; 0 if not measured.
        host_memory: bytes per second that AdamW reads and writes on the host, with the threads of the calibration.
        curves: "kind dtype" -> the measured share of the predicted seconds.
    """

    date: str
    per_op: float = 0.0
    per_launch: float = 0.0
    host_bandwidth: float = 0.0
    host_memory: float = 0.0
    link: float = 0.0
    curves: tuple[tuple[str, Curve], ...] = ()

    def corrected(self, seconds: float, kinds: Sequence[str]) -> float:
        """Predicted `seconds` of an op, as the first of `kinds` that was measured takes them."""
        known = dict(self.curves)
        points = next((known[kind] for kind in kinds if kind in known), None)
        if not points or seconds <= 0:
            return seconds
        seconds = max(seconds, points[0][0])  # no op is shorter than the shortest that was measured
        at = bisect(points, (seconds, 0.0))
        (a, low), (b, high) = points[max(at - 1, 0)], points[min(at, len(points) - 1)]
        share = log(seconds / a) / log(b / a) if b > a else 0.0
        return seconds * exp(log(low) + share * (log(high) - log(low)))


@dataclass(frozen=True)
class GPU:
    """One GPU, or the CPU of this machine if it was calibrated.

    Units are bytes, bytes per second and FLOP/s; a rate of 0 means that the card has no such units.
    """

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
    calibration: Calibration | None = None  # of this machine's own card
    efficiency_fp8: float = 0.0  # share of `fp8` that large matmuls reach; 0 for `efficiency`
    sized: bool = False  # only its memory was given: its seconds are not known

    @property
    def is_cpu(self) -> bool:
        """Whether this is the CPU of this machine, which runs one op after another."""
        return self.arch == CPU

    @property
    def capability(self) -> int:
        """The compute capability as one number: 75 for (7, 5)."""
        return 10 * self.arch[0] + self.arch[1]

    @property
    def usable(self) -> int:
        """Bytes that the caching allocator can reserve."""
        return self.memory - self.context

    @property
    def host_bandwidth(self) -> float:
        """Bytes per second between host and card: an x16 slot of the PCIe generation of its compute capability.

        PCIe 3.0, 4.0 and 5.0 specify 15.75, 31.5 and 63 GB/s; that 80 % are reached is an assumption.
        """
        if self.calibration is not None and self.calibration.host_bandwidth:
            return self.calibration.host_bandwidth
        major = self.arch[0]
        return 0.8 * (15.75e9 if major < 8 else 31.5e9 if major == 8 else 63e9)

    @property
    def clock(self) -> float:
        """Cycles per second of an SM under load: the boost clock from the fp32 rate, reduced by the power cap."""
        # The share of the rate that fp32 matmuls reach without a power cap: V100, A100; H100; RTX 3090, 4090.
        reached = 0.92 if self.lanes == 64 else 0.82 if self.arch[0] in (9, 10) else 0.68
        return self.fp32 / (2 * self.lanes * self.sms) * min(self.efficiency_fp32 / reached, 1.0) * self.sustained

    @property
    def power_share(self) -> float:
        """Share of its clock that a card's power cap leaves to large fp32 matmuls; 1 without such a cap."""
        free = 0.92 if self.lanes == 64 else 0.68  # what cards without such a cap reach
        return 1.0 if self.sustained == 1.0 else min(self.efficiency_fp32 / free, 1.0) * self.sustained

    @property
    def lanes(self) -> int:
        """fp32 lanes of an SM (NVIDIA's architecture whitepapers)."""
        return 64 if self.arch <= (8, 0) else 128

    @property
    def threads(self) -> int:
        """Resident threads of an SM (CUDA C++ programming guide, technical specifications)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.arch, 2048)

    def tensor_rate(self, dtype: str, tf32: bool) -> float:
        """FLOP/s of the tensor cores for `dtype`, 0 without; `tf32` as in `matmul_rate`."""
        whole = 2 * self.fp16 if self.arch >= (7, 5) else 0.0  # int8: at least twice the rate of half precision
        rates = {"float16": self.fp16, "bfloat16": self.bf16, "float32": self.tf32 if tf32 else 0.0, "int8": whole}
        return self.fp8 if dtype.startswith("float8") else rates.get(dtype, 0.0)

    def matmul_rate(self, dtype: str, tf32: bool = False) -> float:
        """FLOP/s that large matmuls of `dtype` ("float16", ...) reach; `tf32`: fp32 operands may be rounded to TF32.

        A dtype without tensor cores on this card runs at the rate of fp32: cuBLAS emulates bf16 on older cards.
        """
        share = (dtype.startswith("float8") and self.efficiency_fp8) or self.efficiency
        return self.tensor_rate(dtype, tf32) * share or self.fp32 * self.efficiency_fp32


def _table(name: str) -> list[dict[str, str]]:
    """The rows of a CSV file beside this one, without its comments."""
    lines = Path(__file__).with_name(name).read_text(encoding="utf-8").splitlines()
    return list(csv.DictReader((line for line in lines if not line.startswith("#")), skipinitialspace=True))


def _gpu(row: dict[str, str]) -> GPU:
    texts = {"name": row["name"], "note": _AMD if row["vendor"] == "amd" else ""}
    major, minor = map(int, row["arch"].split("."))
    sizes = {name: round(float(row[name]) * unit) for name, unit in _SIZES.items()}
    rates = {name: float(row[name]) * unit for name, unit in _RATES.items()}
    return GPU(arch=(major, minor), **texts, **sizes, **rates, **{name: float(row[name]) for name in _SHARES})  # type: ignore[arg-type]


def _variant(row: dict[str, str], like: GPU) -> GPU:
    """A card from a row of gpu_variants.csv: of the generation of `like`, in another size."""
    rated, sms = row["fp32"] != "-", int(row["sms"])
    share = float(row["fp32"]) * 1e12 / like.fp32 if rated else 1.0
    note = _OF_LAPTOP if row["name"].endswith("-laptop") else "" if rated else _OF_KERNELS.format(like.name)
    return replace(
        like,
        name=row["name"],
        sms=sms,
        memory=round(float(row["memory"].lstrip("~")) * GIB),
        context=round(like.context * (1 + sms / like.sms) / 2),
        l2=round(like.l2 * sms / like.sms),
        note=note,
        sized=not rated,
        **{rate: getattr(like, rate) * share for rate in _RATES} | {"bandwidth": float(row["bandwidth"]) * 1e9},
    )


_SIZE = re.compile(r"[\s(,-]*\b(\d+(?:\.\d+)?)\s*(g|m)i?b?\b\)?(?!\.)", re.IGNORECASE)
_BESIDE = re.compile(
    r"^gpu \d+: |\(uuid.*|(?<!laptop )\bgpu\b|\ba card of\b|"
    r"\b(?:with|free|google|colab|kaggle|lambda|runpod|vast(?:\.ai)?|aws|gcp|azure)\b",
    re.IGNORECASE,
)
_OTHER = re.compile(r"apple\b|m[1-9](?:max|pro|ultra)?\b|mps|tpu|xpu|arc\b|gaudi|npu|ascend", re.IGNORECASE)
_NEAR = 0.12  # share by which a card's own size differs from the one that it is sold with, mostly a T4's
_OF_SIZE = "rtx-4090"  # has the kernels of most cards
_DRIVERS = ("/dev/nvidiactl", "/dev/nvmap", "/dev/dxg", "/dev/kfd")  # NVIDIA, Tegra, WSL, AMD
_AMD = (
    "an AMD card's kernels are not known: scratch and workspaces are those of CUDA's libraries, the context is an "
    "H100's, collectives need a rate of their own; what PyTorch itself allocates is the same on both"
)
_OF_KERNELS = "of the card only its memory is known: kernels, context and a plan's seconds are those of {}"
_OF_LAPTOP = "a laptop's rates are those of its highest boost clock, which its power limit may not let it hold"
_SIZES = {"sms": 1, "memory": GIB, "context": GIB, "l2": MIB}  # columns of whole numbers -> their unit
_RATES = {"bandwidth": 1e9, "fp32": 1e12, "tf32": 1e12, "fp16": 1e12, "bf16": 1e12, "fp8": 1e12}
_SHARES = ("efficiency_fp32", "efficiency", "efficiency_fp8", "bandwidth_efficiency", "sustained")
_MEASURED, _VARIANTS = _table("gpus.csv"), _table("gpu_variants.csv")
GPUS: dict[str, GPU] = {row["name"]: _gpu(row) for row in _MEASURED}
GPUS |= {row["name"]: _variant(row, GPUS[row["like"]]) for row in _VARIANTS}
_ALIASES = {alias: row["name"] for row in _MEASURED + _VARIANTS for alias in row["aliases"].split()}


def _plain(name: str) -> str:
    """`name` without vendor, form factor and punctuation: "NVIDIA A100-SXM4-40GB" is "a10040gb"."""
    words = r"nvidia|amd|instinct|tesla|geforce|sxm\d?|hbm\d?e?|laptop gpu$|ada generation|blackwell.*|[^a-z0-9]"
    kept = {"laptop gpu": "laptop", "ada generation": "ada"}
    plain = re.sub(words, lambda match: kept.get(match[0], ""), name.lower())
    return plain if plain == "h100pcie" else plain.replace("pcie", "")


def _names() -> dict[str, str]:
    """The plain names of all cards, with and without the prefix "rtx"."""
    plain = {_plain(name): name for name in GPUS}
    bare = {re.sub("^[rg]tx", "", name): card for name, card in plain.items()}
    work = {f"rtx{name}": card for name, card in plain.items() if re.fullmatch(r"a\d{4}", name)}
    return bare | work | plain | _ALIASES


def gpu_of(device: str | GPU) -> GPU | None:
    """The card that a prediction is for; None for "cpu".

    Args:
        device: a GPU, a GPU's name, "cpu", "here" for the calibrated card of this machine, or "" for the GPU of this
            machine; without one, that is the CPU if it is calibrated, else DEFAULT_GPU.

    Raises:
        UserError: there is no such GPU, or "here" without a calibrated card.
    """
    if isinstance(device, GPU):
        return device
    if device not in ("", HERE):
        return None if device == "cpu" else find_gpu(device)
    found = current_gpu()
    if found is None and calibrated("cpu") is not None:
        return None
    if device == HERE and (found is None or found.calibration is None):
        raise UserError("--device here: this machine's card is not known yet; measure it by `ckpt-ft calibrate`")
    return found or find_gpu(DEFAULT_GPU)


def card_path(name: str) -> Path:
    """The file of the calibrated card of the GPU called `name`, or of "cpu"."""
    return files.cache_root() / "cards" / f"{re.sub(r'[^a-z0-9]+', '-', name.lower())}.json"


def write_card(card: GPU) -> Path:
    """Write the card that `ckpt-ft calibrate` has measured, whole or not at all."""
    return files.write(card_path("cpu" if card.is_cpu else card.name), json.dumps(asdict(card), indent=1))


def calibrated(name: str) -> GPU | None:
    """The calibrated card of the GPU called `name`, or of "cpu"; None if there is none.

    Raises:
        UserError: its file cannot be read.
    """
    path = card_path(name)
    return _read_card(path, path.stat().st_mtime_ns) if path.is_file() else None


def calibrated_cards() -> list[GPU]:
    return [_read_card(path, path.stat().st_mtime_ns) for path in sorted(card_path("").parent.glob("[!.]*.json"))]


@cache
def _read_card(path: Path, changed: int) -> GPU:
    from pydantic import TypeAdapter

    try:
        card = TypeAdapter(GPU).validate_json(path.read_bytes())
        assert card.calibration is not None
    except (OSError, ValueError, AssertionError) as error:
        raise UserError(f"{path}: not a file that `ckpt-ft calibrate` wrote; delete it, or calibrate again") from error
    return card


def find_gpu(name: str) -> GPU:
    """The GPU called `name`, in any case and punctuation, with or without the vendor; "a100" is the smaller one.

    Names that nvidia-smi, PyTorch, Colab and shops print are known too, with a size ("RTX 3060 12GB") or without it.
    Another size is such a card with that memory ("rtx-4090 48GB"); a size alone ("8GB") is a card without seconds.

    Raises:
        UserError: there is no such GPU; the message names similar ones.
    """
    known, plain = _names(), _plain(name)
    if plain in known:
        return GPUS[known[plain]]
    if name == HERE and (own := gpu_of(HERE)):
        return own
    name = _BESIDE.sub(" ", f"{name}GB" if name.isdecimal() else name).strip()
    size = _SIZE.search(name)
    if size is not None and size[0] == name:
        card = _resized(GPUS[_OF_SIZE], name)
        note = _OF_KERNELS.format(_OF_SIZE)
        return replace(card, name=f"a card of {format_bytes(card.memory)}", note=note, sized=True)
    bare = _plain(_SIZE.sub(" ", name))
    models = [
        (card, key.removesuffix(card.rpartition("-")[2]) if card.endswith("gb") else key)
        for key, card in known.items()
    ]
    sizes = {card: GPUS[card].memory / GIB for card, model in models if model == bare}
    if size is None and sizes:
        return GPUS[known.get(re.sub("^[rg]tx", "", bare)) or min(sizes, key=sizes.__getitem__)]
    if size is not None and sizes:
        asked = float(size[1]) / (1024 if size[2].lower() == "m" else 1)
        nearest = min(sizes, key=lambda card: abs(asked / sizes[card] - 1))
        near = abs(asked / sizes[nearest] - 1) < _NEAR
        return GPUS[nearest] if near else _resized(GPUS[nearest], f"{size[1]} {size[2]}iB")
    if is_other(name):
        raise UserError(f"--device {name}: only cards that run CUDA or ROCm are predicted (`ckpt-ft gpus` lists them)")
    close = dict.fromkeys(known[match] for match in difflib.get_close_matches(plain, known, n=3, cutoff=0.7))
    hint = f"; did you mean {' or '.join(close)}?" if close else ""
    other = "for another card: --device 24GB, or 'rtx-4090 48GB', a similar one with its own memory"
    raise UserError(f"no GPU '{name}'{hint} (`ckpt-ft gpus` lists them; {other})")


def is_other(name: str) -> bool:
    """Whether `name` is a chip that runs neither CUDA nor ROCm."""
    return bool(_OTHER.match(name.strip()))


def _resized(card: GPU, size: str) -> GPU:
    """`card` with other memory; raises UserError for less than its CUDA context."""
    nbytes = parse_budget(size)
    if nbytes <= card.context:
        raise UserError(f"--device {size}: the CUDA context alone takes {format_bytes(card.context)}")
    return replace(card, name=f"{card.name} with {format_bytes(nbytes)}", memory=nbytes)


def current_gpu(index: int | None = None) -> GPU | None:
    """The current CUDA device (or device `index`) with the memory and SM count that it reports; None without one.

    A card outside the table has the rates and bandwidth of the most similar one, scaled by SM count: an estimate.
    A calibrated card is returned as it was measured.
    """
    if "torch" not in sys.modules and sys.platform == "linux" and not any(map(os.path.exists, _DRIVERS)):
        return None  # needs no torch, which takes a second to import
    import torch

    if not torch.cuda.is_available():
        return None
    found = match_device(torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index))
    own = calibrated(found.name)
    return found if own is None else replace(own, memory=found.memory)


def match_device(properties: object) -> GPU:
    name, arch = properties.name, (properties.major, properties.minor)  # type: ignore[attr-defined]
    sms, memory = properties.multi_processor_count, properties.total_memory  # type: ignore[attr-defined]
    words = set(re.split(r"[^a-z0-9]+", name.lower()))
    same = [gpu for gpu in GPUS.values() if gpu.name.removeprefix("rtx-").split("-")[0] in words and gpu.sms == sms]
    if same:
        return replace(min(same, key=lambda gpu: abs(gpu.memory - memory)), memory=memory)
    amd = bool(words & {"amd", "instinct", "radeon"})
    sm = 10 * arch[0] + arch[1]
    made = [gpu for gpu in GPUS.values() if (gpu.note == _AMD) == amd]
    near = min(made, key=lambda gpu: (gpu.arch > arch, abs(gpu.capability - sm), abs(gpu.sms - sms)))
    rates = {rate: getattr(near, rate) * sms / near.sms for rate in _RATES}
    return replace(near, name=name, arch=arch, sms=sms, memory=memory, **rates)
