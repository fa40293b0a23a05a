"""Recorded: what views are made from. StepTrace is one, and draws and writes itself through them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from ckpt_ft.memory.allocator.replay import Replay
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.spec.launch import Launch

from .cost import Span
from .events import Holder, Op, Storage


class Recorded(Protocol):
    """The record of a training step; StepTrace says what each of its parts is."""

    device: str
    storages: list[Storage]
    events: list[int]
    ops: list[Op]
    marks: list[tuple[int, str]]
    notes: list[str]
    gpu: GPU | None
    micro_batches: int
    launch: Launch | None
    alloc_conf: str
    source: str

    @property
    def replay(self) -> Replay: ...
    @property
    def emptied(self) -> frozenset[int]: ...
    @property
    def start(self) -> int: ...
    @property
    def peak_at(self) -> int: ...
    @property
    def phase_marks(self) -> list[tuple[int, str]]: ...
    def timeline(self) -> list[dict[str, int]]: ...
    def grouped_holders(self, n: int = ...) -> list[Holder]: ...
    def schedule(self) -> Iterator[Span]: ...
