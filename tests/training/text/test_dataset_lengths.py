"""Lengths read from datasets, and the Trainer's step on rows chosen by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import nn
from transformers import TrainingArguments

from ckpt_ft.training.text.dataset_lengths import dataset_lengths, padded_rows, row_lengths
from ckpt_ft.training.text.encode import PadCollator

LENGTHS = [8, 32, 16, 24, 9]
ROWS = Dataset.from_list([{"input_ids": [1] * length, "labels": [1] * length} for length in LENGTHS])


class Recorder(nn.Module):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, **batch: torch.Tensor) -> Any:
        self.batch = batch
        return type("Output", (), {"loss": self.weight.clone()})


def test_lengths_of_rows() -> None:
    assert row_lengths(ROWS) == LENGTHS
    assert row_lengths(ROWS.select([3, 1])) == [24, 32]
    assert sorted(row_lengths(ROWS.shuffle(seed=1))) == sorted(LENGTHS)


def test_batches_hold_the_longest_and_padding(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True, train_sampling_strategy="group_by_length")
    rows = padded_rows(args, ROWS, PadCollator(0))
    assert rows is not None
    assert rows.lengths.by_length
    model = Recorder()
    for length, shorter in ((32, 16), (9, 8), (8, 8), (25, 16)):
        rows.step(3, length)(model, torch.optim.SGD(model.parameters()))
        lengths = model.batch["attention_mask"].sum(1).tolist()
        assert lengths == [min(n for n in LENGTHS if n >= length), shorter, shorter]
    rows.worst(2)(model, torch.optim.SGD(model.parameters()))
    assert model.batch["input_ids"].shape == (2, 32)


def test_images_have_none(tmp_path: Path) -> None:
    args = TrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    assert padded_rows(args, [{"pixel_values": torch.zeros(3)}], PadCollator(0)) is None


def test_text_is_tokenized_as_the_recipe_does(sample: tuple[Path, Path]) -> None:
    model, corpus = sample
    lengths = dataset_lengths(str(corpus), str(model), 64)
    assert lengths.longest == 64
    assert 8 < lengths.tokens[0] < lengths.mean < 64
