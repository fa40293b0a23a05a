"""How the package is laid out: files of a few screens, no passage written twice, no flags of a command below it."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path
from statistics import median

import ckpt_ft

PACKAGE = Path(ckpt_ft.__file__).parent
SOURCES = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py")}
RUN = 6  # lines
SAME = re.compile(r"#|import |from |\w+: .*,$")


def passages(sources: dict[str, str]) -> dict[tuple[str, ...], list[str]]:
    """Every `RUN` lines of code in a row, and the places where they stand.

    Without imports and comments, and without parameters: two functions that are asked the same have the same.
    """
    found = defaultdict(list)
    for name, text in sources.items():
        lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), start=1)]
        code = [(number, line) for number, line in lines if line and not SAME.match(line)]
        for start in range(len(code) - RUN + 1):
            run = code[start : start + RUN]
            if sum(any(letter.isalnum() for letter in line) for _, line in run) == RUN:
                found[tuple(line for _, line in run)].append(f"{name}:{run[0][0]}")
    return found


def test_a_file_is_taken_in_at_a_glance() -> None:
    lines = {name: text.count("\n") for name, text in SOURCES.items() if text}
    assert len(lines) > 130
    assert {name: count for name, count in lines.items() if count > 300} == {}
    assert median(lines.values()) <= 140


def test_nothing_is_written_twice() -> None:
    assert [places for places in passages(SOURCES).values() if len(places) > 1] == []


def test_what_is_written_twice_would_be_found() -> None:
    text = "\n".join(f"step_{number}()" for number in range(RUN))
    assert next(iter(passages({"a.py": f"import os\n{text}", "b.py": f"# here\n{text}\nmore()"}).values())) == [
        "a.py:2", "b.py:2",
    ]  # fmt: skip


def test_only_commands_and_recipes_speak_of_flags() -> None:
    """What stands below them is asked by several: an error that names a flag of one would be wrong for the others."""
    spoken = []
    for name, text in SOURCES.items():
        if name.startswith(("cli/", "training/")):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Raise):
                words = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                spoken += [f"{name}:{node.lineno}" for word in words if isinstance(word, str) and "--" in word]
    assert spoken == []
