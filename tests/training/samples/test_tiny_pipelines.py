"""The tiny pipelines: VAE, tokenizer, and three architectures."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from tiny_unets import make_tiny_pipeline

from ckpt_ft.training.samples.drawings import drawings
from ckpt_ft.training.samples.pipelines import (
    LATENT_CHANNELS,
    _gather,
    _principal_components,
    tiny_pipeline_dir,
    tiny_tokenizer,
    tiny_vae,
)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    pictures = np.stack([np.asarray(drawing.image(32)) for drawing in drawings()])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


def test_encoder_projects_patches(images: torch.Tensor) -> None:
    """Despite norms and activations, the hand-set convolutions compute the projection from which they were set."""
    projection, mean = _principal_components(images)
    patches = _gather(_gather(images[:64])) - mean[None, :, None, None]
    expected = torch.einsum("lk,bkhw->blhw", projection, patches)
    with torch.no_grad():
        latents = tiny_vae(decoder_steps=0).encode(images[:64]).latent_dist
    assert latents.mean.shape == (64, LATENT_CHANNELS, 8, 8)
    assert (latents.mean - expected).abs().mean() < 0.002
    assert latents.std.max() < 0.051


def test_latents_have_unit_variance(images: torch.Tensor) -> None:
    with torch.no_grad():
        latents = tiny_vae(decoder_steps=0).encode(images[:512]).latent_dist.mean
    assert latents.std(dim=(0, 2, 3)).sub(1).abs().max() < 0.15


@pytest.mark.slow
def test_decoder_learns(images: torch.Tensor) -> None:
    def error(steps: int) -> float:
        torch.manual_seed(0)
        vae = tiny_vae(steps)
        with torch.no_grad():
            decoded = vae.decode(vae.encode(images[:32]).latent_dist.mean).sample
        return float((decoded - images[:32]).square().mean())

    assert error(30) < 0.3 * error(0)


def test_tiny_pipeline_is_made_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[StableDiffusionPipeline] = []

    def make() -> StableDiffusionPipeline:
        made.append(make_tiny_pipeline("sd1", 0, (16,)))
        return made[0]

    monkeypatch.setattr("ckpt_ft.training.samples.pipelines.make_tiny_pipeline", make)
    first = tiny_pipeline_dir()
    assert tiny_pipeline_dir() == first
    assert len(made) == 1
    assert Path(first).parent == own_cache
    assert [path.name for path in Path(first).parent.iterdir()] == [Path(first).name]  # no temporary directory is left


def test_pipelines_of_three_architectures() -> None:
    before = torch.random.get_rng_state()
    sd1, sd2, sdxl = (make_tiny_pipeline(kind, 0, (16,)) for kind in ("sd1", "sd2", "sdxl"))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert type(sd1) is type(sd2) is StableDiffusionPipeline
    assert sd1.scheduler.config.prediction_type == "epsilon"
    assert sd2.scheduler.config.prediction_type == "v_prediction"
    assert isinstance(sdxl, StableDiffusionXLPipeline)
    assert sdxl.unet.config.addition_embed_type == "text_time"
    same = zip(sd1.unet.parameters(), sd2.unet.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


def test_tokenizer_knows_the_captions() -> None:
    tokenizer = make_tiny_pipeline("sd1", 0, (16,)).tokenizer
    for drawing in drawings(50):
        ids = tokenizer(drawing.caption).input_ids
        assert len(ids) == len(drawing.caption.split()) + 2  # every word is one token
    assert tokenizer.decode(tokenizer("zebra").input_ids[1:-1]).strip() == "zebra"


def test_tokenizer_is_deterministic() -> None:
    """Its trainer iterates over a hash map; ids that depend on that order would differ between machines."""
    assert len({tiny_tokenizer().backend_tokenizer.to_str() for _ in range(4)}) == 1
