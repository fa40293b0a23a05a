"""The sizes of a dataset's samples: histograms of row lengths, and aspect-ratio buckets of images."""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from ckpt_ft.errors import UserError

PREFERENCES = ("prompt_ids", "chosen_ids", "rejected_ids")  # columns of TRL's DPOTrainer


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
_STEPS, _MOST_STEP = 16, 64  # a step is this fraction of the square's side, and at most this many pixels
_LONGEST = 2.0  # ratio of the long side to the short one
_LEAST, _MOST = 8, 2**14  # pixels per side


def read_buckets(text: str) -> list[Size]:
    """Parse the sizes in the text 'height,width;height,width'.

    Raises:
        UserError: the text has another form, or sides are out of range.
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
    """Returns the sizes of training images: those in `text`, or the square of `resolution` if `text` is empty.

    token: each side must be a multiple of this many pixels.

    Raises:
        UserError: a side is not a multiple of `token`.
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
    """Returns the index of the size with the closest aspect ratio; among equal ones, the one closest in pixels."""
    height, width = image

    def distance(size: Size) -> tuple[float, float]:
        shape = abs(math.log(height / width) - math.log(size[0] / size[1]))
        return round(shape, 6), abs(math.log(height * width) - math.log(size[0] * size[1]))

    return min(range(len(sizes)), key=lambda at: distance(sizes[at]))


@dataclass(frozen=True)
class ImageSizes:
    """The sizes (height, width) of a dataset's images, in pixels, and how many images have each.

    A workload knows a size by its length, the number of pixels. The largest size sets the peak.
    """

    sizes: tuple[Size, ...]
    images: tuple[int, ...]

    @property
    def lengths(self) -> Lengths | None:
        """The length of each image; None if there is one size."""
        if len(self.sizes) == 1:
            return None
        each = (math.prod(size) for size, count in zip(self.sizes, self.images, strict=True) for _ in range(count))
        return Lengths.of(each, by_length=True, unit="pixels")

    def of(self, length: int | None) -> Size:
        """The size whose length is nearest to `length`; the largest for None."""
        if length is None:
            return max(self.sizes, key=math.prod)
        return min(self.sizes, key=lambda size: abs(math.prod(size) - length))


def rows_by_length(rows: Any, grouped: bool = False) -> tuple[Callable[[int, int | None], list[Any]], Lengths | None]:
    """Returns (samples, length) -> rows whose longest has that length, and the histogram of lengths.

    Rows without lengths are treated as identical: the first one is repeated, and there is no histogram. In most
    batches the other rows are padded, so they are chosen from the middle of the shorter ones. Among rows with images,
    those with more `pixels` count as longer, and the longest row is batched with the row that has the most pixels.

    Args:
        grouped: whether batches are made of rows of similar length.
    """
    columns = getattr(rows, "column_names", None) or ()
    if "input_ids" not in columns and not all(name in columns for name in PREFERENCES):
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


def row_lengths(rows: Any) -> list[int]:
    """Returns the number of tokens of each row of a `datasets.Dataset` with `input_ids` or TRL's preferences.

    The length of a preference is that of its prompt and its longer answer.

    Raises:
        UserError: the columns do not hold lists.
    """
    if "input_ids" in rows.column_names:
        lengths = _list_lengths(rows, "input_ids")
        pairs = _list_lengths(rows, "positives") if "positives" in rows.column_names else lengths
        return [max(pair) for pair in zip(lengths, pairs, strict=True)]
    prompts, chosen, rejected = (_list_lengths(rows, name) for name in PREFERENCES)
    return [prompt + max(pair) for prompt, *pair in zip(prompts, chosen, rejected, strict=True)]


def _list_lengths(rows: Any, column: str) -> list[int]:
    """Reads only the lengths of Arrow's lists, not their values."""
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
