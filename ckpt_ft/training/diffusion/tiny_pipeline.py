"""Stable Diffusion pipelines small enough for two CPU cores, made offline from configs: what the recipe runs unasked.

Nothing is downloaded, so nothing is pretrained. The VAE gets its weights from the drawn shapes (tiny_vae.py); the text
encoders keep their random ones, as a random transformer's states still tell apart every word and place. The U-Net is
random and is what the recipe trains. `kind` chooses the architecture: "sd1" (epsilon), "sd2" (v-prediction: Salimans
and Ho, 2022, https://arxiv.org/abs/2202.00512) or "sdxl" (two text encoders, pooled embedding, time ids).
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.files import cache_root
from ckpt_ft.training.images.shapes import drawings
from ckpt_ft.training.run.manifest import make_whole

from .tiny_vae import LATENT_CHANNELS, RESOLUTION, tiny_vae

if TYPE_CHECKING:
    from diffusers import DiffusionPipeline
    from transformers import CLIPTokenizer

DECODER_STEPS = 300
_VERSION = 1  # part of the cache directory's name: raise it when what is made changes
PROMPT_LENGTH = 12  # tokens: the longest caption has ten words
TEXT_WIDTH = 64


def tiny_pipeline_dir(kind: str = "sd2") -> str:
    """The directory of the cached pipeline, which `from_pretrained` loads; made on first use, about a minute."""

    def fill(directory: Path) -> None:
        make_tiny_pipeline(kind).save_pretrained(directory)

    return str(make_whole(cache_root() / f"tiny-{kind}-v{_VERSION}", fill))


def make_tiny_pipeline(
    kind: str = "sd2", decoder_steps: int = DECODER_STEPS, widths: tuple[int, ...] = (64, 96)
) -> DiffusionPipeline:
    """A pipeline of `kind` for `RESOLUTION` pixels, the same on each call; the caller's RNG is left as it was.

    Args:
        kind: sd1, sd2 or sdxl.
        decoder_steps: steps of the VAE's decoder; 0 leaves it random, enough for tests that look at no image.
        widths: channels of the U-Net's levels.
    """
    from diffusers import DDIMScheduler, StableDiffusionPipeline, StableDiffusionXLPipeline

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        parts: dict[str, Any] = {
            "vae": tiny_vae(decoder_steps),
            "text_encoder": tiny_clip("CLIPTextModel"),
            "tokenizer": tiny_tokenizer(),
            "scheduler": DDIMScheduler(
                beta_start=0.00085,
                beta_end=0.012,
                beta_schedule="scaled_linear",
                prediction_type="v_prediction" if kind == "sd2" else "epsilon",
                clip_sample=False,
                set_alpha_to_one=False,
                steps_offset=1,
            ),
        }
        if kind == "sdxl":
            parts |= {"text_encoder_2": tiny_clip("CLIPTextModelWithProjection"), "tokenizer_2": tiny_tokenizer()}
            return StableDiffusionXLPipeline(unet=_unet(widths, sdxl=True), **parts)
        return StableDiffusionPipeline(
            unet=_unet(widths), safety_checker=None, feature_extractor=None, requires_safety_checker=False, **parts
        )


def _unet(widths: tuple[int, ...], sdxl: bool = False) -> nn.Module:
    from diffusers import UNet2DConditionModel

    conditioning: dict[str, Any] = {"cross_attention_dim": TEXT_WIDTH}
    if sdxl:
        time_ids = 8  # width of the embedding of each of the six
        conditioning = {
            "cross_attention_dim": 2 * TEXT_WIDTH,
            "addition_embed_type": "text_time",
            "addition_time_embed_dim": time_ids,
            "projection_class_embeddings_input_dim": TEXT_WIDTH + 6 * time_ids,
        }
    return UNet2DConditionModel(
        sample_size=RESOLUTION // 4,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        block_out_channels=widths,
        layers_per_block=1,
        down_block_types=("CrossAttnDownBlock2D",) * len(widths),
        up_block_types=("CrossAttnUpBlock2D",) * len(widths),
        attention_head_dim=4,
        norm_num_groups=8,
        **conditioning,
    )


def tiny_tokenizer() -> CLIPTokenizer:
    """A CLIP tokenizer whose BPE knows the captions' words whole and falls back to letters for all others."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
    from transformers import CLIPTokenizer

    special = ["<|startoftext|>", "<|endoftext|>"]
    bpe = Tokenizer(models.BPE(unk_token=special[1], end_of_word_suffix="</w>"))
    bpe.normalizer = normalizers.Lowercase()
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    letters = list("abcdefghijklmnopqrstuvwxyz0123456789.,'-")
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        # Of themselves the trainer numbers the word ends in another order in each process.
        special_tokens=[*special, *(f"{letter}</w>" for letter in letters)],
        initial_alphabet=letters,
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    # Every letter is also seen as a word's end: without that, other people's words could not be spelled.
    bpe.train_from_iterator([*(drawing.caption for drawing in drawings()), *letters], trainer)
    with tempfile.TemporaryDirectory() as directory:
        vocabulary, merges = bpe.model.save(directory)
        return CLIPTokenizer(vocab=vocabulary, merges=merges, model_max_length=PROMPT_LENGTH)


def tiny_clip(class_name: str) -> nn.Module:
    """Random, and frozen for ever: words and places are drawn far apart, and the layers change them little."""
    import transformers

    config = transformers.CLIPTextConfig(
        vocab_size=512,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=PROMPT_LENGTH,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
        initializer_factor=0.1,
    )
    encoder = getattr(transformers, class_name)(config).eval()
    for name, weight in encoder.named_parameters():
        if name.endswith("_embedding.weight"):
            nn.init.normal_(weight, std=1.0 if "token" in name else 0.5)
    return encoder
