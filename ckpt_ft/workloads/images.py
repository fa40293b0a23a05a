"""Images in a model's rows of text: what its own processor makes of blank ones, and how many tokens stand for them.

The processor is transformers' own, with the settings of the model's directory, of what comes with the package, or else
of its class and the model's configuration. Its tokenizer is a stand-in that has a word for each place of an image.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.spec.training_spec import TrainingSpec

from .workload import Batch

_PLACES = (
    "image", "video", "boi", "eoi", "image_start", "image_end", "start_image", "end_image", "vision_start",
    "vision_end", "image_break", "image_newline", "image_boundary", "context_image", "image_wrapper", "fake_image",
    "global_image",
)  # fmt: skip
_OF_TEXT = {"attention_mask", "labels"}  # which a batch has where its rows need them
_OF_TOWERS = {"pixtral"}  # types of vision towers whose own processor is taken, whatever model they are in
_WITHOUT_CLASS = "default"  # LLaVA's word: of the tower's tokens those of patches alone


@dataclass(frozen=True)
class Pictured:
    """A row's images as the processor gives them.

    inputs: what the model takes besides ids, of one row; along a row's tokens where `along` names it.
    ids: (1, tokens), those that stand for images and for where one begins and ends, a token of text behind each.
    image_tokens: how many of them the images' features take the place of.
    """

    inputs: Batch
    ids: torch.Tensor
    along: frozenset[str]
    image_tokens: int

    @property
    def length(self) -> int:
        """Tokens that the images take of a row, with what stands around them."""
        return self.ids.shape[1]

    def put_into(self, batch: Batch) -> None:
        """Give a batch of text these images, in front of each row."""
        samples, tokens = batch["input_ids"].shape
        batch["input_ids"][:, : self.length] = self.ids
        for name, value in self.inputs.items():
            if name in self.along:  # the text goes on as its first token does
                last = value[:, -1:].repeat(1, tokens - self.length, *[1] * (value.ndim - 2))
                value = torch.cat([value, last], 1)
            batch[name] = value.repeat(samples, *[1] * (value.ndim - 1))


def pictured(model: Any, published: Mapping[str, Any], spec: TrainingSpec) -> Pictured:
    """What `spec.data.images` blank images of `spec.data.image_size` are to `model`, on meta.

    published: the settings of the model's processor, {} where it has none.

    Raises:
        UserError: the model takes no images among its text, or its processor cannot be made here.
    """
    from PIL import Image

    config = model.config
    called, taken = type(model).__name__, set(inspect.signature(model.forward).parameters)
    if not {"input_ids", "pixel_values"} <= taken:
        raise UserError(f"{spec.data.images} images: {called} takes no images among its text")
    wide, high = spec.data.image_size
    try:
        processor = _processor(config, published)
        choose_size(processor.image_processor, spec.data.max_pixels, spec.data.longest_side)
        images = [Image.new("RGB", (wide, high))] * spec.data.images
        text = f"{processor.image_token} <text>" * spec.data.images  # models look for where one ends
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of libraries about each other
            made = dict(processor(text=[text], images=[images], return_tensors="pt"))
    except UserError:
        raise
    except ImportError as error:
        needs = one_line(error).partition(" but it was not found")[0]
        raise UserError(f"{spec.data.images} images: {needs}: install it, or leave the images out") from error
    except Exception as error:
        reason = one_line(error, 160)
        raise UserError(f"{spec.data.images} images: no processor for {called} can be made here: {reason}") from error
    ids = made.pop("input_ids")
    stands = ids.mode().values  # of all tokens there is most of the one that stands for the images
    placed = ids == stands[:, None]
    inputs = {name: value for name, value in made.items() if name in taken - _OF_TEXT}
    along = frozenset(name for name, value in inputs.items() if value.ndim > 1 and value.shape[1] == ids.shape[1])
    image_token = getattr(config, "image_token_id", None)
    ids = torch.where(placed, config.image_token_index if image_token is None else image_token, 0)
    return Pictured(inputs, ids, along, int(placed.sum()))


def choose_size(images: Any, max_pixels: int | None, longest_side: int | None) -> None:
    """Set the pixel budget of an image processor, under the name that it has there; None or 0 leaves it.

    Raises:
        UserError: its images have a size that cannot be chosen so.
    """
    kind, size = type(images).__name__, dict(images.size or {})
    known = getattr(images, "valid_kwargs", type(images)).__annotations__
    counts = "max_pixels" in known  # its edges are pixels in all
    if max_pixels:
        if not counts:
            raise UserError(f"max pixels {max_pixels}: {kind} has no such budget, its images have {_said(size)}")
        least = size.get("shortest_edge") or 0
        if max_pixels < least:
            raise UserError(f"max pixels {max_pixels}: {kind} makes no image of less than {least} pixels")
        images.size = type(images.size)(**{**size, "longest_edge": max_pixels})
    if longest_side:
        if counts or not size.get("longest_edge"):
            raise UserError(
                f"longest side {longest_side}: {kind} does not go by it, its images have "
                f"{'a number of pixels in all, max pixels' if counts else _said(size)}"
            )
        images.size = type(images.size)(**{**size, "longest_edge": longest_side})


def _said(size: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items() if value) or "no size of their own"


def _processor(config: Any, published: Mapping[str, Any]) -> Any:
    """The processor of transformers that is published with the model, or else of its type, beside a tokenizer that
    knows the places of images alone."""
    kind, images = _classes(config, published)
    taken = set(inspect.signature(kind.__init__).parameters)
    of_images = {**_of_images(config, images), **published, **published.get("image_processor", {})}
    known = {**_of_text(config), **published}
    absent = dict.fromkeys(("video_processor", "feature_extractor"))  # what needs libraries that are not asked for
    rest = {name: value for name, value in {**absent, **known}.items() if name in taken - {"image_processor"}}
    unchecked = type(
        kind.__name__, (kind,), {"check_argument_for_proper_class": lambda self, name, value: type(value)}
    )
    with _without_videos(kind):
        return unchecked(image_processor=images(**of_images), tokenizer=_tokenizer(_own_tokens(kind)), **rest)


def _own_tokens(kind: Any) -> list[str]:
    """Tokens that a processor of this class writes by a name of its own."""
    given = inspect.signature(kind.__init__).parameters.items()
    return [word.default for name, word in given if name.endswith("_token") and isinstance(word.default, str)]


def _classes(config: Any, published: Mapping[str, Any]) -> tuple[Any, Any]:
    """The classes of the processor and of its images, which go through Pillow where they can."""
    import transformers
    from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    tower = getattr(config.vision_config, "model_type", "")
    kind = tower if tower in _OF_TOWERS else config.model_type
    both = {**published, **published.get("image_processor", {})}
    named = str(both.get("image_processor_type") or "").removesuffix("Fast")
    of_images = next(
        (names for names in IMAGE_PROCESSOR_MAPPING_NAMES.values() if named in names.values()),
        IMAGE_PROCESSOR_MAPPING_NAMES[kind],
    )
    of_both = both.get("processor_class") or PROCESSOR_MAPPING_NAMES[kind]
    return getattr(transformers, of_both), getattr(transformers, of_images.get("pil") or of_images["torchvision"])


@contextmanager
def _without_videos(kind: Any) -> Iterator[None]:
    """SmolVLM's writes the number of a video's frames in words, by a package that it asks for even where none is."""
    module = sys.modules.get(kind.__module__)
    if getattr(module, "num2words", True) is not None:
        yield
        return
    with patch.object(module, "num2words", str):
        yield


def _of_images(config: Any, images: Any) -> dict[str, Any]:
    """Settings of an image processor of the class `images` that follow from the model's configuration."""
    tower = config.vision_config
    found = {name: getattr(tower, name, None) for name in ("patch_size", "temporal_patch_size")}
    found["merge_size"] = getattr(tower, "spatial_merge_size", None)
    found["image_grid_pinpoints"] = getattr(config, "image_grid_pinpoints", None)
    side, sides = getattr(tower, "image_size", None), set(images.size or {})
    side = side[0] if isinstance(side, (list, tuple)) else side
    tile = getattr(images, "max_image_size", None)  # where images are cut in tiles, so many of them along a side
    if isinstance(side, int) and tile:
        most = images.size["longest_edge"] // tile["longest_edge"] * side
        found |= {"size": {"longest_edge": most}, "max_image_size": {"longest_edge": side}}
    elif isinstance(side, int) and sides and sides != {"shortest_edge", "longest_edge"}:
        found |= {"size": dict.fromkeys(sides, side), "crop_size": {"height": side, "width": side}}
    return {name: value for name, value in found.items() if value is not None}


def _of_text(config: Any) -> dict[str, Any]:
    """Settings of a processor that follow from the model's configuration: of how many tokens an image is."""
    tower, strategy = config.vision_config, getattr(config, "vision_feature_select_strategy", None)
    found: dict[str, Any] = {
        "patch_size": getattr(tower, "patch_size", None),
        "vision_feature_select_strategy": strategy,
        "num_additional_image_tokens": int(strategy == _WITHOUT_CLASS),
        "image_seq_length": getattr(config, "mm_tokens_per_image", None) or getattr(config, "image_seq_length", None),
    }
    side, patch = getattr(tower, "image_size", None), found["patch_size"]
    if isinstance(side, int) and isinstance(patch, int):
        found |= {"num_image_tokens": (side // patch) ** 2, "img_size": side}
        found["downsample_factor"] = getattr(config, "downsample_factor", None)
    if getattr(config, "perceiver_config", None):
        found["image_seq_len"] = config.perceiver_config.resampler_n_latents
    if getattr(config, "scale_factor", None):
        found["image_seq_len"] = (tower.image_size // tower.patch_size // config.scale_factor) ** 2
    return {name: value for name, value in found.items() if value is not None}


def _tokenizer(more: list[str]) -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<unk>": 0}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    places = {f"{place}_token": f"<{place}>" for place in _PLACES}
    made = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        extra_special_tokens=places,
    )  # fmt: skip
    made.add_tokens(more, special_tokens=True)
    return made
