"""Storage and Op: the records that a trace consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any, TypeGuard

from ckpt_ft.export.timeline import CATEGORY_COLOURS
from ckpt_ft.export.timeline import PHASES as PHASES

CATEGORIES = tuple(CATEGORY_COLOURS)
EMPTIED = "empty_cache"  # a mark: torch.cuda.empty_cache() was called


@dataclass(slots=True)
class Storage:
    """One allocation. `op` and `phase` are "" if it existed before the record began."""

    nbytes: int  # on the device, as requested, unrounded
    category: str  # one of CATEGORIES
    op: str  # "aten.mm.default"
    module: str  # qualified name of the module that was running, "" outside
    phase: str  # one of PHASES
    stream: str = ""  # CUDA stream of the allocation, "" for the computation stream
    owner: str = ""  # qualified name of the module whose parameter, buffer, gradient or optimizer state it is
    host: int = 0  # bytes in host memory; `nbytes` is 0 then
    host_kind: str = ""  # one of HOST_COLOURS, if there are such bytes

    @property
    def place(self) -> str:
        """The module that owns the tensor, or else the module that was running."""
        return self.owner or self.module

    def copy(self) -> Storage:
        return Storage(*_OF_STORAGE(self))


@dataclass(slots=True)
class Op:
    """One dispatched op."""

    name: str
    flops: int  # 2*m*n*k for matmuls, 0 for elementwise
    nbytes: int  # bytes read and written
    dtype: str  # of its main operand: "float16"
    phase: str
    module: str
    at: int  # the number of events before it
    kernels: int = 1  # CUDA kernels that it launches; 0 for views, metadata and copies by a copy engine
    stream: str = ""  # of its kernels
    wire: int = 0  # bytes that this rank sends in a collective
    shape: tuple[int, ...] = ()  # sizes that the time of its kernels depends on: see cost/kernels.py
    around: str = ""  # Python around it on the host: "hooks" of a checkpoint's second run, or a dispatch "mode"
    group: tuple[int, int] = (0, 0)  # ranks of a collective, and how far apart they are; zeros for all of the launch

    def later(self, events: int) -> Op:
        made = Op(*_OF_OP(self))
        made.at += events
        return made


Item = Op | int | str  # of a record: an op, an event (see `Recorder.events`), or the name of a mark


def is_allocation(item: Item) -> TypeGuard[int]:
    return type(item) is int and item >= 0


def is_free(item: Item) -> TypeGuard[int]:
    return type(item) is int and item < 0


# `dataclasses.replace` takes five times as long, and a trace has tens of thousands of records
_OF_STORAGE = attrgetter(*(field.name for field in fields(Storage)))
_OF_OP = attrgetter(*(field.name for field in fields(Op)))


def columns_of(records: Sequence[Storage] | Sequence[Op]) -> list[tuple[Any, ...]]:
    """The columns of records; `zip` turns them into rows again."""
    return list(zip(*map(_OF_OP if records and isinstance(records[0], Op) else _OF_STORAGE, records), strict=True))
