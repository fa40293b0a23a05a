"""Drawn pictures with a question and its answer: shapes of many colours, and bar charts of unlike sizes.

What is drawn, asked and answered follows from a seed alone, so two machines make the same set.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from PIL import Image, ImageDraw

from ckpt_ft.training.images.shapes import COLOURS, Drawing, drawings

_SIDE = 48  # pixels of a picture of a shape
_BAR = 16  # and of a bar, with the gap beside it
_SHAPES = ("circle", "square", "triangle", "cross")
_COLOURS = ("red", "yellow", "green", "blue", "purple")
_HEIGHTS = (10, 18, 26, 34, 42)  # of bars: no two of a chart are alike


@dataclass(frozen=True)
class Asked:
    """A picture, what is asked about it and the one right answer."""

    image: Image.Image
    question: str
    answer: str


def asked(count: int, seed: int = 0) -> list[Asked]:
    """`count` pictures with a question each, shapes and charts in turn."""
    draw = random.Random(seed)
    shapes = [drawing for drawing in drawings(seed=seed) if drawing.shape in _SHAPES and drawing.colour in _COLOURS]
    return [_chart(draw) if at % 2 else _shape(shapes[at // 2], draw) for at in range(count)]


def _shape(drawing: Drawing, draw: random.Random) -> Asked:
    return Asked(drawing.image(_SIDE), *draw.choice((
        ("Which shape is it?", drawing.shape),
        ("Which colour is it?", drawing.colour),
        ("What is in the picture?", f"a {drawing.colour} {drawing.shape} on {drawing.background}"),
    )))  # fmt: skip


def _chart(draw: random.Random) -> Asked:
    """Two to five bars; the wider the more there are."""
    count = draw.randint(2, 5)
    colours, heights = draw.sample(_COLOURS, count), draw.sample(_HEIGHTS, count)
    image = Image.new("RGB", (_BAR * count, _SIDE), (255, 255, 255))
    canvas = ImageDraw.Draw(image)
    for at, (colour, height) in enumerate(zip(colours, heights, strict=True)):
        canvas.rectangle((_BAR * at + 2, _SIDE - height, _BAR * at + _BAR - 3, _SIDE - 1), fill=COLOURS[colour])
    return Asked(image, *draw.choice((
        ("How many bars are there?", str(count)),
        ("Which bar is the highest?", colours[heights.index(max(heights))]),
        ("Which bars are there?", " ".join(colours)),
    )))  # fmt: skip
