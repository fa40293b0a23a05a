"""What a card trains, without a model being named: the longest sequences of well-known models, from a stored table.

card_table.json has the bytes that steps of one sequence reserve, for cards with the same kernels, and tokens a second
for each card. benchmarks/card_table.py traces them again; every figure is that of `ckpt-ft estimate`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.rules.cuda import same_kernels
from ckpt_ft.spec.command import command_for
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.model_config import known_models

from .budget import Candidate, MemoryBudget, memory_budget
from .methods import METHODS, method_of

TABLE = Path(__file__).with_name("card_table.json")
POLICY = "full,head"
LENGTHS = tuple(512 * 2**n for n in range(7))  # tokens of the sequences that were traced
SPEED_AT = 2048  # tokens of the sequence that a speed is of, or of the longest that fits
SWAPPED_AT = 1024  # tokens of the sequence that is traced with all frozen blocks in host memory
PAGE = 2 * 2**20  # bytes reserved are a multiple of it


@dataclass(frozen=True)
class Fit:
    """How one model trains on a card with one method.

    Attributes:
        length: tokens of the longest sequence of LENGTHS that fits; 0 if none does.
        more: whether the next longer one was traced, and does not fit.
        speed: tokens a second on sequences of `speed_at` tokens; 0 if it is not known.
        swap: N of the term `swap:N`, without which no sequence fits; 0 for none.
        needed: bytes of the smallest card on which the shortest sequence fits, if `length` is 0.
    """

    model: str
    parameters: int
    method: str
    length: int = 0
    more: bool = False
    speed: float = 0.0
    swap: int = 0
    needed: int = 0

    @property
    def speed_at(self) -> int:
        return min(self.length, SPEED_AT)


def spec_of(model: str, method: str, length: int, card: GPU, swap: int = 0) -> TrainingSpec:
    """The run that a row describes: in bf16, on cards without it in fp16, where full fine-tuning uses autocast."""
    policy = f"{POLICY},swap:{swap}" if swap else POLICY
    spec = TrainingSpec.of(model, policy=policy, seq_length=length, device=card.name, dtype="bfloat16")
    if card.arch < (8, 0):
        old = {"dtype": "float32", "mixed_precision": "fp16"} if method == "full" else {"dtype": "float16"}
        spec = spec.edit(**old)
    return method_of(spec, method)


def kernels_of(card: GPU) -> str:
    """The name of the group of cards with the same kernels and precision, whose bytes are the same."""
    return " ".join(str(int(part)) for part in (*same_kernels(card), card.arch >= (8, 0)))


@cache
def stored() -> dict[str, Any]:
    """The table: {model: {method: {kernels: arguments of `_fit`}}}."""
    found: dict[str, Any] = json.loads(TABLE.read_text(encoding="utf-8"))
    return found


def fits(card: GPU, methods: Sequence[str] = tuple(METHODS)) -> list[Fit]:
    """How each model of the table trains on `card` with each method, the smallest model first."""
    room, kernels = memory_budget(None, card), kernels_of(card)
    rows = [
        _fit(card.name, room, Fit(model, int(known_models()[model].parameters), method), **entry[method][kernels])
        for model, entry in stored().items()
        for method in methods
    ]
    return sorted(rows, key=lambda row: row.parameters)


def _fit(
    card: str, room: MemoryBudget, unfit: Fit, pages: Sequence[int], swap: Sequence[int], speed: dict[str, float]
) -> Fit:
    """How the model of `unfit` trains: from the pages that each length reserves, and (N, pages) under `swap:N`."""
    fitting = [at for at, count in enumerate(pages) if PAGE * count <= room.limit]
    blocks, swapped = swap or (0, 0)
    if fitting:
        longest = fitting[-1]
        return replace(unfit, length=LENGTHS[longest], more=longest + 1 < len(pages), speed=speed.get(card, 0.0))
    if blocks and PAGE * swapped <= room.limit:
        return replace(unfit, length=SWAPPED_AT, swap=blocks, speed=speed.get(card, 0.0))
    return replace(unfit, needed=room.needs(Candidate("", 1, 0, PAGE * pages[0], 0.0)))


def largest(found: Sequence[Fit]) -> Fit | None:
    """The largest model that trains without weights in host memory; else the largest that trains at all."""
    fitting = [one for one in found if one.length]
    return max(fitting, key=lambda one: (not one.swap, one.parameters, one.length), default=None)


def command_of(one: Fit, card: GPU) -> str:
    """The command that trains so."""
    return command_for(spec_of(one.model, one.method, one.speed_at, card, one.swap), "causal-lm", one.speed_at)
