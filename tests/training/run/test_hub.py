"""An unreachable Hub is asked once and noted in one line, and libraries do not retry."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from huggingface_hub import constants

from ckpt_ft.training import run_arguments as parser


@dataclass
class Named:
    model_name_or_path: str | None = None
    dataset_name: str | None = None


@pytest.fixture
def questions_to_hub(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records each check whether the Hub answers, which fails; afterwards the libraries are online again."""
    import datasets.config

    questions: list[str] = []
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    monkeypatch.setattr(parser, "hub_answers", lambda: questions.append("asked") is not None)
    return questions


def test_unreachable_hub_is_asked_only_once(questions_to_hub: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    import datasets.config

    for _ in range(2):
        parser.read_cache_where_offline([Named("Qwen/Qwen2.5-0.5B"), Named(dataset_name="no/where")])
    assert questions_to_hub == ["asked"]
    said = capsys.readouterr().err
    assert said == (f"note: {constants.ENDPOINT} does not answer; Qwen/Qwen2.5-0.5B, no/where: from the cache here\n")
    assert constants.is_offline_mode()
    assert datasets.config.HF_HUB_OFFLINE


def test_local_files_do_not_ask_the_hub(questions_to_hub: list[str], tmp_path: Path) -> None:
    parser.read_cache_where_offline([Named(str(tmp_path)), Named()])
    assert questions_to_hub == []
    assert not constants.is_offline_mode()
