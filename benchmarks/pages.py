"""Shared by the scripts that write parts of docs/: Markdown tables, prose, and who made them."""

from __future__ import annotations

import datetime
import os
import platform
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ckpt_ft.memory.measure.report import provenance

DOCS, DATA = Path(__file__).parents[1] / "docs", Path(__file__).parent / "data"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], words: int = 1) -> str:
    """A Markdown table; columns after the first `words` ones are aligned to the right."""
    lines = [header, ["---" if at < words else "---:" for at in range(len(header))], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def prose(name: str) -> dict[str, str]:
    """The sections of a file in data/, by the names in the comments before them."""
    text = (DATA / name).read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- (\w+) -->\n(.*?)\n(?=\n<!-- \w+ -->|\Z)", text, re.DOTALL))


def made_by() -> str:
    """Returns command, versions, machine and day as one line."""
    facts = provenance()
    versions = ", ".join(f"{name} {facts['versions'][name]}" for name in ("python", "torch", "transformers"))
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {gpu}"
    return f"Made by `python benchmarks/{facts['command']}` with {versions} on {machine}, {datetime.date.today()}."


def write_section(page: str, name: str, text: str) -> None:
    """Writes `text` into a page of docs/ as the section `name`, replacing the previous one."""
    path, begin, end = DOCS / page, f"<!-- {name} -->", f"<!-- end of {name} -->"
    section = f"{begin}\n{text.strip()}\n\n{made_by()}\n{end}"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    path.write_text(pattern.sub(lambda _: section, path.read_text(encoding="utf-8")), encoding="utf-8")
    print(f"wrote {page}", file=sys.stderr)
