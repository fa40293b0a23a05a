"""Pipelines of all families of diffusion transformers, small enough to be built and trained in tests.

The VAE of "flux" and "sd3" can learn the drawn shapes. All other weights are random.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ckpt_ft.training.samples.pipelines import (
    LATENT_CHANNELS,
    RESOLUTION,
    TEXT_WIDTH,
    WORDS,
    make_tiny_flux,
    tiny_clip,
    tiny_t5,
    tiny_tokenizer,
    tiny_vae,
    word_tokenizer,
)

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline


def make_tiny_transformer(kind: str, vae_steps: int = 0, heads: int = 1, layers: int = 1) -> DiffusionPipeline:
    """Returns a transformer's pipeline for `RESOLUTION` pixels, the same on each call; keeps the random state.

    Args:
        kind: flux, flux2, sd3, qwen or sana.
        vae_steps: training steps of the VAE of flux and sd3; 0 leaves it random.
        heads: attention heads of the transformer, each 32 wide.
        layers: double-stream blocks, beside twice as many single-stream ones; half the blocks if there is one kind.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KINDS[kind](vae_steps, heads, layers)


def flow_scheduler(shift: float) -> Any:
    """Returns the flow-matching scheduler."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


def shapes_vae(vae_steps: int) -> torch.nn.Module:
    """Returns `tiny_vae` with the shift that transformer pipelines read."""
    vae = tiny_vae(vae_steps)
    vae.register_to_config(shift_factor=0.0)
    return vae


def _sd3(vae_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        scheduler=flow_scheduler(shift=3.0),
        vae=shapes_vae(vae_steps),
        text_encoder=tiny_clip("CLIPTextModelWithProjection"),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tiny_clip("CLIPTextModelWithProjection"),
        tokenizer_2=tiny_tokenizer(),
        text_encoder_3=tiny_t5(2 * TEXT_WIDTH),  # as wide as the other two together
        tokenizer_3=word_tokenizer(),
        transformer=SD3Transformer2DModel(
            sample_size=RESOLUTION // 4, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS,
            num_layers=2 * layers, attention_head_dim=32, num_attention_heads=heads,
            joint_attention_dim=2 * TEXT_WIDTH, caption_projection_dim=32 * heads,
            pooled_projection_dim=2 * TEXT_WIDTH, pos_embed_max_size=8, dual_attention_layers=(0,), qk_norm="rms_norm",
        ),
    )  # fmt: skip


def _flux2(vae_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    width = 16
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 8), layers_per_block=1, latent_channels=LATENT_CHANNELS, norm_num_groups=4,
        mid_block_add_attention=False,
    )  # fmt: skip
    encoder = Qwen3ForCausalLM(  # as deep as the published one, because the pipeline reads three of its layers
        Qwen3Config(num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **_sizes(width))
    )
    tokenizer = word_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return Flux2KleinPipeline(
        scheduler=flow_scheduler(shift=3.0),
        vae=vae,
        text_encoder=encoder.eval(),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=4 * LATENT_CHANNELS, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=32,
            num_attention_heads=heads, joint_attention_dim=3 * width, axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        ),
    )  # fmt: skip


def _qwen(vae_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline, QwenImageTransformer2DModel
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    config = Qwen2_5_VLConfig(
        text_config={
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, **_sizes(TEXT_WIDTH),
            "rope_parameters": {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 1e4},
        },
        vision_config={
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": TEXT_WIDTH,
        },
    )  # fmt: skip
    return QwenImagePipeline(
        scheduler=flow_scheduler(shift=1.0),
        vae=AutoencoderKLQwenImage(
            base_dim=8, z_dim=LATENT_CHANNELS, dim_mult=[1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True],
            latents_mean=[0.1] * LATENT_CHANNELS, latents_std=[0.5] * LATENT_CHANNELS,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=word_tokenizer(),
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_layers=2 * layers,
            attention_head_dim=32, num_attention_heads=heads, joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
    )  # fmt: skip


def _sana(vae_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    widths, counts, scales = (8, 8, 16), (1, 1, 1), ((), (), ())
    encoder = Gemma2Model(
        Gemma2Config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **_sizes(16))
    )
    return SanaPipeline(
        tokenizer=word_tokenizer(),
        text_encoder=encoder.eval(),
        vae=AutoencoderDC(
            latent_channels=LATENT_CHANNELS, attention_head_dim=8, scaling_factor=0.5,
            encoder_block_out_channels=widths, decoder_block_out_channels=widths, encoder_layers_per_block=counts,
            decoder_layers_per_block=counts, encoder_qkv_multiscales=scales, decoder_qkv_multiscales=scales,
        ),
        transformer=SanaTransformer2DModel(
            in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_attention_heads=heads,
            attention_head_dim=32, num_layers=2 * layers, num_cross_attention_heads=heads, cross_attention_head_dim=32,
            cross_attention_dim=32 * heads, caption_channels=16, sample_size=RESOLUTION // 4,
        ),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )  # fmt: skip


KINDS: dict[str, Callable[[int, int, int], Any]] = {
    "flux": make_tiny_flux, "flux2": _flux2, "sd3": _sd3, "qwen": _qwen, "sana": _sana,
}  # fmt: skip


def _sizes(width: int) -> dict[str, int]:
    return {"vocab_size": WORDS, "hidden_size": width, "intermediate_size": width}
