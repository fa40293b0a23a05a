"""Transformers' pipelines small enough for two CPU cores, made offline: what the recipe runs unasked is the FLUX one.

As in tiny_pipeline.py the text encoders are random and stay so, and the transformer is what is trained. The VAE of
"flux" and "sd3" knows the drawn shapes. Those of the other families, of architectures of their own, are random:
enough for all but looking at images.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.files import cache_root
from ckpt_ft.training.images.shapes import drawings
from ckpt_ft.training.run.manifest import make_whole

from .tiny_pipeline import DECODER_STEPS, PROMPT_LENGTH, TEXT_WIDTH, tiny_clip, tiny_tokenizer
from .tiny_vae import LATENT_CHANNELS, RESOLUTION, tiny_vae

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import PreTrainedTokenizerFast

_VERSION = 1  # part of the cache directory's name: raise it when what is made changes
_VOCABULARY = 256


def tiny_transformer_dir() -> str:
    """The directory of the cached pipeline, which `from_pretrained` loads; made on first use, about a minute."""

    def fill(directory: Path) -> None:
        make_tiny_transformer("flux", DECODER_STEPS, heads=4, layers=2).save_pretrained(directory)

    return str(make_whole(cache_root() / f"tiny-flux-v{_VERSION}", fill))


def make_tiny_transformer(kind: str, decoder_steps: int = 0, heads: int = 1, layers: int = 1) -> DiffusionPipeline:
    """A pipeline of `kind` for `RESOLUTION` pixels, the same on each call; the caller's RNG is left as it was.

    Args:
        kind: flux, flux2, sd3, qwen or sana.
        decoder_steps: of the VAE of flux and sd3; 0 leaves it random.
        heads: of the transformer, 32 wide each.
        layers: of which there is one of two streams and two of a single one, or else two of the one kind there is.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KINDS[kind](decoder_steps, heads, layers)


def _flux(decoder_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import FluxPipeline, FluxTransformer2DModel

    return FluxPipeline(
        scheduler=_scheduler(shift=1.0),
        vae=_shapes_vae(decoder_steps),
        text_encoder=tiny_clip("CLIPTextModel"),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=_t5(),
        tokenizer_2=_words(),
        transformer=FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=layers,
            num_single_layers=2 * layers,
            attention_head_dim=32,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
    )


def _sd3(decoder_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        scheduler=_scheduler(shift=3.0),
        vae=_shapes_vae(decoder_steps),
        text_encoder=tiny_clip("CLIPTextModelWithProjection"),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tiny_clip("CLIPTextModelWithProjection"),
        tokenizer_2=tiny_tokenizer(),
        text_encoder_3=_t5(2 * TEXT_WIDTH),  # as wide as both of the others
        tokenizer_3=_words(),
        transformer=SD3Transformer2DModel(
            sample_size=RESOLUTION // 4,
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2 * layers,
            attention_head_dim=32,
            num_attention_heads=heads,
            joint_attention_dim=2 * TEXT_WIDTH,
            caption_projection_dim=32 * heads,
            pooled_projection_dim=2 * TEXT_WIDTH,
            pos_embed_max_size=8,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        ),
    )


def _flux2(decoder_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import AutoencoderKLFlux2, Flux2KleinPipeline, Flux2Transformer2DModel
    from transformers import Qwen3Config, Qwen3ForCausalLM

    widths, width = (8, 8, 8), 16
    vae = AutoencoderKLFlux2(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=widths,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=4,
        mid_block_add_attention=False,
    )
    # The pipeline reads three layers of those that the published one has.
    encoder = Qwen3ForCausalLM(
        Qwen3Config(num_hidden_layers=28, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **_sizes(width))
    )
    tokenizer = _words()
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    return Flux2KleinPipeline(
        scheduler=_scheduler(shift=3.0),
        vae=vae,
        text_encoder=encoder.eval(),
        tokenizer=tokenizer,
        transformer=Flux2Transformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            num_layers=layers,
            num_single_layers=2 * layers,
            attention_head_dim=32,
            num_attention_heads=heads,
            joint_attention_dim=3 * width,
            axes_dims_rope=(8, 8, 8, 8),
            guidance_embeds=False,
        ),
    )


def _qwen(decoder_steps: int, heads: int, layers: int) -> DiffusionPipeline:
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
        scheduler=_scheduler(shift=1.0),
        vae=AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=LATENT_CHANNELS,
            dim_mult=[1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.1] * LATENT_CHANNELS,
            latents_std=[0.5] * LATENT_CHANNELS,
        ),
        text_encoder=Qwen2_5_VLForConditionalGeneration(config).eval(),
        tokenizer=_words(),
        transformer=QwenImageTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_layers=2 * layers,
            attention_head_dim=32,
            num_attention_heads=heads,
            joint_attention_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
    )


def _sana(decoder_steps: int, heads: int, layers: int) -> DiffusionPipeline:
    from diffusers import AutoencoderDC, DPMSolverMultistepScheduler, SanaPipeline, SanaTransformer2DModel
    from transformers import Gemma2Config, Gemma2Model

    widths, counts = (8, 8, 16), (1, 1, 1)
    encoder = Gemma2Model(
        Gemma2Config(num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, head_dim=8, **_sizes(16))
    )
    return SanaPipeline(
        tokenizer=_words(),
        text_encoder=encoder.eval(),
        vae=AutoencoderDC(
            latent_channels=LATENT_CHANNELS,
            attention_head_dim=8,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            encoder_layers_per_block=counts,
            decoder_layers_per_block=counts,
            encoder_qkv_multiscales=((), (), ()),
            decoder_qkv_multiscales=((), (), ()),
            scaling_factor=0.5,
        ),
        transformer=SanaTransformer2DModel(
            in_channels=LATENT_CHANNELS,
            out_channels=LATENT_CHANNELS,
            num_attention_heads=heads,
            attention_head_dim=32,
            num_layers=2 * layers,
            num_cross_attention_heads=heads,
            cross_attention_head_dim=32,
            cross_attention_dim=32 * heads,
            caption_channels=16,
            sample_size=RESOLUTION // 4,
        ),
        scheduler=DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    )


KINDS: dict[str, Callable[[int, int, int], Any]] = {
    "flux": _flux, "flux2": _flux2, "sd3": _sd3, "qwen": _qwen, "sana": _sana,
}  # fmt: skip


def _scheduler(shift: float) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


def _shapes_vae(decoder_steps: int) -> nn.Module:
    vae = tiny_vae(decoder_steps)
    vae.register_to_config(shift_factor=0.0)
    return vae


def _t5(width: int = TEXT_WIDTH) -> nn.Module:
    """Random: words are drawn far apart, and the layers change them little."""
    from transformers import T5Config, T5EncoderModel

    config = T5Config(
        vocab_size=_VOCABULARY, d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2, initializer_factor=0.5
    )
    encoder = T5EncoderModel(config).eval()
    nn.init.normal_(encoder.shared.weight)
    return encoder


def _sizes(width: int) -> dict[str, int]:
    return {"vocab_size": _VOCABULARY, "hidden_size": width, "intermediate_size": width}


def _words() -> PreTrainedTokenizerFast:
    """A token for each word of the captions, one for all others."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    known = sorted({word for drawing in drawings() for word in drawing.caption.split()})
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<unk>", *known])}, "<unk>"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=PROMPT_LENGTH
    )
