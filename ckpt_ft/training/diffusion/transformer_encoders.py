"""The frozen parts of a transformer's pipeline, and the transformer: what the families' table leaves to be loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads, require_weights
from ckpt_ft.workloads.model_config import check_sizes
from ckpt_ft.workloads.sample_sizes import Size

from .arguments import TransformerArguments
from .families import FAMILIES, Family
from .latents import FramedImages
from .parts import check_words, given, in_dtype, load_part, pipeline_index
from .trained import Trained

if TYPE_CHECKING:
    from diffusers import FlowMatchEulerDiscreteScheduler

_OWN_RESOLUTION = 1024  # of a family whose configurations name none


class Captions:
    """What a row keeps of its caption: itself. The pipelines make tokens of it.

    Attributes:
        tokenizers: the pipeline's.
    """

    def __init__(self, tokenizers: list[Any]) -> None:
        self.tokenizers = tokenizers

    def __call__(self, caption: str) -> dict[str, Any]:
        return {"caption": caption}


class TransformerEncoders:
    """VAE, tokenizers and text encoders of a pipeline of `family`, which encodes prompts itself.

    The VAE stays in float32; the text encoders take `dtype`. Attributes are those of the U-Net's `Encoders`.

    Raises:
        UserError: a part cannot be loaded.
    """

    def __init__(self, args: TransformerArguments, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        import diffusers

        self.rows, self.source = FramedImages, given(args)
        self.family, self.device, self.tokens = family, device, args.max_sequence_length or family.tokens
        self.vae = load_part(getattr(diffusers, family.vae), args, "vae", variant=args.variant)
        with library_reads(f"{given(args)}: no usable text encoders"):
            self.pipeline = family.part.pipeline_class.from_pretrained(
                args.pretrained_model_name_or_path, transformer=None, vae=self.vae, **in_dtype(dtype),
                revision=args.revision, variant=args.variant,
            )  # fmt: skip
            components = self.pipeline.components
            self.absent = [name for name in components if name.startswith(("text_encoder", "tokenizer"))]
            self.text_encoders = [components[name] for name in self.absent if isinstance(components[name], nn.Module)]
            for encoder in self.text_encoders:
                require_weights(encoder)
        tokenizers = [components[name] for name in self.absent if name.startswith("tokenizer")]
        for tokenizer in filter(None, tokenizers):
            check_words(given(args), tokenizer)
        self.tokenize = Captions([tokenizer for tokenizer in tokenizers if tokenizer is not None])
        templates = [tokenizer.chat_template for tokenizer in self.tokenize.tokenizers]
        self.identity = f"{dtype} {self.tokens} {templates}"
        self.vae_scale_factor: int = self.pipeline.vae_scale_factor
        for module in self.modules:
            module.requires_grad_(False).eval().to(device)

    @property
    def token(self) -> int:
        return self.vae_scale_factor * self.family.patch

    @property
    def modules(self) -> list[nn.Module]:
        return [self.vae, *self.text_encoders]

    def blank(self, images: int, size: Size) -> dict[str, Any]:
        """What `encode` is given of so many black images of `size` (height, width) without captions."""
        return {"pixels": torch.zeros(images, 3, *size), "caption": [""] * images}

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """`moments` of the latents of `pixels`, and what `encode_prompts` returns of `caption`."""
        moments = self.family.moments(self.vae, batch["pixels"].to(self.device))
        return {"moments": moments, **self.encode_prompts(batch["caption"])}

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """What the pipeline takes in place of `prompts`, by the names of its arguments."""
        with library_reads(
            f"{self.source}: its tokenizers and text encoders take no prompt; are their files all there?"
        ):
            return self.family.encode(self.pipeline, prompts, self.tokens, self.device)

    @torch.no_grad()
    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        """Channels, height and width of an image's latents, as the transformer is trained on them."""
        pixels = torch.zeros(1, 3, resolution, resolution, device=self.device)
        state = torch.random.get_rng_state()
        shape = tuple(self.family.latents(self.vae, self.family.moments(self.vae, pixels)).shape[1:])
        torch.random.set_rng_state(state)
        return shape


def family_of(args: TransformerArguments) -> Family:
    """The row of the table that the pipeline belongs to.

    Raises:
        UserError: it belongs to none.
    """
    named = pipeline_index(args)["_class_name"]
    if not isinstance(named, str) or named not in FAMILIES:
        known = ", ".join(f"{family.name} ({pipeline})" for pipeline, family in FAMILIES.items())
        raise UserError(f"{given(args)}: its pipeline is {named}; of transformers are supported {known}")
    return FAMILIES[named]


def transformer_config(args: TransformerArguments, family: Family) -> Any:
    """The transformer's configuration alone, with defaults for what its file leaves out, before any weights are read.

    Raises:
        UserError: it is not there, or of another class than its pipeline is made for.
    """
    model, component = family.part.model_class, family.part.component
    with library_reads(f"{given(args)}: no usable {component}"):
        config = model.load_config(args.pretrained_model_name_or_path, subfolder=component, revision=args.revision)
        check_sizes(f"{given(args)}: {component}", config)
        with torch.device("meta"):
            return model.from_config(config).config


def checked_resolution(asked: int | None, config: Any, encoders: TransformerEncoders) -> int:
    """The side of the images in pixels: `asked`, else the one that the transformer was made for.

    Raises:
        UserError: it is not a whole number of the transformer's tokens.
    """
    side, token = config.get("sample_size"), encoders.token
    resolution: int = asked or (side * encoders.vae_scale_factor if isinstance(side, int) else _OWN_RESOLUTION)
    if resolution % token:
        below = max(token, resolution // token * token)
        raise UserError(
            f"--resolution {resolution}: a token of {encoders.family.name} holds {token} x {token} pixels, so it must "
            f"be a multiple of {token}; take {below} or {below + token}"
        )
    return resolution


def load_transformer(args: TransformerArguments, part: Trained, dtype: torch.dtype) -> Any:
    """The transformer in float32; with `load_in_4bit` in NF4, which computes in `dtype`; for adapters in `dtype`.

    Raises:
        UserError: it is not there or cannot be read.
    """
    more: dict[str, Any] = in_dtype(dtype if args.adapts else torch.float32)
    if args.load_in_4bit:
        from diffusers import BitsAndBytesConfig

        more["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return load_part(part.model_class, args, part.component, variant=args.variant, **more)


def load_times(args: TransformerArguments) -> FlowMatchEulerDiscreteScheduler:
    """The times that the pipeline was trained on, whatever sampler it draws with."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return load_part(FlowMatchEulerDiscreteScheduler, args, "scheduler")
