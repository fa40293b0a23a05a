"""No secret is written down, and what is none stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_ft.redact import redacted, redacted_text


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        (["--hub_token", "X1", "--seed", "3"], ["--hub_token", "***", "--seed", "3"]),
        (["--hub_token=X1"], ["--hub_token=***"]),
        (["--hub-token", "--seed", "3"], ["--hub-token", "--seed", "3"]),
        (["--push_to_hub_token", "X1"], ["--push_to_hub_token", "***"]),
        (["WANDB_API_KEY=X1", "MY_SECRET=a=b"], ["WANDB_API_KEY=***", "MY_SECRET=***"]),
        (["--api_key", "X1", "--password", "X1"], ["--api_key", "***", "--password", "***"]),
        (["--max_new_tokens", "7", "--tokenizer", "t"], ["--max_new_tokens", "7", "--tokenizer", "t"]),
        (["hf_abcdefgh", "https://me:pw@host/x"], ["***", "https://***@host/x"]),
        (["--revision", "0123456789abcdef0123456789abcdef01234567"],) * 2,
    ],
)
def test_redacted(given: list[str], kept: list[str]) -> None:
    assert redacted(given) == kept


def test_homes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    assert redacted_text("--out=/home/jane/x /home/janet /home/jane") == "--out=~/x /home/janet ~"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert redacted_text("/data/x") == "/data/x"
