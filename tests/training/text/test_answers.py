"""Sample answers of the model card: the model is given the prompt of a row and nothing more."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from datasets import Dataset

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import LanguageModelArguments, load_model, within_positions
from ckpt_ft.training.text import IGNORED
from ckpt_ft.training.trainer import SHOWN, prompts_of


def rows(**columns: list[list[int]]) -> Dataset:
    return Dataset.from_dict(columns)


def test_prompt_is_the_part_without_loss() -> None:
    ids, labels = [5, 6, 7, 8, 9], [IGNORED, IGNORED, IGNORED, 8, 9]
    assert prompts_of(rows(input_ids=[ids] * 5, labels=[labels] * 5)) == [[5, 6, 7]] * SHOWN


def test_prompt_of_packed_rows_is_the_first_rows() -> None:
    packed = rows(
        input_ids=[[5, 6, 7, 8, 9]], labels=[[IGNORED, IGNORED, 7, IGNORED, 9]], position_ids=[[0, 1, 2, 0, 1]]
    )
    assert prompts_of(packed) == [[5, 6]]


def test_prompt_of_plain_text_is_its_beginning() -> None:
    long, short = list(range(40)), [1, 2, 3, 4]
    texts = rows(input_ids=[long, short], labels=[[IGNORED, *long[1:]], [IGNORED, *short[1:]]])
    assert prompts_of(texts) == [list(range(16)), [1, 2]]


def test_default_length_is_at_most_the_positions(sample: tuple[Path, Path], caplog: pytest.LogCaptureFixture) -> None:
    small = LanguageModelArguments(model_name_or_path=str(sample[0]))  # it has 512 positions
    with caplog.at_level(logging.WARNING):
        assert within_positions(small, 1024) == 512
    assert caplog.messages == ["--max_length 1024 is reduced to 512, the positions that the model has"]
    assert within_positions(small, 300) == 300
    with pytest.raises(
        UserError, match="--max_length 600: the model has 512 positions; give at most that, or --rope_scaling yarn"
    ):
        within_positions(small, 600)
    scaled = LanguageModelArguments(model_name_or_path=str(sample[0]), rope_scaling="yarn")
    assert within_positions(scaled, 600) == 600
    assert load_model(scaled, 600).config.rope_parameters["factor"] == 600 / 512
