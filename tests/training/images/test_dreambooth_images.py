"""Folders of one subject, and flags that contradict each other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.training.images import ImageArguments, load_captioned


def folder(path: Path, *names: str) -> str:
    path.mkdir(parents=True)
    for name in names:
        Image.new("RGB", (40, 24), (255, 0, 0)).save(path / name)
    return str(path)


def test_images_of_a_subject_folder(tmp_path: Path) -> None:
    place = folder(tmp_path / "subject", "b.png", "a.jpg", ".half.png")
    folder(tmp_path / "subject" / "class", "other.png")
    (tmp_path / "subject" / "notes.txt").write_text("not an image")
    args = ImageArguments(instance_data_dir=place, instance_prompt="a photo of sks dog")
    rows = load_captioned(args, 32)
    assert [Path(row["path"]).name for row in rows["image"]] == ["a.jpg", "b.png"]
    assert set(rows["text"]) == {"a photo of sks dog"}
    args.max_train_samples = 1
    assert len(load_captioned(args, 32)) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"instance_data_dir": "a"}, "--instance_data_dir needs --instance_prompt"),
        ({"instance_data_dir": "a", "instance_prompt": " "}, "--instance_data_dir needs --instance_prompt"),
        ({"instance_prompt": "sks"}, "--instance_prompt belongs to --instance_data_dir: add"),
        (
            {"instance_data_dir": "a", "instance_prompt": "sks", "train_data_dir": "b"},
            "--instance_data_dir and --train_data_dir are two sources",
        ),
    ],
)
def test_contradictory_dreambooth_flags_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        ImageArguments(**flags)


def test_missing_subject_images_are_refused(tmp_path: Path) -> None:
    def load(place: str) -> None:
        load_captioned(ImageArguments(instance_data_dir=place, instance_prompt="sks"), 32)

    with pytest.raises(UserError, match="--instance_data_dir /nowhere: no such directory"):
        load("/nowhere")
    with pytest.raises(UserError, match="there is no image in it"):
        load(folder(tmp_path / "empty"))
    place = folder(tmp_path / "bad", "good.png")
    (tmp_path / "bad" / "bad.png").write_bytes(b"nothing")
    with pytest.raises(UserError, match=r"bad.png is no image that Pillow can read"):
        load(place)
