"""How long a dataset's rows are: the longest one sets a plan's peak, what batches usually are its speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate


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
