"""Removes secrets (tokens, keys, passwords) and the home directory from text written about a run."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

HIDDEN = "***"
# Names of secrets: --hub_token, WANDB_API_KEY, client-secret, db_password. Tokens of a tokenizer are not secrets.
_NAME = (
    r"(?![.-]|(?:eos|bos|pad|unk|sep|cls|mask|image|video|audio|stop|end|start|begin)_?-?token\b)"
    r"[\w.-]*(?:token|secret|passw(?:or)?d|passphrase|credentials?|api-?key|access-?key|(?<![A-Za-z0-9])key|[_-]pwd"
    r"|[_-]auth|signature)"
)
_NAMED = re.compile(rf"-{{0,2}}{_NAME}", re.IGNORECASE)
_QUOTED = r'"(?:[^"\\]|\\.)*"' + r"|'(?:[^'\\]|\\.)*'"
# name=value, name: value and --name value; a value may be quoted or a list. true, false, null are not secrets.
_PAIR = re.compile(
    rf"(?P<quote>\\?[\"']?)(?<![\w.-])(?P<name>--{_NAME}|{_NAME})(?P=quote)"
    rf"(?P<equals>\s*[=:]\s*|\s+(?!--)(?=\S))"
    rf"(?!(?:true|false|null|none)\b)(?P<value>\[[^\]]*\]|\\\".*?\\\"|{_QUOTED}|[^\s,;&#}})\]\"'`]+)",
    re.IGNORECASE,
)
# Patterns of tokens of Hugging Face, GitHub, OpenAI and AWS, and of user names and passwords in URLs.
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{6,}|\bgh[pousr]_[A-Za-z0-9]{6,}|\bgithub_pat_\w{6,}|\bsk-[\w-]{8,}|\bAKIA[0-9A-Z]{12,}"
    r"|(?<=://)[^/\s\"'<>?#]+(?=@)"
)


def redacted(command: Sequence[str]) -> list[str]:
    """Returns the words of a command, with `***` for values of flags that name a secret and for token-like text."""
    words: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            words.append(HIDDEN)
        elif equals and _NAMED.fullmatch(name):
            words.append(f"{name}={HIDDEN}")
        else:
            words.append(redacted_text(word))
        hide = not equals and word.startswith("-") and bool(_NAMED.fullmatch(word))
    return words


def redacted_text(text: str) -> str:
    """Returns `text` without secrets, and with `~` for the home directory.

    Hides text that looks like a token, user names and passwords in URLs, and the values of `name=value`,
    `"name": value` (JSON) and `--name value` if the name is a secret's.
    """
    home = str(Path.home())
    text = _LOOKS.sub(HIDDEN, text)
    text = _PAIR.sub(_hide_value, text)
    return text if home in ("/", ".") else re.sub(rf"{re.escape(home)}(?=$|\W)", "~", text)


def _hide_value(pair: re.Match[str]) -> str:
    if pair["equals"].isspace() and not pair["name"].startswith("--"):
        return pair[0]
    value = pair["value"]
    quote = next((mark for mark in ('\\"', '"', "'") if value.startswith(mark)), "")
    start = pair.start("value") - pair.start()
    return f"{pair[0][:start]}{quote}{HIDDEN}{quote}"
