"""What is written down about a run names no secret: tokens, keys, passwords and home directories are taken out."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

HIDDEN = "***"
_NAMED = re.compile(r"^-{0,2}[\w-]*(token|secret|password|passwd|credential|api_?-?key|access_?-?key)$", re.IGNORECASE)
# Tokens of Hugging Face, GitHub, OpenAI and AWS by their looks, and passwords within addresses.
_LOOKS = re.compile(
    r"\bhf_[A-Za-z0-9]{6,}|\bgh[pousr]_[A-Za-z0-9]{6,}|\bgithub_pat_\w{6,}|\bsk-[\w-]{8,}|\bAKIA[0-9A-Z]{12,}"
    r"|(?<=://)[^/\s@]+(?=@)"
)


def redacted(command: Sequence[str]) -> list[str]:
    """The words of a command: what follows a flag that is named as a secret's, and what looks like one, is `***`."""
    words: list[str] = []
    hide = False
    for word in command:
        name, equals, _ = word.partition("=")
        if hide and not word.startswith("--"):
            words.append(HIDDEN)
        elif equals and _NAMED.match(name):
            words.append(f"{name}={HIDDEN}")
        else:
            words.append(redacted_text(word))
        hide = not equals and word.startswith("-") and bool(_NAMED.match(word))
    return words


def redacted_text(text: str) -> str:
    """`text` without what looks like a token, and with `~` for the home directory."""
    home = str(Path.home())
    text = _LOOKS.sub(HIDDEN, text)
    return text if home in ("/", ".") else re.sub(rf"{re.escape(home)}(?=$|\W)", "~", text)
