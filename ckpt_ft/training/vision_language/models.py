"""Loads a vision-language model and its processor, and encodes a dataset for the planner with them.

Bad input raises UserError, one line that names the model, the dataset or the flag.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from transformers import ProcessorMixin
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import load_pretrained, with_adapters
from ckpt_ft.training.text.data import load_rows
from ckpt_ft.validation import library_reads
from ckpt_ft.workloads.adapters import TrainedTowers, without_adapters
from ckpt_ft.workloads.batches import ImagePositions, check_packing, in_one_sequence
from ckpt_ft.workloads.images import choose_size
from ckpt_ft.workloads.model_config import read_config
from ckpt_ft.workloads.sample_sizes import rows_by_length

from .conversations import ImageLoader, VisionLanguageArguments, VisionLanguageModelArguments, load_conversations
from .encode import TOKEN_TYPES, ImageCollator, encode_conversations

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn
    from transformers import PreTrainedModel

    from ckpt_ft.workloads.sample_sizes import Lengths
    from ckpt_ft.workloads.workload import Batch, MakeBatch


def load_processor(args: VisionLanguageModelArguments, data: VisionLanguageArguments) -> ProcessorMixin:
    """Returns the model's processor, set to the image size of the flags."""
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


def load_model(args: VisionLanguageModelArguments, max_length: int = 0) -> PreTrainedModel:
    """Returns the model in train mode, with the other towers frozen; with adapters only the trained towers have them.

    max_length: tokens of the longest sequence, for `--rope_scaling`.
    """
    from transformers import AutoModelForImageTextToText

    model = load_pretrained(args, AutoModelForImageTextToText, max_length)
    model.config.get_text_config().use_cache = False  # some models read this one; a Trainer sets the whole model's
    trained = TrainedTowers(model, args.train_towers)
    if args.adapts:
        by = f"--peft_config {args.peft_config}:" if args.peft_config else "--lora_target_modules"
        return with_adapters(model, args, targets=lambda asked: trained.adapted_layers(asked, by))
    trained.freeze_others()
    return model


def collator_of(model: Any, pad_token_id: int, packing: bool = False) -> ImageCollator:
    """Returns the collator of encoded rows for `model`, with the inputs that its forward takes."""
    model = without_adapters(model)
    forward = inspect.signature(model.forward)
    token_types = tuple(name for name in TOKEN_TYPES if name in forward.parameters)
    image_token = getattr(model.config, "image_token_index", -1)
    if not packing:
        return ImageCollator(pad_token_id, token_types, image_token=image_token)
    check_packing(model)
    return ImageCollator(pad_token_id, token_types, ImagePositions.of(model), in_one_sequence(model))


def check_all_have_images(rows: Dataset, train_towers: str) -> None:
    """Raises UserError if only the vision tower is trained and a row has no image."""
    without = sum(not count for count in rows.with_format(None)["pixels"])
    if train_towers == "vision" and without:
        raise UserError(
            f"--train_towers vision: {without} of {len(rows)} rows have no image, of which that tower learns nothing; "
            "leave them out, or train both towers"
        )


def patch_size(config: Mapping[str, Any]) -> int:
    """Returns the pixels of the shorter side of a vision model's patch; 1 if the configuration does not say."""
    patch = (config.get("vision_config") or {}).get("patch_size") or 1
    return min(patch) if isinstance(patch, (list, tuple)) else int(patch)


@dataclass(frozen=True)
class DatasetRows:
    """A dataset as recipes/vlm.py encodes it, for the planner."""

    encoded: Dataset
    pad_token_id: int

    @property
    def lengths(self) -> Lengths:
        lengths = rows_by_length(self.encoded)[1]
        assert lengths is not None, "encoded rows have tokens"
        return lengths

    @property
    def pixels(self) -> list[int]:
        """The number of values in the images of each row."""
        return list(self.encoded.with_format(None)["pixels"])

    def batches(self, model: nn.Module) -> MakeBatch:
        """Returns a function (samples, length) -> a batch whose longest row has that length (None: the longest)."""
        collate = collator_of(model, self.pad_token_id)
        of_length, lengths = rows_by_length(self.encoded)
        assert lengths is not None, "encoded rows have tokens"

        def make_batch(samples: int, length: int | None) -> Batch:
            return collate(of_length(samples, lengths.longest if length is None else length))

        return make_batch


def rows_with_images(
    dataset: str, model: str, max_length: int, max_pixels: int | None = None, longest_side: int | None = None
) -> DatasetRows | None:
    """Returns the rows of `dataset` as the processor of `model` encodes them; None if they have no images.

    Args:
        model: a vision-language model.
        max_pixels, longest_side: image size; None or 0 for the processor's own.
    """
    smallest = patch_size(read_config(model))
    data = VisionLanguageArguments(
        dataset_name=dataset, max_length=max_length, max_pixels=max_pixels or None, longest_side=longest_side or None
    )
    if not {"images", "image"} & set(load_rows(data, evaluate=False, seed=0)[0].column_names):
        return None
    source = str(Path(model).parent) if Path(model).is_file() else model  # a config file lies beside its processor
    try:
        rows, _, folder = load_conversations(data, evaluate=False, seed=0)
        processor: Any = load_processor(VisionLanguageModelArguments(model_name_or_path=source), data)
        encoded = encode_conversations(rows, processor, ImageLoader(folder, smallest), data)
        return DatasetRows(encoded, processor.tokenizer.pad_token_id)
    except UserError as error:
        raise UserError(f"--dataset {dataset}: {error}") from error


class _VideoSettings(BaseVideoProcessor):
    """Stands in for a video processor without torchvision: keeps its settings, so that they are saved unchanged."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        return dict(self.settings)


@contextmanager
def without_videos() -> Iterator[None]:
    """Lets `AutoProcessor` load a processor of images and videos without torchvision, which only videos need."""
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    if is_torchvision_available():
        yield
        return
    check = ProcessorMixin.check_argument_for_proper_class

    def checked(processor: ProcessorMixin, name: str, part: Any) -> Any:
        return _VideoSettings if isinstance(part, _VideoSettings) else check(processor, name, part)

    with (
        patch.object(AutoVideoProcessor, "from_pretrained", _VideoSettings.from_pretrained),
        patch.object(ProcessorMixin, "check_argument_for_proper_class", checked),
    ):
        yield
