"""How a tracker handles an op: what runs in its place, what is recorded after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, is_traceable_wrapper_subclass_type

from ckpt_ft.memory.cost.op_work import Work as Work
from ckpt_ft.memory.cost.op_work import collective_bytes as collective_bytes
from ckpt_ft.memory.cost.op_work import describe as describe
from ckpt_ft.memory.cost.op_work import is_asynchronous as is_asynchronous
from ckpt_ft.memory.cost.op_work import measure as measure
from ckpt_ft.memory.cost.op_work import tensors as tensors

Rule = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]  # (op, args, kwargs) -> result
After = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], Any], None]  # (tracker, op, args, kwargs, result)


_is_wrapper = cache(is_traceable_wrapper_subclass_type)


def wraps(types: Sequence[type]) -> bool:
    """Whether an op is called on tensors that wrap others."""
    for kind in types:  # noqa: SIM110  no generator: once for every op
        if _is_wrapper(kind):
            return True
    return False


def plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensor as it lies in memory: of a DTensor its shard, of any wrapper what it wraps, a sparse one's two."""
    if is_traceable_wrapper_subclass(tensor):
        for part in (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]):
            if isinstance(part, torch.Tensor):  # DTensor names its mesh too
                yield from plain(part)
    elif tensor.is_sparse:
        with torch._C._DisableTorchDispatch():  # no op of the step
            yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


@dataclass(frozen=True, eq=False, slots=True)
class Handling:
    """What a tracker does about an operator, worked out when it is first called.

    Each call looks it up once: there are tens of thousands, and OpOverload's hash is Python.
    """

    name: str
    rule: Rule | None = None  # to call in its place
    after: After | None = None  # to call once its results are recorded
    collective: bool = False
    silent: bool = False  # record_function: no tensor, no work
