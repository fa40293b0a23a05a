"""Drawn shapes: image data sets that need no download.

A picture, its caption and its labels follow from a combination of properties alone, so every machine draws the same
set; `seed` only sets the order. The shapes serve diffusion (`image`, `text`) and classification (`image`, `label`);
shapes with a question and an answer serve vision-language models.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import product
from typing import Any

from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image, ImageDraw

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "heart")
COLOURS = {
    "red": (220, 40, 40), "orange": (245, 140, 30), "yellow": (240, 215, 50), "green": (50, 165, 70),
    "cyan": (60, 200, 215), "blue": (50, 80, 220), "purple": (140, 60, 180), "pink": (245, 130, 180),
}  # fmt: skip
BACKGROUNDS = {"white": (255, 255, 255), "black": (0, 0, 0)}
SIZES = {"small": 0.15, "medium": 0.2, "large": 0.25}  # radius, as a fraction of the image's side
_ROWS = {"top": 0.27, "": 0.5, "bottom": 0.73}
_COLUMNS = {"left": 0.27, "": 0.5, "right": 0.73}
POSITIONS = {
    " ".join(filter(None, (row, column))) or "centre": (x, y)
    for (row, y), (column, x) in product(_ROWS.items(), _COLUMNS.items())
}
COMBINATIONS = len(SHAPES) * len(COLOURS) * len(POSITIONS) * len(SIZES) * len(BACKGROUNDS)
LEARNED_PROMPTS = [  # captions with every shape and colour, which the diffusion recipes draw as they learn
    "a large red circle at the top left on white",
    "a large orange square at the top on black",
    "a large yellow triangle at the top right on white",
    "a large green star at the left on black",
    "a large cyan cross at the centre on white",
    "a large blue ring at the right on black",
    "a large purple diamond at the bottom left on white",
    "a large pink heart at the bottom on black",
]
_OVERSAMPLING = 4  # shapes are drawn this many times larger and averaged down, which smooths their edges
_SIDE = 48  # pixels of a picture with a question


@dataclass(frozen=True)
class Drawing:
    """One combination of properties, with its caption and its picture."""

    shape: str
    colour: str
    position: str
    size: str
    background: str

    @property
    def caption(self) -> str:
        return f"a {self.size} {self.colour} {self.shape} at the {self.position} on {self.background}"

    def image(self, resolution: int) -> Image.Image:
        """Draws an RGB picture of `resolution` x `resolution` pixels."""
        side = resolution * _OVERSAMPLING
        canvas = Image.new("RGB", (side, side), BACKGROUNDS[self.background])
        draw, colour = ImageDraw.Draw(canvas), COLOURS[self.colour]
        x, y = (fraction * side for fraction in POSITIONS[self.position])
        radius = SIZES[self.size] * side
        if self.shape in _OUTLINES:
            draw.polygon([(x + radius * dx, y + radius * dy) for dx, dy in _OUTLINES[self.shape]], fill=colour)
        else:
            draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        if self.shape == "ring":
            hole = 0.5 * radius
            draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=BACKGROUNDS[self.background])
        return canvas.resize((resolution, resolution), Image.Resampling.BOX)


def _polygon(corners: int, radii: tuple[float, ...], turn: float = -90.0) -> list[tuple[float, float]]:
    """Returns `corners` points around the origin with alternating radii; by default the first points up."""
    angles = [math.radians(turn + 360 * i / corners) for i in range(corners)]
    return [(radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)]


def _heart() -> list[tuple[float, float]]:
    """The curve x = 16 sin^3 t, y = 13 cos t - 5 cos 2t - 2 cos 3t - cos 4t, scaled to the unit circle."""
    turns = [2 * math.pi * i / 60 for i in range(60)]
    return [
        (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16)
        for t in turns
    ]


_OUTLINES: dict[str, list[tuple[float, float]]] = {
    "square": _polygon(4, (1.2,), turn=45),
    "triangle": _polygon(3, (1.15,)),
    "star": _polygon(10, (1.2, 0.5)),
    "cross": [
        (-.36, -1), (.36, -1), (.36, -.36), (1, -.36), (1, .36), (.36, .36),
        (.36, 1), (-.36, 1), (-.36, .36), (-1, .36), (-1, -.36), (-.36, -.36),
    ],
    "diamond": [(0, -1.2), (0.7, 0), (0, 1.2), (-0.7, 0)],
    "heart": _heart(),
}  # fmt: skip


def drawings(count: int | None = None, seed: int = 0) -> list[Drawing]:
    """Returns `count` different combinations (all of them by default) in an order shuffled by `seed`."""
    every = [Drawing(*parts) for parts in product(SHAPES, COLOURS, POSITIONS, SIZES, BACKGROUNDS)]
    random.Random(seed).shuffle(every)
    return every[:count]


def drawn_shapes(count: int | None = None, resolution: int = 64) -> Dataset:
    """Returns a data set of `drawings(count)`.

    Its columns are `image` (PIL, RGB, `resolution` squared), `text` (a caption) and `label` (ClassLabel of `SHAPES`).
    """
    chosen = drawings(count)
    rows: dict[str, list[Any]] = {
        "image": [drawing.image(resolution) for drawing in chosen],
        "text": [drawing.caption for drawing in chosen],
        "label": [drawing.shape for drawing in chosen],
    }
    features = Features(image=ImageFeature(), text=Value("string"), label=ClassLabel(names=list(SHAPES)))
    return Dataset.from_dict(rows, features=features)


def questions(count: int, seed: int = 0) -> list[tuple[Image.Image, str, str]]:
    """Returns `count` pictures of shapes, each with a question and its one right answer."""
    draw = random.Random(seed)
    return [(drawing.image(_SIDE), *draw.choice(_asked(drawing))) for drawing in drawings(count, seed)]


def _asked(drawing: Drawing) -> list[tuple[str, str]]:
    return [
        ("Which shape is it?", drawing.shape),
        ("Which colour is it?", drawing.colour),
        ("What is in the picture?", f"a {drawing.colour} {drawing.shape} on {drawing.background}"),
    ]
