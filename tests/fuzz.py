"""Ways to damage a JSON document, for the tests of hostile input: few in the suite, many by `CKPT_FT_FUZZ`."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Iterator
from typing import Any

ROUNDS = int(os.environ.get("CKPT_FT_FUZZ", "60"))  # e.g. 5000, on demand
_VALUES = (
    None, True, 0, -1, 10**400, 1e308, float("nan"), float("inf"), "", "x" * 1000, "\0", "../../x", "caf\u00e9",
    [], [None], [[]], {}, {"a": None},
)  # fmt: skip


def damaged(document: Any, seed: int = 0, rounds: int = ROUNDS) -> Iterator[bytes]:
    """`document` with a value replaced, removed or doubled, cut short, in another encoding, or something else."""
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
        changed = copy.deepcopy(document)
        place, key = draw.choice(list(_places(changed)))
        if draw.random() < 0.2:
            del place[key]
        else:
            place[key] = draw.choice(_VALUES)
        yield json.dumps(changed).encode()


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in `node`."""
    items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    for key, value in items:
        yield node, key
        yield from _places(value)
