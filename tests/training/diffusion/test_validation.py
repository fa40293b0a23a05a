"""Validation images: each file is complete or missing, and one sheet shows all of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

from ckpt_ft.training.diffusion.arguments import LoopArguments
from ckpt_ft.training.diffusion.sampling import Validation

SIDE = 128
ACCELERATOR: Any = SimpleNamespace(device=torch.device("cpu"), autocast=None, trackers=[])


def validation(output: Path, images: int) -> Validation:
    drawn = [Image.new("RGB", (SIDE, SIDE), "red")] * images
    none: Any = None
    encoders: Any = SimpleNamespace(
        vae=None, absent=[], encode_prompts=lambda prompts: {"prompt_embeds": torch.zeros(len(prompts), 1)}
    )
    args = LoopArguments(output_dir=str(output), validation_prompt=["a red circle"] * images)
    made = Validation(none, none, encoders, SIDE, args)
    made.images = lambda *_: drawn  # type: ignore[method-assign]
    return made


def size(path: Path) -> tuple[int, int]:
    with Image.open(path) as image:
        return image.size


def test_each_validation_is_a_row_of_the_sheet(tmp_path: Path) -> None:
    pictures = validation(tmp_path, images=2)
    model: Any = None
    for step in (0, 10):
        pictures.run(model, ACCELERATOR, step)
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == ["step-000000.png", "step-000010.png"]
    pictures.write_sheet(tmp_path / "samples.png")
    row = size(tmp_path / "samples" / "step-000010.png")
    assert row == (2 * SIDE, SIDE)
    assert size(tmp_path / "samples.png") == (row[0], 2 * row[1])
    pictures.run(model, ACCELERATOR, 0)  # another run with the same output
    assert not (tmp_path / "samples" / "step-000010.png").exists()


def test_failed_image_write_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pictures = validation(tmp_path, images=1)
    model: Any = None
    pictures.run(model, ACCELERATOR, 0)
    before = (tmp_path / "samples" / "step-000000.png").read_bytes()

    def cut(image: Image.Image, path: Path) -> None:
        path.write_bytes(b"\x89PNG")
        raise OSError("no space left")

    monkeypatch.setattr(Image.Image, "save", cut)
    with pytest.raises(OSError, match="no space left"):
        pictures.run(model, ACCELERATOR, 10)
    assert (tmp_path / "samples" / "step-000000.png").read_bytes() == before
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000000.png"]
