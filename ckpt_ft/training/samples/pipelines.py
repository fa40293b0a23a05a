"""Diffusion pipelines small enough for two CPU cores, made offline: what the diffusion recipes train by default.

Nothing is pretrained. The VAE learns the drawn shapes within a minute. The text encoders stay random: their states
still tell words and positions apart. The U-Net or transformer is random and is what the recipe trains.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from diffusers import (
    AutoencoderKL,
    DDIMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    FluxTransformer2DModel,
    UNet2DConditionModel,
)
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from transformers import CLIPTokenizer, PreTrainedTokenizerFast, T5Config, T5EncoderModel

from ckpt_ft.files import made_once

from .drawings import drawings

RESOLUTION = 32
LATENT_CHANNELS = 8
VAE_STEPS = 800
PROMPT_LENGTH = 12  # tokens; the longest caption has ten words
TEXT_WIDTH = 64
_VERSION = 2  # part of the cache directories' names: raise it when what is made changes
WORDS = 256  # vocabulary of the transformers' text encoders
_VAE_WIDTHS = (16, 32, 32)  # channels of the VAE's levels
_VAE_BATCH, _KL_WEIGHT = 16, 1e-4


def tiny_pipeline_dir() -> str:
    """Returns the directory of the cached U-Net pipeline; made on first use, in about a minute."""
    return _made("tiny-sd2", make_tiny_pipeline)


def tiny_transformer_dir() -> str:
    """Returns the directory of the cached FLUX.1 pipeline; made on first use, in about a minute."""
    return _made("tiny-flux", lambda: make_tiny_flux(VAE_STEPS, heads=4, layers=2))


def _made(name: str, make: Callable[[], DiffusionPipeline]) -> str:
    """Returns the cached pipeline; the caller's random state is unchanged."""

    def fill(directory: Path) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            make().save_pretrained(directory)

    return str(made_once(f"{name}-v{_VERSION}", fill))


def make_tiny_pipeline() -> DiffusionPipeline:
    """Returns a Stable Diffusion pipeline for `RESOLUTION` pixels.

    Its U-Net predicts velocity (Salimans and Ho, 2022, https://arxiv.org/abs/2202.00512).
    """
    from diffusers import StableDiffusionPipeline  # logs a warning without torchvision

    return StableDiffusionPipeline(
        vae=tiny_vae(VAE_STEPS),
        text_encoder=tiny_clip("CLIPTextModel"),
        tokenizer=tiny_tokenizer(),
        scheduler=diffusion_scheduler("v_prediction"),
        unet=tiny_unet((64, 96)),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    )  # fmt: skip


def diffusion_scheduler(prediction_type: str) -> Any:
    return DDIMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", prediction_type=prediction_type,
        clip_sample=False, set_alpha_to_one=False, steps_offset=1,
    )  # fmt: skip


def tiny_unet(widths: tuple[int, ...], cross_attention_dim: int = TEXT_WIDTH, **conditioning: Any) -> nn.Module:
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 4, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS,
        block_out_channels=widths, layers_per_block=1, attention_head_dim=4, norm_num_groups=8,
        down_block_types=("CrossAttnDownBlock2D",) * len(widths), up_block_types=("CrossAttnUpBlock2D",) * len(widths),
        cross_attention_dim=cross_attention_dim, **conditioning,
    )  # fmt: skip


def tiny_tokenizer() -> CLIPTokenizer:
    """Returns a CLIP tokenizer with one token for each word of the captions; it spells other words by letters."""
    special = ["<|startoftext|>", "<|endoftext|>"]
    bpe = Tokenizer(models.BPE(unk_token=special[1], end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789.,'-")
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        # Given as special tokens, because the trainer would number the ends of words differently in each process.
        special_tokens=[*special, *(f"{letter}</w>" for letter in letters)],
        initial_alphabet=letters,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    # The letters are trained as words, so that every letter can end a word that is spelled.
    bpe.train_from_iterator([*(drawing.caption for drawing in drawings()), *letters], trainer)
    with tempfile.TemporaryDirectory() as directory:
        vocabulary, merges = bpe.model.save(directory)
        return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=PROMPT_LENGTH)


def tiny_clip(class_name: str) -> nn.Module:
    """Returns a random CLIP text encoder whose words and positions are far apart and change little in its layers."""
    config = transformers.CLIPTextConfig(
        vocab_size=512, hidden_size=TEXT_WIDTH, intermediate_size=2 * TEXT_WIDTH, projection_dim=TEXT_WIDTH,
        num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=PROMPT_LENGTH,
        bos_token_id=0, eos_token_id=1, pad_token_id=1, initializer_factor=0.1,
    )  # fmt: skip
    encoder = getattr(transformers, class_name)(config).eval()
    for name, weight in encoder.named_parameters():
        if name.endswith("_embedding.weight"):
            nn.init.normal_(weight, std=1.0 if "token" in name else 0.5)
    return encoder


def make_tiny_flux(vae_steps: int = 0, heads: int = 1, layers: int = 1) -> DiffusionPipeline:
    """Returns a FLUX.1 pipeline for `RESOLUTION` pixels.

    Args:
        vae_steps: training steps of the VAE; 0 leaves it random.
        heads: attention heads of the transformer, each 32 wide.
        layers: double-stream blocks, beside twice as many single-stream ones.
    """
    from diffusers import FluxPipeline

    vae = tiny_vae(vae_steps)
    vae.register_to_config(shift_factor=0.0)  # which transformers' pipelines read
    return FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.0),
        vae=vae,
        text_encoder=tiny_clip("CLIPTextModel"),
        tokenizer=tiny_tokenizer(),
        text_encoder_2=tiny_t5(),
        tokenizer_2=word_tokenizer(),
        transformer=FluxTransformer2DModel(
            in_channels=4 * LATENT_CHANNELS, num_layers=layers, num_single_layers=2 * layers, attention_head_dim=32,
            num_attention_heads=heads, joint_attention_dim=TEXT_WIDTH, pooled_projection_dim=TEXT_WIDTH,
            axes_dims_rope=(8, 12, 12),
        ),
    )  # fmt: skip


def tiny_t5(width: int = TEXT_WIDTH) -> nn.Module:
    """Returns a random T5 encoder whose words are far apart and change little in its layer."""
    config = T5Config(
        vocab_size=WORDS, d_model=width, d_kv=8, d_ff=width, num_layers=1, num_heads=2, initializer_factor=0.5
    )
    encoder = T5EncoderModel(config).eval()
    nn.init.normal_(encoder.shared.weight)
    return encoder


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Returns a tokenizer with one token for each word of the captions, and one for all other words."""
    known = sorted({word for drawing in drawings() for word in drawing.caption.split()})
    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate(["<pad>", "<unk>", *known])}, "<unk>"))
    words.normalizer, words.pre_tokenizer = normalizers.Lowercase(), pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", model_max_length=PROMPT_LENGTH
    )


def tiny_vae(steps: int) -> AutoencoderKL:
    """Returns a VAE in eval mode, trained on the drawn shapes for `steps` steps; with 0 it stays random.

    Latents have 1/4 of the image's side and `LATENT_CHANNELS` channels. Draws from torch's global random state.
    """
    levels = len(_VAE_WIDTHS)
    vae = AutoencoderKL(
        block_out_channels=_VAE_WIDTHS, layers_per_block=1, latent_channels=LATENT_CHANNELS,
        down_block_types=("DownEncoderBlock2D",) * levels, up_block_types=("UpDecoderBlock2D",) * levels,
        norm_num_groups=LATENT_CHANNELS, sample_size=RESOLUTION, scaling_factor=1.0, mid_block_add_attention=False,
    )  # fmt: skip
    if steps:
        _train(vae, steps)
    return vae.eval()


def _train(vae: AutoencoderKL, steps: int) -> None:
    """Trains `vae` to draw what it is shown, and sets the factor that scales its latents to unit variance.

    The loss is the mean squared plus half the mean absolute error of the pixels, and a little KL divergence, which
    keeps the latents of similar pictures close to each other.
    """
    images = torch.from_numpy(np.stack([np.asarray(drawing.image(RESOLUTION)) for drawing in drawings()]))
    images = images.permute(0, 3, 1, 2).float() / 127.5 - 1
    optimizer = torch.optim.AdamW(vae.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        shown = images[torch.randint(0, len(images), (_VAE_BATCH,))]
        latents = vae.encode(shown).latent_dist
        drawn = vae.decode(latents.sample()).sample
        loss = functional.mse_loss(drawn, shown) + 0.5 * functional.l1_loss(drawn, shown)
        loss = loss + _KL_WEIGHT * latents.kl().mean() / latents.mean[0].numel()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    with torch.no_grad():
        spread = vae.encode(images[:256]).latent_dist.mean.std().item()
    vae.register_to_config(scaling_factor=1 / spread)
