"""Loads the parts of a pipeline: VAE, tokenizers, text encoders, noise schedule, and what is trained.

Bad input raises UserError, one line that names the part.
"""

from __future__ import annotations

from typing import Any

import torch
from accelerate import Accelerator
from diffusers import BitsAndBytesConfig, DiffusionPipeline
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.validation import library_reads, require_weights
from ckpt_ft.workloads.diffusion_models import TRAINABLE_ENCODERS, TextAndUNet
from ckpt_ft.workloads.model_config import check_sizes
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .arguments import DiffusionModelArguments, PipelineArguments, TransformerArguments
from .denoiser import set_prediction_type
from .families import FAMILIES, UNET, UNET_XL, Family, from_diffusers

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
        self.scheduler = load_part(from_diffusers(family.scheduler), args, "scheduler")
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
        for module in self.modules:
            module.requires_grad_(False).eval().to(device)

    @property
    def modules(self) -> list[nn.Module]:
        """All models with weights."""
        return [self.vae, *self.text_encoders]

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Encodes a batch of pixels, time ids and captions.

        Returns:
            `moments` (B, 2C, h, w) of the latents, `time_ids` (B, 6), and the results of `encode_prompts`.
        """
        pixels, time_ids = batch["pixels"].to(self.device), batch["time_ids"].to(self.device)
        encoded = {"moments": self.family.moments(self.vae, pixels), "time_ids": time_ids}
        encoded |= self.encode_prompts(batch["caption"])
        return encoded

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Returns encoded prompts by the names of the pipeline's arguments, or their tokens (see `Family.encode`)."""
        with library_reads(
            f"{self.source}: its tokenizers and text encoders take no prompt; are their files all there?"
        ):
            return self.family.encode(self.pipeline, prompts, self.tokens, self.device)

    @torch.no_grad()
    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        """Returns channels, height and width of an image's latents; keeps the random state."""
        pixels = torch.zeros(1, 3, resolution, resolution, device=self.device)
        with torch.random.fork_rng(devices=[]):
            return tuple(self.family.latents(self.vae, self.family.moments(self.vae, pixels)).shape[1:])


def pipeline_flag(args: PipelineArguments) -> str:
    """The flag that names the pipeline, for errors."""
    return f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"


def frozen_dtype(accelerator: Accelerator) -> torch.dtype:
    """Returns the dtype of weights that are not trained: that of mixed precision."""
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU give bf16 or no")
    return MIXED_PRECISION.get(accelerator.mixed_precision) or torch.float32


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
    """Loads the pipeline's VAE, or the one that a flag names, which may be the `vae` folder of another pipeline."""
    cls, path = from_diffusers(family.vae), getattr(args, "pretrained_vae_model_name_or_path", None)
    if path is None:
        return load_part(cls, args, "vae", variant=args.variant)
    with library_reads(f"--pretrained_vae_model_name_or_path {path} cannot be loaded"):
        try:
            vae = cls.from_pretrained(path)
        except (OSError, ValueError):
            vae = cls.from_pretrained(path, subfolder="vae")
        require_weights(vae)
    return vae


def _load_text_parts(args: PipelineArguments, family: Family, dtype: torch.dtype, **parts: Any) -> Any:
    """Returns the pipeline with `parts`, its own tokenizers and text encoders, and without what is trained."""
    source, absent = pipeline_flag(args), dict.fromkeys((family.component, *family.absent))
    if "safety_checker" in absent:
        absent["requires_safety_checker"] = False
    with library_reads(f"{source}: no usable text_encoder or tokenizer"):
        pipeline = family.pipeline_class.from_pretrained(
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
            options["quantization_config"] = BitsAndBytesConfig(
                load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
            )
    model = load_part(family.model_class, args, family.component, variant=args.variant, **options)
    if isinstance(args, DiffusionModelArguments):
        _check_unet(args, model.config)
        if args.train_text_encoder:
            components = _load_text_parts(args, family, dtype, vae=None).components
            model = TextAndUNet(
                model, [components[name].requires_grad_(False) for name in TRAINABLE_ENCODERS if name in components]
            )
    return model


def _check_unet(args: PipelineArguments, config: Any) -> None:
    if config.addition_embed_type not in (None, "text_time"):
        raise UserError(
            f"{args.pretrained_model_name_or_path}: its U-Net expects '{config.addition_embed_type}' conditions; "
            "SD 1.x, 2.x and SDXL are supported"
        )
    if config.in_channels != config.out_channels:
        raise UserError(
            f"{args.pretrained_model_name_or_path}: its U-Net takes {config.in_channels} channels and returns "
            f"{config.out_channels} (inpainting?); those that draw from text are trained here, and `ckpt-ft run` puts "
            "a script that trains another one under a policy"
        )


def family_of(args: PipelineArguments) -> tuple[Family, Any]:
    """Returns the family of the pipeline and the configuration of what is trained, before any weights are read."""
    unet = isinstance(args, DiffusionModelArguments)
    if unet:
        config = _load_config(UNET, args, "no U-Net in it (unet/config.json); give an SD 1.x, 2.x or SDXL pipeline")
    with library_reads(f"{pipeline_flag(args)}: no usable model_index.json"):
        index = DiffusionPipeline.load_config(args.pretrained_model_name_or_path, revision=args.revision)
        name = index["_class_name"]
    if unet:
        if not isinstance(name, str):  # saving the result needs it
            raise UserError(f"{pipeline_flag(args)}: its pipeline is custom code; SD 1.x, 2.x and SDXL are supported")
        return (UNET_XL if config["addition_embed_type"] == "text_time" else UNET), config
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(f"{family.name} ({pipeline})" for pipeline, family in FAMILIES.items())
        raise UserError(f"{pipeline_flag(args)}: its pipeline is {name}; supported transformers: {known}")
    family = FAMILIES[name]
    return family, _load_config(family, args, f"no usable {family.component}")


def _load_config(family: Family, args: PipelineArguments, missing: str) -> Any:
    """Returns the configuration of what is trained, with the class's defaults."""
    model, component = family.model_class, family.component
    with library_reads(f"{pipeline_flag(args)}: {missing}"):
        config = model.load_config(args.pretrained_model_name_or_path, subfolder=component, revision=args.revision)
        check_sizes(f"{pipeline_flag(args)}: {component}", config)
        with torch.device("meta"):
            return model.from_config(config).config


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
