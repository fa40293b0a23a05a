"""Damaged JSON, JSON lines and YAML, for tests of hostile input. CKPT_FT_FUZZ sets how many."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

from ckpt_ft.errors import UserError

ROUNDS = int(os.environ.get("CKPT_FT_FUZZ", "60"))  # for example 5000, on demand
_VALUES = (
    None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 1000, "\0", "../../x", "caf\u00e9",
    [], [None], [[]], {}, {"a": None}, "\ud800", ["a", 1], [1, [1]], -0.0, 2**63,
)  # fmt: skip
_LINES = (
    b"", b"null", b"7", b"[]", b"{}", b'"x"', b"\xff\xfe", b"caf\xe9", b"\0", b"{", b"}", b"nul", b"NaN",
    b"9" * 5000, b"[" * 100_000, b'{"a":' * 100_000, b"\xef\xbb\xbf{}", b"\r", b"\x1a", b"// no", b"{}{}",
    b"{'a': 1}", b'{"a": "\xe9"}',
)  # fmt: skip
_YAML = (
    "", ":", ": ", "- ", "? ", "[", "]", "{", "}", "&a ", "*a", "<<: *a", "!!python/object/apply:os.system [x]",
    "!!binary x", "!x", "|", ">", "%", "@", "`", "\t", "\0", "\n", "---", "...", "#", "'", '"', "~", "null", "yes",
    ".nan", "-.inf",
    "1e999", "9" * 5000, "0x", "1_0", "2024-13-45", "2024-01-02", "12:30:45", "x" * 2000, "[" * 3000, "{a: " * 3000,
    "\u2028", "\ud800", "caf\u00e9", "../..", "=", ",", "1.5", "-1", "[a, [b]]", "{a: {b: 1}}",
)  # fmt: skip


def damaged(document: Any, seed: int = 0, rounds: int = ROUNDS) -> Iterator[bytes]:
    """Yields `document` with a value replaced, removed or doubled, truncated, encoded otherwise, or other content."""
    whole = json.dumps(document).encode()
    yield from (b"", b"null", b"[]", b"{}", b"7", b'"x"', b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000)
    yield from (
        whole[: len(whole) // 2],
        whole[:-1],
        whole + whole,
        whole.replace(b'"', b"'"),
        whole.decode().encode("utf-16"),
    )
    draw = random.Random(seed)
    for _ in range(rounds):
        yield _changed(document, draw)


def damaged_lines(rows: list[Any], seed: int = 0, rounds: int = ROUNDS) -> Iterator[bytes]:
    """Yields a file of JSON lines with some lines damaged, moved, truncated, or in another encoding."""
    draw = random.Random(seed)
    for _ in range(rounds):
        lines = [json.dumps(row).encode() for row in rows]
        for _ in range(draw.choice((1, 1, 1, 2, 5))):
            place = draw.randrange(len(lines))
            how = draw.random()
            if how < 0.4:
                lines[place] = _changed(rows[place % len(rows)], draw)
            elif how < 0.8:
                lines[place] = draw.choice(_LINES)
            elif how < 0.9:
                lines.insert(place, draw.choice(_LINES))
            else:
                lines[place] = lines[place][: draw.randrange(len(lines[place]) + 1)]
        content = draw.choice((b"\n", b"\n", b"\n", b"\r\n", b"\r", b" ")).join(lines)
        yield draw.choice((b"", b"", b"", b"\xef\xbb\xbf", b"\n\n")) + content + draw.choice((b"", b"\n"))


def damaged_yaml(text: str, seed: int = 0, rounds: int = ROUNDS) -> Iterator[bytes]:
    """Yields `text` with pieces inserted, removed or replaced, sometimes in another encoding."""
    draw = random.Random(seed)
    for _ in range(rounds):
        changed = text
        for _ in range(draw.choice((1, 1, 2, 4))):
            start = draw.randrange(len(changed) + 1)
            end = start + draw.choice((0, 0, 1, 5, 40))
            piece = draw.choice(_YAML)
            if draw.random() < 0.4:  # a value instead of any position
                start = changed.find(": ", start) + 2
                end = changed.find("\n", start)
            changed = changed[:start] + piece + changed[max(end, start) :]
        yield changed.encode(draw.choice(("utf-8", "utf-8", "utf-8", "utf-16", "latin-1")), errors="replace")


def _changed(document: Any, draw: random.Random) -> bytes:
    changed = copy.deepcopy(document)
    place, key = draw.choice(list(_places(changed)))
    if draw.random() < 0.2:
        del place[key]
    else:
        place[key] = draw.choice(_VALUES)
    return json.dumps(changed).encode()


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Yields every (container, key) in `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _places(value)


def assert_one_line(error: UserError, number: int) -> None:
    """Asserts that the error of damaged document `number` is one line."""
    assert "\n" not in str(error), number
    assert 10 < len(str(error)) < 600, number
