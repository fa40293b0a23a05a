"""What each class of diffusers' U-Nets and transformers is called with in training: latents, prompts, times, places.

Shapes are those of diffusers' own training scripts and pipelines: how many tokens a prompt is padded to, how many
pixels (and frames) one latent stands for. Tokens and masks are all real: a prompt as long as it may be.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .workload import Batch

CLIP_TOKENS = 77  # of a prompt, as CLIP's text encoders have it
_META_SIZES = 6  # original size, crop and target size of an image


@dataclass(frozen=True)
class Latents:
    """A micro-batch of noisy latents: `size` samples of `height` x `width`, `frames` of them where they are videos.

    prompt_tokens: of a U-Net's prompts.
    """

    config: Any
    size: int
    height: int
    width: int
    frames: int
    dtype: torch.dtype
    prompt_tokens: int = CLIP_TOKENS

    def zeros(self, *shape: int) -> torch.Tensor:
        """One for every sample, in the latents' dtype."""
        return torch.zeros(self.size, *shape, dtype=self.dtype)

    def image(self) -> torch.Tensor:
        return self.zeros(self.config.in_channels, self.height, self.width)

    def video(self) -> torch.Tensor:
        return self.zeros(self.config.in_channels, self.frames, self.height, self.width)

    def tokens(self, patch: int) -> int:
        """Squares of `patch` x `patch` in an image."""
        return (self.height // patch) * (self.width // patch)

    def prompt(self, tokens: int, width: int) -> torch.Tensor:
        return self.zeros(tokens, width)

    def times(self) -> torch.Tensor:
        return torch.zeros(self.size, dtype=torch.long)

    def mask(self, tokens: int) -> torch.Tensor:
        """No prompt has padding."""
        return torch.ones(self.size, tokens, dtype=torch.long)


@dataclass(frozen=True)
class Kind:
    """How a class is called. `scale`: pixels of an image's side for one of a latent; `frames`: of a video, likewise.

    inputs: those of its forward; the first of them are the latents.
    """

    inputs: Callable[[Latents], Batch]
    scale: int | Callable[[Any], int] = 8
    frames: int = 0
    own_side: int = 128  # of a latent, for configurations that name none

    def pixels(self, config: Any) -> int:
        return self.scale(config) if callable(self.scale) else self.scale


def _unet(x: Latents) -> Batch:
    return {"sample": x.image(), "timestep": x.times()}


def _conditional_unet(x: Latents) -> Batch:
    config = x.config
    batch = {**_unet(x), "encoder_hidden_states": x.prompt(x.prompt_tokens, config.cross_attention_dim)}
    if config.addition_embed_type == "text_time":
        pooled = config.projection_class_embeddings_input_dim - _META_SIZES * config.addition_time_embed_dim
        batch["added_cond_kwargs"] = {"text_embeds": x.zeros(pooled), "time_ids": x.zeros(_META_SIZES)}
    return batch


def _sd3(x: Latents) -> Batch:
    return {
        "hidden_states": x.image(),
        "encoder_hidden_states": x.prompt(333, x.config.joint_attention_dim),
        "pooled_projections": x.zeros(x.config.pooled_projection_dim),
        "timestep": x.times(),
    }


def _packed(x: Latents, patch: int, prompt: int, axes: int) -> Batch:
    """Latents as a sequence, each token a square of `patch` x `patch`, with positions on `axes` axes."""
    tokens = x.tokens(patch)
    return {
        "hidden_states": x.zeros(tokens, x.config.in_channels),
        "encoder_hidden_states": x.prompt(prompt, x.config.joint_attention_dim),
        "timestep": x.zeros(),
        "img_ids": torch.zeros(tokens, axes, dtype=x.dtype),
        "txt_ids": torch.zeros(prompt, axes, dtype=x.dtype),
    }


def _flux(x: Latents) -> Batch:
    batch = {**_packed(x, 2, 512, 3), "pooled_projections": x.zeros(x.config.pooled_projection_dim)}
    return {**batch, **({"guidance": x.zeros()} if x.config.guidance_embeds else {})}


def _flux2(x: Latents) -> Batch:
    return {**_packed(x, 1, 512, 4), **({"guidance": x.zeros()} if x.config.guidance_embeds else {})}


def _chroma(x: Latents) -> Batch:
    return _packed(x, 2, 512, 3)


def _qwen_image(x: Latents) -> Batch:
    return {
        "hidden_states": x.zeros(x.tokens(2), x.config.in_channels),
        "encoder_hidden_states": x.prompt(512, x.config.joint_attention_dim),
        "encoder_hidden_states_mask": x.mask(512),
        "timestep": x.zeros(),
        "img_shapes": [[(1, x.height // 2, x.width // 2)]] * x.size,
    }


def _pixart(x: Latents) -> Batch:
    return {
        "hidden_states": x.image(),
        "encoder_hidden_states": x.prompt(120, x.config.caption_channels),
        "timestep": x.times(),
        "added_cond_kwargs": {"resolution": x.zeros(2), "aspect_ratio": x.zeros(1)},
    }


def _dit(x: Latents) -> Batch:
    return {"hidden_states": x.image(), "timestep": x.times(), "class_labels": x.times()}


def _sana(x: Latents) -> Batch:
    return {
        "hidden_states": x.image(),
        "encoder_hidden_states": x.prompt(300, x.config.caption_channels),
        "encoder_attention_mask": x.mask(300),
        "timestep": x.times(),
        **({"guidance": x.zeros()} if x.config.guidance_embeds else {}),
    }


def _aura_flow(x: Latents) -> Batch:
    prompt = x.prompt(256, x.config.joint_attention_dim)
    return {"hidden_states": x.image(), "encoder_hidden_states": prompt, "timestep": x.zeros()}


def _hunyuan_dit(x: Latents) -> Batch:
    config = x.config
    rotary = x.tokens(config.patch_size), config.attention_head_dim
    return {
        "hidden_states": x.image(),
        "timestep": x.zeros(),  # whose dtype the class takes for all of its embeddings
        "encoder_hidden_states": x.prompt(config.text_len, config.cross_attention_dim),
        "text_embedding_mask": x.mask(config.text_len),
        "encoder_hidden_states_t5": x.prompt(config.text_len_t5, config.cross_attention_dim_t5),
        "text_embedding_mask_t5": x.mask(config.text_len_t5),
        "image_meta_size": x.zeros(_META_SIZES),
        "style": x.times(),
        "image_rotary_emb": (torch.zeros(rotary), torch.zeros(rotary)),
    }


def _cogview4(x: Latents) -> Batch:
    sizes = ("original_size", "target_size", "crop_coords")
    return {
        "hidden_states": x.image(),
        "encoder_hidden_states": x.prompt(224, x.config.text_embed_dim),
        "timestep": x.times(),
        **{name: x.zeros(2) for name in sizes},
    }


def _lumina2(x: Latents) -> Batch:
    return {
        "hidden_states": x.image(),
        "timestep": x.zeros(),
        "encoder_hidden_states": x.prompt(256, x.config.cap_feat_dim),
        "encoder_attention_mask": x.mask(256),
    }


def _z_image(x: Latents) -> Batch:
    """Every sample on its own, in lists."""
    latents = torch.zeros(x.config.in_channels, 1, x.height, x.width, dtype=x.dtype)
    prompt = torch.zeros(512, x.config.cap_feat_dim, dtype=x.dtype)
    return {
        "x": [latents.clone() for _ in range(x.size)],
        "t": x.zeros(),
        "cap_feats": [prompt.clone() for _ in range(x.size)],
    }


def _wan(x: Latents) -> Batch:
    return {
        "hidden_states": x.video(),
        "timestep": x.times(),
        "encoder_hidden_states": x.prompt(512, x.config.text_dim),
    }


def _ltx(x: Latents) -> Batch:
    return {
        "hidden_states": x.zeros(x.frames * x.tokens(1), x.config.in_channels),
        "encoder_hidden_states": x.prompt(128, x.config.caption_channels),
        "timestep": x.times(),
        "encoder_attention_mask": x.mask(128),
        "num_frames": x.frames,
        "height": x.height,
        "width": x.width,
    }


def _hunyuan_video(x: Latents) -> Batch:
    return {
        "hidden_states": x.video(),
        "timestep": x.times(),
        "encoder_hidden_states": x.prompt(256, x.config.text_embed_dim),
        "encoder_attention_mask": x.mask(256),
        "pooled_projections": x.zeros(x.config.pooled_projection_dim),
        **({"guidance": x.zeros()} if x.config.guidance_embeds else {}),
    }


def _cogvideox(x: Latents) -> Batch:
    config = x.config
    batch: Batch = {
        "hidden_states": x.zeros(x.frames, config.in_channels, x.height, x.width),
        "encoder_hidden_states": x.prompt(config.max_text_seq_length, config.text_embed_dim),
        "timestep": x.times(),
    }
    if config.use_rotary_positional_embeddings:
        frames = math.ceil(x.frames / (config.patch_size_t or 1))
        rotary = frames * x.tokens(config.patch_size), config.attention_head_dim
        batch["image_rotary_emb"] = (torch.zeros(rotary), torch.zeros(rotary))
    return batch


KINDS = {
    "UNet2DModel": Kind(_unet, scale=1),
    "UNet2DConditionModel": Kind(_conditional_unet),
    "DiTTransformer2DModel": Kind(_dit),
    "PixArtTransformer2DModel": Kind(_pixart),
    "SD3Transformer2DModel": Kind(_sd3),
    "FluxTransformer2DModel": Kind(_flux),
    "Flux2Transformer2DModel": Kind(_flux2, scale=16, own_side=64),
    "ChromaTransformer2DModel": Kind(_chroma),
    "QwenImageTransformer2DModel": Kind(_qwen_image),
    "SanaTransformer2DModel": Kind(_sana, scale=32, own_side=32),
    "AuraFlowTransformer2DModel": Kind(_aura_flow),
    "HunyuanDiT2DModel": Kind(_hunyuan_dit),
    "CogView4Transformer2DModel": Kind(_cogview4),
    "Lumina2Transformer2DModel": Kind(_lumina2),
    "ZImageTransformer2DModel": Kind(_z_image),
    "WanTransformer3DModel": Kind(_wan, lambda config: 16 if config.in_channels == 48 else 8, frames=4, own_side=60),
    "LTXVideoTransformer3DModel": Kind(_ltx, scale=32, frames=8, own_side=16),
    "HunyuanVideoTransformer3DModel": Kind(_hunyuan_video, frames=4, own_side=60),
    "CogVideoXTransformer3DModel": Kind(_cogvideox, frames=4, own_side=60),
}
