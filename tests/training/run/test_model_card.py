"""The model card: its memory section, and failures of writing or uploading it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ckpt_ft.errors import WorkFailed
from ckpt_ft.training.trainer import write_model_card

REPORT = SimpleNamespace(to_markdown=lambda: "# Memory\n\npeak 3 GiB\n")


class Pushing:
    """The parts of a Trainer that writing a card needs."""

    hub_model_id = "me/model"

    def __init__(self, out: Path, push: bool = False, fails: Exception | None = None) -> None:
        self.args = SimpleNamespace(output_dir=str(out), push_to_hub=push, hub_token=None)
        self.fails = fails

    def is_world_process_zero(self) -> bool:
        return True

    def create_model_card(self, **named: str) -> None:
        if self.fails is not None:
            raise self.fails
        Path(self.args.output_dir, "README.md").write_text("# model\n")

    push_to_hub = create_model_card


def card(trainer: Any, report: Any = REPORT) -> None:
    write_model_card(trainer, report)


def test_report_is_a_section_of_the_card(tmp_path: Path) -> None:
    card(Pushing(tmp_path))
    assert (tmp_path / "README.md").read_text() == "# model\n\n## Memory\n\npeak 3 GiB\n"


def test_failed_card_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "ckpt_ft"):
        card(Pushing(tmp_path, fails=UnicodeEncodeError("ascii", "\u00b7", 0, 1, "ordinal not in range(128)")))
    [said] = [record.message for record in caplog.records]
    assert said.startswith("writing the model card failed; training is not affected: UnicodeEncodeError: ")


def test_failed_upload_names_the_local_weights(tmp_path: Path) -> None:
    with pytest.raises(WorkFailed) as failed:
        card(Pushing(tmp_path, push=True, fails=ConnectionError("no route\nto host")))
    assert str(failed.value) == (
        "--push_to_hub: the upload failed (ConnectionError: no route to host); all that was trained is in "
        f"{tmp_path}: `hf upload me/model {tmp_path}` sends it"
    )


def test_section_is_uploaded_after_the_trainers_card(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[str] = []
    monkeypatch.setattr(
        "huggingface_hub.upload_file", lambda path_or_fileobj, **where: sent.append(path_or_fileobj.read_text())
    )
    card(Pushing(tmp_path, push=True))
    assert sent == ["# model\n\n## Memory\n\npeak 3 GiB\n"]


def test_card_has_no_secrets_of_the_command(tmp_path: Path) -> None:
    report = SimpleNamespace(
        to_markdown=lambda: "# Memory\n\nMade by `llm.py --run_name https://a:b@c@h/x?token=T1`\n"
    )
    card(Pushing(tmp_path), report)
    assert "--run_name https://***@h/x?token=***`" in (tmp_path / "README.md").read_text()
