"""The frozen parts of a Stable Diffusion pipeline: VAE, tokenizers and text encoders, loaded part by part."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.workloads.model_config import check_sizes

from .arguments import DiffusionModelArguments
from .parts import check_words, given, load_part, load_vae, pipeline_index

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
        for name, tokenizer in zip(("input_ids", "input_ids_2"), self.tokenizers, strict=False):
            length = tokenizer.model_max_length
            tokens = tokenizer(caption, padding="max_length", max_length=length, truncation=True)
            ids[name] = torch.tensor(tokens.input_ids)
        return ids


class Encoders:
    """VAE, tokenizers and text encoders of a pipeline: one text encoder for SD 1.x and 2.x, two for SDXL.

    The VAE stays in float32, since SDXL's own overflows in half precision; the text encoders take `dtype`.

    Attributes:
        absent: components that drawing from prompts already encoded does without.
        identity: what prompts' encodings depend on beside weights and tokenizers.

    Raises:
        UserError: a part cannot be loaded.
    """

    def __init__(self, args: DiffusionModelArguments, sdxl: bool, device: torch.device, dtype: torch.dtype) -> None:
        from diffusers import AutoencoderKL
        from transformers import CLIPTextModel, CLIPTextModelWithProjection, CLIPTokenizer

        self.sdxl, self.device, self.identity = sdxl, device, str(dtype)
        self.absent = [
            "text_encoder",
            "tokenizer",
            *(("text_encoder_2", "tokenizer_2") if sdxl else ("safety_checker",)),
        ]
        classes: list[tuple[str, type[Any]]] = [("", CLIPTextModel)]
        if sdxl:
            classes.append(("_2", CLIPTextModelWithProjection))
        self.tokenize = Tokenize([load_part(CLIPTokenizer, args, f"tokenizer{suffix}") for suffix, _ in classes])
        self.text_encoders = [
            load_part(cls, args, f"text_encoder{suffix}", variant=args.variant, dtype=dtype) for suffix, cls in classes
        ]
        for tokenizer, encoder in zip(self.tokenize.tokenizers, self.text_encoders, strict=True):
            _check_fit(given(args), tokenizer, encoder)
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

    @torch.no_grad()
    def encode(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """What the U-Net needs of `pixels`, `time_ids` and `input_ids*`.

        Returns:
            `moments` (B, 2C, h, w) of the latents, `time_ids` (B, 6), and what `encode_text` returns.
        """
        moments = self.vae.encode(batch["pixels"].to(self.device)).latent_dist.parameters
        return {"moments": moments, "time_ids": batch["time_ids"], **self.encode_text(batch)}

    @torch.no_grad()
    def encode_text(self, ids: dict[str, Tensor]) -> dict[str, Tensor]:
        """`prompt_embeds` (B, length, width); for SDXL of both encoders, plus `pooled_prompt_embeds` (B, width)."""
        if not self.sdxl:
            return {"prompt_embeds": self.text_encoders[0](ids["input_ids"].to(self.device))[0]}
        outputs = [
            encoder(ids[name].to(self.device), output_hidden_states=True)
            for encoder, name in zip(self.text_encoders, ("input_ids", "input_ids_2"), strict=True)
        ]
        # SDXL was trained on the last layer but one, without the final norm, and the second encoder's pooled output.
        embeds = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
        return {"prompt_embeds": embeds, "pooled_prompt_embeds": outputs[1].text_embeds}

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
    if unet.config.in_channels != unet.config.out_channels:
        raise UserError(
            f"{args.pretrained_model_name_or_path}: its U-Net takes {unet.config.in_channels} channels and returns "
            f"{unet.config.out_channels}, as for inpainting; give a text-to-image pipeline"
        )
    return unet


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
    pipeline: Any, autocast: Callable[[], AbstractContextManager[Any]], guidance: float, arguments: dict[str, Any]
) -> list[Image.Image]:
    """What the pipeline draws, decoded outside of autocast: SDXL's VAE overflows in half precision."""
    with autocast():
        latents = pipeline(guidance_scale=guidance, output_type="latent", **arguments).images
    vae = pipeline.vae
    parts = [vae.decode(part.float() / vae.config.scaling_factor).sample for part in latents.split(4)]
    images: list[Image.Image] = pipeline.image_processor.postprocess(torch.cat(parts).cpu(), output_type="pil")
    return images


def _check_fit(source: str, tokenizer: Any, encoder: Any) -> None:
    """Raises UserError where `tokenizer` is not the one of `encoder`, or knows no word."""
    positions = encoder.config.max_position_embeddings
    if tokenizer.model_max_length > positions:
        raise UserError(
            f"{source}: its tokenizer makes {tokenizer.model_max_length} tokens, its text encoder takes {positions}; "
            "set model_max_length in tokenizer_config.json"
        )
    check_words(source, tokenizer)
