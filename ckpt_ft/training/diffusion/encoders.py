"""The frozen parts of a Stable Diffusion pipeline: VAE, tokenizers and text encoders, loaded part by part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.workloads.model_config import check_sizes
from ckpt_ft.workloads.pipeline_parts import IDS, TextAndUNet, encoded_text, inpaints
from ckpt_ft.workloads.sample_sizes import Size

from .arguments import DiffusionModelArguments
from .inpainting import MaskedImages, encode_masked
from .latents import FramedImages
from .parts import given, load_part, load_vae, pipeline_index
from .sampling import Autocast
from .text_encoders import load_text_encoders, load_tokenizers

if TYPE_CHECKING:
    from diffusers import DDPMScheduler, UNet2DConditionModel
    from PIL import Image


class Tokenize:
    """Captions into `input_ids` (and `input_ids_2` of the second tokenizer), padded to full length.

    Apart from the encoders, so that processes that load data hold no models.
    """

    def __init__(self, tokenizers: list[Any]) -> None:
        self.tokenizers = tokenizers

    def __call__(self, caption: str | list[str]) -> dict[str, Tensor]:
        """Tensors (length) for one caption, (B, length) for a list."""
        ids = {}
        for name, tokenizer in zip(IDS, self.tokenizers, strict=False):
            length = tokenizer.model_max_length
            tokens = tokenizer(caption, padding="max_length", max_length=length, truncation=True)
            ids[name] = torch.tensor(tokens.input_ids)
        return ids


class Encoders:
    """VAE, tokenizers and text encoders of a pipeline: one text encoder for SD 1.x and 2.x, two for SDXL.

    The VAE stays in float32, since SDXL's own overflows in half precision; the text encoders take `dtype`. Those that
    are trained are not among them: then a prompt's tokens stand for what it is encoded to.

    Attributes:
        rows: images as they are read; masked ones for inpainting.
        absent: components that drawing from prompts already encoded does without.
        identity: what prompts' encodings depend on beside weights and tokenizers.

    Raises:
        UserError: a part cannot be loaded.
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

        self.rows = rows
        self.device, self.identity = device, str(dtype)
        self.absent = [
            "text_encoder",
            "tokenizer",
            *(("text_encoder_2", "tokenizer_2") if sdxl else ("safety_checker",)),
        ]
        self.tokenize = Tokenize(load_tokenizers(args, sdxl))
        self.text_encoders: list[Any] = []
        if not args.train_text_encoder:
            self.text_encoders = load_text_encoders(args, self.tokenize.tokenizers, dtype)
        if args.pretrained_vae_model_name_or_path is None:
            self.vae = load_part(AutoencoderKL, args, "vae", variant=args.variant)
        else:
            self.vae = load_vae(args.pretrained_vae_model_name_or_path)
        for module in self.modules:
            module.requires_grad_(False).eval().to(device)

    @property
    def modules(self) -> list[nn.Module]:
        return [self.vae, *self.text_encoders]

    @property
    def vae_scale_factor(self) -> int:
        """Pixels of an image's side for one of a latent."""
        factor: int = 2 ** (len(self.vae.config.block_out_channels) - 1)
        return factor

    @property
    def token(self) -> int:
        """A latent's pixels; images are in steps of eight whatever the VAE."""
        return max(8, self.vae_scale_factor)

    def blank(self, images: int, size: Size) -> dict[str, Tensor]:
        """What `encode` is given of so many black images of `size` (height, width) without captions."""
        masks = {"mask": torch.ones(images, 1, *size)} if self.rows is MaskedImages else {}
        ids, time_ids = self.tokenize([""] * images), torch.zeros(images, 6, dtype=torch.long)
        return {"pixels": torch.zeros(images, 3, *size), "time_ids": time_ids, **masks, **ids}

    @torch.no_grad()
    def encode(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the U-Net needs of `pixels`, `time_ids` and `input_ids*`; for inpainting of `mask` as well.

        Returns:
            `moments` (B, 2C, h, w) of the latents, `time_ids` (B, 6), and what `encode_text` (and `encode_masked`)
            returns.
        """
        pixels = batch["pixels"].to(self.device)
        moments = self.vae.encode(pixels).latent_dist.parameters
        encoded = {"moments": moments, "time_ids": batch["time_ids"].to(self.device), **self.encode_text(batch)}
        if "mask" in batch:
            encoded |= encode_masked(self.vae, pixels, batch["mask"].to(self.device))
        return encoded

    @torch.no_grad()
    def encode_text(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """What a model is shown of a prompt: see `encoded_text`; its tokens, where it encodes them itself."""
        on_device = {name: value.to(self.device) for name, value in ids.items() if name in IDS}
        return encoded_text(self.text_encoders, on_device) if self.text_encoders else on_device

    def encode_prompts(self, prompts: list[str]) -> dict[str, Tensor]:
        """`encode_text` of captions."""
        return self.encode_text(self.tokenize(prompts))


def load_unet(args: DiffusionModelArguments) -> UNet2DConditionModel:
    """The U-Net in float32.

    Raises:
        UserError: the pipeline has none, or one that takes something other than latents, text and SDXL's time ids.
    """
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


def load_denoiser(args: DiffusionModelArguments, dtype: torch.dtype) -> Any:
    """The U-Net in float32; with `train_text_encoder` as one model with its text encoders, those in `dtype`.

    Raises:
        UserError: a part cannot be loaded.
    """
    unet = load_unet(args)
    if not args.train_text_encoder:
        return unet
    tokenizers = load_tokenizers(args, unet.config.addition_embed_type == "text_time")
    return TextAndUNet(unet, load_text_encoders(args, tokenizers, dtype))


def unet_config(args: DiffusionModelArguments) -> Any:
    """The U-Net's configuration alone, with defaults for what its file leaves out, before any weights are read.

    Raises:
        UserError: the pipeline has no U-Net, brings code of its own, or says of no class what it is.
    """
    from diffusers import UNet2DConditionModel

    source: dict[str, Any] = {"revision": args.revision}
    with library_reads(f"{given(args)}: no U-Net in it (unet/config.json); give an SD 1.x, 2.x or SDXL pipeline"):
        config = UNet2DConditionModel.load_config(args.pretrained_model_name_or_path, subfolder="unet", **source)
        check_sizes(f"{given(args)}: unet", config)
        with torch.device("meta"):
            found = UNet2DConditionModel.from_config(config).config
    if not isinstance(pipeline_index(args)["_class_name"], str):  # it is needed when the result is saved
        raise UserError(f"{given(args)}: its pipeline is code of its own; SD 1.x, 2.x and SDXL are supported")
    return found


def own_side(config: Any) -> int:
    """The latent side that a U-Net was made for, by its configuration.

    Raises:
        UserError: it names none.
    """
    if not isinstance(config.sample_size, int):
        raise UserError("the U-Net's configuration has no sample_size; give --resolution")
    side: int = config.sample_size
    return side


def load_scheduler(args: DiffusionModelArguments) -> DDPMScheduler:
    """The noise schedule that the pipeline was trained with; `prediction_type` of `args` beats its own."""
    from diffusers import DDPMScheduler

    scheduler = load_part(DDPMScheduler, args, "scheduler")
    if args.prediction_type is not None:
        scheduler.register_to_config(prediction_type=args.prediction_type)
    return scheduler


def draw_latents(
    pipeline: Any, autocast: Autocast, guidance: float | None, arguments: dict[str, Any]
) -> list[Image.Image]:
    """What the pipeline draws, decoded outside of autocast: SDXL's VAE overflows in half precision."""
    scale = {} if guidance is None else {"guidance_scale": guidance}
    with autocast():
        latents = pipeline(**scale, output_type="latent", **arguments).images
    vae = pipeline.vae.float()
    parts = [vae.decode(part.float() / vae.config.scaling_factor).sample for part in latents.split(4)]
    images: list[Image.Image] = pipeline.image_processor.postprocess(torch.cat(parts).cpu(), output_type="pil")
    return images
