"""The default length of a sequence is at most the positions that the model has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.models import LanguageModelArguments, load_model, within_positions


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
