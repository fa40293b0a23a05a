"""What a pipeline has beside the model that it denoises with: VAE and text encoders, built on the meta device.

From the pipeline's own configurations where they are at hand, else from those of the published pipelines whose U-Net
or transformer is of that class and takes prompts of that width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ckpt_ft.errors import UserError, one_line

from .buckets import Size
from .model_config import read_parts
from .text_and_unet import NAMES, blank_ids, encoded_text

TEXT_ENCODERS = (*NAMES, "text_encoder_3")
UNET = "UNet2DConditionModel"
_MOST_LEVELS = 8  # of a VAE, each half the side of the one before
_VIDEO = ("AutoencoderKLQwenImage",)  # an image is a video of one frame to these

_CLIP_L = {
    "architectures": ["CLIPTextModel"], "model_type": "clip_text_model", "vocab_size": 49408, "hidden_size": 768,
    "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12, "projection_dim": 768,
}  # fmt: skip
_CLIP_H = {
    **_CLIP_L, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 23, "num_attention_heads": 16,
    "hidden_act": "gelu", "projection_dim": 512,
}  # fmt: skip
_PROJECTED = {"architectures": ["CLIPTextModelWithProjection"]}
_CLIP_G = {
    **_CLIP_L, **_PROJECTED, "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
    "num_attention_heads": 20, "hidden_act": "gelu", "projection_dim": 1280,
}  # fmt: skip
_T5_XXL = {
    "architectures": ["T5EncoderModel"], "model_type": "t5", "d_model": 4096, "d_kv": 64, "d_ff": 10240,
    "num_layers": 24, "num_heads": 64, "vocab_size": 32128, "feed_forward_proj": "gated-gelu",
}  # fmt: skip
_VAE = {
    "_class_name": "AutoencoderKL", "block_out_channels": [128, 256, 512, 512], "layers_per_block": 2,
    "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4, "latent_channels": 4,
}  # fmt: skip
_VAE_16 = {**_VAE, "latent_channels": 16, "use_quant_conv": False, "use_post_quant_conv": False}
# Class and width of prompts -> the VAE and the text encoders, by the published pipelines' files.
_PUBLISHED: dict[tuple[str, int], tuple[dict[str, Any], ...]] = {
    (UNET, 768): (_VAE, _CLIP_L),
    (UNET, 1024): (_VAE, _CLIP_H),
    (UNET, 2048): (_VAE, _CLIP_L, _CLIP_G),
    ("FluxTransformer2DModel", 4096): (_VAE_16, _CLIP_L, _T5_XXL),
    ("SD3Transformer2DModel", 4096): (_VAE_16, {**_CLIP_L, **_PROJECTED}, _CLIP_G, _T5_XXL),
}


def inpaints(config: Any) -> bool:
    """Whether a U-Net of this configuration is one for inpainting: latents, a mask, and latents of what it leaves."""
    return bool(config["in_channels"] == 2 * config["out_channels"] + 1)


def unet_sizes(name: str) -> tuple[int, int] | None:
    """(pixels of an image's side for one of a latent, tokens of a prompt) in the U-Net pipeline `name`, by its VAE's
    and text encoder's own configurations; None where they are not at hand, as of known models."""
    parts = read_parts(name)
    vae, text = (parts.get(part, {}) for part in ("vae", NAMES[0]))
    widths, tokens = vae.get("block_out_channels"), text.get("max_position_embeddings")
    if not (isinstance(widths, list) and 0 < len(widths) <= _MOST_LEVELS and isinstance(tokens, int) and tokens > 0):
        return None
    return 2 ** (len(widths) - 1), tokens


def part_configs(name: str, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Configurations of VAE and text encoders of the pipeline `name`, whose model has `config`, by the parts' names.

    Raises:
        UserError: they are not known.
    """
    found = read_parts(name)
    if "vae" in found and len(found) > 1:
        return found
    width = config.get("cross_attention_dim") or config.get("joint_attention_dim")
    known = _PUBLISHED.get((config["_class_name"], width)) if isinstance(width, int) else None
    if known is None:
        raise UserError(
            f"{name}: its VAE and text encoders are not known; give the directory or Hub id of its pipeline"
        )
    return dict(zip(("vae", *TEXT_ENCODERS), known, strict=False))


def build_text_encoder(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """A text encoder, frozen.

    Raises:
        UserError: the configuration makes none.
    """
    import transformers

    try:
        kind = getattr(transformers, config["architectures"][0])
        with torch.device("meta"):
            built = kind(kind.config_class.from_dict(dict(config)))
        return nn.Module.to(built, dtype).requires_grad_(False).eval()
    except Exception as error:
        raise UserError(f"{name}: its config makes no text encoder: {one_line(error, 200)}") from error


def build_vae(name: str, config: Mapping[str, Any]) -> Any:
    """A VAE, frozen and in float32, as the recipes have it.

    Raises:
        UserError: the configuration makes none.
    """
    import diffusers

    try:
        with torch.device("meta"):
            built = getattr(diffusers, config["_class_name"]).from_config(dict(config))
        return built.requires_grad_(False).eval()
    except Exception as error:
        raise UserError(f"{name}: its config makes no VAE: {one_line(error, 200)}") from error


class Encoding:
    """What encodes images and prompts in each step, where nothing is cached.

    Args:
        text_encoders: those that are not trained.
        tokens: of a prompt; None for a U-Net's, which are full.
        masked: whether each image is encoded a second time, without what a mask hides.
    """

    def __init__(self, vae: Any, text_encoders: Sequence[Any], tokens: int | None, masked: bool) -> None:
        self.vae, self.text_encoders, self.tokens, self.masked = vae, text_encoders, tokens, masked

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.vae, *self.text_encoders

    @torch.no_grad()
    def __call__(self, images: int, size: Size) -> None:
        """What a step does with so many images of `size` (height, width) and their prompts."""
        pixels = torch.zeros(images, 3, *size)
        moments = self._encode(pixels)
        if self.text_encoders and self.tokens is None:
            encoded_text(self.text_encoders, blank_ids(self.text_encoders, images))
        for encoder in self.text_encoders if self.tokens else ():
            most: int = getattr(encoder.config, "max_position_embeddings", None) or 2**20
            encoder(torch.zeros(images, min(self.tokens or 0, most), dtype=torch.long))
        if self.masked:
            hidden = torch.ones(images, 1, *size) >= 0.5
            self._encode(pixels.masked_fill(hidden, 0.0))
        del moments  # with the prompts they are of the step's batch

    def _encode(self, pixels: torch.Tensor) -> Any:
        return self.vae.encode(pixels.unsqueeze(2) if type(self.vae).__name__ in _VIDEO else pixels)
