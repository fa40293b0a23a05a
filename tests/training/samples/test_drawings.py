"""The drawn shapes: every combination once, equal on every machine, with correct captions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_ft.errors import UserError
from ckpt_ft.files import made_once
from ckpt_ft.training.samples.drawings import (
    BACKGROUNDS,
    COLOURS,
    COMBINATIONS,
    POSITIONS,
    SHAPES,
    SIZES,
    Drawing,
    drawings,
    drawn_shapes,
)

combinations = st.builds(
    Drawing,
    *(st.sampled_from(list(names)) for names in (SHAPES, COLOURS, POSITIONS, SIZES, BACKGROUNDS)),
)


def test_every_combination_is_drawn_once() -> None:
    assert COMBINATIONS == 8 * 8 * 9 * 3 * 2 == 3456
    every = drawings()
    assert len({drawing.caption for drawing in every}) == len(every) == 3456
    assert drawings(seed=1) != every
    assert drawings(10) == every[:10]


def test_all_pictures_differ() -> None:
    pictures = {drawing.image(32).tobytes() for drawing in drawings()}
    assert len(pictures) == COMBINATIONS


@settings(max_examples=30, deadline=None)
@given(combinations)
def test_caption_describes_the_picture(drawing: Drawing) -> None:
    """The coloured pixels are where the caption says, and all other pixels are background."""
    image = np.asarray(drawing.image(64)).astype(int)
    background, colour = np.array(BACKGROUNDS[drawing.background]), np.array(COLOURS[drawing.colour])
    rows, columns = np.nonzero(np.abs(image - colour).sum(2) == 0)
    assert len(rows) > 30
    x, y = POSITIONS[drawing.position]
    assert abs((columns.min() + columns.max() + 1) / 128 - x) < 0.06
    # the bounding boxes of triangles and hearts are not centred
    assert abs((rows.min() + rows.max() + 1) / 128 - y) < 0.12
    reach = 1.3 * SIZES[drawing.size] * 64
    far = np.hypot(*(np.indices((64, 64)) + 0.5 - 64 * np.array([y, x])[:, None, None])) > reach * 1.05
    assert (image[far] == background).all()


def test_rings_have_holes() -> None:
    for shape, hole in (("ring", True), ("circle", False)):
        centre = Drawing(shape, "red", "centre", "large", "white").image(64).getpixel((32, 32))
        assert (centre == (255, 255, 255)) is hole


def test_drawn_shapes_as_a_classification_dataset() -> None:
    train = drawn_shapes(100, 16)
    assert len(set(train["text"])) == len(train) == 100
    row = train[3]
    assert row["image"].size == (16, 16)
    assert train.features["label"].int2str(row["label"]) == drawings(4)[3].shape
    assert row["text"] == drawings(4)[3].caption
    assert drawn_shapes(100, 16)._fingerprint == train._fingerprint


def test_invalid_cache_directory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache is a file, or lies in a directory that accepts none."""
    (tmp_path / "file").touch()
    for root in (tmp_path / "file" / "cache", tmp_path / "file", Path("/proc/nowhere")):
        monkeypatch.setenv("CKPT_FT_CACHE", str(root))
        with pytest.raises(UserError, match=r"made cannot be made \(.*\); CKPT_FT_CACHE names another directory"):
            made_once("made", lambda directory: (directory / "x").touch())
