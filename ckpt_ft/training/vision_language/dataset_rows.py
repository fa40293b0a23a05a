"""A dataset of conversations about images as the planner sees it: its own rows, in the worst batch and usual ones."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ckpt_ft.errors import UserError
from ckpt_ft.training.text.data import load_rows
from ckpt_ft.training.trainer_workload import by_length
from ckpt_ft.workloads.model_config import read_config

from .arguments import VisionLanguageArguments, VisionLanguageModelArguments
from .encode import encode_conversations
from .models import collator_of, load_processor, patch_of
from .rows import Pictures, load_conversations

if TYPE_CHECKING:
    from datasets import Dataset
    from torch import nn

    from ckpt_ft.spec.training_spec import TrainingSpec
    from ckpt_ft.workloads.lengths import Lengths
    from ckpt_ft.workloads.workload import Batch, MakeBatch


@dataclass(frozen=True)
class DatasetRows:
    """Rows as recipes/vlm.py encodes them, and the token that pads them."""

    encoded: Dataset
    pad_token_id: int

    @property
    def lengths(self) -> Lengths:
        lengths = by_length(self.encoded)[1]
        assert lengths is not None, "encoded rows have tokens"
        return lengths

    @property
    def pixels(self) -> list[int]:
        """Of each row."""
        return list(self.encoded.with_format(None)["pixels"])

    def batches(self, model: nn.Module) -> MakeBatch:
        """(samples, length) -> a batch of these rows for `model`: the one of that length, and others."""
        collate = collator_of(model, self.pad_token_id)
        of_length, lengths = by_length(self.encoded)
        assert lengths is not None, "encoded rows have tokens"

        def make_batch(samples: int, length: int | None) -> Batch:
            return collate(of_length(samples, lengths.longest if length is None else length))

        return make_batch


def rows_with_images(dataset: str, model: str, spec: TrainingSpec) -> DatasetRows | None:
    """The rows of `dataset`, of at most the settings' tokens and pixels, as the processor of `model` makes them; None
    where they have no images.

    model: one that sees.

    Raises:
        UserError: the dataset or the processor cannot be read, or a row is wrong.
    """
    smallest = patch_of(read_config(model))
    data = VisionLanguageArguments(
        dataset_name=dataset,
        max_length=spec.data.tokens,
        max_pixels=spec.data.max_pixels or None,
        longest_side=spec.data.longest_side or None,
    )
    if not {"images", "image"} & set(load_rows(data, evaluate=False, seed=0)[0].column_names):
        return None
    source = str(Path(model).parent) if Path(model).is_file() else model  # a config: the processor lies beside it
    try:
        rows, _, folder = load_conversations(data, evaluate=False, seed=0)
        processor: Any = load_processor(VisionLanguageModelArguments(model_name_or_path=source), data)
        pictures = Pictures(folder, smallest)
        return DatasetRows(encode_conversations(rows, processor, pictures, data), processor.tokenizer.pad_token_id)
    except UserError as error:
        raise UserError(f"--dataset {dataset}: {error}") from error
