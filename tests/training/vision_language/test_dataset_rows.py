"""A dataset with images in a plan: the largest images and the longest text set the peak."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ckpt_ft.training.conversations import ImageLoader, VisionLanguageArguments, load_conversations
from ckpt_ft.training.samples.language import make_questions
from ckpt_ft.training.vision_language import (
    ImageCollator,
    VisionLanguageModelArguments,
    encode_conversations,
    load_processor,
)
from ckpt_ft.workloads.sample_sizes import rows_by_length


@pytest.fixture(scope="module")
def model(_caches: None) -> str:
    return make_questions(48)[0]


def encoded(folder: Path, model: str, *rows: tuple[int, str]) -> Any:
    """Returns the collator's batch of (samples, length), from rows of an image (its width) and a question."""
    lines = []
    for at, (width, question) in enumerate(rows):
        Image.new("RGB", (width, 48)).save(folder / f"{at}.png")
        turns = [{"role": "user", "content": f"<image>{question}"}, {"role": "assistant", "content": "red"}]
        lines.append(json.dumps({"messages": turns, "images": [f"{at}.png"]}) + "\n")
    (folder / "rows.jsonl").write_text("".join(lines))
    args = VisionLanguageArguments(dataset_name=str(folder / "rows.jsonl"), max_length=512)
    train, _, images = load_conversations(args, evaluate=False, seed=0)
    processor: Any = load_processor(VisionLanguageModelArguments(model_name_or_path=model), args)
    return encode_conversations(train, processor, ImageLoader(images), args)


def test_largest_batch_has_the_longest_row_and_largest_images(model: str, tmp_path: Path) -> None:
    words = "why " * 60
    rows = encoded(tmp_path, model, (48, "a?"), (96, "a?"), (48, words), (48, "a?"))
    chosen, lengths = rows_by_length(rows)
    assert lengths is not None
    pixels = rows.with_format(None)["pixels"]
    assert pixels[1] > pixels[0] == pixels[2]
    collate = ImageCollator(0, ())
    worst = collate(chosen(3, None))
    assert worst["input_ids"].shape == (3, lengths.longest)
    assert worst["image_sizes"].tolist() == [[48, 48], [48, 96], [48, 96]]  # (height, width)
    usual = collate(chosen(3, lengths.tokens[0]))
    assert usual["image_sizes"].tolist() == [[48, 48]] * 3
