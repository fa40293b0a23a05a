"""Failures of writing or uploading the model card."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_ft.errors import WorkFailed
from ckpt_ft.training.trainer import write_model_card


class Pushing:
    """The parts of a Trainer that writing a card needs."""

    hub_model_id = "me/model"

    def __init__(self, out: Path, push: bool = False, fails: Exception | None = None) -> None:
        self.args = SimpleNamespace(output_dir=str(out), push_to_hub=push)
        self.fails = fails

    def create_model_card(self, **named: str) -> None:
        if self.fails is not None:
            raise self.fails
        Path(self.args.output_dir, "README.md").write_text("# model\n")

    push_to_hub = create_model_card


def card(trainer: Any) -> None:
    write_model_card(trainer)


def test_failed_card_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        write_model_card(
            Pushing(tmp_path, fails=UnicodeEncodeError("ascii", "\u00b7", 0, 1, "ordinal not in range(128)"))
        )
    [said] = [record.message for record in caplog.records]
    assert said.startswith("writing the model card failed; training is not affected: UnicodeEncodeError: ")


def test_failed_upload_names_the_local_weights(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed) as failed:
        card(Pushing(tmp_path, push=True, fails=ConnectionError("no route\nto host")))
    assert str(failed.value) == (
        "--push_to_hub: the upload failed (ConnectionError: no route to host); all that was trained is in "
        f"{tmp_path}: `hf upload me/model {tmp_path}` sends it"
    )
