"""Loads the parts of a pipeline one by one: VAE, tokenizers, text encoders, noise schedule, and what is trained.

Bad input raises UserError, one line that names the part.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from ckpt_ft.errors import UserError
from ckpt_ft.validation import library_reads, require_weights
from ckpt_ft.workloads.model_config import check_sizes
from ckpt_ft.workloads.pipeline_parts import IDS, NAMES, TextAndUNet, encoded_text, inpaints
from ckpt_ft.workloads.sample_sizes import Size
from ckpt_ft.workloads.workload import MIXED_PRECISION

from .arguments import DiffusionModelArguments, PipelineArguments, TransformerArguments
from .data import FramedImages, MaskedImages
from .denoiser import TrainedPart
from .families import FAMILIES, Family

if TYPE_CHECKING:
    from accelerate import Accelerator
    from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler, UNet2DConditionModel

_DEFAULT_RESOLUTION = 1024  # of a transformer whose configuration names none


class FrozenEncoders(ABC):
    """The VAE and the text encoders of a pipeline, frozen and in eval mode.

    Attributes:
        rows: the dataset class of the images: FramedImages, or MaskedImages for inpainting.
        tokenize: a function of a caption that returns what a row keeps of it; it has the `tokenizers`.
        absent: names of the pipeline's components that are not needed to draw from encoded prompts.
        identity: what encodings depend on besides weights and tokenizers.
    """

    rows: type[FramedImages] = FramedImages
    device: torch.device
    vae: Any
    text_encoders: list[Any]
    tokenize: Any
    absent: list[str]
    identity: str
    vae_scale_factor: int

    @property
    def modules(self) -> list[nn.Module]:
        """All models with weights."""
        return [self.vae, *self.text_encoders]

    @property
    @abstractmethod
    def token(self) -> int:
        """Pixels along a side that the trained model takes a whole number of."""

    @abstractmethod
    def blank(self, images: int, size: Size) -> dict[str, Any]:
        """Returns the arguments of `encode` for `images` black images of `size` (height, width) without captions."""

    @abstractmethod
    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        """Returns the `moments` of the latents, and the encoded prompts, of a batch of `FramedImages`."""

    @abstractmethod
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """Returns encoded prompts by the names of the pipeline's arguments."""

    def _freeze(self) -> None:
        for module in self.modules:
            module.requires_grad_(False).eval().to(self.device)


class Tokenize:
    """Turns captions into `input_ids` (and `input_ids_2` of a second tokenizer), padded to full length.

    Apart from the encoders, so that processes that load data hold no models.
    """

    def __init__(self, tokenizers: list[Any]) -> None:
        self.tokenizers = tokenizers

    def __call__(self, caption: str | list[str]) -> dict[str, Tensor]:
        """Returns tensors (length) for one caption, (B, length) for a list."""
        ids = {}
        for name, tokenizer in zip(IDS, self.tokenizers, strict=False):
            length = tokenizer.model_max_length
            tokens = tokenizer(caption, padding="max_length", max_length=length, truncation=True)
            ids[name] = torch.tensor(tokens.input_ids)
        return ids


class UNetEncoders(FrozenEncoders):
    """VAE, tokenizers and text encoders of a Stable Diffusion pipeline; SDXL has two text encoders.

    The VAE stays in float32, because SDXL's own overflows in half precision; the text encoders are in `dtype`. With
    `--train_text_encoder` there are no text encoders here, and a prompt is encoded to its tokens.
    """

    def __init__(
        self,
        args: DiffusionModelArguments,
        sdxl: bool,
        device: torch.device,
        dtype: torch.dtype,
        rows: type[FramedImages] = FramedImages,
    ) -> None:
        from diffusers import AutoencoderKL

        self.rows, self.device, self.identity = rows, device, str(dtype)
        second = ("text_encoder_2", "tokenizer_2") if sdxl else ("safety_checker",)
        self.absent = ["text_encoder", "tokenizer", *second]
        self.tokenize = Tokenize(load_tokenizers(args, sdxl))
        self.text_encoders = []
        if not args.train_text_encoder:
            self.text_encoders = load_text_encoders(args, self.tokenize.tokenizers, dtype)
        if args.pretrained_vae_model_name_or_path is None:
            self.vae = load_part(AutoencoderKL, args, "vae", variant=args.variant)
        else:
            self.vae = _load_vae(args.pretrained_vae_model_name_or_path)
        self.vae_scale_factor = 2 ** (len(self.vae.config.block_out_channels) - 1)
        self._freeze()

    @property
    def token(self) -> int:
        return max(8, self.vae_scale_factor)  # images are in steps of eight whatever the VAE

    def blank(self, images: int, size: Size) -> dict[str, Tensor]:
        masks = {"mask": torch.ones(images, 1, *size)} if self.rows is MaskedImages else {}
        ids, time_ids = self.tokenize([""] * images), torch.zeros(images, 6, dtype=torch.long)
        return {"pixels": torch.zeros(images, 3, *size), "time_ids": time_ids, **masks, **ids}

    @torch.no_grad()
    def encode(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """Encodes `pixels`, `time_ids`, `input_ids*` and, for inpainting, `mask`.

        Returns:
            `moments` (B, 2C, h, w) of the latents, `time_ids` (B, 6), and the results of `encode_text` and
            `encode_masked`.
        """
        pixels = batch["pixels"].to(self.device)
        moments = self.vae.encode(pixels).latent_dist.parameters
        encoded = {"moments": moments, "time_ids": batch["time_ids"].to(self.device), **self.encode_text(batch)}
        if "mask" in batch:
            encoded |= encode_masked(self.vae, pixels, batch["mask"].to(self.device))
        return encoded

    @torch.no_grad()
    def encode_text(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the encoded prompts (see `encoded_text`), or their tokens if the model encodes them itself."""
        on_device = {name: value.to(self.device) for name, value in ids.items() if name in IDS}
        return encoded_text(self.text_encoders, on_device) if self.text_encoders else on_device

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        return self.encode_text(self.tokenize(prompts))


class TransformerEncoders(FrozenEncoders):
    """VAE, tokenizers and text encoders of a transformer's pipeline, which encodes prompts itself.

    The VAE stays in float32; the text encoders are in `dtype`.
    """

    def __init__(self, args: TransformerArguments, family: Family, device: torch.device, dtype: torch.dtype) -> None:
        import diffusers

        self.family, self.device, self.tokens = family, device, args.max_sequence_length or family.tokens
        self.source = pipeline_flag(args)
        self.vae = load_part(getattr(diffusers, family.vae), args, "vae", variant=args.variant)
        with library_reads(f"{self.source}: no usable text encoders"):
            self.pipeline = family.part.pipeline_class.from_pretrained(
                args.pretrained_model_name_or_path, transformer=None, vae=self.vae, **dtype_argument(dtype),
                revision=args.revision, variant=args.variant,
            )  # fmt: skip
            components = self.pipeline.components
            self.absent = [name for name in components if name.startswith(("text_encoder", "tokenizer"))]
            self.text_encoders = [components[name] for name in self.absent if isinstance(components[name], nn.Module)]
            for encoder in self.text_encoders:
                require_weights(encoder)
        named = [components[name] for name in self.absent if name.startswith("tokenizer")]
        tokenizers = [tokenizer for tokenizer in named if tokenizer is not None]
        for tokenizer in tokenizers:
            _check_vocabulary(self.source, tokenizer)
        self.tokenize = Captions(tokenizers)
        self.identity = f"{dtype} {self.tokens} {[tokenizer.chat_template for tokenizer in tokenizers]}"
        self.vae_scale_factor = self.pipeline.vae_scale_factor
        self._freeze()

    @property
    def token(self) -> int:
        return self.vae_scale_factor * self.family.patch

    def blank(self, images: int, size: Size) -> dict[str, Any]:
        return {"pixels": torch.zeros(images, 3, *size), "caption": [""] * images}

    @torch.no_grad()
    def encode(self, batch: dict[str, Any]) -> dict[str, Tensor]:
        moments = self.family.moments(self.vae, batch["pixels"].to(self.device))
        return {"moments": moments, **self.encode_prompts(batch["caption"])}

    @torch.no_grad()
    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        with library_reads(
            f"{self.source}: its tokenizers and text encoders take no prompt; are their files all there?"
        ):
            return self.family.encode(self.pipeline, prompts, self.tokens, self.device)

    @torch.no_grad()
    def latent_shape(self, resolution: int) -> tuple[int, ...]:
        """Returns channels, height and width of an image's latents; keeps the random state."""
        pixels = torch.zeros(1, 3, resolution, resolution, device=self.device)
        state = torch.random.get_rng_state()
        shape = tuple(self.family.latents(self.vae, self.family.moments(self.vae, pixels)).shape[1:])
        torch.random.set_rng_state(state)
        return shape


class Captions:
    """Keeps a caption as it is; the transformers' pipelines tokenize captions themselves."""

    def __init__(self, tokenizers: list[Any]) -> None:
        self.tokenizers = tokenizers

    def __call__(self, caption: str) -> dict[str, Any]:
        return {"caption": caption}


@torch.no_grad()
def encode_masked(vae: Any, pixels: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Returns `mask` (B, 1, h, w) at the size of the latents, and `masked_moments` of the images, grey there."""
    hidden = mask >= 0.5
    moments = vae.encode(pixels.masked_fill(hidden, 0.0)).latent_dist.parameters
    return {"mask": functional.interpolate(hidden.float(), size=moments.shape[-2:]), "masked_moments": moments}


def pipeline_flag(args: PipelineArguments) -> str:
    """The flag that names the pipeline, for errors."""
    return f"--pretrained_model_name_or_path {args.pretrained_model_name_or_path}"


def frozen_dtype(accelerator: Accelerator) -> torch.dtype:
    """Returns the dtype of weights that are not trained: that of mixed precision."""
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        raise UserError("--mixed_precision fp16 needs a GPU; on a CPU give bf16 or no")
    return MIXED_PRECISION.get(accelerator.mixed_precision) or torch.float32


def dtype_argument(dtype: torch.dtype) -> dict[str, Any]:
    """Returns `dtype` as an argument of diffusers' `from_pretrained`, whose name depends on the version."""
    from diffusers.utils import deprecation_utils

    renamed = hasattr(deprecation_utils, "_TORCH_DTYPE_DEPRECATION_MESSAGE")
    return {"dtype" if renamed else "torch_dtype": dtype}


def load_part(cls: Any, args: PipelineArguments, subfolder: str, **kwargs: Any) -> Any:
    """Returns `cls.from_pretrained` of one part of the pipeline."""
    with library_reads(f"{pipeline_flag(args)}: no usable {subfolder}"):
        part = cls.from_pretrained(
            args.pretrained_model_name_or_path, subfolder=subfolder, revision=args.revision, **kwargs
        )
        if isinstance(part, nn.Module):
            require_weights(part)
    return part


def _pipeline_class_name(args: PipelineArguments) -> Any:
    """Returns the pipeline's class as its model_index.json names it."""
    from diffusers import DiffusionPipeline

    with library_reads(f"{pipeline_flag(args)}: no usable model_index.json"):
        index = DiffusionPipeline.load_config(args.pretrained_model_name_or_path, revision=args.revision)
        return index["_class_name"]


def _load_config(model: Any, args: PipelineArguments, component: str, missing: str) -> Any:
    """Returns a component's configuration, with the class's defaults, before any weights are read."""
    with library_reads(f"{pipeline_flag(args)}: {missing}"):
        config = model.load_config(args.pretrained_model_name_or_path, subfolder=component, revision=args.revision)
        check_sizes(f"{pipeline_flag(args)}: {component}", config)
        with torch.device("meta"):
            return model.from_config(config).config


def _load_vae(path: str) -> Any:
    """Loads a VAE, or the `vae` folder of a pipeline."""
    from diffusers import AutoencoderKL

    with library_reads(f"--pretrained_vae_model_name_or_path {path} cannot be loaded"):
        try:
            vae = AutoencoderKL.from_pretrained(path)
        except (OSError, ValueError):
            vae = AutoencoderKL.from_pretrained(path, subfolder="vae")
        require_weights(vae)
    return vae


def _check_vocabulary(source: str, tokenizer: Any) -> None:
    """Raises UserError if `tokenizer` gives all words the same token, as one without its files does."""
    if tokenizer("a").input_ids == tokenizer("b").input_ids:
        raise UserError(
            f"{source}: its tokenizer knows no words; are its files (tokenizer.json, vocab.json) all there?"
        )


def load_tokenizers(args: DiffusionModelArguments, sdxl: bool) -> list[Any]:
    """Returns the tokenizers of a Stable Diffusion pipeline: two for SDXL, else one."""
    from transformers import CLIPTokenizer

    tokenizers = [load_part(CLIPTokenizer, args, f"tokenizer{suffix}") for suffix in ("", "_2")[: 1 + sdxl]]
    for tokenizer in tokenizers:
        _check_vocabulary(pipeline_flag(args), tokenizer)
    return tokenizers


def load_text_encoders(args: DiffusionModelArguments, tokenizers: list[Any], dtype: torch.dtype) -> list[Any]:
    """Returns the frozen text encoders that belong to `tokenizers`."""
    from transformers import CLIPTextModel, CLIPTextModelWithProjection

    encoders = []
    for name, cls, tokenizer in zip(NAMES, (CLIPTextModel, CLIPTextModelWithProjection), tokenizers, strict=False):
        encoder = load_part(cls, args, name, variant=args.variant, dtype=dtype).requires_grad_(False)
        positions = encoder.config.max_position_embeddings
        if tokenizer.model_max_length > positions:
            raise UserError(
                f"{pipeline_flag(args)}: its tokenizer makes {tokenizer.model_max_length} tokens, its text encoder "
                f"takes {positions}; set model_max_length in tokenizer_config.json"
            )
        encoders.append(encoder)
    return encoders


def load_denoiser(args: DiffusionModelArguments, dtype: torch.dtype) -> Any:
    """Returns the U-Net in float32; with `train_text_encoder` a model of it and its text encoders in `dtype`."""
    unet = load_unet(args)
    if not args.train_text_encoder:
        return unet
    tokenizers = load_tokenizers(args, unet.config.addition_embed_type == "text_time")
    return TextAndUNet(unet, load_text_encoders(args, tokenizers, dtype))


def load_unet(args: DiffusionModelArguments) -> UNet2DConditionModel:
    """Returns the U-Net in float32."""
    from diffusers import UNet2DConditionModel

    unet = load_part(UNet2DConditionModel, args, "unet", variant=args.variant)
    if unet.config.addition_embed_type not in (None, "text_time"):
        raise UserError(
            f"{args.pretrained_model_name_or_path}: its U-Net wants '{unet.config.addition_embed_type}' conditions; "
            "SD 1.x, 2.x and SDXL are supported"
        )
    if unet.config.in_channels != unet.config.out_channels and not inpaints(unet.config):
        raise UserError(
            f"{args.pretrained_model_name_or_path}: its U-Net takes {unet.config.in_channels} channels and returns "
            f"{unet.config.out_channels}; those from text ({unet.config.out_channels}) and for inpainting "
            f"({2 * unet.config.out_channels + 1}) are supported"
        )
    return unet


def unet_config(args: DiffusionModelArguments) -> Any:
    """Returns the U-Net's configuration, before any weights are read."""
    from diffusers import UNet2DConditionModel

    missing = "no U-Net in it (unet/config.json); give an SD 1.x, 2.x or SDXL pipeline"
    config = _load_config(UNet2DConditionModel, args, "unet", missing)
    if not isinstance(_pipeline_class_name(args), str):  # saving the result needs it
        raise UserError(f"{pipeline_flag(args)}: its pipeline is code of its own; SD 1.x, 2.x and SDXL are supported")
    return config


def own_side(config: Any) -> int:
    """Returns the side of the latents that a U-Net was made for."""
    if not isinstance(config.sample_size, int):
        raise UserError("the U-Net's configuration has no sample_size; give --resolution")
    side: int = config.sample_size
    return side


def load_scheduler(args: DiffusionModelArguments) -> DDPMScheduler:
    """Returns the noise schedule that the pipeline was trained with; `prediction_type` of `args` overrides its own."""
    from diffusers import DDPMScheduler

    scheduler = load_part(DDPMScheduler, args, "scheduler")
    if args.prediction_type is not None:
        scheduler.register_to_config(prediction_type=args.prediction_type)
    return scheduler


def family_of(args: TransformerArguments) -> Family:
    """Returns the family of the pipeline."""
    name = _pipeline_class_name(args)
    if not isinstance(name, str) or name not in FAMILIES:
        known = ", ".join(f"{family.name} ({pipeline})" for pipeline, family in FAMILIES.items())
        raise UserError(f"{pipeline_flag(args)}: its pipeline is {name}; of transformers are supported {known}")
    return FAMILIES[name]


def transformer_config(args: TransformerArguments, family: Family) -> Any:
    """Returns the transformer's configuration, before any weights are read."""
    component = family.part.component
    return _load_config(family.part.model_class, args, component, f"no usable {component}")


def checked_resolution(asked: int | None, config: Any, encoders: TransformerEncoders) -> int:
    """Returns the side of the images in pixels: `asked`, else the one that the transformer was made for."""
    side, token = config.get("sample_size"), encoders.token
    own = side * encoders.vae_scale_factor if isinstance(side, int) else _DEFAULT_RESOLUTION
    resolution: int = asked or own
    if resolution % token:
        below = max(token, resolution // token * token)
        raise UserError(
            f"--resolution {resolution}: a token of {encoders.family.name} holds {token} x {token} pixels, so it must "
            f"be a multiple of {token}; take {below} or {below + token}"
        )
    return resolution


def load_transformer(args: TransformerArguments, part: TrainedPart, dtype: torch.dtype) -> Any:
    """Returns the transformer: float32 if all weights are trained, `dtype` under adapters, NF4 with `load_in_4bit`."""
    options: dict[str, Any] = dtype_argument(dtype if args.adapts else torch.float32)
    if args.load_in_4bit:
        from diffusers import BitsAndBytesConfig

        options["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
        )
    return load_part(part.model_class, args, part.component, variant=args.variant, **options)


def load_times(args: TransformerArguments) -> FlowMatchEulerDiscreteScheduler:
    """Returns the schedule of times that the pipeline was trained on, whatever sampler it draws with."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return load_part(FlowMatchEulerDiscreteScheduler, args, "scheduler")
