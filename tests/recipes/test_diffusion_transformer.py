"""recipes/diffusion_transformer.py on a tiny pipeline of every family, run in this process."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image
from recipe_scripts import assert_same_weights, copy_checkpoint, load_recipe, losses_of
from safetensors.torch import load_file
from tiny_transformers import KINDS, make_tiny_transformer

from ckpt_ft.cli import main as cli
from ckpt_ft.errors import Interrupted, UserError, run
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.diffusion.arguments import LoopArguments, TransformerArguments
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.training.run_arguments import parse_args
from ckpt_ft.training.session import Session
from ckpt_ft.units import parse_bytes
from ckpt_ft.workloads.model_config import find_model

pytestmark = pytest.mark.usefixtures("one_process")

ROOT = Path(__file__).parents[2]
SMALL = ["--max_train_samples", "6", "--train_batch_size", "2", "--max_train_steps", "3", "--lr_warmup_steps", "1",
         "--resolution", "32", "--max_sequence_length", "16", "--ac_report", "none"]  # fmt: skip
RANDOM = [  # everything in a step that draws random numbers
    "--rank", "2", "--lora_dropout", "0.2", "--no_center_crop", "--random_flip", "--proportion_empty_prompts", "0.3",
    "--weighting_scheme", "logit_normal", "--use_ema", "--gradient_accumulation_steps", "2",
    "--lr_scheduler", "cosine",
]  # fmt: skip
ADAPTERS = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny pipelines, by family."""
    root = tmp_path_factory.mktemp("transformers")
    for kind in KINDS:
        make_tiny_transformer(kind).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("diffusion_transformer")


def train(recipe: ModuleType, base: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a run with output in `out`."""
    return losses_of(recipe, base, out, *SMALL, *flags)


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    unbinned = {"use_resolution_binning": False} if type(pipeline).__name__ == "SanaPipeline" else {}
    images = pipeline(
        prompt="a red circle", height=32, width=32, num_inference_steps=1, max_sequence_length=16,
        generator=torch.Generator().manual_seed(0), **unbinned,
    ).images  # fmt: skip
    return np.asarray(images[0])


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # warnings of diffusers' DPM solver
@pytest.mark.parametrize("kind", list(KINDS))
def test_transformer_lora_is_loadable(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, kind: str) -> None:
    """The pipeline's own loader reads it with its scale; a checkpoint has the same adapter and no transformer."""
    flags = ["--rank", "2", "--lora_alpha", "8", "--learning_rate", "1e-1", "--checkpointing_steps", "3"]
    flags += ["--ac_policy", "full", "--ac_check"]
    assert len(train(recipe, tiny[kind], tmp_path, *flags)) == 3
    pipeline = DiffusionPipeline.from_pretrained(tiny[kind])
    plain = draw(pipeline)
    pipeline.load_lora_weights(tmp_path, weight_name=ADAPTERS)
    config = pipeline.transformer.peft_config["default_0"]
    assert (config.r, config.lora_alpha) == (2, 8)
    saved = load_file(tmp_path / ADAPTERS)
    loaded = {name for name, _ in pipeline.transformer.named_parameters() if "lora_" in name}
    assert len(loaded) == len([name for name in saved if "lora" in name])
    assert (draw(pipeline) != plain).any()
    assert_same_weights(tmp_path / "checkpoint-3" / ADAPTERS, tmp_path / ADAPTERS)
    assert sum(path.stat().st_size for path in (tmp_path / "checkpoint-3").iterdir()) < 200_000


@pytest.mark.parametrize("kind", ["flux", pytest.param("sana", marks=pytest.mark.slow)])
def test_saved_transformer_is_a_pipeline(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, kind: str) -> None:
    train(recipe, tiny[kind], tmp_path, "--learning_rate", "1e-3", "--checkpointing_steps", "3")
    trained, base = (DiffusionPipeline.from_pretrained(place).transformer for place in (tmp_path, tiny[kind]))
    changed = [not torch.equal(one, two) for one, two in zip(trained.parameters(), base.parameters(), strict=True)]
    assert all(changed) or kind != "flux"
    checkpoint = type(base).from_pretrained(tmp_path / "checkpoint-3", subfolder="transformer")
    pairs = zip(checkpoint.parameters(), trained.parameters(), strict=True)
    assert all(torch.equal(one, two) for one, two in pairs)


@pytest.mark.parametrize(
    "flags", [pytest.param(["--rank", "2"], id="cached"), pytest.param(RANDOM, id="random", marks=pytest.mark.slow)]
)
def test_resumed_transformer_run_has_the_same_losses(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, flags: list[str]
) -> None:
    """Bit for bit, from within an epoch; the saved weights are equal too."""
    flags = [*flags, "--max_train_steps", "5", "--checkpointing_steps", "2", "--learning_rate", "1e-2"]
    whole = train(recipe, tiny["flux"], tmp_path / "whole", *flags)
    part = copy_checkpoint(tmp_path / "whole", 2, tmp_path / "part")
    assert train(recipe, tiny["flux"], part, *flags, "--resume_from_checkpoint", "latest") == whole
    assert_same_weights(part / ADAPTERS, tmp_path / "whole" / ADAPTERS)


@pytest.mark.parametrize(
    ("kind", "layers", "policy"), [("sd3", 1, "save:attention+matmul"), ("flux", 2, "full,swap:4")]
)
def test_policy_keeps_dit_losses(recipe: ModuleType, tmp_path: Path, kind: str, layers: int, policy: str) -> None:
    base, flags = str(tmp_path / "base"), ["--rank", "2", "--lora_dropout", "0.2"]
    make_tiny_transformer(kind, layers=layers).save_pretrained(base)
    plain = train(recipe, base, tmp_path / "plain", *flags)
    assert train(recipe, base, tmp_path / "policy", *flags, "--ac_policy", policy) == plain


def test_offloaded_optimizer_keeps_the_losses_of_a_transformer(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU the offloaded optimizer is AdamW."""
    monkeypatch.setattr("ckpt_ft.training.flags.require_package", lambda *args: None)
    flags = ["--max_grad_norm", "0", "--ac_report", "json"]
    plain = train(recipe, tiny["sd3"], tmp_path / "plain", *flags)
    flags += ["--offload_optimizer", "gradients"]
    assert train(recipe, tiny["sd3"], tmp_path / "away", *flags) == plain


@pytest.mark.slow
def test_stopped_and_resumed_run_has_the_same_losses(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a signal the run finishes its step and a checkpoint; a resumed run ends like an undisturbed one."""
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--use_ema"]
    whole = train(recipe, tiny["flux2"], tmp_path / "whole", *flags)
    out, calls = tmp_path / "out", []

    def step(memory: Session) -> None:
        calls.append(memory)
        if len(calls) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(Session, "step", step)
        with pytest.raises(Interrupted, match="checkpoint-2 is complete"):
            train(recipe, tiny["flux2"], out, *flags)
    assert train(recipe, tiny["flux2"], out, *flags, "--resume_from_checkpoint", "latest") == whole
    assert_same_weights(out / ADAPTERS, tmp_path / "whole" / ADAPTERS)


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("flux", ["--rank", "2", "--ac_policy", "full"]),
        ("sd3", []),
        ("qwen", ["--rank", "2", "--random_flip"]),
        *(pytest.param(kind, [], marks=pytest.mark.slow) for kind in KINDS if kind != "sd3"),
        *(pytest.param(kind, ["--rank", "2"], marks=pytest.mark.slow) for kind in KINDS),
        *(pytest.param(kind, ["--random_flip"], marks=pytest.mark.slow) for kind in KINDS),
    ],
)
def test_predicted_peak_of_a_transformer(recipe: ModuleType, tmp_path: Path, kind: str, flags: list[str]) -> None:
    """Within 0.5 % of the run's own step, including the encoders if nothing is cached."""
    make_tiny_transformer(kind, heads=4, layers=2).save_pretrained(tmp_path / "base")
    flags = [*flags, "--train_batch_size", "8", "--max_train_samples", "16", "--ac_report", "json"]
    train(recipe, str(tmp_path / "base"), tmp_path / "out", *flags)
    rank = json.loads((tmp_path / "out" / "memory_report.json").read_text())["ranks"][0]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    assert measured > 10e6
    assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)


@pytest.mark.slow
def test_plan_uses_the_runs_own_step(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Plans and found batch sizes are for the run's own latents and prompts."""
    train(recipe, tiny["flux"], tmp_path / "auto", "--rank", "2", "--ac_policy", "auto", "--ac_budget", "64MiB")
    assert "--ac_policy auto:" in capsys.readouterr().out
    flags = ["--train_batch_size", "8", "--find_max_batch_size", "--ac_budget", "3MiB", "--max_train_steps", "1"]
    train(recipe, tiny["flux"], tmp_path / "found", *flags)
    assert "out of memory)" in capsys.readouterr().out


def test_validation_does_not_change_training(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    flags = ["--validation_prompt", "a large red circle at the top left on white", "--validation_steps", "2"]
    losses = train(recipe, tiny["qwen"], tmp_path / "out", *flags, "--validation_inference_steps", "1", "--use_ema")
    assert losses == train(recipe, tiny["qwen"], tmp_path / "plain", "--use_ema")
    names = sorted(path.name for path in (tmp_path / "out" / "samples").iterdir())
    assert names == ["step-000000.png", "step-000002.png", "step-000003.png"]
    with (
        Image.open(tmp_path / "out" / "samples.png") as sheet,
        Image.open(tmp_path / "out" / "samples" / names[0]) as row,
    ):
        assert sheet.height == 3 * row.height  # three validations


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pretrained_model_name_or_path", "/nowhere"], "no usable model_index.json"),
        (["--resolution", "36"], "must be a multiple of "),
        (["--rank", "2", "--lora_target_modules", "to_z"], "--lora_target_modules to_z"),
        (["--train_data_dir", "/nowhere"], "no such directory"),
        (["--weighting_scheme", "logit-normal"], "invalid choice: 'logit-normal'"),
    ],
)
def test_invalid_flags_of_the_transformer_recipe_are_refused(
    recipe: ModuleType, tiny: dict[str, str], tmp_path: Path, flags: list[str], words: str
) -> None:
    with pytest.raises(UserError, match=words):
        train(recipe, tiny["flux"], tmp_path / "out", *flags)


def test_unsupported_transformers_are_refused(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    base = tmp_path / "base"
    shutil.copytree(tiny["flux"], base)
    index = json.loads((base / "model_index.json").read_text())
    (base / "model_index.json").write_text(json.dumps({**index, "_class_name": "StableDiffusionPipeline"}))
    with pytest.raises(UserError, match="its pipeline is StableDiffusionPipeline; supported are FLUX"):
        train(recipe, str(base), tmp_path / "out")
    (base / "model_index.json").write_text(json.dumps(index))
    (base / "transformer" / "config.json").unlink()
    with pytest.raises(UserError, match="no usable transformer"):
        train(recipe, str(base), tmp_path / "out")


def test_image_smaller_than_a_token_is_refused(recipe: ModuleType, tiny: dict[str, str], tmp_path: Path) -> None:
    """Published VAEs have eight pixels per latent, and a token of FLUX is sixteen pixels wide."""
    base = tmp_path / "base"
    shutil.copytree(tiny["flux"], base)
    wide = diffusers.AutoencoderKL(
        block_out_channels=(8,) * 4, down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=8, shift_factor=0.0,
    )  # fmt: skip
    wide.save_pretrained(base / "vae")
    with pytest.raises(UserError, match="--resolution 24: a token of FLUX.1 holds 16 x 16 pixels.* take 16 or 32"):
        train(recipe, str(base), tmp_path / "out", "--resolution", "24")


def test_exit_code_of_invalid_flags(
    recipe: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["diffusion_transformer.py", "--load_in_4bit", "--output_dir", str(tmp_path)])
    with pytest.raises(SystemExit) as stopped:
        run(recipe.main)
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --load_in_4bit: 4-bit weights cannot be trained themselves")
    assert said.count("\n") == 1


CONFIGS = sorted((ROOT / "recipes" / "diffusion_transformer").glob("*.yaml"))
DREAMBOOTH = ROOT / "recipes" / "diffusion" / "sdxl_dreambooth_lora_12gb.yaml"
PREDICTED = re.compile(r"predicted on an ([\w-]+): ([\d.]+) GiB reserved")


@pytest.mark.parametrize("config", CONFIGS, ids=lambda path: path.stem)
def test_transformer_yaml_files_parse_and_contain_their_command(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())  # as if bitsandbytes were installed
    model, images, _, ac = parse_args(
        (TransformerArguments, ImageArguments, LoopArguments, ACArguments), ["--config", str(config)]
    )
    assert find_model(model.pretrained_model_name_or_path) is not None
    assert (model.rank is not None) is ("lora" in config.stem)
    assert images.cache_latents
    assert ac.policy is not None
    comment = " ".join(line.strip("# \\") for line in config.read_text().splitlines() if line.startswith("#"))
    assert "accelerate_configs/single_gpu.yaml recipes/diffusion_transformer.py" in comment
    assert f"--config recipes/diffusion_transformer/{config.name}" in comment
    device, amount = PREDICTED.findall(comment)[0]
    assert 0.4 * find_gpu(device).memory < parse_bytes(f"{amount}GiB") < find_gpu(device).memory


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", [*CONFIGS, DREAMBOOTH], ids=lambda path: path.stem)
def test_prediction_in_the_comments_is_current(
    config: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Compares the configuration's comment with an estimate."""
    device, amount = PREDICTED.findall(config.read_text())[0]
    words = ["ckpt-ft", "estimate", "--config", str(config), "--device", device, "--json"]
    monkeypatch.setattr(sys, "argv", words)
    assert cli._main() == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["headroom"] > 0
    assert answer["peak_reserved"] == pytest.approx(parse_bytes(f"{amount}GiB"), rel=0.01)
