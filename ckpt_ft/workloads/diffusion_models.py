"""Diffusion models of diffusers as workloads: U-Nets, transformers and the pipeline's other parts on the meta device.

The inputs of each class have the shapes of diffusers' own training scripts and pipelines: how many tokens a prompt is
padded to, and how many pixels and frames one latent represents. No prompt has padding.

VAE and text encoders are built from the pipeline's own configurations. If these are not available, they are those of
the published pipelines whose model has the same class and takes prompts of the same width.
"""

from __future__ import annotations

import configparser
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.spec.peft_file import takes
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.validation import library_reads, require_package
from ckpt_ft.workloads.adapters import adapt
from ckpt_ft.workloads.model_config import known_models, read_parts
from ckpt_ft.workloads.sample_sizes import ImageSizes, Size, sizes_of
from ckpt_ft.workloads.workload import DTYPES, MIXED_PRECISION, Batch, Forward, Workload

TRAINABLE_ENCODERS = ("text_encoder", "text_encoder_2")  # their names in a pipeline
IDS = ("input_ids", "input_ids_2")
_TARGETS = ("q_proj", "k_proj", "v_proj", "out_proj")  # the targets of diffusers' scripts


class TextAndUNet(nn.Module):
    """A U-Net and its text encoders as one model for a policy, a trace, accelerate and a checkpoint.

    It takes {"sample", "timestep", "input_ids", ...} and returns the U-Net's prediction. Each step encodes prompts.
    """

    def __init__(self, unet: Any, text_encoders: Sequence[Any]) -> None:
        super().__init__()
        self.unet = unet
        for name, encoder in zip(TRAINABLE_ENCODERS, text_encoders, strict=False):
            self.add_module(name, encoder)

    @property
    def text_encoders(self) -> dict[str, Any]:
        """The text encoders by their names in a pipeline."""
        return {name: getattr(self, name) for name in TRAINABLE_ENCODERS if hasattr(self, name)}

    def encode(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encoded prompts of `input_ids` and, for SDXL, `input_ids_2`, each (B, length)."""
        return encoded_text(list(self.text_encoders.values()), ids)

    def forward(
        self, sample: Tensor, timestep: Tensor, time_ids: Tensor | None = None, return_dict: bool = True, **ids: Tensor
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
    from peft import LoraConfig, inject_adapter_in_model

    for encoder in model.text_encoders.values():
        config = LoraConfig(
            r=rank, lora_alpha=alpha or rank, lora_dropout=dropout, init_lora_weights="gaussian",
            target_modules=list(_TARGETS),
        )  # fmt: skip
        inject_adapter_in_model(config, encoder)  # transformers' add_adapter refuses versions of PEFT that can do this
        cast_training_params(encoder, dtype=torch.float32)
    if len(model.text_encoders) > 1:
        modules = model.text_encoders[TRAINABLE_ENCODERS[0]].named_modules()
        layers: Any = next(module for name, module in modules if name.endswith("encoder.layers"))
        layers[-1].requires_grad_(False)  # SDXL reads the output of the layer before
    return model.train()


TEXT_ENCODERS = (*TRAINABLE_ENCODERS, "text_encoder_3")
UNET = "UNet2DConditionModel"
_MOST_LEVELS = 8  # of a VAE; each level halves the side
_OF_PROMPTS = ("_class_name", "cross_attention_dim", "joint_attention_dim")  # class, and width of the prompts
_VIDEO = ("AutoencoderKLQwenImage",)  # VAEs that take an image as a video of one frame


def unet_sizes(name: str) -> tuple[int, int] | None:
    """(pixels of an image's side per latent, tokens of a prompt) of U-Net pipeline `name`, or None if unknown."""
    parts = read_parts(name)
    vae, text = (parts.get(part, {}) for part in ("vae", TRAINABLE_ENCODERS[0]))
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
    like = [config.get(key) for key in _OF_PROMPTS]
    for known in known_models().values():
        if known.parts and [known.config.get(key) for key in _OF_PROMPTS] == like:
            return known.parts
    raise UserError(f"{name}: its VAE and text encoders are not known; give the directory or Hub id of its pipeline")


def build_text_encoder(name: str, config: Mapping[str, Any], dtype: torch.dtype) -> Any:
    """Builds a frozen text encoder; raises UserError if `config` does not describe one."""
    import transformers

    with library_reads(f"{name}: its config makes no text encoder"), torch.device("meta"):
        kind = getattr(transformers, config["architectures"][0])
        built = kind(kind.config_class.from_dict(dict(config)))
        return nn.Module.to(built, dtype).requires_grad_(False).eval()


def build_vae(name: str, config: Mapping[str, Any]) -> Any:
    """Builds a frozen VAE in float32, as the recipes use it; raises UserError if `config` does not describe one."""
    import diffusers

    with library_reads(f"{name}: its config makes no VAE"), torch.device("meta"):
        return getattr(diffusers, config["_class_name"]).from_config(dict(config)).requires_grad_(False).eval()


class Encoding:
    """Encodes images and prompts in each step, for training without cached encodings.

    Args:
        text_encoders: the text encoders that are not trained.
        tokens: tokens of a prompt; None for a U-Net's prompts, which have the encoders' full length.
    """

    def __init__(self, vae: Any, text_encoders: Sequence[Any], tokens: int | None) -> None:
        self.vae, self.text_encoders, self.tokens = vae, text_encoders, tokens

    @property
    def modules(self) -> tuple[nn.Module, ...]:
        return self.vae, *self.text_encoders

    @torch.no_grad()
    def __call__(self, images: int, size: Size) -> None:
        """Encode `images` images of `size` (height, width) and their prompts."""
        pixels = torch.zeros(images, 3, *size)
        moments = self.vae.encode(pixels.unsqueeze(2) if type(self.vae).__name__ in _VIDEO else pixels)
        if self.text_encoders and self.tokens is None:
            encoded_text(self.text_encoders, blank_ids(self.text_encoders, images))
        for encoder in self.text_encoders if self.tokens else ():
            most: int = getattr(encoder.config, "max_position_embeddings", None) or 2**20
            encoder(torch.zeros(images, min(self.tokens or 0, most), dtype=torch.long))
        del moments  # the step's batch has its own latents


CLIP_TOKENS = 77  # of a prompt for CLIP's text encoders
_META_SIZES = 6  # numbers in an image's original size, crop and target size


@dataclass(frozen=True)
class Latents:
    """A micro-batch of noisy latents: `size` samples of `height` x `width`, with `frames` if they are videos."""

    config: Any
    size: int
    height: int
    width: int
    frames: int
    dtype: torch.dtype
    prompt_tokens: int = CLIP_TOKENS

    def zeros(self, *shape: int) -> torch.Tensor:
        """Zeros of this shape for every sample, in the latents' dtype."""
        return torch.zeros(self.size, *shape, dtype=self.dtype)

    def tokens(self, patch: int) -> int:
        """The number of squares of `patch` x `patch` in an image."""
        return (self.height // patch) * (self.width // patch)

    def number(self, text: str) -> int:
        """A number, or the one of that name in the latents or in the model's configuration."""
        value = int(text) if text.isdecimal() else getattr(self if hasattr(self, text) else self.config, text)
        return int(value)

    def rotary(self, frames: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of rotary positions."""
        shape = frames * self.tokens(self.config.patch_size), self.config.attention_head_dim
        return torch.zeros(shape), torch.zeros(shape)


def _sdxl_sizes(x: Latents) -> Batch | None:
    """SDXL's pooled prompt and sizes."""
    config = x.config
    if config.addition_embed_type != "text_time":
        return None
    pooled = config.projection_class_embeddings_input_dim - _META_SIZES * config.addition_time_embed_dim
    return {"text_embeds": x.zeros(pooled), "time_ids": x.zeros(_META_SIZES)}


def _video_rotary(x: Latents) -> tuple[torch.Tensor, torch.Tensor] | None:
    frames = math.ceil(x.frames / (x.config.patch_size_t or 1))
    return x.rotary(frames) if x.config.use_rotary_positional_embeddings else None


# The words of diffusion_inputs.ini -> (latents, numbers) -> an argument; None if the configuration does not take it.
_MAKERS: dict[str, Callable[..., Any]] = {
    "image": lambda x: x.zeros(x.config.in_channels, x.height, x.width),
    "video": lambda x: x.zeros(x.config.in_channels, x.frames, x.height, x.width),
    "patches": lambda x, patch, frames=1: x.zeros(frames * x.tokens(patch), x.config.in_channels),
    "positions": lambda x, patch, axes: torch.zeros(x.tokens(patch), axes, dtype=x.dtype),
    "shared": lambda x, *shape: torch.zeros(shape, dtype=x.dtype),  # by all samples
    "list": lambda x, *shape: [torch.zeros(shape, dtype=x.dtype) for _ in range(x.size)],
    "mask": lambda x, tokens: torch.ones(x.size, tokens, dtype=torch.long),
    "times": lambda x: torch.zeros(x.size, dtype=torch.long),
    "time": Latents.zeros,
    "guidance": lambda x: x.zeros() if x.config.guidance_embeds else None,
    "number": lambda x, number: number,
    "image_shapes": lambda x: [[(1, x.height // 2, x.width // 2)]] * x.size,
    "pixart_sizes": lambda x: {"resolution": x.zeros(2), "aspect_ratio": x.zeros(1)},
    "sdxl_sizes": _sdxl_sizes,
    "rotary": Latents.rotary,
    "video_rotary": _video_rotary,
}


class Kind:
    """How to call the forward of a model class: a section of diffusion_inputs.ini."""

    def __init__(self, section: Mapping[str, str]) -> None:
        self.arguments = {name: text.split() for name, text in section.items() if not name.startswith("@")}
        self.frames, self.own_side = int(section.get("@frames", 0)), int(section.get("@own_side", 128))
        self._scale = int(section.get("@scale", 8))
        self._scale_48 = int(section.get("@scale_48", self._scale))

    def pixels(self, config: Any) -> int:
        """Pixels of an image's side per latent."""
        return self._scale_48 if config.in_channels == 48 else self._scale

    def inputs(self, x: Latents) -> Batch:
        """The arguments of forward."""
        made = {}
        for name, (first, *rest) in self.arguments.items():
            make, sizes = (_MAKERS[first], rest) if first in _MAKERS else (Latents.zeros, [first, *rest])
            made[name] = make(x, *map(x.number, sizes))
        return {name: value for name, value in made.items() if value is not None}


_TABLE = configparser.ConfigParser(interpolation=None)
_TABLE.optionxform = str  # type: ignore[assignment,method-assign]  # keeps the case of names
_TABLE.read_string(Path(__file__).with_name("diffusion_inputs.ini").read_text(encoding="utf-8"))
KINDS = {name: Kind(_TABLE[name]) for name in _TABLE.sections()}


WITH_RECIPE = {  # class -> kind of workload that a recipe trains
    UNET: "diffusion U-Net",
    **dict.fromkeys(
        ("FluxTransformer2DModel", "Flux2Transformer2DModel", "SD3Transformer2DModel", "QwenImageTransformer2DModel",
         "SanaTransformer2DModel"),
        "diffusion transformer",
    ),
}  # fmt: skip
ATTENTION_PROJECTIONS = ("to_k", "to_q", "to_v", "to_out.0")  # the targets of diffusers' LoRA scripts
_LEAST = 8  # a resolution is a multiple of so many pixels, even if a latent is one pixel
_FRAMES = 49  # default length of a video, about two seconds


def diffusion_model(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> Workload:
    """The workload of a diffusers model config (the one with `_class_name`).

    Raises:
        UserError: no training step is known for the class, or the resolution does not fit its VAE.
    """
    model, called = _build(name, config, spec)
    kind = config["_class_name"]
    sized = unet_sizes(name) if kind == UNET else None
    scale, prompt_tokens = sized or (called.pixels(model.config), CLIP_TOKENS)
    side = _latent_side(model.config, called, scale, spec.data.resolution)
    spec = _adapting_attention(spec)
    dtype = torch.float32 if spec.precision.mixed_precision != "no" else DTYPES[spec.precision.dtype]
    frames = (spec.data.frames or _FRAMES) if called.frames else 0
    latent_frames = (frames - 1) // called.frames + 1 if frames else 0

    sizes = sizes_of(spec.data.buckets, side * scale, max(scale, _LEAST))
    images = ImageSizes(tuple(sizes), (1,) * len(sizes))
    own = model.config

    def inputs(samples: int, shape: tuple[int, int]) -> Batch:
        return called.inputs(Latents(own, samples, *shape, latent_frames, dtype, prompt_tokens))

    if kind == UNET and own["in_channels"] == 2 * own["out_channels"] + 1:
        raise UserError(f"{name} is an inpainting U-Net: predict the script that trains it with `ckpt-ft dry-run`")
    whole = {**own, "_class_name": kind}
    model, encoding = adapt(model, spec), None
    if spec.adapter.train_text_encoder or spec.data.encode_each_step:
        prompt = inputs(1, (side, side)).get("encoder_hidden_states")
        tokens = None if kind == UNET else 0 if prompt is None else prompt.shape[1]
        model, encoding = _with_parts(name, part_configs(name, whole), spec, model, tokens)

    def make_batch(samples: int, length: int | None) -> Batch:
        height, width = size = images.of(length)
        if encoding is not None:
            encoding(samples, size)
        batch = inputs(samples, (height // scale, width // scale))
        joint = isinstance(model, TextAndUNet)
        return text_inputs(batch, list(model.text_encoders.values())) if joint else batch

    height, width = images.of(None)
    shape = {"resolution": side * scale, **({"frames": frames} if frames else {})}
    before = (
        ""
        if spec.data.encode_each_step
        else "images and prompts are encoded before (--encode-each-step: in the step), and "
    )
    notes: tuple[str, ...] = (f"{before}samples are drawn between steps, without gradients: they have no rows here",)
    if spec.data.buckets:
        shape = {**shape, "height": height, "width": width}
        notes = (f"buckets: a batch of {height}x{width} pixels, the largest of {len(sizes)}", *notes)
    return Workload(
        model,
        make_batch,
        noise_loss,
        kind=WITH_RECIPE.get(kind, "diffusion model"),
        shape=shape,
        auxiliary_models=() if encoding is None else encoding.modules,
        notes=notes,
        lengths=images.lengths,
    )


def _build(name: str, config: Mapping[str, Any], spec: TrainingSpec) -> tuple[Any, Kind]:
    """The model on the meta device in the spec's dtype, and how its class is called.

    Raises:
        UserError: diffusers is missing, or has no such class, or no training step is known, or its config is invalid.
    """
    require_package("diffusers", f"{name}, a diffusion model,")
    import diffusers

    kind = config["_class_name"]
    if kind not in KINDS:
        raise UserError(f"{name}: no training step is known for {kind} ({', '.join(KINDS)})")
    if not hasattr(diffusers, kind):
        raise UserError(f"{name}: diffusers {diffusers.__version__} has no {kind}")
    with library_reads(f"{name}: its config does not make a model"), torch.device("meta"):
        model = getattr(diffusers, kind).from_config(dict(config))
        nn.Module.to(model, DTYPES[spec.precision.dtype])  # diffusers' own `to` warns about what wants float32
    return model.train(), KINDS[kind]


def _latent_side(config: Any, called: Kind, scale: int, resolution: int) -> int:
    """The latents per side of images of `resolution` pixels, `scale` pixels each; 0 pixels for the model's own side.

    Raises:
        UserError: the resolution is not a whole number of latents, or is 0 and the model's own images are not square.
    """
    if resolution % max(scale, _LEAST):
        raise UserError(
            f"resolution {resolution}: a latent holds {scale} x {scale} pixels, so it must be a multiple of "
            f"{max(scale, _LEAST)}"
        )
    own = config.get("sample_size") or called.own_side
    if not resolution and not isinstance(own, int):
        raise UserError(f"resolution: the model's own is no square ({own} latents); give the side of one in pixels")
    return resolution // scale if resolution else int(own)


def _adapting_attention(spec: TrainingSpec) -> TrainingSpec:
    """Returns `spec` with adapters on the attention's projections if it names no modules."""
    if spec.adapter.lora_r:
        targets = spec.adapter.lora_targets or ATTENTION_PROJECTIONS
        spec = spec.edit(lora_targets=targets, lora_dropout=spec.adapter.lora_dropout or 0.0)
    peft = spec.adapter.peft
    if peft and not peft.get("target_modules") and takes(peft, "target_modules", "the PEFT configuration"):
        spec = spec.edit(peft={**peft, "target_modules": list(ATTENTION_PROJECTIONS)})
    return spec


def _with_parts(
    name: str, parts: Mapping[str, Any], spec: TrainingSpec, model: Any, tokens: int | None
) -> tuple[Any, Encoding | None]:
    """Returns `model`, joined with its text encoders if they are trained, and the encoding in each step, if any.

    Raises:
        UserError: other parts of the pipeline are unknown, or text encoders are to be trained without a U-Net.
    """
    if spec.adapter.train_text_encoder and tokens is not None:
        raise UserError(f"train text encoder: {name} is no U-Net, whose text encoders alone are trained with it")
    dtype = MIXED_PRECISION[spec.precision.mixed_precision] or DTYPES[spec.precision.dtype]
    encoders = [build_text_encoder(name, parts[part], dtype) for part in TEXT_ENCODERS if part in parts]
    if spec.adapter.train_text_encoder:
        with torch.device("meta"):
            model = TextAndUNet(model, encoders)
            add_text_adapters(model, spec.adapter.lora_r, dropout=spec.adapter.lora_dropout or 0.0)
        encoders = []
    if not spec.data.encode_each_step:
        return model, None
    return model, Encoding(build_vae(name, parts["vae"]), encoders, tokens)


def noise_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """Mean squared error in fp32 between the prediction and the batch's "target"; zeros without one."""
    inputs = {key: value for key, value in batch.items() if key != "target"}
    prediction = model(**inputs, return_dict=False)[0]
    if isinstance(prediction, list):  # one per sample
        prediction = torch.stack(prediction)
    target = batch["target"] if "target" in batch else torch.zeros_like(prediction)
    return torch.nn.functional.mse_loss(prediction.float(), target.float(), reduction="mean")
