"""The sizes of a dataset's samples: histograms of row lengths, and aspect-ratio buckets of images."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

from ckpt_ft.errors import UserError


@dataclass(frozen=True)
class Lengths:
    """A histogram of the lengths of a dataset's rows.

    Attributes:
        tokens: the lengths that occur, in rising order.
        rows: the number of rows of each length.
        by_length: whether batches have rows of similar length instead of random ones.
        unit: what the lengths count: tokens, or pixels of images.
    """

    tokens: tuple[int, ...]
    rows: tuple[int, ...]
    by_length: bool = False
    unit: str = "tokens"

    @classmethod
    def of(cls, lengths: Iterable[int], by_length: bool = False, unit: str = "tokens") -> Lengths:
        """The histogram of `lengths`, at least one."""
        tokens, rows = zip(*sorted(Counter(lengths).items()), strict=True)
        return cls(tokens, rows, by_length, unit)

    @property
    def longest(self) -> int:
        return self.tokens[-1]

    @property
    def mean(self) -> float:
        return sum(t * n for t, n in zip(self.tokens, self.rows, strict=True)) / sum(self.rows)

    def padded(self, batch: int) -> int:
        """Tokens per row with padding in a typical batch of `batch` rows: the expected length of its longest row."""
        if self.by_length:
            return round(self.mean)
        total = sum(self.rows)
        at_most = [(n / total) ** batch for n in accumulate(self.rows)]  # chance that no row of a batch is longer
        return round(sum(t * (p - q) for t, p, q in zip(self.tokens, at_most, [0.0, *at_most], strict=False)))

    def quantile(self, share: float) -> int:
        """The smallest length that at least `share` of the rows do not exceed."""
        enough = share * sum(self.rows)
        return next(t for t, n in zip(self.tokens, accumulate(self.rows), strict=True) if n >= enough)

    def cut(self, longest: int) -> Lengths:
        """The histogram with longer rows cut to `longest`."""
        kept = [(t, n) for t, n in zip(self.tokens, self.rows, strict=True) if t < longest]
        tokens, rows = zip(*kept, (longest, sum(self.rows) - sum(n for _, n in kept)), strict=True)
        return Lengths(tokens, rows, self.by_length, self.unit)

    def __str__(self) -> str:
        return f"{sum(self.rows)} rows of {self.tokens[0]} to {self.longest} {self.unit}, {self.mean:.0f} on average"


Size = tuple[int, int]  # height, width
AUTO = "auto"
_STEPS, _MOST_STEP = 16, 64  # a step is this fraction of the square's side, and at most so many pixels
_LONGEST = 2.0  # ratio of the long side to the short one
_LEAST, _MOST = 8, 2**14  # pixels per side


def read_buckets(text: str) -> list[Size]:
    """The sizes in the text 'height,width;height,width'.

    Raises:
        UserError: text of another form, or sides out of range.
    """
    sizes = []
    for part in text.split(";"):
        found = re.fullmatch(r"\s*(\d{1,6})\s*,\s*(\d{1,6})\s*", part)
        sides = (int(found[1]), int(found[2])) if found else (0, 0)
        if not all(_LEAST <= side <= _MOST for side in sides):
            raise UserError(
                f"aspect ratio buckets {text}: '{part.strip()}' is no height,width in pixels, each from {_LEAST} to "
                f"{_MOST}; give '1024,1024;832,1216' for example, or {AUTO}"
            )
        sizes.append(sides)
    return list(dict.fromkeys(sizes))


def sizes_of(text: str | None, resolution: int, token: int) -> list[Size]:
    """The sizes of training images: those in `text`, or the square of `resolution` if `text` is empty.

    token: each side must be a multiple of so many pixels.

    Raises:
        UserError: a side is no such multiple.
    """
    if not text:
        return [(resolution, resolution)]
    if text == AUTO:
        return _around(resolution, token)
    sizes = read_buckets(text)
    for height, width in sizes:
        if height % token or width % token:
            nearest = ",".join(str(max(token, round(side / token) * token)) for side in (height, width))
            raise UserError(
                f"aspect ratio buckets: {height},{width} is not in whole steps of {token} pixels, which this model "
                f"needs; {nearest} is"
            )
    return sizes


def _around(resolution: int, token: int) -> list[Size]:
    """Sizes of at most `resolution`**2 pixels, as kohya's scripts make them: sides in steps, and the square."""
    step = max(token, min(resolution // _STEPS, _MOST_STEP) // token * token)
    found = {(resolution, resolution)}
    for short in range(step, resolution, step):
        long = resolution**2 // short // step * step
        if long / short <= _LONGEST:
            found |= {(short, long), (long, short)}
    return sorted(found, key=lambda size: (size[0] / size[1], size))


def nearest(image: Size, sizes: Sequence[Size]) -> int:
    """The index of the size with the aspect ratio closest to the image's; of several, the one closest in pixels."""
    height, width = image

    def apart(size: Size) -> tuple[float, float]:
        shape = abs(math.log(height / width) - math.log(size[0] / size[1]))
        return round(shape, 6), abs(math.log(height * width) - math.log(size[0] * size[1]))

    return min(range(len(sizes)), key=lambda at: apart(sizes[at]))
