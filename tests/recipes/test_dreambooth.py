"""DreamBooth in both diffusion recipes, on tiny pipelines: class images, pairs of rows, peaks, checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image
from recipe_scripts import ROOT, assert_same_weights, copy_checkpoint, forget_process, load_recipe
from tiny_transformers import make_tiny_transformer
from tiny_unets import make_tiny_pipeline

from ckpt_ft.errors import UserError, WorkFailed
from ckpt_ft.training.diffusion.loop import read_losses
from ckpt_ft.training.diffusion.sampling import Sampler
from ckpt_ft.training.samples.drawings import drawings

pytestmark = pytest.mark.usefixtures("one_process")

SMALL = ["--train_batch_size", "2", "--max_train_steps", "3", "--lr_warmup_steps", "1", "--resolution", "32"]
ADAPTERS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny pipelines, by kind."""
    root = tmp_path_factory.mktemp("dreambooth")
    for kind in ("sd1", "sdxl"):
        make_tiny_pipeline(kind, 0, (16, 32)).save_pretrained(root / kind)
    make_tiny_transformer("flux").save_pretrained(root / "flux")
    return {path.name: str(path) for path in root.iterdir()}


@pytest.fixture(scope="module")
def recipes() -> dict[str, ModuleType]:
    unet = load_recipe("diffusion_unet")
    return {"sd1": unet, "sdxl": unet, "flux": load_recipe("diffusion_transformer")}


@pytest.fixture
def subject(tmp_path: Path) -> list[str]:
    """Flags for three images of one subject, and five class images to be generated."""
    (tmp_path / "subject").mkdir()
    for place, drawing in enumerate(drawings(3)):
        drawing.image(32).save(tmp_path / "subject" / f"{place}.png")
    return [
        "--instance_data_dir", str(tmp_path / "subject"), "--instance_prompt", "a sks star",
        "--with_prior_preservation", "--class_data_dir", str(tmp_path / "class"), "--class_prompt", "a star",
        "--num_class_images", "5", "--sample_batch_size", "2", "--prior_loss_weight", "0.5",
    ]  # fmt: skip


def train(recipes: dict[str, ModuleType], bases: dict[str, str], kind: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a run with output in `out`."""
    forget_process()
    quiet = [] if "--ac_report" in flags else ["--ac_report", "none"]
    base = [] if "--pretrained_model_name_or_path" in flags else ["--pretrained_model_name_or_path", bases[kind]]
    tokens = ["--max_sequence_length", "16"] if kind == "flux" else []
    recipes[kind].main([*base, *SMALL, *tokens, *quiet, "--output_dir", str(out), *flags])
    return [line["loss"] for line in read_losses(str(out))]


def pixels(path: Path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image).astype(int)


@pytest.mark.parametrize("kind", ["flux", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("sd1", "sdxl"))])
def test_class_images_are_generated_once(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path, kind: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Only missing images are generated, in batches; image i and the losses do not depend on when it is generated."""
    drawn, images = [], Sampler.images

    def counted(self: Sampler, *args: object, **more: object) -> list[Image.Image]:
        made = images(self, *args, **more)  # type: ignore[arg-type]
        drawn.append(len(made))
        return made

    monkeypatch.setattr(Sampler, "images", counted)
    first = train(recipes, bases, kind, tmp_path / "first", "--rank", "2", *subject)
    assert drawn == [2, 2, 1]
    files = sorted((tmp_path / "class").iterdir())
    assert [path.name for path in files] == [f"class-{number:05}.png" for number in range(5)]
    assert pixels(files[0]).shape == (32, 32, 3)
    before = [pixels(path) for path in files]
    assert all((before[0] != other).any() for other in before[1:])
    for path in (files[1], files[3], files[4]):
        path.unlink()
    repeated = train(recipes, bases, kind, tmp_path / "again", "--rank", "2", *subject)
    assert drawn == [2, 2, 1, 2, 1]
    assert all(abs(pixels(path) - image).max() <= 1 for path, image in zip(files, before, strict=True))
    assert repeated == pytest.approx(first, rel=1e-3)
    continued = train(recipes, bases, kind, tmp_path / "there", "--rank", "2", *subject)
    assert (continued, drawn) == (repeated, [2, 2, 1, 2, 1])


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "uncached"), [("sd1", True), ("flux", False)], ids=["random", "cached"])
def test_dreambooth_run_resumes_bit_for_bit_under_any_policy(
    recipes: dict[str, ModuleType],
    bases: dict[str, str],
    subject: list[str],
    tmp_path: Path,
    kind: str,
    uncached: bool,
) -> None:
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--use_ema", "--checkpointing_steps", "1", *subject]
    flags += ["--no_center_crop", "--random_flip", "--gradient_accumulation_steps", "2"] if uncached else []
    whole = train(recipes, bases, kind, tmp_path / "whole", *flags)
    part = copy_checkpoint(tmp_path / "whole", 1, tmp_path / "part")
    flags += ["--ac_policy", "full", "--ac_check", "--resume_from_checkpoint", "latest"]
    assert train(recipes, bases, kind, part, *flags) == whole
    assert_same_weights(part / ADAPTERS, tmp_path / "whole" / ADAPTERS)


@pytest.mark.parametrize("kind", ["sd1", pytest.param("flux", marks=pytest.mark.slow)])
def test_loss_is_linear_in_the_prior_weight(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path, kind: str
) -> None:
    """The loss is the subject's plus the weight times the class's, from the same noise."""
    losses = []
    for weight in ("0", "1", "3"):
        flags = [*subject, "--prior_loss_weight", weight, "--rank", "2", "--max_train_steps", "1"]
        losses += train(recipes, bases, kind, tmp_path / weight, *flags)
    assert losses[1] - losses[0] > 0.05
    assert losses[2] == pytest.approx(losses[0] + 3 * (losses[1] - losses[0]), rel=1e-5)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("flux", ["--rank", "2"]),
        pytest.param("sd1", [], marks=pytest.mark.slow),
        pytest.param("sdxl", ["--rank", "2"], marks=pytest.mark.slow),
    ],
)
def test_predicted_peak_of_dreambooth(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path, kind: str,
    flags: list[str],
) -> None:  # fmt: skip
    """Within 0.5 % of the measured peak, for both halves of the batch."""
    flags = [*flags, *subject, "--train_batch_size", "8", "--ac_report", "json", "--ac_policy", "full"]
    train(recipes, bases, kind, tmp_path / "out", *flags)
    rank = json.loads((tmp_path / "out" / "memory_report.json").read_text())["ranks"][0]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)


@pytest.mark.slow
def test_largest_batch_of_pairs(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Without a prior five samples fit, so two pairs (four samples) fit."""
    flags = ["--train_batch_size", "8", "--find_max_batch_size", "--ac_budget", "10MiB", "--max_train_steps", "1"]
    train(recipes, bases, "sd1", tmp_path / "out", *subject, *flags)
    assert "predicted 2, proved 2" in capsys.readouterr().out


def test_out_of_memory_while_generating_class_images(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The error names the cause, no step is replanned, and the generated images are kept."""
    images, calls = Sampler.images, []

    def fails_on_the_second_call(self: Sampler, *args: object, **more: object) -> list[Image.Image]:
        calls.append(args)
        if len(calls) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return images(self, *args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(Sampler, "images", fails_on_the_second_call)
    with pytest.raises(WorkFailed, match="finished ones are kept: give a --sample_batch_size below 2"):
        train(recipes, bases, "sd1", tmp_path / "out", *subject, "--ac_policy", "auto", "--ac_budget", "1GiB")
    assert len(list((tmp_path / "class").iterdir())) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--instance_data_dir", "/nowhere"], "--instance_data_dir /nowhere: no such directory"),
        (["--class_data_dir", "/proc/class"], "--class_data_dir /proc/class cannot be made"),
        (["--class_data_dir", "/proc/sys"], "--class_data_dir /proc/sys/class-00000.png: cannot be written"),
        (["--dataset_name", "someone/dogs"], "two sources of images"),
    ],
)
def test_invalid_dreambooth_flags_are_refused(
    recipes: dict[str, ModuleType], bases: dict[str, str], subject: list[str], tmp_path: Path, flags: list[str],
    words: str,
) -> None:  # fmt: skip
    with pytest.raises(UserError, match=words):
        train(recipes, bases, "sd1", tmp_path / "out", *subject, *flags)


@pytest.mark.slow
def test_two_processes_generate_class_images(bases: dict[str, str], subject: list[str], tmp_path: Path) -> None:
    script = ["recipes/diffusion_unet.py", "--pretrained_model_name_or_path", bases["sd1"], *SMALL, *subject]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", *script]
        + ["--rank", "2", "--output_dir", str(tmp_path / "out"), "--ac_report", "none"],
        cwd=ROOT, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(list((tmp_path / "class").iterdir())) == 5
    assert len(read_losses(str(tmp_path / "out"))) == 3
