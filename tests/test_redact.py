"""Secrets are redacted, and everything else stays."""

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
        (["--run_name", "https://joe:pw@host/x?token=S1"], ["--run_name", "https://***@host/x?token=***"]),
        (
            ["https://user:p@ss@host/x", "s3://b/k?X-Amz-Signature=S1&n=2#f"],
            ["https://***@host/x", "s3://b/k?X-Amz-Signature=***&n=2#f"],
        ),
        (
            ["--wandb_key", "X", "--secret_key=X", "--db-pwd", "X"],
            ["--wandb_key", "***", "--secret_key=***", "--db-pwd", "***"],
        ),
        (["--kw", '{"token": "X", "api_key":"a\\"b", "n": 1}'], ["--kw", '{"token": "***", "api_key":"***", "n": 1}']),
        (
            ["--pad_token", "<pad>", "--eos_token=</s>", "--monkey", "3"],
            ["--pad_token", "<pad>", "--eos_token=</s>", "--monkey", "3"],
        ),
        (["--push_to_hub_token=", "git@github.com:a/b"], ["--push_to_hub_token=***", "git@github.com:a/b"]),
        (["--revision", "0123456789abcdef0123456789abcdef01234567"],) * 2,
    ],
)
def test_secrets_in_words_are_redacted(given: list[str], kept: list[str]) -> None:
    assert redacted(given) == kept


def test_home_directory_is_abbreviated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: Path("/home/jane"))
    assert redacted_text("--out=/home/jane/x /home/janet /home/jane") == "--out=~/x /home/janet ~"
    monkeypatch.setattr(Path, "home", lambda: Path("/"))
    assert redacted_text("/data/x") == "/data/x"


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("run --wandb_key X --seed 3", "run --wandb_key *** --seed 3"),
        ("{'hub_token': 'a b', 'x': 1}", "{'hub_token': '***', 'x': 1}"),
        (r'"{\"token\": \"X\", \"k\": \"v\"}"', r'"{\"token\": \"***\", \"k\": \"v\"}"'),
        ('{"secret": ["a", "b"], "x": 2}', '{"secret": ***, "x": 2}'),
        ('"hf_token": null, "tokens": 5', '"hf_token": null, "tokens": 5'),
        ("the token was sampled; the key to success", "the token was sampled; the key to success"),
        ("--hub_token --seed 3", "--hub_token --seed 3"),
    ],
)
def test_secrets_in_text_are_redacted(given: str, kept: str) -> None:
    assert redacted_text(given) == kept
