"""Row lengths of datasets."""

from __future__ import annotations

from pathlib import Path

from datasets import Dataset

from ckpt_ft.training.text import dataset_lengths
from ckpt_ft.workloads.sample_sizes import row_lengths

LENGTHS = [8, 32, 16, 24, 9]
ROWS = Dataset.from_list([{"input_ids": [1] * length, "labels": [1] * length} for length in LENGTHS])


def test_lengths_of_rows() -> None:
    assert row_lengths(ROWS) == LENGTHS
    assert row_lengths(ROWS.select([3, 1])) == [24, 32]
    assert sorted(row_lengths(ROWS.shuffle(seed=1))) == sorted(LENGTHS)


def test_text_is_tokenized_as_the_recipe_does(sample: tuple[Path, Path]) -> None:
    model, corpus = sample
    lengths = dataset_lengths(str(corpus), str(model), 64)
    assert lengths.longest == 64
    assert 8 < lengths.tokens[0] < lengths.mean < 64
