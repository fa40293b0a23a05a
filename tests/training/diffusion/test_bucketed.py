"""Images in aspect-ratio buckets: scaling and cropping, cache, order; a run peaks with its largest bucket."""

from __future__ import annotations

import json
import random
from itertools import islice
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from recipe_scripts import copy_checkpoint, forget_process, load_recipe, losses_on_two_ranks
from tiny_transformers import make_tiny_transformer
from tiny_unets import make_tiny_pipeline
from torch.utils.data import default_collate

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.data import EndlessBatches, FramedImages, cache_latents
from ckpt_ft.training.diffusion.encoders import Encoders
from ckpt_ft.training.diffusion.families import UNET_XL
from ckpt_ft.training.diffusion.loop import read_losses
from ckpt_ft.training.images import ImageArguments, framed, load_captioned, size_of

pytestmark = pytest.mark.usefixtures("one_process")

SHAPES = [(100, 100), (60, 100), (100, 60), (90, 100), (50, 90), (64, 64), (40, 70)]  # width, height
SIZES = [(64, 64), (80, 48), (48, 80)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Seven pictures of different colours, one with an EXIF rotation."""
    folder = tmp_path_factory.mktemp("images")
    for number, shape in enumerate(SHAPES):
        image = Image.new("RGB", shape, (30 * number, 0, 255 - 30 * number))
        exif = image.getexif()
        if number == 6:
            exif[0x0112] = 6
        image.save(folder / f"{number}.jpg", exif=exif)
        (folder / f"{number}.txt").write_text(f"shade {number}")
    return folder


@pytest.fixture(scope="module")
def pipelines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("pipelines")
    make_tiny_pipeline("sdxl", 0, (16, 32)).save_pretrained(root / "sdxl")
    make_tiny_transformer("flux", heads=4, layers=2).save_pretrained(root / "flux")
    return {kind: str(root / kind) for kind in ("sdxl", "flux")}


def test_image_is_scaled_and_cropped_to_its_size() -> None:
    """It is scaled until it covers the size and cropped in the middle; the time ids record both."""
    picture = Image.new("RGB", (200, 100))
    picture.paste((255, 255, 255), (100, 0, 200, 100))
    pixels, ids = framed(picture, (40, 48), ImageArguments(), random.Random(0))
    assert pixels.shape == (3, 40, 48)
    assert ids.tolist() == [100, 200, 0, 16, 40, 48]
    assert pixels[0, :, 2].mean() < -0.9
    assert pixels[0, :, -2].mean() > 0.9
    draws = [framed(picture, (40, 48), ImageArguments(center_crop=False), random.Random(n))[1] for n in range(9)]
    assert len({tuple(draw.tolist()) for draw in draws}) > 1
    assert {(draw[2].item(), draw[4].item()) for draw in draws} == {(0, 40)}


def test_rows_are_in_the_bucket_nearest_their_shape(folder: Path, pipelines: dict[str, str], tmp_path: Path) -> None:
    """Sizes are read from image headers; the cache has the encoders' results, in batches of one shape."""
    args = ImageArguments(train_data_dir=str(folder))
    rows = load_captioned(args, 64)
    assert [size_of(image) for image in rows["image"]][-1] == (40, 70)  # rotated
    base = DiffusionModelArguments(pretrained_model_name_or_path=pipelines["sdxl"])
    encoders = Encoders(base, UNET_XL, torch.device("cpu"), torch.float32)
    images = FramedImages(rows, [*SIZES, (64, 256)], args, seed=0)
    assert images.sizes == SIZES  # no image has the last size
    assert images.buckets == [[0, 3, 5], [1, 4], [2, 6]]
    cached = cache_latents(images, encoders, tmp_path, batch_size=2)
    assert len(cached) == 7
    assert len(list(tmp_path.glob("*/*.safetensors"))) == 7
    for index in range(7):
        expected = encoders.encode(default_collate([images[(0, index)]]))
        for name, value in cached[(3, index)].items():
            torch.testing.assert_close(value, expected[name][0], rtol=1e-4, atol=1e-4)
    assert cached[(0, 1)]["time_ids"].tolist() == [100, 60, 0, 0, 80, 48]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 7), min_size=1, max_size=4), st.integers(1, 4), st.integers(1, 3), st.integers(0, 30))
def test_batches_are_of_one_bucket_on_all_ranks(counts: list[int], batch: int, ranks: int, start: int) -> None:
    """The order is a function of the position, and every row appears equally often."""
    firsts = [sum(counts[:at]) for at in range(len(counts))]
    buckets = [range(first, first + count) for first, count in zip(firsts, counts, strict=True)]
    of = {row: at for at, rows in enumerate(buckets) for row in rows}

    def batches(rank: int, start: int, count: int) -> list[list[tuple[int, int]]]:
        return list(islice(EndlessBatches(buckets, batch, 0, rank, ranks, start), count))

    epochs = 12
    count = sum(epochs * rows // (batch * ranks) for rows in counts)
    taken = [batches(rank, 0, count) for rank in range(ranks)]
    assert [batches(rank, start, 3) for rank in range(ranks)] == [
        batches(rank, 0, start + 3)[start:] for rank in range(ranks)
    ]
    seen: dict[int, list[int]] = {row: [] for row in of}
    for step in zip(*taken, strict=True):
        assert len({of[row] for part in step for _, row in part}) == 1
        for part in step:
            for epoch, row in part:
                seen[row].append(epoch)
    for row, of_epochs in seen.items():
        assert len(set(of_epochs)) == len(of_epochs)  # once per epoch
        full = epochs * counts[of[row]] // (batch * ranks) * batch * ranks // counts[of[row]]
        assert len(of_epochs) in (full, full + 1)


def train(recipe: ModuleType, base: str, folder: Path, out: Path, *flags: str) -> list[float]:
    forget_process()
    small = ["--train_batch_size", "4", "--max_train_steps", "6", "--lr_warmup_steps", "1", "--resolution", "64"]
    small += ["--pretrained_model_name_or_path", base, "--train_data_dir", str(folder), "--rank", "2"]
    recipe.main([*small, "--learning_rate", "1e-2", "--output_dir", str(out), *flags])
    return [line["loss"] for line in read_losses(str(out))]


@pytest.mark.parametrize(
    ("kind", "buckets", "more"),
    [
        ("sdxl", "64,64;80,48;48,80", []),
        pytest.param("flux", "64,64;96,64", ["--random_flip"], marks=pytest.mark.slow),
        pytest.param("flux", "auto", [], marks=pytest.mark.slow),
        pytest.param("sdxl", "64,64;96,64", ["--gradient_accumulation_steps", "2"], marks=pytest.mark.slow),
        pytest.param("sdxl", "64,64;80,48;48,80", ["--random_flip"], marks=pytest.mark.slow),
    ],
)
def test_run_in_buckets_has_the_predicted_peak_and_resumes(
    folder: Path,
    pipelines: dict[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    kind: str,
    buckets: str,
    more: list[str],
) -> None:
    """The prediction, for the largest bucket, is within 0.5 %; a run resumed within an epoch is bit-equal."""
    recipe = load_recipe("diffusion_transformer" if kind == "flux" else "diffusion_unet")
    flags = ["--aspect_ratio_buckets", buckets, "--checkpointing_steps", "2", "--ac_report", "json", *more]
    whole = train(recipe, pipelines[kind], folder, tmp_path / "whole", *flags)
    assert buckets == "auto" or "buckets: 64x64: " in capsys.readouterr().out
    [rank] = json.loads((tmp_path / "whole" / "memory_report.json").read_text())["ranks"]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    if (
        "--gradient_accumulation_steps" in more
    ):  # The prediction takes all micro-batches of a step from the largest bucket; in the run, any of them may be.
        assert measured <= 1.005 * rank["predicted"]["allocated"] < 1.1 * measured
    else:
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)
    part = copy_checkpoint(tmp_path / "whole", 2, tmp_path / "part")
    assert train(recipe, pipelines[kind], folder, part, *flags, "--resume_from_checkpoint", "latest") == whole


@pytest.mark.slow
def test_two_ranks_take_batches_of_the_same_bucket(folder: Path, pipelines: dict[str, str], tmp_path: Path) -> None:
    """Both ranks have the same bucket in each step, so that they take equally long."""

    def launch(out: Path, *more: str) -> list[float]:
        flags = ["--train_batch_size", "1", "--max_train_steps", "6", "--resolution", "64", "--rank", "2"]
        flags += ["--aspect_ratio_buckets", "64,64;96,48;48,96", "--checkpointing_steps", "2", "--ac_report", "json"]
        flags += ["--train_data_dir", str(folder), "--lr_warmup_steps", "1"]
        return losses_on_two_ranks("recipes/diffusion_unet.py", pipelines["sdxl"], out, *flags, *more)

    whole = launch(tmp_path / "whole")
    assert len(whole) == 6
    ranks = json.loads((tmp_path / "whole" / "memory_report.json").read_text())["ranks"]
    first, second = (rank["history"]["allocated"]["backward"] for rank in ranks)
    assert first == second
    assert len(first) == 3  # steps 1, 2 and 6; 2 and 6 have different buckets
    assert first[1] != first[2]
    for rank in ranks:
        measured = max(peak["allocated"] for peak in rank["peaks"].values())
        assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)
    part = copy_checkpoint(tmp_path / "whole", 2, tmp_path / "part")
    assert launch(part, "--resume_from_checkpoint", "latest") == whole


def test_invalid_bucket_sizes_are_refused(folder: Path, pipelines: dict[str, str], tmp_path: Path) -> None:
    recipe = load_recipe("diffusion_transformer")
    with pytest.raises(UserError, match=r"64,66 is not in whole steps of \d+ pixels"):
        train(recipe, pipelines["flux"], folder, tmp_path / "out", "--aspect_ratio_buckets", "64,66")
    with pytest.raises(UserError, match="'square' is no height,width in pixels"):
        ImageArguments(aspect_ratio_buckets="square")
