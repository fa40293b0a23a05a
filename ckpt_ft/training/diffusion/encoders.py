"""Loads the parts of a pipeline: VAE, tokenizers, text encoders, noise schedule, and what is trained.

Bad input raises UserError, one line that names the part.
"""

from __future__ import annotations

from typing import Any

import diffusers
import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.validation import library_reads, require_weights
from ckpt_ft.workloads.diffusion_models import TRAINABLE_ENCODERS, TextAndUNet
from ckpt_ft.workloads.model_config import check_sizes

from .arguments import DiffusionModelArguments, PipelineArguments, TransformerArguments
from .denoiser import set_prediction_type
from .families import FAMILIES, Family

_MULTIPLE = 8  # images are in steps of so many pixels, whatever the VAE


class Encoders:
    """The VAE, tokenizers and text encoders of a pipeline, frozen and in eval mode, and its noise schedule.

    The VAE stays in float32, because SDXL's own overflows in half precision; the text encoders are in `dtype`. With
    `--train_text_encoder` there are no text encoders here, and a prompt is encoded to its tokens.

    Attributes:
        absent: names of the pipeline's components that are not needed to draw from encoded prompts.
        identity: what encodings depend on besides weights and tokenizers.
        token: pixels along a side that the trained model takes a whole number of.
    """

    def __init__(self, args: PipelineArguments, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        self.family, self.device, self.source = family, device, pipeline_flag(args)
        self.tokens = getattr(args, "max_sequence_length", None) or family.tokens
        self.vae = _load_vae(args, family)
        self.scheduler = load_part(getattr(diffusers, family.scheduler), args, "scheduler")
        set_prediction_type(self.scheduler, args)
        absent = dict.fromkeys(TRAINABLE_ENCODERS) if getattr(args, "train_text_encoder", False) else {}
        self.pipeline = _load_text_parts(args, family, dtype, vae=self.vae, scheduler=self.scheduler, **absent)
        components = self.pipeline.components
        self.absent = [name for name in components if name.startswith(("text_encoder", "tokenizer", "safety_checker"))]
        held = {name: components[name] for name in self.absent if components[name] is not None}
        self.text_encoders = [part for name, part in held.items() if name.startswith("text_encoder")]
        self.tokenizers = [part for name, part in held.items() if name.startswith("tokenizer")]
        self.identity = f"{dtype} {self.tokens} {[tokenizer.chat_template for tokenizer in self.tokenizers]}"
        self.vae_scale_factor: int = self.pipeline.vae_scale_factor
        self.token = max(_MULTIPLE, self.vae_scale_factor * family.patch)
        self.modules: list[nn.Module] = [self.vae, *self.text_encoders]
        for module in self.modules:
            module.requires_grad_(False).eval().to(device)

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Encodes a batch of pixels, time ids and captions.

        Returns:
            `moments` (B, 2C, h, w) of the latents, `time_ids` (B, 6), and the results of `encode_prompts`.
        """
        pixels, time_ids = batch["pixels"].to(self.device), batch["time_ids"].to(self.device)
        moments = self.family.moments(self.vae, pixels)
        return {"moments": moments, "time_ids": time_ids, **self.encode_prompts(batch["caption"])}

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Returns encoded prompts by the names of the pipeline's arguments, or their tokens (see `Family.encode`)."""
        with library_reads(f"{self.source}: its tokenizers and text encoders take no prompt"):
            return self.family.encode(self.pipeline, prompts, self.tokens, self.device)

    @torch.no_grad()
    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        """Returns channels, height and width of an image's latents; keeps the random state."""
        pixels = torch.zeros(1, 3, resolution, resolution, device=self.device)
        with torch.random.fork_rng(devices=[]):
            return tuple(self.family.latents(self.vae, self.family.moments(self.vae, pixels)).shape[1:])


def pipeline_flag(args: PipelineArguments) -> str:
    return f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"


def load_part(cls: Any, args: PipelineArguments, subfolder: str, **kwargs: Any) -> Any:
    """Returns `cls.from_pretrained` of one part of the pipeline."""
    with library_reads(f"{pipeline_flag(args)}: no usable {subfolder}"):
        part = cls.from_pretrained(
            args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision, **kwargs
        )
        if isinstance(part, nn.Module):
            require_weights(part)
    return part


def _load_vae(args: PipelineArguments, family: Family) -> Any:
    """Loads the pipeline's VAE, or the one that a flag names."""
    cls, path = getattr(diffusers, family.vae), getattr(args, "pretrained_vae_model_name_or_path", None)
    if path is None:
        return load_part(cls, args, "vae", variant=args.variant)
    with library_reads(f"--pretrained_vae_model_name_or_path {path} cannot be loaded"):
        vae = cls.from_pretrained(path)
        require_weights(vae)
    return vae


def _load_text_parts(args: PipelineArguments, family: Family, dtype: torch.dtype, **parts: Any) -> Any:
    """Returns the pipeline with `parts`, its own tokenizers and text encoders, and without what is trained."""
    source, absent = pipeline_flag(args), dict.fromkeys((family.component, *family.absent))
    if "safety_checker" in absent:
        absent["requires_safety_checker"] = False
    with library_reads(f"{source}: no usable text_encoder or tokenizer"):
        pipeline = getattr(diffusers, family.pipeline).from_pretrained(
            args.pretrained_model_name_or_path, revision=args.revision, variant=args.variant,
            dtype=dtype, **absent, **parts,
        )  # fmt: skip
        for name, part in pipeline.components.items():
            if name.startswith("text_encoder") and part is not None:
                require_weights(part)
    for suffix in ("", "_2", "_3"):
        tokenizer, encoder = (getattr(pipeline, f"{name}{suffix}", None) for name in ("tokenizer", "text_encoder"))
        if tokenizer is None:
            continue
        if tokenizer("a").input_ids == tokenizer("b").input_ids:
            raise UserError(
                f"{source}: its tokenizer has no vocabulary; are its files (tokenizer.json, vocab.json) complete?"
            )
        positions = getattr(getattr(encoder, "config", None), "max_position_embeddings", None)
        if not family.tokens and positions is not None and tokenizer.model_max_length > positions:
            raise UserError(
                f"{source}: its tokenizer makes {tokenizer.model_max_length} tokens, its text encoder takes "
                f"{positions}; set model_max_length in tokenizer_config.json"
            )
    return pipeline


def load_denoiser(args: PipelineArguments, family: Family, dtype: torch.dtype) -> Any:
    """Returns the U-Net or transformer.

    A U-Net is in float32; with `train_text_encoder` it is a model of it and its text encoders in `dtype`. A
    transformer is in float32 if all weights are trained, in `dtype` under adapters, and in NF4 with `load_in_4bit`.
    """
    options: dict[str, Any] = {}
    if isinstance(args, TransformerArguments):
        options["dtype"] = dtype if args.adapts else torch.float32
        if args.load_in_4bit:
            options["quantization_config"] = diffusers.BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
    model = load_part(getattr(diffusers, family.model), args, family.component, variant=args.variant, **options)
    if getattr(args, "train_text_encoder", False):
        components = _load_text_parts(args, family, dtype, vae=None).components
        encoders = [components[name].requires_grad_(False) for name in TRAINABLE_ENCODERS if name in components]
        return TextAndUNet(model, encoders)
    return model


def family_of(args: PipelineArguments) -> tuple[Family, Any]:
    """Returns the family of the pipeline and the configuration of what is trained, before any weights are read."""
    source = pipeline_flag(args)
    unet = isinstance(args, DiffusionModelArguments)
    with library_reads(f"{source}: no usable model_index.json"):
        index = diffusers.DiffusionPipeline.load_config(args.pretrained_model_name_or_path, revision=args.revision)
        name = str(index["_class_name"])
    known = {pipeline: family for pipeline, family in FAMILIES.items() if (family.component == "unet") is unet}
    if name not in known:
        supported = ", ".join(f"{family.name} ({pipeline})" for pipeline, family in known.items())
        raise UserError(f"{source}: its pipeline is {name}; supported are {supported}")
    family = known[name]
    model, component = getattr(diffusers, family.model), family.component
    with library_reads(f"{source}: no usable {component}"):
        config = model.load_config(args.pretrained_model_name_or_path, subfolder=component, revision=args.revision)
        check_sizes(f"{source}: {component}", config)
        with torch.device("meta"):
            return family, model.from_config(config).config


def checked_resolution(given: int | None, config: Any, encoders: Encoders) -> int:
    """Returns the side of the images in pixels: `given`, else the one that the model was made for."""
    side, token, family = config.get("sample_size"), encoders.token, encoders.family
    own = side * encoders.vae_scale_factor if isinstance(side, int) else family.side
    if not (given or own):
        raise UserError("the U-Net's configuration has no sample_size; give --resolution")
    resolution: int = given or own or 0
    if resolution % token:
        below = max(token, resolution // token * token)
        raise UserError(
            f"--resolution {resolution}: a token of {family.name} holds {token} x {token} pixels, so it must be a "
            f"multiple of {token}; take {below} or {below + token}"
        )
    return resolution
