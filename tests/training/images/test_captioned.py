"""Captioned images: sources, cropping, and errors for invalid ones."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from PIL import Image

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.images import ImageArguments, framed, load_captioned
from ckpt_ft.training.samples.drawings import COMBINATIONS, Drawing, drawings


def folder(path: Path, entries: list[Any], images: int = 2) -> Path:
    path.mkdir(exist_ok=True)
    for number in range(images):
        Image.new("RGB", (40, 24 + number), (255, 0, 0)).save(path / f"{number}.png")
    lines = [entry if isinstance(entry, str) else json.dumps(entry) for entry in entries]
    (path / "metadata.jsonl").write_text("\n".join(lines) + "\n")
    return path


GOOD = [{"file_name": "0.png", "text": "red"}, {"file_name": "1.png", "text": "also red"}]


def test_folder_with_a_metadata_file(tmp_path: Path) -> None:
    rows = load_captioned(ImageArguments(train_data_dir=str(folder(tmp_path / "a", GOOD))), 32)
    assert list(rows["text"]) == ["red", "also red"]
    assert rows[1]["image"]["path"] == str(tmp_path / "a" / "1.png")
    first = load_captioned(ImageArguments(train_data_dir=str(tmp_path / "a"), max_train_samples=1), 32)
    assert len(first) == 1


def test_only_needed_shapes_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[str] = []
    draw = Drawing.image
    monkeypatch.setattr(Drawing, "image", lambda self, size: (drawn.append(self.caption), draw(self, size))[1])
    rows = load_captioned(ImageArguments(max_train_samples=3), 16)
    assert list(rows["text"]) == drawn == [drawing.caption for drawing in drawings()[:3]]
    assert rows[0]["image"]["bytes"].startswith(b"\x89PNG")
    assert len(load_captioned(ImageArguments(max_train_samples=COMBINATIONS + 1), 8)) == COMBINATIONS


def test_captions_in_text_files(tmp_path: Path) -> None:
    """As for kohya's scripts, also in subfolders; each image needs a caption."""
    for name, caption in (("b.png", " a red\n"), ("a.jpg", "blé"), ("more/c.png", "green")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 40)).save(path)
        path.with_suffix(".txt").write_text(caption, encoding="utf-8")
    (tmp_path / "._b.png").write_bytes(b"macOS")  # macOS creates such a file beside each copied file
    args = ImageArguments(train_data_dir=str(tmp_path))
    rows = load_captioned(args, 32)
    assert [Path(image["path"]).name for image in rows["image"]] == ["a.jpg", "b.png", "c.png"]
    assert list(rows["text"]) == ["blé", "a red", "green"]
    for content, words in ((b"", "b.txt is empty"), (b"\xff\xfe\xff", "b.txt beside it: "), (None, "No such file")):
        (tmp_path / "b.txt").unlink()
        if content is not None:
            (tmp_path / "b.txt").write_bytes(content)
        with pytest.raises(UserError, match=f"b.png has no caption: .*{words}"):
            load_captioned(args, 32)


def test_damaged_dataset_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"image": "1.png", "text": "red"}\n{"image": broken\n')
    says = "(JSON parse error|Expected object)"
    with pytest.raises(UserError, match=f"--dataset_name {tmp_path}: {says}"):
        load_captioned(ImageArguments(dataset_name=str(tmp_path)), 32)


def test_columns_of_a_dataset_are_mapped(tmp_path: Path) -> None:
    from datasets import Image as ImageFeature

    rows = Dataset.from_dict({"photo": [Image.new("RGB", (8, 8))] * 3, "says": ["a", "b", "c"], "more": [1, 2, 3]})
    rows.cast_column("photo", ImageFeature()).to_parquet(tmp_path / "train.parquet")
    args = ImageArguments(dataset_name=str(tmp_path), image_column="photo", caption_column="says")
    loaded = load_captioned(args, 32)
    assert loaded.column_names == ["image", "text"]
    assert list(loaded["text"]) == ["a", "b", "c"]
    with pytest.raises(UserError, match="--image_column image: .* no such column; it has photo, says, more"):
        load_captioned(ImageArguments(dataset_name=str(tmp_path)), 32)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([*GOOD, "{oops"], "--train_data_dir .*: JSON parse error"),
        ([GOOD[0], {"text": "red"}], "row 2 has no image"),
        ([GOOD[0], {"file_name": "1.png"}], "row 2 has no 'text'"),
        ([GOOD[0], {"file_name": "1.png", "text": " "}], "row 2 has no 'text'"),
        ([{"file_name": "1.png", "text": ["a red dog", "a dog"]}], "'text' holds .*; captions are texts"),
        ([{"file_name": "1.png", "says": "red"}], "--caption_column text: .* no such column; it has image, says"),
        ([GOOD[0], {"file_name": "7.png", "text": "x"}], r"7\.png cannot be read \(.*No such file.*--skip_bad_images"),
        ([], "--train_data_dir .*: "),
        ([GOOD[0], {"file_name": "../0.png", "text": "x"}], "Invalid metadata file_name '../0.png'"),
        ([{"file_name": "/etc/passwd", "text": "x"}], "Invalid metadata file_name '/etc/passwd'"),
        ([{"file_name": "a\0b", "text": "x"}], "cannot be read"),
        (['{"file_name": ' + "[" * 100_000], "--train_data_dir .*: "),
    ],
)
def test_invalid_metadata_is_refused(tmp_path: Path, entries: list[Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refused:
        load_captioned(ImageArguments(train_data_dir=str(folder(tmp_path / "a", entries))), 32)
    assert "\n" not in str(refused.value)


def test_bad_images_are_named_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names = ["empty.png", "text.png", "cut.png"]
    path = folder(tmp_path / "a", [*GOOD, *({"file_name": name, "text": "bad"} for name in names)])
    whole = (path / "0.png").read_bytes()
    for name, content in zip(names, (b"", b"not an image", whole[: len(whole) // 2]), strict=True):
        (path / name).write_bytes(content)
    with pytest.raises(UserError, match=r"empty\.png is no image.*text\.png is no image.*cut\.png cannot be read"):
        load_captioned(ImageArguments(train_data_dir=str(path)), 32)
    rows = load_captioned(ImageArguments(train_data_dir=str(path), skip_bad_images=True), 32)
    assert len(rows) == 2
    said = capsys.readouterr().out
    assert all(f"{name} " in said for name in names)


def test_kohya_folders_set_repeats_and_prompts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, captions in (("3_sks dog", ("a dog on grass", None)), ("1_cat", ("a cat",)), ("2024", ("a year",))):
        (tmp_path / name).mkdir()
        for number, caption in enumerate(captions):
            Image.new("RGB", (8, 8)).save(tmp_path / name / f"{number}.png")
            if caption:
                (tmp_path / name / f"{number}.txt").write_text(caption)
    args = ImageArguments(train_data_dir=str(tmp_path), skip_bad_images=True)
    assert Counter(load_captioned(args, 8)["text"]) == {"a dog on grass": 3, "sks dog": 3, "a cat": 1, "a year": 1}
    (tmp_path / "3_sks dog" / "1.png").write_bytes(b"")
    assert len(load_captioned(args, 8)) == 5
    assert capsys.readouterr().out.count("1.png is no image") == 1
    (tmp_path / "2024" / "0.txt").unlink()
    with pytest.raises(UserError, match="0.png has no caption"):
        load_captioned(args, 8)


def test_missing_folder_or_captions_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such directory"):
        load_captioned(ImageArguments(train_data_dir=str(tmp_path / "none")), 32)
    with pytest.raises(UserError, match="neither a metadata.jsonl nor .txt files"):
        load_captioned(ImageArguments(train_data_dir=str(tmp_path)), 32)


def halves() -> Image.Image:
    """An image of 40 x 20 pixels: the left half is white, the right half black."""
    image = Image.new("RGB", (40, 20), (255, 255, 255))
    image.paste((0, 0, 0), (20, 0, 40, 20))
    return image


def test_image_is_scaled_and_centre_cropped() -> None:
    pixels, ids = framed(halves(), (16, 16), ImageArguments(), random.Random(0))
    assert pixels.shape == (3, 16, 16)
    assert pixels[:, :, 0].mean() > 0.9
    assert pixels[:, :, -1].mean() < -0.9
    # original height and width, top and left of the crop, target height and width
    assert ids.tolist() == [20, 40, 0, 8, 16, 16]


def test_random_crop_and_flip() -> None:
    args = ImageArguments(center_crop=False, random_flip=True)
    assert args.cache_latents is False
    draws = [framed(halves(), (16, 16), args, random.Random(seed)) for seed in range(40)]
    assert len({int(ids[3]) for _, ids in draws}) > 12  # a crop can start at 17 positions
    mirrored = [bool(pixels[..., 0].mean() < pixels[..., -1].mean()) for pixels, _ in draws]
    assert 8 < sum(mirrored) < 32
    repeated = framed(halves(), (16, 16), args, random.Random(3))
    assert torch.equal(repeated[0], draws[3][0])


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: ImageArguments(resolution=0), "--resolution 0"),
        (lambda: ImageArguments(dataset_name="a", train_data_dir="b"), "two sources"),
        (lambda: ImageArguments(cache_latents=True, random_flip=True), "--cache_latents encodes each image once"),
        (lambda: ImageArguments(proportion_empty_prompts=1.0), "it should be less than 1"),
        (lambda: DiffusionModelArguments(rank=0), "--rank 0: it should be greater than or equal to 1"),
        (lambda: DiffusionModelArguments(lora_alpha=4), "--lora_alpha belongs to --rank"),
        (lambda: DiffusionModelArguments(rank=4, lora_dropout=1.0), "--lora_dropout"),
        (lambda: LoopArguments(train_batch_size=0), "--train_batch_size 0: it should be greater than or equal to 1"),
        (lambda: LoopArguments(checkpoints_total_limit=0), "--checkpoints_total_limit 0"),
        (lambda: DiffusionModelArguments(snr_gamma=0.0), "--snr_gamma"),
    ],
)
def test_invalid_image_flags_are_refused(make: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        make()
