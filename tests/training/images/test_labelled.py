"""Labelled images from folders, columns and drawn shapes; labels; one line for unusable data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Value
from datasets import Image as ImageFeature
from PIL import Image
from transformers import EvalPrediction

from ckpt_ft.errors import UserError
from ckpt_ft.training.classification import VisionArguments, load_images
from ckpt_ft.training.images import open_image, to_rgb
from ckpt_ft.training.labels import accuracy


def folder(root: Path, **counts: int) -> Path:
    """Creates class folders with that many images each."""
    for name, count in counts.items():
        (root / name).mkdir(parents=True)
        for i in range(count):
            Image.new("RGB", (20, 16), (40 * i, 0, 0)).save(root / name / f"{i}.png")
    return root


def load(path: Path | None, evaluate: bool = False, **flags: Any) -> tuple[Dataset, Dataset | None, list[str]]:
    return load_images(VisionArguments(dataset_name=str(path) if path else None, **flags), evaluate=evaluate, seed=0)


def test_class_folders_become_labels(tmp_path: Path) -> None:
    train, test, names = load(folder(tmp_path, dog=3, cat=2))
    assert names == ["cat", "dog"]
    assert train["label"] == [0, 0, 1, 1, 1]
    assert test is None
    assert open_image(train[4]["image"]).getpixel((0, 0)) == (80, 0, 0)


def test_split_folders_and_held_out_share(tmp_path: Path) -> None:
    folder(tmp_path / "train", a=4, b=4)
    folder(tmp_path / "validation", b=2)
    train, test, _ = load(tmp_path, evaluate=True, dataset_test_split="validation")
    assert (len(train), test and test["label"]) == (8, [1, 1])
    train, test, _ = load(tmp_path, evaluate=True, test_split_size=0.25)
    assert (len(train), test and len(test)) == (6, 2)


def test_drawn_shapes_do_not_overlap_with_their_test_set() -> None:
    train, test, names = load(None, evaluate=True)
    assert len(names) == 8
    assert test is not None
    assert (len(train), len(test)) == (3456 - 512, 512)
    seen = {row["bytes"] for row in train["image"]}
    assert not any(row["bytes"] in seen for row in test["image"])


def test_sample_has_all_classes(tmp_path: Path) -> None:
    train, _, _ = load(folder(tmp_path, a=30, b=30), max_train_samples=20)
    assert len(train) == 20
    assert 4 < sum(train["label"]) < 16


@pytest.mark.parametrize(
    ("values", "feature", "names", "labels"),
    [
        (["red", "blue", "red"], Value("string"), ["blue", "red"], [1, 0, 1]),
        ([10, 3, 10], Value("int64"), ["3", "10"], [1, 0, 1]),  # fewer classes than the highest label
        ([1, 0, 1], ClassLabel(names=["x", "y", "z"]), ["x", "y", "z"], [1, 0, 1]),
    ],
)
def test_labels_become_class_indices(
    monkeypatch: pytest.MonkeyPatch, values: Any, feature: Any, names: list[str], labels: list[int]
) -> None:
    hub(monkeypatch, values, feature)
    train, _, found = load(Path("owner/rows"))
    assert found == names
    assert train["label"] == labels


def test_class_without_images_is_noted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    hub(monkeypatch, [0, 1], ClassLabel(names=["x", "y", "z"]))
    _, _, names = load(Path("owner/rows"))
    assert names == ["x", "y", "z"]
    assert "1 of 3 classes have no training row: z" in capsys.readouterr().out


def hub(monkeypatch: pytest.MonkeyPatch, labels: Any, feature: Any, image: str = "image") -> None:
    """Makes load_dataset return a dataset with these labels."""
    features = Features({image: ImageFeature(), "label": feature})
    rows = Dataset.from_dict({image: [Image.new("RGB", (8, 8))] * len(labels), "label": labels}, features=features)
    monkeypatch.setattr("datasets.load_dataset", lambda name, config, split: rows)


@pytest.mark.parametrize(
    ("labels", "feature", "message"),
    [
        ([0, -1], ClassLabel(names=["x", "y"]), "row 2 has label -1, but there are 2 classes to train on (x, y)"),
        ([0, None], Value("int64"), "row 2 has no label"),
        ([0.5, 1.5], Value("float64"), "labels are whole numbers or names, not float"),
        ([1, 1], ClassLabel(names=["x", "y"]), "every training row is of class 'y'"),
    ],
)
def test_unusable_labels_are_refused(monkeypatch: pytest.MonkeyPatch, labels: Any, feature: Any, message: str) -> None:
    hub(monkeypatch, labels, feature)
    with pytest.raises(UserError) as error:
        load(Path("owner/rows"))
    assert message in str(error.value)


def test_class_of_the_test_set_alone_is_noted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path / "train", a=2, b=2)
    folder(tmp_path / "test", c=1)
    _, test, names = load(tmp_path, evaluate=True)
    assert (names, test and test["label"]) == (["a", "b", "c"], [2])
    assert "1 of 3 classes have no training row: c" in capsys.readouterr().out


def test_other_column_names(monkeypatch: pytest.MonkeyPatch) -> None:
    hub(monkeypatch, [0, 1], ClassLabel(names=["x", "y"]), image="img")
    train, _, _ = load(Path("owner/rows"), image_column="img")
    assert train.column_names == ["image", "label"]
    with pytest.raises(UserError, match="--image_column image: owner/rows has no such column; did you mean 'img'"):
        load(Path("owner/rows"))


def test_unusable_folders_are_refused(tmp_path: Path) -> None:
    folder(tmp_path / "one", a=1, b=0)  # a folder without images is no class
    with pytest.raises(UserError, match="--label_column label: .* has no such column; it has image"):
        load(tmp_path / "one")
    (tmp_path / "flat").mkdir()
    with pytest.raises(UserError, match=f"dataset {tmp_path}/flat: "):
        load(tmp_path / "flat")
    with pytest.raises(UserError, match="dataset .*two: Unknown split .test."):
        load(folder(tmp_path / "two", a=1, b=1), evaluate=True)
    with pytest.raises(UserError, match="neither a local path nor a dataset of the Hub"):
        load(tmp_path / "nowhere")


def test_unreadable_images_are_refused_or_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder(tmp_path, a=2, b=2)
    (tmp_path / "a" / "empty.png").touch()
    (tmp_path / "a" / "text.png").write_text("no image")
    whole = tmp_path / "b" / "0.png"
    (tmp_path / "b" / "cut.png").write_bytes(whole.read_bytes()[:-30])
    with pytest.raises(UserError) as error:
        load(tmp_path)
    assert "a/empty.png is no image" in str(error.value)
    assert "a/text.png is no image" in str(error.value)
    assert "b/cut.png cannot be read" in str(error.value)
    assert "--skip_bad_images" in str(error.value)
    train, _, _ = load(tmp_path, skip_bad_images=True)
    assert train["label"] == [0, 0, 1, 1]
    assert capsys.readouterr().out.count("skipped: ") == 3


def test_image_truncated_during_training_is_named(tmp_path: Path) -> None:
    train, _, _ = load(folder(tmp_path, a=1, b=1))
    file = tmp_path / "b" / "0.png"
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(UserError, match=r"b/0.png cannot be read \(.*\); repair it or take it out"):
        open_image(train[1]["image"])


def test_images_are_converted_to_rgb(tmp_path: Path) -> None:
    folder(tmp_path, a=1, b=1)
    Image.new("L", (8, 8), 7).save(tmp_path / "a" / "grey.png")
    Image.new("RGBA", (8, 8), (0, 0, 0, 0)).save(tmp_path / "a" / "none.png")
    train, _, _ = load(tmp_path)
    pictures = [open_image(image) for image in train["image"]]
    assert {picture.mode for picture in pictures} == {"RGB"}
    assert pictures[1].getpixel((0, 0)) == (7, 7, 7)
    assert pictures[2].getpixel((0, 0)) == (255, 255, 255)


def test_16_bit_images_are_scaled_to_8_bits() -> None:
    deep = Image.fromarray(np.array([[0, 256, 65535]], dtype=np.uint16))
    assert [to_rgb(deep).getpixel((x, 0)) for x in range(3)] == [(0, 0, 0), (1, 1, 1), (255, 255, 255)]


def test_accuracy_and_balanced_accuracy() -> None:
    found = accuracy(EvalPrediction(predictions=np.array([0, 0, 0, 1]), label_ids=np.array([0, 0, 0, 2])))
    assert found == {"accuracy": 0.75, "balanced_accuracy": 0.5}


@pytest.mark.parametrize(
    "flags", [{"test_split_size": 1.0}, {"max_train_samples": 1}, {"resolution": 4}, {"min_crop": 0.0}]
)
def test_invalid_classification_flags_are_refused(flags: dict[str, Any]) -> None:
    with pytest.raises(UserError, match=f"--{next(iter(flags))}"):
        VisionArguments(**flags)
