"""The images in a vision-language model's batch: what the model's processor returns for blank images.

The processor is transformers' own class, with the settings that are published with the model, or else with those of
its class and the model's configuration. It runs offline, so its tokenizer is a stand-in that only knows the special
tokens around images.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.training_spec import TrainingSpec

from .workload import Batch

_SPECIAL_TOKENS = (
    "image", "video", "boi", "eoi", "image_start", "image_end", "start_image", "end_image", "vision_start",
    "vision_end", "image_break", "image_newline", "image_boundary", "context_image", "image_wrapper", "fake_image",
    "global_image",
)  # fmt: skip
_TEXT_INPUTS = {"attention_mask", "labels"}  # batches have them only if their rows need them
_TOWERS_WITH_PROCESSOR = {"pixtral"}  # vision towers whose own processor is used in any model
_WITHOUT_CLASS_TOKEN = "default"  # LLaVA's vision_feature_select_strategy that drops the tower's class token


@dataclass(frozen=True)
class RowImages:
    """The images of one row, as the processor returns them.

    Attributes:
        inputs: the model's other arguments for one row.
        ids: (1, tokens), the image tokens and those around them, with one token of text after each image.
        per_token: the names of `inputs` that have one value per token.
        image_tokens: number of tokens that are replaced by image features.
    """

    inputs: Batch
    ids: torch.Tensor
    per_token: frozenset[str]
    image_tokens: int

    @property
    def length(self) -> int:
        """Number of tokens that the images take in a row."""
        return self.ids.shape[1]

    def put_into(self, batch: Batch) -> None:
        """Puts the images in front of each row of a batch of text."""
        samples, tokens = batch["input_ids"].shape
        batch["input_ids"][:, : self.length] = self.ids
        for name, value in self.inputs.items():
            if name in self.per_token:  # all text tokens are like the last one, which is text
                last = value[:, -1:].repeat(1, tokens - self.length, *[1] * (value.ndim - 2))
                value = torch.cat([value, last], 1)
            batch[name] = value.repeat(samples, *[1] * (value.ndim - 1))


def images_of_row(model: Any, published: Mapping[str, Any], spec: TrainingSpec) -> RowImages:
    """Returns `spec.data.images` blank images of `spec.data.image_size` (width, height) as inputs of `model`.

    Args:
        model: may be on the meta device.
        published: settings of the model's processor; {} if there are none.

    Raises:
        UserError: the model takes no images in its text, or its processor cannot be made here.
    """
    from PIL import Image

    config, count = model.config, spec.data.images
    name, arguments = type(model).__name__, set(inspect.signature(model.forward).parameters)
    if not {"input_ids", "pixel_values"} <= arguments:
        raise UserError(f"{count} images: {name} takes no images among its text")
    try:
        processor = _processor(config, published)
        choose_size(processor.image_processor, spec.data.max_pixels, spec.data.longest_side)
        images = [Image.new("RGB", spec.data.image_size)] * count
        text = f"{processor.image_token} <text>" * count  # models look for the end of an image
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # libraries warn about each other
            made = dict(processor(text=[text], images=[images], return_tensors="pt"))
    except UserError:
        raise
    except ImportError as error:
        needs = one_line(error).partition(" but it was not found")[0]
        raise UserError(f"{count} images: {needs}: install it, or leave the images out") from error
    except Exception as error:
        reason = one_line(error, 160)
        raise UserError(f"{count} images: no processor for {name} can be made here: {reason}") from error
    ids = made.pop("input_ids")
    of_images = ids == ids.mode().values[:, None]  # most tokens are image tokens
    inputs = {name: value for name, value in made.items() if name in arguments - _TEXT_INPUTS}
    per_token = frozenset(name for name, value in inputs.items() if value.ndim > 1 and value.shape[1] == ids.shape[1])
    image_token = getattr(config, "image_token_id", None)
    ids = torch.where(of_images, config.image_token_index if image_token is None else image_token, 0)
    return RowImages(inputs, ids, per_token, int(of_images.sum()))


def choose_size(images: Any, max_pixels: int | None, longest_side: int | None) -> None:
    """Sets the largest size of an image processor's images; None or 0 keeps it.

    Raises:
        UserError: the processor's size cannot be chosen in this way.
    """
    kind, size = type(images).__name__, dict(images.size or {})
    arguments = getattr(images, "valid_kwargs", type(images)).__annotations__
    by_pixels = "max_pixels" in arguments  # its longest_edge is a number of pixels
    current = ", ".join(f"{name} {value}" for name, value in size.items() if value) or "no size of their own"
    if max_pixels:
        if not by_pixels:
            said = f"max pixels {max_pixels}: {kind} has no such budget, its images have {current}"
            raise UserError(said, max_pixels=None)
        least = size.get("shortest_edge") or 0
        if max_pixels < least:
            raise UserError(
                f"max pixels {max_pixels}: {kind} makes no image of less than {least} pixels", max_pixels=None
            )
        images.size = type(images.size)(**{**size, "longest_edge": max_pixels})
    if longest_side:
        if by_pixels or not size.get("longest_edge"):
            have = "a number of pixels in all, max pixels" if by_pixels else current
            raise UserError(f"longest side {longest_side}: {kind} does not go by it, its images have {have}")
        images.size = type(images.size)(**{**size, "longest_edge": longest_side})


def _processor(config: Any, published: Mapping[str, Any]) -> Any:
    """Returns the model's processor with the stand-in tokenizer, without parts for videos and sound."""
    processor, images = _classes(config, published)
    parameters = inspect.signature(processor.__init__).parameters
    image_settings = {**_image_settings(config, images), **published, **published.get("image_processor", {})}
    absent = dict.fromkeys(("video_processor", "feature_extractor"))  # they need other libraries
    settings = {**absent, **_text_settings(config), **published}
    settings = {name: value for name, value in settings.items() if name in parameters and name != "image_processor"}
    any_class = lambda processor, name, part: type(part)  # noqa: E731  in place of transformers' check of parts
    own_tokens = [
        parameter.default
        for name, parameter in parameters.items()
        if name.endswith("_token") and isinstance(parameter.default, str)
    ]
    module = inspect.getmodule(processor.__init__)
    with (
        patch.object(module, "num2words", str, create=True),  # SmolVLM writes a video's frame number in words
        patch.object(processor, "check_argument_for_proper_class", any_class),
    ):
        return processor(image_processor=images(**image_settings), tokenizer=_tokenizer(own_tokens), **settings)


def _classes(config: Any, published: Mapping[str, Any]) -> tuple[Any, Any]:
    """Returns the classes of the processor and of its image processor, the one based on Pillow if there is one."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    tower = getattr(config.vision_config, "model_type", "")
    kind = tower if tower in _TOWERS_WITH_PROCESSOR else config.model_type
    both = {**published, **published.get("image_processor", {})}
    named = str(both.get("image_processor_type") or "").removesuffix("Fast")
    images = next(
        (names for names in IMAGE_PROCESSOR_MAPPING_NAMES.values() if named in names.values()),
        IMAGE_PROCESSOR_MAPPING_NAMES[kind],
    )
    processor = both.get("processor_class") or PROCESSOR_MAPPING_NAMES[kind]
    return getattr(transformers, processor), getattr(transformers, images.get("pil") or images["torchvision"])


def _image_settings(config: Any, images: Any) -> dict[str, Any]:
    """Returns the settings of the image processor class `images` that follow from the model's configuration."""
    tower = config.vision_config
    found = {name: getattr(tower, name, None) for name in ("patch_size", "temporal_patch_size")}
    found["merge_size"] = getattr(tower, "spatial_merge_size", None)
    found["image_grid_pinpoints"] = getattr(config, "image_grid_pinpoints", None)
    side, edges = getattr(tower, "image_size", None), set(images.size or {})
    side = side[0] if isinstance(side, (list, tuple)) else side
    tile = getattr(images, "max_image_size", None)  # images are cut into tiles of this size
    if isinstance(side, int) and tile:
        longest = images.size["longest_edge"] // tile["longest_edge"] * side
        found |= {"size": {"longest_edge": longest}, "max_image_size": {"longest_edge": side}}
    elif isinstance(side, int) and edges and edges != {"shortest_edge", "longest_edge"}:
        found |= {"size": dict.fromkeys(edges, side), "crop_size": {"height": side, "width": side}}
    return {name: value for name, value in found.items() if value is not None}


def _text_settings(config: Any) -> dict[str, Any]:
    """Returns the settings of a processor that follow from the model's configuration: how many tokens an image has."""
    tower, strategy = config.vision_config, getattr(config, "vision_feature_select_strategy", None)
    found: dict[str, Any] = {
        "patch_size": getattr(tower, "patch_size", None),
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(strategy == _WITHOUT_CLASS_TOKEN),
        "image_seq_length": getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None),
    }
    side, patch_side = getattr(tower, "image_size", None), found["patch_size"]
    if isinstance(side, int) and isinstance(patch_side, int):
        found |= {"num_image_tokens": (side // patch_side) ** 2, "img_size": side}
        found["downsample_factor"] = getattr(config, "downsample_factor", None)
    if getattr(config, "perceiver_config", None):
        found["image_seq_len"] = config.perceiver_config.resampler_n_latents
    if getattr(config, "scale_factor", None):
        found["image_seq_len"] = (tower.image_size // tower.patch_size // config.scale_factor) ** 2
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(own_tokens: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {f"{name}_token": f"<{name}>" for name in _SPECIAL_TOKENS}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        extra_special_tokens=special,
    )  # fmt: skip
    tokenizer.add_tokens(own_tokens, special_tokens=True)
    return tokenizer
