"""Rows are encoded again if one of their image files has changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.training.conversations import ImageLoader, VisionLanguageArguments, image_files_digest, load_conversations
from ckpt_ft.training.samples.language import make_questions
from ckpt_ft.training.vision_language import VisionLanguageModelArguments, encode_conversations, load_processor

ANSWER = {"role": "assistant", "content": "red"}


def draw(path: Path, width: int) -> None:
    Image.new("RGB", (width, 48), "red").save(path)


def test_changed_or_deleted_image_is_read_again(tmp_path: Path) -> None:
    for at in range(2):
        draw(tmp_path / f"{at}.png", 48)
    turns = [{"role": "user", "content": "<image>Which colour is it?"}, ANSWER]
    lines = [json.dumps({"messages": turns, "images": [f"{at}.png"]}) for at in range(2)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    data = VisionLanguageArguments(dataset_name=str(tmp_path / "rows.jsonl"))
    processor = load_processor(VisionLanguageModelArguments(model_name_or_path=make_questions()[0]), data)

    def lengths() -> list[int]:
        rows, _, folder = load_conversations(data, evaluate=False, seed=0)
        return list(encode_conversations(rows, processor, ImageLoader(folder), data).with_format(None)["length"])

    first = lengths()
    assert first == lengths()
    draw(tmp_path / "1.png", 96)
    reread = lengths()
    assert reread[0] == first[0]
    assert reread[1] > first[1]  # two tiles
    (tmp_path / "0.png").unlink()
    with pytest.raises(UserError, match="row 1: image .*0.png' does not exist"):
        lengths()


def test_digest_changes_with_each_image_of_the_folder(tmp_path: Path) -> None:
    path = tmp_path / "below" / "é 画.png"
    path.parent.mkdir()
    before = image_files_digest(tmp_path)
    draw(path, 48)
    (tmp_path / "rows.jsonl").touch()
    one = image_files_digest(tmp_path)
    draw(path, 49)
    assert len({before, one, image_files_digest(tmp_path)}) == 3
    (tmp_path / "rows.jsonl").write_text("{}")
    assert image_files_digest(tmp_path) not in (before, one)
    assert image_files_digest(None) == image_files_digest(None)  # images inside a dataset are part of its rows
