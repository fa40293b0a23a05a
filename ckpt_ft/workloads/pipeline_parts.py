"""The other parts of a diffusion pipeline, VAE and text encoders, and a U-Net that is trained with its text encoders.

Parts are built on the meta device from the pipeline's own configurations. If these are not available, they are those
of the published pipelines whose model has the same class and takes prompts of the same width.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError, one_line

from .model_config import read_parts
from .sample_sizes import Size

NAMES = ("text_encoder", "text_encoder_2")  # their names in a pipeline
IDS = ("input_ids", "input_ids_2")
_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")  # the targets of diffusers' scripts


class TextAndUNet(nn.Module):
    """A U-Net and its text encoders as one model, for training both.

    It takes {"sample", "timestep", "input_ids", ...} and returns the U-Net's prediction. So a policy, a trace,
    accelerate and a checkpoint handle one model. Prompts are not encoded in advance: rows keep their tokens, and each
    step encodes them.
    """

    def __init__(self, unet: Any, text_encoders: Sequence[Any]) -> None:
        super().__init__()
        self.unet = unet
        for name, encoder in zip(NAMES, text_encoders, strict=False):
            self.add_module(name, encoder)

    @property
    def text_encoders(self) -> dict[str, Any]:
        """The text encoders by their names in a pipeline."""
        return {name: getattr(self, name) for name in NAMES if hasattr(self, name)}

    def encode(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encoded prompts of `input_ids` and, for SDXL, `input_ids_2`, each (B, length)."""
        return encoded_text(list(self.text_encoders.values()), ids)

    def forward(
        self,
        sample: Tensor,
        timestep: Tensor,
        time_ids: Tensor | None = None,
        return_dict: bool = True,
        **ids: Tensor,
    ) -> Any:
        """The U-Net's forward on encoded prompts; SDXL needs `time_ids` (B, 6)."""
        encoded: dict[str, Any] = {**self.encode(ids), "time_ids": time_ids}
        return self.unet(sample, timestep, return_dict=return_dict, **conditions(encoded))


def encoded_text(text_encoders: Sequence[Any], ids: dict[str, Tensor]) -> dict[str, Tensor]:
    """Returns `prompt_embeds` (B, length, width); with two encoders (SDXL) also `pooled_prompt_embeds` (B, width)."""
    if len(text_encoders) == 1:
        return {"prompt_embeds": text_encoders[0](ids["input_ids"])[0]}
    outputs = [encoder(ids[name], output_hidden_states=True) for encoder, name in zip(text_encoders, IDS, strict=True)]
    # SDXL was trained on the last layer but one, without the final norm, and the second encoder's pooled output.
    embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return {"prompt_embeds": embeds, "pooled_prompt_embeds": outputs[1].text_embeds}


def conditions(encoded: dict[str, Tensor]) -> dict[str, Any]:
    """Returns a U-Net's arguments for prompts and, for SDXL, sizes; unencoded prompts remain tokens."""
    if "prompt_embeds" not in encoded:
        return {name: value for name, value in encoded.items() if name == "time_ids" or name.startswith("input_ids")}
    given: dict[str, Any] = {"encoder_hidden_states": encoded["prompt_embeds"]}
    if "pooled_prompt_embeds" in encoded:
        given["added_cond_kwargs"] = {"text_embeds": encoded["pooled_prompt_embeds"], "time_ids": encoded["time_ids"]}
    return given


def text_inputs(inputs: dict[str, Any], text_encoders: Sequence[Any]) -> dict[str, Any]:
    """Returns the inputs of `TextAndUNet`: a U-Net's `inputs` with tokens of full prompts, not encoded ones."""
    given = {name: inputs[name] for name in ("sample", "timestep")}
    if "added_cond_kwargs" in inputs:
        given["time_ids"] = inputs["added_cond_kwargs"]["time_ids"]
    return {**given, **blank_ids(text_encoders, len(given["sample"]))}


def blank_ids(text_encoders: Sequence[Any], prompts: int) -> dict[str, Tensor]:
    """Zero tokens (B, length) of `prompts` full prompts for each encoder."""
    return {
        name: torch.zeros(prompts, encoder.config.max_position_embeddings, dtype=torch.long)
        for name, encoder in zip(IDS, text_encoders, strict=False)
    }


def add_text_adapters(model: TextAndUNet, rank: int, alpha: int | None = None, dropout: float = 0.0) -> TextAndUNet:
    """Add LoRA in float32 to the frozen text encoders. `alpha` is `rank` by default."""
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    for encoder in model.text_encoders.values():
        encoder.add_adapter(
            LoraConfig(
                r=rank,
                lora_alpha=alpha or rank,
                lora_dropout=dropout,
                init_lora_weights="gaussian",
                target_modules=list(_TARGETS),
            )
        )
        cast_training_params(encoder, dtype=torch.float32)
    if len(model.text_encoders) > 1:
        _last_layer(model.text_encoders[NAMES[0]]).requires_grad_(False)  # SDXL reads the output of the layer before
    return model.train()


def _last_layer(encoder: nn.Module) -> nn.Module:
    layers = next(module for name, module in encoder.named_modules() if name.endswith("encoder.layers"))
    assert isinstance(layers, nn.ModuleList)
    return layers[-1]


TEXT_ENCODERS = (*NAMES, "text_encoder_3")
UNET = "UNet2DConditionModel"
_MOST_LEVELS = 8  # of a VAE; each level halves the side
_VIDEO = ("AutoencoderKLQwenImage",)  # VAEs that take an image as a video of one frame

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
# (class, width of prompts) -> VAE and text encoders of the published pipelines.
_PUBLISHED: dict[tuple[str, int], tuple[dict[str, Any], ...]] = {
    (UNET, 768): (_VAE, _CLIP_L),
    (UNET, 1024): (_VAE, _CLIP_H),
    (UNET, 2048): (_VAE, _CLIP_L, _CLIP_G),
    ("FluxTransformer2DModel", 4096): (_VAE_16, _CLIP_L, _T5_XXL),
    ("SD3Transformer2DModel", 4096): (_VAE_16, {**_CLIP_L, **_PROJECTED}, _CLIP_G, _T5_XXL),
}


def inpaints(config: Any) -> bool:
    """Whether a U-Net is for inpainting: it takes latents, a mask, and the latents of the masked image."""
    return bool(config["in_channels"] == 2 * config["out_channels"] + 1)


def unet_sizes(name: str) -> tuple[int, int] | None:
    """(pixels of an image's side per latent, tokens of a prompt) of the U-Net pipeline `name`.

    Read from the pipeline's VAE and text encoder; None if their configurations are not available, as for known models.
    """
    parts = read_parts(name)
    vae, text = (parts.get(part, {}) for part in ("vae", NAMES[0]))
    widths, tokens = vae.get("block_out_channels"), text.get("max_position_embeddings")
    if not (isinstance(widths, list) and 0 < len(widths) <= _MOST_LEVELS and isinstance(tokens, int) and tokens > 0):
        return None
    return 2 ** (len(widths) - 1), tokens


def part_configs(name: str, config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The configurations of the VAE and text encoders of pipeline `name`, by their names in the pipeline.

    Raises:
        UserError: they are unknown.
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
    """Build a frozen text encoder.

    Raises:
        UserError: the configuration is invalid.
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
    """Build a frozen VAE in float32, as the recipes use it.

    Raises:
        UserError: the configuration is invalid.
    """
    import diffusers

    try:
        with torch.device("meta"):
            built = getattr(diffusers, config["_class_name"]).from_config(dict(config))
        return built.requires_grad_(False).eval()
    except Exception as error:
        raise UserError(f"{name}: its config makes no VAE: {one_line(error, 200)}") from error


class Encoding:
    """Encodes images and prompts in each step, for training without cached encodings.

    Args:
        text_encoders: the text encoders that are not trained.
        tokens: tokens of a prompt; None for a U-Net's prompts, which have the encoders' full length.
        masked: whether each image is encoded a second time with its masked part removed.
    """

    def __init__(self, vae: Any, text_encoders: Sequence[Any], tokens: int | None, masked: bool) -> None:
        self.vae, self.text_encoders, self.tokens, self.masked = vae, text_encoders, tokens, masked

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.vae, *self.text_encoders

    @torch.no_grad()
    def __call__(self, images: int, size: Size) -> None:
        """Encode `images` images of `size` (height, width) and their prompts."""
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
        del moments  # the step's batch has its own latents

    def _encode(self, pixels: torch.Tensor) -> Any:
        return self.vae.encode(pixels.unsqueeze(2) if type(self.vae).__name__ in _VIDEO else pixels)
