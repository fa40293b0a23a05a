"""VAE and text encoders of a pipeline, from its own files or from published configurations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.diffusion_models import (
    TEXT_ENCODERS,
    TextAndUNet,
    build_text_encoder,
    build_vae,
    part_configs,
)
from ckpt_ft.workloads.load import load

SDXL = "stabilityai/stable-diffusion-xl-base-1.0"
# counts of the weight files on the Hub
VAE, VAE_16, CLIP_L, CLIP_H, CLIP_G, T5 = 83653863, 83819683, 123060480, 340387840, 694659840, 4762310656


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        ({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 768}, [VAE, CLIP_L]),
        ({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 1024}, [VAE, CLIP_H]),
        ({"_class_name": "UNet2DConditionModel", "cross_attention_dim": 2048}, [VAE, CLIP_L, CLIP_G]),
        ({"_class_name": "FluxTransformer2DModel", "joint_attention_dim": 4096}, [VAE_16, CLIP_L, T5]),
        (
            {"_class_name": "SD3Transformer2DModel", "joint_attention_dim": 4096},
            [VAE_16, CLIP_L + 768 * 768, CLIP_G, T5],
        ),
    ],
)
def test_parameters_of_published_parts(config: dict[str, Any], parameters: list[int]) -> None:
    found = part_configs("mine", config)
    built = [build_vae("mine", found["vae"])]
    built += [build_text_encoder("mine", found[part], torch.float32) for part in TEXT_ENCODERS if part in found]
    assert [sum(p.numel() for p in part.parameters()) for part in built] == parameters


def test_text_encoders_and_vae_of_sdxl() -> None:
    """All weights are counted. SDXL reads the first text encoder before its last layer, which is not trained."""
    workload = load(TrainingSpec.of(SDXL, lora_r=4, train_text_encoder=True, encode_each_step=True), "t4")
    assert isinstance(workload.model, TextAndUNet)
    trained = {name for name, p in workload.model.named_parameters() if p.requires_grad}
    assert sum(name.startswith("text_encoder.") for name in trained) == 11 * 4 * 2
    assert sum(name.startswith("text_encoder_2.") for name in trained) == 32 * 4 * 2
    assert [sum(p.numel() for p in model.parameters()) for model in workload.auxiliary_models] == [VAE]
    without = "samples are drawn between steps, without gradients: they have no rows here"
    assert workload.notes == (without,)
    alone = load(TrainingSpec.of(SDXL, lora_r=4), "t4")
    assert alone.notes == (f"images and prompts are encoded before (--encode-each-step: in the step), and {without}",)


def test_inpainting_unet_is_refused_with_the_way_to_an_answer(tmp_path: Path) -> None:
    config = {"_class_name": "UNet2DConditionModel", "in_channels": 9, "out_channels": 4, "cross_attention_dim": 768}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="inpainting U-Net: predict the script that trains it with `ckpt-ft dry-run`"):
        load(TrainingSpec.of(str(tmp_path), dtype="bfloat16", lora_r=4), "t4")


def write(folder: Path, **config: Any) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))


def test_pipeline_files_decide_latent_size_and_prompt_length(tmp_path: Path) -> None:
    """A VAE of three levels has 4 x 4 pixels per latent; without files it is 8 x 8, and prompts have 77 tokens."""
    tiny = {"block_out_channels": [32, 32], "sample_size": 8, "cross_attention_dim": 16}
    down, up = ["CrossAttnDownBlock2D", "DownBlock2D"], ["UpBlock2D", "CrossAttnUpBlock2D"]
    write(tmp_path / "unet", _class_name="UNet2DConditionModel", down_block_types=down, up_block_types=up, **tiny)

    def sizes(**asked: Any) -> tuple[Any, ...]:
        workload = load(TrainingSpec.of(str(tmp_path), **asked), "t4")
        batch = workload.make_batch(1, None)
        return workload.shape["resolution"], batch["sample"].shape[-1], batch["encoder_hidden_states"].shape[1]

    assert (sizes(), sizes(resolution=64)) == ((64, 8, 77), (64, 8, 77))
    write(tmp_path / "vae", block_out_channels=[8, 8, 8])
    assert sizes() == (64, 8, 77)  # one file without the other is ignored
    write(tmp_path / "text_encoder", max_position_embeddings=12)
    assert (sizes(), sizes(resolution=64)) == ((32, 8, 12), (64, 16, 12))
    (tmp_path / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8] * 999}))
    assert sizes() == (64, 8, 77)


@pytest.mark.parametrize(
    ("name", "asked", "says"),
    [
        (
            "Wan-AI/Wan2.1-T2V-1.3B-Diffusers",
            {"encode_each_step": True},
            "give the directory or Hub id of its pipeline",
        ),
        ("black-forest-labs/FLUX.1-dev", {"lora_r": 4, "train_text_encoder": True}, "is no U-Net"),
        ("gpt2", {"encode_each_step": True}, "gpt2, of kind 'causal-lm', has no images to encode"),
    ],
)
def test_missing_pipeline_parts_are_refused(name: str, asked: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(name, **asked), "t4")
    with pytest.raises(UserError, match="train text encoder: it has no effect without LoRA rank"):
        TrainingSpec.of(train_text_encoder=True)
