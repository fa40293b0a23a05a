"""How long a dataset's rows are: the longest one sets a plan's peak, what batches usually are its speed."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckpt_ft.errors import UserError

PREFERENCES = ("prompt_ids", "chosen_ids", "rejected_ids")  # columns of TRL's DPOTrainer


@dataclass(frozen=True)
class Lengths:
    """Tokens per row, as a histogram: `tokens`, in order, each in so many `rows`.

    by_length: batches are of rows of like length, not drawn at random.
    unit: what is counted, where rows are no text.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    by_length: bool = False
    unit: str = "tokens"

    @classmethod
    def of(cls, lengths: Iterable[int], by_length: bool = False, unit: str = "tokens") -> Lengths:
        """The histogram of at least one length."""
        tokens, rows = zip(*sorted(Counter(lengths).items()), strict=True)
        return cls(tokens, rows, by_length, unit)

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        return sum(t * n for t, n in zip(self.tokens, self.rows, strict=True)) / sum(self.rows)

    def padded(self, batch: int) -> int:
        """Tokens that a row takes, padding included, in a usual batch of `batch` rows: the expected longest of it."""
        if self.by_length:
            return round(self.mean)
        total = sum(self.rows)
        at_most = [(n / total) ** batch for n in accumulate(self.rows)]  # a whole batch is
        return round(sum(t * (p - q) for t, p, q in zip(self.tokens, at_most, [0.0, *at_most], strict=False)))

    def quantile(self, share: float) -> int:
        """The length that at least `share` of the rows do not exceed."""
        enough = share * sum(self.rows)
        return next(t for t, n in zip(self.tokens, accumulate(self.rows), strict=True) if n >= enough)

    def cut(self, longest: int) -> Lengths:
        """These rows, none longer than `longest`."""
        kept = [(t, n) for t, n in zip(self.tokens, self.rows, strict=True) if t < longest]
        tokens, rows = zip(*kept, (longest, sum(self.rows) - sum(n for _, n in kept)), strict=True)
        return Lengths(tokens, rows, self.by_length, self.unit)

    def __str__(self) -> str:
        return f"{sum(self.rows)} rows of {self.tokens[0]} to {self.longest} {self.unit}, {self.mean:.0f} on average"


def rows_by_length(rows: Any, grouped: bool = False) -> tuple[Callable[[int, int | None], list[Any]], Lengths | None]:
    """Returns (samples, length) -> rows whose longest has that length, and the histogram of lengths.

    Rows without lengths are taken as alike: the first one is repeated, and there is no histogram. In most batches the
    other rows are padded, so they are taken from the middle of the shorter ones. Of rows with images, those with more
    `pixels` count as longer, and the row with the most pixels stands beside the longest row.

    Args:
        grouped: whether batches are made of rows of similar length.
    """
    if not have_lengths(rows):
        return lambda samples, length: [rows[0]] * samples, None
    lengths = row_lengths(rows)
    pixels = list(rows.with_format(None)["pixels"]) if "pixels" in rows.column_names else []
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], -pixels[row] if pixels else 0))

    def chosen(samples: int, length: int | None) -> list[Any]:
        longest = lengths[order[-1]]
        wanted = longest if length is None else length
        first = min(bisect_left(order, wanted, key=lengths.__getitem__), len(order) - 1)
        other = order[first // 2]
        if pixels and lengths[order[first]] == longest:
            other = pixels.index(max(pixels))
        return [rows[order[first]], *[rows[other]] * (samples - 1)]

    return chosen, Lengths.of(lengths, grouped)


def have_lengths(rows: Any) -> bool:
    """Whether `row_lengths` knows the lengths of these rows."""
    columns = getattr(rows, "column_names", None) or ()
    return "input_ids" in columns or all(name in columns for name in PREFERENCES)


def row_lengths(rows: Any) -> list[int]:
    """The tokens of each row of a `datasets.Dataset`: of its `input_ids`, or of the prompt and the longer answer of a
    preference pair.

    Raises:
        UserError: a row has no list of tokens.
    """
    if "input_ids" in rows.column_names:
        return _list_lengths(rows, "input_ids")
    prompts, chosen, rejected = (_list_lengths(rows, name) for name in PREFERENCES)
    return [prompt + max(pair) for prompt, *pair in zip(prompts, chosen, rejected, strict=True)]


def _list_lengths(rows: Any, column: str) -> list[int]:
    """The lengths of the lists in a column, without reading their items."""
    import pyarrow as pa
    import pyarrow.compute as pc

    tables = rows.select_columns(column).with_format("arrow").iter(batch_size=10_000)
    try:
        found = [length for table in tables for length in pc.list_value_length(table[column]).to_pylist()]
    except pa.ArrowNotImplementedError as error:
        kind = rows.features[column]
        raise UserError(f"the dataset's '{column}' are {kind}; expected a list of tokens in each row") from error
    if None in found:
        raise UserError(f"row {found.index(None) + 1}: '{column}' is null; expected a list of tokens")
    return found
