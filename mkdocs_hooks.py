"""Pages of the guide that are made while it is built: the command line from its own help, and the notebook."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File
from typer.cli import get_docs_for_click

from ckpt_ft.cli.main import app

NOTEBOOK = Path(__file__).parent / "docs" / "notebook.ipynb"


def on_files(files: Any, config: Any) -> Any:
    for name, text in (("cli.md", command_line()), ("notebook.md", notebook(json.loads(NOTEBOOK.read_text("utf-8"))))):
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if page.file.src_uri in ("settings.md", "cli.md", "reference.md"):  # they have every word
        page.meta["search"] = {"boost": 0.1}
    return markdown


def command_line() -> str:
    """Every command with its options, as Markdown."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="ckpt-ft")
    return text.replace("# `ckpt-ft`", "# Command line", 1)


def notebook(content: dict[str, Any]) -> str:
    """The cells of a notebook with their outputs, as Markdown."""
    parts = []
    for cell in content["cells"]:
        source = "".join(cell["source"])
        parts.append(source if cell["cell_type"] == "markdown" else f"```python\n{source}\n```")
        for output in cell.get("outputs", ()):
            shown = output.get("data", {"text/plain": output.get("text", "")})
            html, plain = ("".join(shown.get(kind, "")) for kind in ("text/html", "text/plain"))
            lines = [line for line in html.splitlines() if line.strip()]  # an empty line would end it
            parts.append(f"<div>{''.join(lines)}</div>" if html else f"```text\n{plain}\n```")
    return "\n\n".join(parts)
