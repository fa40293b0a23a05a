"""The shapes that images' latents have: one, or one for each aspect-ratio bucket; the largest sets the peak."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ckpt_ft.workloads.sample_sizes import Lengths, Size


@dataclass(frozen=True)
class LatentShapes:
    """Shapes (C, h, w), how many images have each, and how many pixels of a side one latent is.

    A workload knows them as lengths: latents of an image, h * w.
    """

    shapes: tuple[tuple[int, int, int], ...]
    images: tuple[int, ...]
    scale: int

    @classmethod
    def of(cls, sizes: Sequence[Size], buckets: Sequence[Sequence[int]], channels: int, scale: int) -> LatentShapes:
        """Of images of `sizes` in pixels, `scale` of them for one of a latent's side."""
        shapes = tuple((channels, height // scale, width // scale) for height, width in sizes)
        return cls(shapes, tuple(map(len, buckets)), scale)

    @property
    def lengths(self) -> Lengths | None:
        """None where all are alike."""
        if len(self.shapes) == 1:
            return None
        each = [_area(shape) for shape, count in zip(self.shapes, self.images, strict=True) for _ in range(count)]
        return Lengths.of(each, by_length=True, unit="latents")

    def shape(self, length: int | None) -> tuple[int, int, int]:
        """The one of most nearly so many latents; None for the largest."""
        if length is None:
            return max(self.shapes, key=_area)
        return min(self.shapes, key=lambda shape: abs(_area(shape) - length))

    def size(self, length: int | None) -> Size:
        """Height and width in pixels of images of `shape(length)`."""
        _, height, width = self.shape(length)
        return height * self.scale, width * self.scale


def _area(shape: tuple[int, int, int]) -> int:
    return shape[1] * shape[2]
