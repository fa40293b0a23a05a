"""Diffusers' U-Nets and transformers: each is traced on latents of its own shape, and a policy keeps its numbers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from model_configs import write_config

pytest.importorskip("diffusers")

from ckpt_ft.errors import UserError
from ckpt_ft.planning.check import check_model
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.diffusion_models import KINDS
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import known_models

# Configuration, and the shape of one sample's latents at 64 x 64 pixels (and 9 frames).
TINY: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "Flux2Transformer2DModel": (
        {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 8, "in_channels": 16, "axes_dims_rope": [4, 4, 4, 4]}, (16, 16)),
    "ChromaTransformer2DModel": (
        {"num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
         "joint_attention_dim": 8, "axes_dims_rope": [4, 4, 8], "approximator_num_channels": 8,
         "approximator_hidden_dim": 16, "approximator_layers": 1}, (16, 64)),
    "QwenImageTransformer2DModel": (
        {"num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2, "joint_attention_dim": 8,
         "axes_dims_rope": [4, 4, 8]}, (16, 64)),
    "SanaTransformer2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "num_cross_attention_heads": 2,
         "cross_attention_head_dim": 8, "cross_attention_dim": 16, "caption_channels": 8}, (32, 2, 2)),
    "AuraFlowTransformer2DModel": (
        {"num_mmdit_layers": 2, "num_single_dit_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2,
         "joint_attention_dim": 8, "caption_projection_dim": 16}, (4, 8, 8)),
    "HunyuanDiT2DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "in_channels": 4, "patch_size": 2, "sample_size": 16,
         "hidden_size": 16, "num_layers": 2, "cross_attention_dim": 8, "cross_attention_dim_t5": 8,
         "pooled_projection_dim": 8, "text_len": 4, "text_len_t5": 4}, (4, 8, 8)),
    "CogView4Transformer2DModel": (
        {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "text_embed_dim": 8,
         "time_embed_dim": 8, "condition_dim": 4, "rope_axes_dim": [16, 16]}, (16, 8, 8)),
    "Lumina2Transformer2DModel": (
        {"hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1,
         "axes_dim_rope": [4, 4, 4], "axes_lens": [300, 64, 64], "cap_feat_dim": 8, "multiple_of": 8}, (16, 8, 8)),
    "ZImageTransformer2DModel": (
        {"dim": 32, "n_layers": 2, "n_refiner_layers": 1, "n_heads": 2, "n_kv_heads": 2, "cap_feat_dim": 8,
         "axes_dims": [4, 4, 8], "axes_lens": [1024, 64, 64]}, (16, 1, 8, 8)),
    "WanTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 12, "text_dim": 8, "freq_dim": 8, "ffn_dim": 16,
         "num_layers": 2}, (16, 3, 8, 8)),
    "LTXVideoTransformer3DModel": (
        {"in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 8,
         "cross_attention_dim": 16, "num_layers": 2, "caption_channels": 8}, (8, 8)),
    "HunyuanVideoTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2, "num_single_layers": 2,
         "num_refiner_layers": 1, "text_embed_dim": 8, "pooled_projection_dim": 8, "rope_axes_dim": [4, 4, 8]},
        (16, 3, 8, 8)),
    "CogVideoXTransformer3DModel": (
        {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "text_embed_dim": 8,
         "time_embed_dim": 8, "use_rotary_positional_embeddings": True, "max_text_seq_length": 8,
         "sample_width": 16, "sample_height": 16}, (3, 16, 8, 8)),
}  # fmt: skip
ELSEWHERE = {  # classes that other tests trace
    "UNet2DModel", "UNet2DConditionModel", "DiTTransformer2DModel", "PixArtTransformer2DModel",
    "SD3Transformer2DModel", "FluxTransformer2DModel",
}  # fmt: skip


def written(path: Path, name: str, config: dict[str, Any]) -> str:
    return write_config(path, {"_class_name": name, **config})


def test_every_class_is_tested() -> None:
    assert set(TINY) | ELSEWHERE == set(KINDS)


@pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers warns about itself
@pytest.mark.parametrize("name", TINY)
def test_model_is_traced_on_its_own_latents(name: str, tmp_path: Path) -> None:
    config, shape = TINY[name]
    file = written(tmp_path, name, config)
    settings = TrainingSpec.of(resolution=64, frames=9 if "3D" in name else 0)
    workload = load(settings.edit(model=file), "cpu")
    latents = next(iter(workload.make_batch(2, None).values()))
    assert (tuple(latents[0].shape), len(latents)) == (shape, 2)
    assert workload.trace(2).at_peak["parameters"] == sum(p.numel() * 4 for p in workload.model.parameters())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", TINY)
def test_policy_keeps_the_numbers_of_diffusion_models(name: str, tmp_path: Path) -> None:
    settings = TrainingSpec.of(resolution=64, frames=9 if "3D" in name else 0)
    assert check_model(settings.edit(model=written(tmp_path, name, TINY[name][0]), policy="full", batch_size=2), 0).ok


@pytest.mark.parametrize(
    ("name", "pixels", "latents"),
    [
        ("Wan-AI/Wan2.1-T2V-1.3B-Diffusers", {"resolution": 480, "frames": 49}, (16, 13, 60, 60)),
        ("Wan-AI/Wan2.2-TI2V-5B-Diffusers", {"resolution": 960, "frames": 49}, (48, 13, 60, 60)),
        ("Lightricks/LTX-Video", {"resolution": 512, "frames": 49}, (7 * 16 * 16, 128)),
        ("black-forest-labs/FLUX.2-klein-base-4B", {"resolution": 1024}, (64 * 64, 128)),
        ("Efficient-Large-Model/Sana_600M_1024px_diffusers", {"resolution": 1024}, (32, 32, 32)),
    ],
)
def test_latents_of_published_models(name: str, pixels: dict[str, int], latents: tuple[int, ...]) -> None:
    workload = load(TrainingSpec.of(name), "t4")
    assert workload.shape == pixels
    assert tuple(next(iter(workload.make_batch(1, None).values())).shape[1:]) == latents


def test_every_known_diffusion_model_has_a_kind_of_batch() -> None:
    assert {model.kind for model in known_models().values() if model.family == "diffusion"} <= set(KINDS)


def test_loss_of_a_check_has_a_fixed_target(tmp_path: Path) -> None:
    """The target must not be uninitialized memory."""
    config, _ = TINY["SanaTransformer2DModel"]
    workload = load(TrainingSpec.of(written(tmp_path, "SanaTransformer2DModel", config), resolution=64), "t4")
    prediction = torch.full((2, 3), 2.0, requires_grad=True)
    loss = workload.compute_loss(lambda **inputs: (prediction,), {})
    assert math.isclose(loss.item(), 4.0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"resolution": 100}, "resolution 100: a latent holds 32 x 32 pixels, so it must be a multiple of 32"),
        ({"frames": 9}, "9 frames: the batches of .*, of kind 'diffusion transformer', hold no videos"),
    ],
)
def test_invalid_resolution_or_frames_are_refused(asked: dict[str, int], says: str, tmp_path: Path) -> None:
    config, _ = TINY["SanaTransformer2DModel"]
    with pytest.raises(UserError, match=says):
        load(TrainingSpec.of(written(tmp_path, "SanaTransformer2DModel", config), **asked), "t4")


def test_model_of_rectangular_images(tmp_path: Path) -> None:
    config = {
        "sample_size": [8, 4], "block_out_channels": [8, 8], "norm_num_groups": 4, "layers_per_block": 1,
        "down_block_types": ["DownBlock2D"] * 2, "up_block_types": ["UpBlock2D"] * 2,
    }  # fmt: skip
    file = written(tmp_path, "UNet2DModel", config)
    assert load(TrainingSpec.of(file, resolution=16), "t4").shape == {"resolution": 16}
    with pytest.raises(UserError, match=r"resolution: the model's own is no square \(\[8, 4\] latents\)"):
        load(TrainingSpec.of(file), "t4")
