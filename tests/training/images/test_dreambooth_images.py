"""DreamBooth folders: found and missing images, and invalid flags."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.training.images import (
    ImageArguments,
    load_captioned,
    load_class_images,
    missing_class_images,
    save_class_image,
)


def folder(path: Path, *names: str) -> str:
    path.mkdir(parents=True)
    for name in names:
        Image.new("RGB", (40, 24), (255, 0, 0)).save(path / name)
    return str(path)


def prior(path: Path, images: int = 4, prompt: str = "a dog") -> ImageArguments:
    return ImageArguments(
        with_prior_preservation=True, class_data_dir=str(path), class_prompt=prompt, num_class_images=images
    )


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


def test_only_missing_class_images_are_generated(tmp_path: Path) -> None:
    """Gaps are filled whoever made the images, the user's images count, and of too many images the first are used."""
    asked = prior(tmp_path / "class")
    assert list(missing_class_images(asked)) == [0, 1, 2, 3]
    for number in (0, 2):
        save_class_image(Image.new("RGB", (8, 8)), asked, tmp_path / "class" / f"class-{number:05}.png")
    assert list(missing_class_images(asked)) == [1, 3]
    Image.new("RGB", (8, 8)).save(tmp_path / "class" / "mine.png")
    assert {index: path.name for index, path in missing_class_images(asked).items()} == {1: "class-00001.png"}
    save_class_image(Image.new("RGB", (8, 8)), asked, tmp_path / "class" / "class-00001.png")
    assert missing_class_images(asked) == {}
    assert load_class_images(asked)["text"][:] == ["a dog"] * 4
    assert [Path(row["path"]).name for row in load_class_images(prior(tmp_path / "class", 2))["image"]] == [
        "class-00000.png", "class-00001.png",
    ]  # fmt: skip


def test_class_images_of_another_prompt_are_refused(tmp_path: Path) -> None:
    missing_class_images(prior(tmp_path))
    save_class_image(Image.new("RGB", (8, 8)), prior(tmp_path, prompt="a café"), tmp_path / "class-00000.png")
    assert len(missing_class_images(prior(tmp_path, prompt="a café"))) == 3
    with pytest.raises(UserError, match="class-00000.png was drawn for 'a café', not for --class_prompt 'a dog'"):
        missing_class_images(prior(tmp_path))


def test_too_large_class_image_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "class", "class-00000.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    settings = prior(tmp_path / "class", images=1)
    assert missing_class_images(settings) == {}
    with pytest.raises(UserError, match="class-00000.png cannot be read .*960 pixels.*exceeds limit"):
        load_class_images(settings)


def test_invalid_class_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--class_data_dir .*file cannot be made \(.*File exists"):
        missing_class_images(prior(tmp_path / "file"))
    with pytest.raises(UserError, match="--class_data_dir /proc/class cannot be made"):
        missing_class_images(prior(Path("/proc/class")))


CLASS = {"with_prior_preservation": True, "class_data_dir": "class", "class_prompt": "a dog"}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"instance_data_dir": "a"}, "--instance_data_dir a: what does it show. add --instance_prompt"),
        ({"instance_data_dir": "a", "instance_prompt": " "}, "add --instance_prompt"),
        ({"instance_prompt": "sks"}, "--instance_prompt belongs to --instance_data_dir: add"),
        (
            {"instance_data_dir": "a", "instance_prompt": "sks", "train_data_dir": "b"},
            "--instance_data_dir and --train_data_dir are two sources",
        ),
        ({"class_prompt": "a dog"}, "--class_prompt belongs to --with_prior_preservation: add"),
        ({"num_class_images": 50}, "--num_class_images belongs to --with_prior_preservation"),
        ({"prior_loss_weight": 0.5}, "--prior_loss_weight belongs to --with_prior_preservation"),
        ({"with_prior_preservation": True}, "--with_prior_preservation needs --class_data_dir: a folder"),
        ({**CLASS, "class_prompt": ""}, "--with_prior_preservation needs --class_prompt: such as"),
        ({**CLASS, "num_class_images": 0}, "--num_class_images 0: it should be greater than or equal to 1"),
        ({**CLASS, "sample_batch_size": 0}, "--sample_batch_size 0"),
        ({**CLASS, "prior_loss_weight": -1.0}, "--prior_loss_weight -1.0"),
        (
            {**CLASS, "instance_data_dir": "./class", "instance_prompt": "sks"},
            "--class_data_dir class is --instance_data_dir as well",
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
