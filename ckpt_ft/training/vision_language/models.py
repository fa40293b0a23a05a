"""A vision-language model and its processor from flags: which towers are trained, how large an image may be."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.training.models import load_pretrained, with_adapters
from ckpt_ft.workloads.adapters import without_adapters
from ckpt_ft.workloads.images import choose_size
from ckpt_ft.workloads.packing import ImagePositions, check_packing, in_one_sequence
from ckpt_ft.workloads.trained_towers import TrainedTowers

from .arguments import VisionLanguageArguments, VisionLanguageModelArguments
from .encode import KINDS, PixelCollator
from .videos import without_videos

if TYPE_CHECKING:
    from datasets import Dataset
    from transformers import PreTrainedModel, ProcessorMixin


def load_processor(args: VisionLanguageModelArguments, data: VisionLanguageArguments) -> ProcessorMixin:
    """The model's processor, with the size of images that the flags ask for.

    Raises:
        UserError: there is none that can be read from here, it has no images or no chat template, or its images have a
            size that cannot be chosen so.
    """
    from transformers import AutoProcessor

    with library_reads(f"model {args.model_name_or_path}: no processor can be loaded"), without_videos():
        processor = AutoProcessor.from_pretrained(args.model_name_or_path, **args.source)
    if not hasattr(processor, "image_processor"):
        raise UserError(
            f"model {args.model_name_or_path}: its processor takes no images; recipes/llm.py trains on text"
        )
    tokenizer = processor.tokenizer
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    if processor.chat_template is None:
        processor.chat_template = tokenizer.chat_template
    choose_size(processor.image_processor, data.max_pixels, data.longest_side)
    return processor


def patch_of(config: Mapping[str, Any]) -> int:
    """Pixels of a patch's shorter side, by the configuration of a model that sees; 1 where it does not say."""
    patch = (config.get("vision_config") or {}).get("patch_size") or 1
    return min(patch) if isinstance(patch, (list, tuple)) else int(patch)


def collator_of(model: Any, pad_token_id: int, packing: bool = False) -> PixelCollator:
    """What makes batches of encoded rows for `model`, with the marks of image tokens that its forward takes.

    Raises:
        UserError: the rows are packed, and the model might not keep them apart.
    """
    model = without_adapters(model)
    forward = inspect.signature(model.forward)
    kinds = tuple(name for name in KINDS if name in forward.parameters)
    image_token = getattr(model.config, "image_token_index", -1)
    if not packing:
        return PixelCollator(pad_token_id, kinds, image_token=image_token)
    check_packing(model)
    return PixelCollator(pad_token_id, kinds, ImagePositions.of(model), in_one_sequence(model))


def check_seen(rows: Dataset, train_towers: str) -> None:
    """Raises UserError where the vision tower alone is trained, and a batch might have nothing that it saw."""
    blind = sum(not count for count in rows.with_format(None)["pixels"])
    if train_towers == "vision" and blind:
        raise UserError(
            f"--train_towers vision: {blind} of {len(rows)} rows have no image, of which that tower learns nothing; "
            "leave them out, or train both towers"
        )


def load_model(args: VisionLanguageModelArguments) -> PreTrainedModel:
    """The model in train mode. Towers that are not trained are frozen; with adapters all weights are frozen, and the
    trained towers have them.

    Raises:
        UserError: it cannot be read from here, has no such tower, or nothing in it that could get an adapter.
    """
    from transformers import AutoModelForImageTextToText

    model = load_pretrained(args, AutoModelForImageTextToText)
    model.config.get_text_config().use_cache = False  # some ask this one, and a Trainer sets that of the whole
    trained = TrainedTowers(model, args.train_towers)
    if args.adapts:
        by = f"--peft_config {args.peft_config}:" if args.peft_config else "--lora_target_modules"
        return with_adapters(model, args, targets=lambda asked: trained.adapted_layers(asked, by))
    trained.freeze_others()
    return model
