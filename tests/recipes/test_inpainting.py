"""Inpainting U-Nets in recipes/diffusion_unet.py, on tiny pipelines: inputs, saved results, peaks."""

from __future__ import annotations

import json
import random
from pathlib import Path
from types import ModuleType

import diffusers
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL, DDPMScheduler, DiffusionPipeline, UNet2DConditionModel
from PIL import Image
from recipe_scripts import assert_same_weights, copy_checkpoint, load_recipe, losses_of
from tiny_unets import make_tiny_pipeline

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.data import random_mask
from ckpt_ft.training.diffusion.encoders import encode_masked
from ckpt_ft.training.diffusion.families import UNET
from ckpt_ft.training.diffusion.workload import Denoising
from ckpt_ft.workloads.diffusion_models import inpaints

pytestmark = pytest.mark.usefixtures("one_process")

SMALL = ["--max_train_samples", "6", "--train_batch_size", "2", "--max_train_steps", "3", "--lr_warmup_steps", "1",
         "--resolution", "32"]  # fmt: skip
ADAPTERS = "pytorch_lora_weights.safetensors"
CLASSES = {"sd1": "StableDiffusionInpaintPipeline", "sdxl": "StableDiffusionXLInpaintPipeline"}


@pytest.fixture(scope="session")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Directories of tiny pipelines; their VAE has four channels, as inpainting pipelines require."""
    root = tmp_path_factory.mktemp("inpainting")
    for kind, name in CLASSES.items():
        parts = make_tiny_pipeline(kind, 0, (16, 32)).components
        channels = {"in_channels": 9, "out_channels": 4}
        parts["unet"] = UNet2DConditionModel.from_config({**parts["unet"].config, **channels})
        parts["vae"] = AutoencoderKL.from_config({**parts["vae"].config, "latent_channels": 4})
        extra = {"requires_safety_checker": False} if kind == "sd1" else {}
        getattr(diffusers, name)(**parts, **extra).save_pretrained(root / kind)
    return {kind: str(root / kind) for kind in CLASSES}


@pytest.fixture(scope="module")
def recipe() -> ModuleType:
    return load_recipe("diffusion_unet")


def train(recipe: ModuleType, base: str, out: Path, *flags: str) -> list[float]:
    """Returns the losses of a run with output in `out`."""
    quiet = [] if "--ac_report" in flags else ["--ac_report", "none"]
    return losses_of(recipe, base, out, *SMALL, *quiet, *flags)


def test_random_masks() -> None:
    """Masks are rectangles and ellipses of all sizes and places, white on black, and follow from the random state."""
    masks = [np.asarray(random_mask((32, 32), random.Random(seed))) for seed in range(200)]
    assert all(set(np.unique(mask)) <= {0, 255} and mask.any() for mask in masks)
    shares = [float((mask > 0).mean()) for mask in masks]
    assert min(shares) < 0.02
    assert max(shares) > 0.8
    boxed = [bool(mask[np.ix_(mask.any(1), mask.any(0))].all()) for mask in masks]
    assert 0.4 < np.mean(boxed) < 0.75  # small ellipses look like rectangles
    assert all((masks[seed] == np.asarray(random_mask((32, 32), random.Random(seed)))).all() for seed in (3, 77))


def test_inputs_of_an_inpainting_unet() -> None:
    """Noisy latents, the mask at each latent's first pixel, and latents of the image with a grey mask."""
    vae = make_tiny_pipeline("sd1", 0, (16,)).vae
    pixels, mask = torch.rand(2, 3, 32, 32) * 2 - 1, torch.zeros(2, 1, 32, 32)
    mask[0, :, :16], mask[1, :, :, 8:] = 1, 1
    encoded = encode_masked(vae, pixels, mask)
    assert torch.equal(encoded["mask"], mask[:, :, ::4, ::4])
    with torch.no_grad():
        moments = vae.encode(pixels).latent_dist.parameters
        expected = vae.encode(pixels * (1 - mask)).latent_dist
    assert torch.equal(encoded["masked_moments"], expected.parameters)
    vae.register_to_config(scaling_factor=0.5)
    batch = Denoising(UNET, None, vae, DDPMScheduler(), DiffusionModelArguments())(
        {"moments": moments, "prompt_embeds": torch.zeros(2, 3, 4), **encoded}
    )
    sample = batch["inputs"]["sample"]
    assert sample.shape == (2, 17, 8, 8)
    assert batch["target"].shape == (2, 8, 8, 8)
    assert torch.equal(sample[:, 8:9], encoded["mask"])
    assert ((sample[:, 9:] - 0.5 * expected.mean).abs() < 0.5 * 5 * expected.std).all()


@pytest.mark.parametrize("kind", [pytest.param("sd1", marks=pytest.mark.slow), "sdxl"])
def test_trained_inpainting_lora_draws(recipe: ModuleType, bases: dict[str, str], tmp_path: Path, kind: str) -> None:
    """With validation by the inpainting pipeline: the unmasked part stays, the masked part changes."""
    flags = ["--rank", "2", "--learning_rate", "1e-1", "--validation_prompt", "a red circle", "a blue star"]
    flags += ["--validation_inference_steps", "2", "--num_validation_images", "2"]
    losses = train(recipe, bases[kind], tmp_path / "out", *flags)
    assert losses == train(recipe, bases[kind], tmp_path / "plain", "--rank", "2", "--learning_rate", "1e-1")
    with Image.open(tmp_path / "out" / "samples" / "step-000003.png") as sheet:
        assert sheet.width > 4 * 96
    pipeline = DiffusionPipeline.from_pretrained(bases[kind])
    assert type(pipeline).__name__ == CLASSES[kind]
    pipeline.set_progress_bar_config(disable=True)

    def draw() -> np.ndarray:
        image, mask = Image.new("RGB", (32, 32), (200, 30, 30)), random_mask((32, 32), random.Random(2))
        made = pipeline(
            prompt="a star", image=image, mask_image=mask, height=32, width=32, num_inference_steps=1, strength=1.0,
            generator=torch.Generator().manual_seed(0), output_type="np",
        )  # fmt: skip
        return np.asarray(made.images[0])

    plain = draw()
    pipeline.load_lora_weights(tmp_path / "out", weight_name=ADAPTERS)
    assert np.abs(draw() - plain).max() > 1e-3


@pytest.mark.slow
def test_full_training_saves_an_inpainting_pipeline(recipe: ModuleType, bases: dict[str, str], tmp_path: Path) -> None:
    train(recipe, bases["sd1"], tmp_path, "--learning_rate", "1e-3", "--max_train_steps", "1")
    trained = DiffusionPipeline.from_pretrained(tmp_path)
    assert type(trained).__name__ == CLASSES["sd1"]
    assert inpaints(trained.unet.config)


@pytest.mark.slow
def test_inpainting_with_policy_resumes_bit_for_bit(recipe: ModuleType, bases: dict[str, str], tmp_path: Path) -> None:
    """With text encoders, prior preservation and random crops together."""
    flags = ["--rank", "2", "--lora_dropout", "0.2", "--train_text_encoder", "--checkpointing_steps", "1"]
    flags += ["--no_center_crop", "--with_prior_preservation", "--class_data_dir", str(tmp_path / "class")]
    flags += ["--class_prompt", "a star", "--num_class_images", "2"]
    whole = train(recipe, bases["sdxl"], tmp_path / "whole", *flags)
    assert len(list((tmp_path / "class").iterdir())) == 2
    part = copy_checkpoint(tmp_path / "whole", 1, tmp_path / "part")
    flags += ["--ac_policy", "full", "--ac_check", "--resume_from_checkpoint", "latest"]
    assert train(recipe, bases["sdxl"], part, *flags) == whole
    assert_same_weights(part / ADAPTERS, tmp_path / "whole" / ADAPTERS)


@pytest.mark.parametrize("flags", [("--ac_policy", "full"), ("--rank", "2", "--train_text_encoder")])
def test_predicted_inpainting_peak(
    recipe: ModuleType, bases: dict[str, str], tmp_path: Path, flags: tuple[str, ...]
) -> None:
    """Includes weights and activations of the encoders that run in each step."""
    sizes = ["--train_batch_size", "8", "--max_train_samples", "16", "--ac_report", "json"]
    train(recipe, bases["sd1"], tmp_path, *sizes, *flags)
    [rank] = json.loads((tmp_path / "memory_report.json").read_text())["ranks"]
    measured = max(peak["allocated"] for peak in rank["peaks"].values())
    assert rank["predicted"]["allocated"] == pytest.approx(measured, rel=5e-3)


def test_cached_latents_are_refused_for_inpainting(recipe: ModuleType, bases: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="the masks of inpainting are drawn anew each time: drop it"):
        train(recipe, bases["sd1"], tmp_path, "--cache_latents", "true")
