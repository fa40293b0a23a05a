"""LoRA on text encoders with their U-Net: trained and saved weights, predictions, prompts encoded per step."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from diffusers import AutoencoderKL, DiffusionPipeline
from recipe_scripts import assert_same_weights, copy_checkpoint, forget_process, load_recipe, losses_of
from safetensors.torch import load_file
from tiny_unets import make_tiny_pipeline

from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.cli import main as cli
from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.denoiser import prepare
from ckpt_ft.training.diffusion.encoders import family_of, load_denoiser
from ckpt_ft.workloads.diffusion_models import KINDS as CALLED
from ckpt_ft.workloads.diffusion_models import Latents, TextAndUNet, text_inputs

pytestmark = pytest.mark.usefixtures("one_process")

SMALL = ["--max_train_samples", "6", "--train_batch_size", "2", "--max_train_steps", "3", "--lr_warmup_steps", "1",
         "--resolution", "32", "--rank", "2", "--train_text_encoder"]  # fmt: skip
ADAPTERS = "pytorch_lora_weights.safetensors"
KINDS = ["sd1", "sdxl"]


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny pipelines, by kind."""
    root = tmp_path_factory.mktemp("text_encoders")
    for kind in KINDS:
        make_tiny_pipeline(kind, 0, (16, 32)).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in KINDS}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("diffusion_unet")


def train(recipe: ModuleType, base: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a run with output in `out`."""
    quiet = [] if "--ac_report" in flags else ["--ac_report", "none"]
    return losses_of(recipe, base, out, *SMALL, *quiet, *flags)


def unet_and_text_encoders(base: str) -> Any:
    """Returns U-Net and text encoders with nonzero adapters."""
    args = DiffusionModelArguments(pretrained_model_name_or_path=base, rank=2, train_text_encoder=True)
    model = load_denoiser(args, family_of(args)[0], torch.float32)
    torch.manual_seed(0)
    prepare(model, args, torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model


def draw(pipeline: Any) -> np.ndarray:
    pipeline.set_progress_bar_config(disable=True)
    generator = torch.Generator().manual_seed(0)
    made = pipeline("a red circle", height=32, width=32, num_inference_steps=1, generator=generator, output_type="np")
    return np.asarray(made.images[0])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_text_encoder_lora_is_loadable(recipe: ModuleType, bases: dict[str, str], tmp_path: Path, kind: str) -> None:
    """Every key is the U-Net's or a text encoder's, each part changes the image; the checkpoint's file is equal."""
    train(recipe, bases[kind], tmp_path, "--learning_rate", "1e-2", "--text_encoder_lr", "1e-1",
          "--checkpointing_steps", "3", "--lora_alpha", "4")  # fmt: skip
    saved = load_file(tmp_path / ADAPTERS)
    encoders = ["text_encoder", "text_encoder_2"][: 1 + (kind == "sdxl")]
    for name in encoders:
        assert any(key.startswith(f"{name}.text_model.encoder.layers.0.") for key in saved)
    from_checkpoint = load_file(tmp_path / "checkpoint-3" / ADAPTERS)
    assert all(torch.equal(value, from_checkpoint[key]) for key, value in saved.items())

    def loaded(only: str = "") -> Any:
        pipeline = DiffusionPipeline.from_pretrained(bases[kind])
        kept = {key: value for key, value in saved.items() if key.startswith(only)}
        pipeline.load_lora_weights(kept if only else tmp_path, weight_name=ADAPTERS)
        return pipeline

    whole = loaded()
    parts = {name: getattr(whole, name) for name in ("unet", *encoders)}
    in_pipeline = {name: [w for key, w in part.named_parameters() if ".lora_" in key] for name, part in parts.items()}
    for name, weights in in_pipeline.items():
        ours = [value for key, value in saved.items() if key.startswith(f"{name}.")]
        assert len(ours) == len(weights) > 0
        ours_sum, theirs_sum = (sum(w.detach().abs().sum().item() for w in ws) for ws in (ours, weights))
        assert theirs_sum == pytest.approx(ours_sum, rel=1e-4)
        assert parts[name].peft_config["default_0"].lora_alpha == 4
    plain = draw(DiffusionPipeline.from_pretrained(bases[kind]))
    assert all(np.abs(draw(loaded(f"{name}.")) - plain).max() > 1e-4 for name in parts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("sdxl", {"train_text_encoder": True, "rank": 2, "random_flip": True, "lora_dropout": 0.1}),
        ("sd1", {"train_text_encoder": True, "rank": 4}),
    ],
)
def test_estimate_equals_the_runs_step(
    recipe: ModuleType, bases: dict[str, str], tmp_path: Path, kind: str, flags: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """From the same YAML file: trained text encoders, and encoding in each step if nothing is cached."""
    sizes = {"resolution": 64, "train_batch_size": 8, "max_train_samples": 16, "max_train_steps": 2}
    base, file = tmp_path / "base", tmp_path / "run.yaml"
    shutil.copytree(bases[kind], base)
    vae = AutoencoderKL(
        block_out_channels=(8, 8, 16, 16), down_block_types=("DownEncoderBlock2D",) * 4, norm_num_groups=4,
        up_block_types=("UpDecoderBlock2D",) * 4, latent_channels=8,
    )  # fmt: skip
    vae.save_pretrained(base / "vae")  # a latent of 8 x 8 pixels, as known models have
    file.write_text(yaml.safe_dump({"pretrained_model_name_or_path": str(base), **sizes, **flags}))
    forget_process()
    recipe.main(["--config", str(file), "--output_dir", str(tmp_path / "out"), "--ac_report", "json"])
    [rank] = json.loads((tmp_path / "out" / "memory_report.json").read_text())["ranks"]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    capsys.readouterr()
    monkeypatch.setattr(
        sys,
        "argv",
        ["ckpt-ft", "estimate", "--config", str(file), "--recipe", "diffusion_unet", "--device", "cpu", "--json"],
    )
    assert cli._main() == 0
    estimated = json.loads(capsys.readouterr().out)["peak_allocated"]
    assert (rank["predicted"]["allocated"], estimated) == pytest.approx((measured, measured), rel=5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_encoded_prompts_equal_the_pipelines(bases: dict[str, str], kind: str) -> None:
    """The step passes the U-Net the same embeddings as the pipeline does."""
    model = unet_and_text_encoders(bases[kind]).eval()
    pipeline = DiffusionPipeline.from_pretrained(bases[kind], **model.text_encoders)
    prompts = ["a red circle", "a star"]
    tokenizers = [pipeline.tokenizer, *([pipeline.tokenizer_2] if kind == "sdxl" else [])]
    ids = {
        name: tokenizer(prompts, padding="max_length", return_tensors="pt").input_ids
        for name, tokenizer in zip(("input_ids", "input_ids_2"), tokenizers, strict=False)
    }
    with torch.no_grad():
        encoded = model.encode(ids)
        theirs = pipeline.encode_prompt(
            prompt=prompts, device="cpu", num_images_per_prompt=1, do_classifier_free_guidance=False
        )
    torch.testing.assert_close(encoded["prompt_embeds"], theirs[0])
    if kind == "sdxl":
        torch.testing.assert_close(encoded["pooled_prompt_embeds"], theirs[2])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("policy", ["full", "save:attention", "segments:2", "full@language"])
def test_policies_keep_the_gradients_of_text_encoders(bases: dict[str, str], kind: str, policy: str) -> None:
    """Bit-equal in text encoders and U-Net; every trained adapter has a gradient."""
    model = unet_and_text_encoders(bases[kind])
    latents = Latents(model.unet.config, 2, 8, 8, 0, torch.float32)
    inputs = text_inputs(CALLED["UNet2DConditionModel"].inputs(latents), list(model.text_encoders.values()))
    torch.manual_seed(1)
    inputs["sample"].normal_()
    for name in inputs:
        if name.startswith("input_ids"):
            inputs[name] = torch.randint(0, 500, (2, 12))
    assert check_parity(model, inputs, policy).ok
    model(**inputs).sample.square().mean().backward()
    without = [
        name for name, p in model.named_parameters() if p.requires_grad and (p.grad is None or not p.grad.any())
    ]
    assert without == []


@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
def test_text_encoder_run_resumes_bit_for_bit_under_a_policy(
    recipe: ModuleType, bases: dict[str, str], tmp_path: Path, kind: str
) -> None:
    flags = ["--lora_dropout", "0.2", "--use_ema", "--checkpointing_steps", "1", "--proportion_empty_prompts", "0.3",
             "--text_encoder_lr", "1e-2"]  # fmt: skip
    whole = train(recipe, bases[kind], tmp_path / "whole", *flags)
    part = copy_checkpoint(tmp_path / "whole", 1, tmp_path / "part")
    resumed = [*flags, "--resume_from_checkpoint", "latest"]
    assert train(recipe, bases[kind], part, *resumed, "--ac_policy", "full", "--ac_check") == whole
    assert_same_weights(part / ADAPTERS, tmp_path / "whole" / ADAPTERS)


@pytest.mark.parametrize(("kind", "policy"), [pytest.param("sd1", "none", marks=pytest.mark.slow), ("sdxl", "full")])
def test_predicted_peak_with_text_encoders(
    recipe: ModuleType, bases: dict[str, str], tmp_path: Path, kind: str, policy: str
) -> None:
    flags = ["--train_batch_size", "8", "--max_train_samples", "16", "--ac_report", "json", "--ac_policy", policy]
    train(recipe, bases[kind], tmp_path, *flags)
    rank = json.loads((tmp_path / "memory_report.json").read_text())["ranks"][0]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)


def test_text_encoders_have_their_own_learning_rate(recipe: ModuleType, bases: dict[str, str], tmp_path: Path) -> None:
    """At a rate of 0 the text encoders do not change; validation uses them."""
    flags = ["--text_encoder_lr", "0", "--validation_prompt", "a red circle", "--validation_inference_steps", "1"]
    train(recipe, bases["sd1"], tmp_path, *flags, "--learning_rate", "1e-2")
    saved = load_file(tmp_path / ADAPTERS)
    moved = {key.split(".")[0] for key, value in saved.items() if key.endswith("up.weight") and value.any()}
    assert moved == {"unet"}
    assert (tmp_path / "samples.png").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"train_text_encoder": True}, "--train_text_encoder belongs to --rank"),
        ({"rank": 2, "text_encoder_lr": 1e-5}, "add --train_text_encoder"),
        ({"rank": 2, "train_text_encoder": True, "text_encoder_lr": -1.0}, "--text_encoder_lr -1.0"),
    ],
)
def test_contradictory_text_encoder_flags_are_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        DiffusionModelArguments(**flags)


def test_checkpoint_without_encoders_is_refused(recipe: ModuleType, bases: dict[str, str], tmp_path: Path) -> None:
    train(recipe, bases["sd1"], tmp_path, "--checkpointing_steps", "2")
    flags = ["--train_text_encoder", "false", "--resume_from_checkpoint", str(tmp_path / "checkpoint-2")]
    with pytest.raises(UserError, match="was written with train_text_encoder True, this run has None"):
        train(recipe, bases["sd1"], tmp_path, *flags)
    assert isinstance(unet_and_text_encoders(bases["sd1"]), TextAndUNet)
