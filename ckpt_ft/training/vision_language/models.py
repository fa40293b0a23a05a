"""A vision-language model and its processor from flags: which towers are trained, how large an image may be."""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any

from torch import nn

from ckpt_ft.checkpointing.blocks import find_blocks
from ckpt_ft.checkpointing.towers import Tower, find_towers
from ckpt_ft.errors import UserError
from ckpt_ft.reading import library_reads
from ckpt_ft.training.models import load_pretrained, with_adapters
from ckpt_ft.workloads.adapters import without_adapters

from .arguments import TRAINED, VisionLanguageArguments, VisionLanguageModelArguments
from .encode import KINDS

if TYPE_CHECKING:
    from transformers import PreTrainedModel, ProcessorMixin


def load_processor(args: VisionLanguageModelArguments, data: VisionLanguageArguments) -> ProcessorMixin:
    """The model's processor, with the size of images that the flags ask for.

    Raises:
        UserError: there is none that can be read from here, it has no images or no chat template, or its images have a
            size that cannot be chosen so.
    """
    from transformers import AutoProcessor

    with library_reads(f"model {args.model_name_or_path}: no processor can be loaded"):
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
    _choose_size(processor.image_processor, data)
    return processor


def _choose_size(images: Any, data: VisionLanguageArguments) -> None:
    """Set the pixel budget of an image processor, under the name that it has there."""
    kind, size = type(images).__name__, dict(images.size or {})
    known = getattr(images, "valid_kwargs", type(images)).__annotations__
    counts = "max_pixels" in known  # its edges are pixels in all
    if data.max_pixels is not None:
        if not counts:
            raise UserError(
                f"--max_pixels {data.max_pixels}: {kind} has no such budget, its images have {_said(size)}"
            )
        least = size.get("shortest_edge") or 0
        if data.max_pixels < least:
            raise UserError(f"--max_pixels {data.max_pixels}: {kind} makes no image of less than {least} pixels")
        images.size = type(images.size)(**{**size, "longest_edge": data.max_pixels})
    if data.longest_side is not None:
        if counts or not size.get("longest_edge"):
            raise UserError(
                f"--longest_side {data.longest_side}: {kind} does not go by it, its images have "
                f"{'a number of pixels in all: --max_pixels' if counts else _said(size)}"
            )
        images.size = type(images.size)(**{**size, "longest_edge": data.longest_side})


def _said(size: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in size.items() if value) or "no size of their own"


def patch_of(model: nn.Module) -> int:
    """Pixels of a side of what the vision tower sees as one; 1 where it does not say."""
    patch = getattr(getattr(model.config, "vision_config", None), "patch_size", 1)
    return patch if isinstance(patch, int) else min(patch)


def kinds_of(model: Any) -> tuple[str, ...]:
    """Which marks of image tokens the model's forward takes."""
    forward = inspect.signature(without_adapters(model).forward)
    return tuple(name for name in KINDS if name in forward.parameters)


def load_model(args: VisionLanguageModelArguments) -> PreTrainedModel:
    """The model in train mode. Towers that are not trained are frozen; with adapters all weights are frozen, and the
    trained towers have them.

    Raises:
        UserError: it cannot be read from here, has no such tower, or nothing in it that could get an adapter.
    """
    from transformers import AutoModelForImageTextToText

    model = load_pretrained(args, AutoModelForImageTextToText)
    towers = {tower.name: tower for tower in find_towers(model, find_blocks(model).blocks)}
    wanted = TRAINED[args.train_towers]
    for name in wanted:
        if name not in towers:
            raise UserError(
                f"--train_towers {args.train_towers}: {type(model).__name__} has no {name} tower"
                f"{'; it has ' + ', '.join(towers) if towers else ''}"
            )
    if args.adapts:
        trained, head = [towers[name] for name in wanted], model.get_output_embeddings()
        by = f"--peft_config {args.peft_config}:" if args.peft_config else "--lora_target_modules"
        return with_adapters(model, args, targets=lambda asked: adapted_layers(trained, head, asked, by))
    for name, tower in towers.items():
        if name not in wanted:
            ends = [model.get_input_embeddings(), model.get_output_embeddings()] if name == "language" else []
            for module in [*tower.modules.values(), *(end for end in ends if end is not None)]:
                module.requires_grad_(False)
    return model


def adapted_layers(
    towers: list[Tower], head: nn.Module | None, asked: list[str] | str | None, by: str = "--lora_target_modules"
) -> str:
    """A pattern, as PEFT takes one, of what gets an adapter in `towers`: every linear layer but the head, or what is
    named as `asked` (`by` a flag). Where `asked` is a pattern, that, whatever towers it is of.

    Raises:
        UserError: nothing in them is.
    """
    linear = asked in (None, "all-linear", ["all-linear"])
    if isinstance(asked, str) and not linear:
        return asked
    patterns = []
    for tower in towers:
        inside = [item for root in tower.modules.values() for item in root.named_modules()]
        if linear:
            names = {
                name.rpartition(".")[2] for name, layer in inside if isinstance(layer, nn.Linear) and layer is not head
            }
        else:
            names = {end for end in asked or () if any(f".{name}".endswith(f".{end}") for name, _ in inside)}
        if names:
            roots = "|".join(re.escape(f"{root}.") if root else "" for root in tower.modules)
            patterns.append(rf"(?:{roots})(?:.*\.)?(?:{'|'.join(map(re.escape, sorted(names)))})")
    if not patterns:
        where = " or ".join(tower.name for tower in towers)
        raise UserError(f"{by} {' '.join(asked or ())}: no layer of that name is {where}'s")
    return "|".join(patterns)
