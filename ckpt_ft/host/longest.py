"""The longest rows of a script's dataset come first, so that its first step is the one that decides."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from ckpt_ft.workloads.sample_sizes import PREFERENCES, row_lengths


class _Ordered:
    """A sampler that yields what another one yields, in the order of `key`, the greatest first."""

    def __init__(self, sampler: Any, key: Callable[[Any], int]) -> None:
        self.sampler, self.key = sampler, key

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["sampler"], name)

    def __len__(self) -> int:
        return len(self.sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(self.sampler, key=self.key, reverse=True))


def longest_first(given: Mapping[str, Any], note: Callable[[str], None]) -> dict[str, Any]:
    """The arguments of a DataLoader that gives the batches with the longest rows first.

    given: the arguments as the script has them. A dataset without a length stays as it is, which is noted.
    """
    given, rows = dict(given), given["dataset"]
    if not hasattr(rows, "__len__") or not hasattr(rows, "__getitem__"):
        note("--rows all: a dataset is a stream; its first rows decide")
        return given
    lengths = _lengths(rows)
    if given.get("batch_sampler") is not None:
        given["batch_sampler"] = _Ordered(given["batch_sampler"], lambda batch: max(lengths[row] for row in batch))
    else:
        given.update(sampler=_Ordered(given.get("sampler") or range(len(rows)), lengths.__getitem__), shuffle=False)
    return given


def _lengths(rows: Any) -> list[int]:
    columns = getattr(rows, "column_names", None) or ()
    if "input_ids" in columns or all(name in columns for name in PREFERENCES):
        return row_lengths(rows)
    return [_size(rows[number]) for number in range(len(rows))]


def _size(value: Any) -> int:
    """The number of elements, or letters, in all parts of a row."""
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, Iterable) and not isinstance(value, (str, bytes)):
        return sum(map(_size, value))
    return len(value) if isinstance(value, (str, bytes)) else 1
