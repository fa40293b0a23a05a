"""Storage and Op: the records that a trace consists of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import attrgetter
from typing import Any

CATEGORIES = (
    "parameters", "buffers", "gradients", "optimizer", "activations", "temporary", "communication", "workspace",
)  # fmt: skip
PHASES = ("forward", "backward", "optimizer")
EMPTIED = "empty_cache"  # a mark: torch.cuda.empty_cache() was called


@dataclass(slots=True)
class Storage:
    """One allocation. `op` and `phase` are "" for what existed before the record began."""

    nbytes: int  # as requested, unrounded
    category: str  # one of CATEGORIES
    op: str  # "aten.mm.default"
    module: str  # qualified name of the module that was running, "" outside
    phase: str  # one of PHASES
    stream: str = ""  # CUDA stream that it was allocated in, "" for the one that computes
    owner: str = ""  # qualified name of the module whose parameter, buffer, gradient or optimizer state it is

    @property
    def place(self) -> str:
        """The module whose bytes these are: that owns the tensor, else that was running."""
        return self.owner or self.module

    def copy(self, called: Callable[[str], str] | None = None) -> Storage:
        """One like it; `called` says what modules are called in its place."""
        made = Storage(*_OF_STORAGE(self))
        if called is not None:
            made.module, made.owner = called(made.module), called(made.owner)
        return made


@dataclass(slots=True)
class Op:
    """One dispatched operator."""

    name: str
    flops: int  # 2*m*n*k for matmuls, 0 for elementwise
    nbytes: int  # bytes read and written
    dtype: str  # "float16": of its main operand
    phase: str
    module: str
    at: int  # how many events had happened before it
    kernels: int = 1  # CUDA kernels that it launches; 0 for views and metadata, and for what a copy engine moves
    stream: str = ""  # that its kernels are issued to
    wire: int = 0  # bytes that this rank sends in a collective
    shape: tuple[int, ...] = ()  # sizes that its kernel's time depends on: see cost/kernels.py
    around: str = ""  # Python that the host runs around it: "hooks" of a checkpoint's second run, a dispatch "mode"

    def later(self, events: int, module: str | None = None) -> Op:
        """One like it, so many events later, of `module` if given."""
        made = Op(*_OF_OP(self))
        made.at += events
        if module is not None:
            made.module = module
        return made


# `dataclasses.replace` takes five times as long, for each of tens of thousands
_OF_STORAGE = attrgetter(*(field.name for field in fields(Storage)))
_OF_OP = attrgetter(*(field.name for field in fields(Op)))


def columns_of(records: Sequence[Storage] | Sequence[Op]) -> list[tuple[Any, ...]]:
    """Their fields, one by one; `zip` makes rows of them again."""
    return list(zip(*map(_OF_OP if records and isinstance(records[0], Op) else _OF_STORAGE, records), strict=True))
