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
    tiny_pipeline_dir,
    tiny_tokenizer,
    tiny_vae,
)


@pytest.fixture(scope="module")
def images() -> torch.Tensor:
    pictures = np.stack([np.asarray(drawing.image(32)) for drawing in drawings()])
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


@pytest.mark.slow
def test_vae_learns(images: torch.Tensor) -> None:
    def error_and_spread(steps: int) -> tuple[float, float]:
        torch.manual_seed(0)
        vae = tiny_vae(steps)
        with torch.no_grad():
            latents = vae.encode(images[:64]).latent_dist.mean
            drawn = vae.decode(latents).sample
        assert latents.shape == (64, LATENT_CHANNELS, 8, 8)
        return float((drawn - images[:64]).square().mean()), float(latents.std()) * vae.config.scaling_factor

    error, spread = error_and_spread(60)
    assert error < 0.3 * error_and_spread(0)[0]
    assert 0.8 < spread < 1.2


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
