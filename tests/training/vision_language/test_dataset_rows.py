"""A dataset with images in a plan: the largest images and the longest text set the peak."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.samples.language import make_questions
from ckpt_ft.training.vision_language import patch_size, rows_with_images
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config


@pytest.fixture(scope="module")
def model(_caches: None) -> str:
    return make_questions(48)[0]


def write(folder: Path, *rows: tuple[int, str]) -> str:
    """Writes a file of rows, each given as (width of the image, question)."""
    lines = []
    for at, (width, question) in enumerate(rows):
        Image.new("RGB", (width, 48)).save(folder / f"{at}.png")
        turns = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": "red"}]
        lines.append(json.dumps({"messages": turns, "images": [f"{at}.png"]}) + "\n")
    file = folder / "rows.jsonl"
    file.write_text("".join(lines))
    return str(file)


def test_largest_batch_has_the_longest_row_and_largest_images(model: str, tmp_path: Path) -> None:
    words = "why " * 60
    rows = rows_with_images(write(tmp_path, (48, "a?"), (96, "a?"), (48, words), (48, "a?")), model, 512)
    assert rows is not None
    workload = load(TrainingSpec.of(model), "cpu", rows.lengths, rows.batches)
    assert rows.pixels[1] > rows.pixels[0] == rows.pixels[2]
    worst = workload.make_batch(3, rows.lengths.longest)
    assert worst["input_ids"].shape == (3, rows.lengths.longest)
    assert worst["image_sizes"].tolist() == [[48, 48], [48, 96], [48, 96]]  # (height, width)
    usual = workload.make_batch(3, rows.lengths.tokens[0])
    assert usual["image_sizes"].tolist() == [[48, 48]] * 3
    shorter = workload.trace_of([workload.step(3, rows.lengths.tokens[0])] * 2)
    assert workload.trace(3).peak_allocated > shorter.peak_allocated
    assert workload.notes == ()  # no note about images that are not traced


def test_text_only_dataset_has_no_image_rows(model: str, tmp_path: Path) -> None:
    file = tmp_path / "text.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a"}]}) + "\n")
    assert rows_with_images(str(file), model, 512) is None


def test_patch_size_is_a_number_or_a_pair(model: str) -> None:
    """InternVL's configurations have height and width."""
    assert patch_size(read_config(model)) == 12
    assert patch_size({"vision_config": {"patch_size": [16, 14]}}) == 14
    assert patch_size({"vision_config": {}}) == patch_size({}) == 1
