"""Writes docs/settings.md from the table of settings: python benchmarks/settings.py"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import pages
from benchmarks.pages import DOCS, prose
from ckpt_ft.spec.optimizers import OPTIMIZERS
from ckpt_ft.spec.settings import KEYS, LEFT_OUT, LIVE, MODELLED, NO_EFFECT, REFUSED, VALUE, Entry, table

PAGE = DOCS / "settings.md"
TEXT = prose("settings.md")
TITLES = dict(line.split(" = ", 1) for line in TEXT["titles"].splitlines())


def page() -> str:
    """Returns the text of docs/settings.md."""
    kinds = (MODELLED, NO_EFFECT, LIVE, LEFT_OUT, REFUSED)
    total: Counter[str] = Counter()
    rows = []
    for section, entries in table().items():
        counts = Counter(MODELLED if entry.kind == KEYS else entry.kind for entry in entries.values())
        total += counts
        rows.append([TITLES[section], *(str(counts[kind]) for kind in kinds)])
    rows.append(["all", *(str(total[kind]) for kind in kinds)])
    lines = [TEXT["introduction"] + "\n", "## Counts", "", pages.table(["settings of", *kinds], rows), ""]
    lines += [f"Modelled optimizers, by the names of the libraries: {', '.join(map(_code, OPTIMIZERS))}.", ""]
    lines += ["Refused: `adamw_torch_xla`, which needs a TPU.", ""]
    for section, entries in table().items():
        groups: dict[str, list[str]] = {}
        for name, entry in entries.items():
            groups.setdefault(_answer(entry), []).append(name)
        answers = [[", ".join(map(_code, names)), answer] for answer, names in groups.items()]
        lines += [f"## {TITLES[section]}", "", pages.table(["setting", "answer"], answers, words=2), ""]
    return "\n".join(lines)


def _answer(entry: Entry) -> str:
    said = [_words(entry)]
    groups: dict[str, list[str]] = {}
    for value, one in entry.values.items():
        groups.setdefault(_words(one), []).append(value)
    said += [
        f"{', '.join(_code(value) if value else 'empty' for value in values)}: {one}" for one, values in groups.items()
    ]
    return "; ".join(said)


def _words(entry: Entry) -> str:
    if entry.kind == KEYS:
        return f"modelled, key by key: {', '.join(TITLES[section] for section in entry.text.split(', '))}"
    if entry.kind in (MODELLED, VALUE):
        return f"modelled: {_code(entry.text)}"
    return f"{entry.kind}: {entry.text}"


def _code(name: str) -> str:
    return f"`{name}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
