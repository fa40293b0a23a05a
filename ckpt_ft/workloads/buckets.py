"""Aspect-ratio buckets: the sizes that images are trained in, and which of them each image takes.

Images of one bucket alone are in a batch together, so that none is cut to a square. `auto` makes the buckets from the
resolution as kohya's scripts do: sides in steps, never more pixels than the square has.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ckpt_ft.errors import UserError

Size = tuple[int, int]  # height, width
AUTO = "auto"
_STEPS, _MOST_STEP = 16, 64  # of the side of the square; pixels of a step
_LONGEST = 2.0  # long side over short
_LEAST, _MOST = 8, 2**14  # pixels of a side


def read_buckets(text: str) -> list[Size]:
    """The sizes in 'height,width;height,width'.

    Raises:
        UserError: they are none.
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
    """The sizes that images are trained in: the square of `resolution` where `text` asks for no others.

    token: pixels that each side holds a whole number of.

    Raises:
        UserError: a side does not.
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
    """Sizes of no more than `resolution`**2 pixels, in steps of a sixteenth of it, the square among them."""
    step = max(token, min(resolution // _STEPS, _MOST_STEP) // token * token)
    found = {(resolution, resolution)}
    for short in range(step, resolution, step):
        long = resolution**2 // short // step * step
        if long / short <= _LONGEST:
            found |= {(short, long), (long, short)}
    return sorted(found, key=lambda size: (size[0] / size[1], size))


def nearest(image: Size, sizes: Sequence[Size]) -> int:
    """Which of `sizes` has most nearly the shape of an image; of several, the one of most nearly as many pixels."""
    height, width = image

    def apart(size: Size) -> tuple[float, float]:
        shape = abs(math.log(height / width) - math.log(size[0] / size[1]))
        return round(shape, 6), abs(math.log(height * width) - math.log(size[0] * size[1]))

    return min(range(len(sizes)), key=lambda at: apart(sizes[at]))
