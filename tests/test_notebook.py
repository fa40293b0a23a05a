"""docs/notebook.ipynb runs from top to bottom, and its stored outputs are current.

Cells run as in Jupyter, in one namespace, but without its kernel: an output is what a cell prints, and its last
expression as HTML if it has that. `--overwrite-golden` stores the current outputs.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from versions import is_older

NOTEBOOK = Path(__file__).parents[1] / "docs" / "notebook.ipynb"


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs a cell and returns its outputs in the format of a notebook."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(compile(tree, str(NOTEBOOK), "exec"), names)
        value = None if last is None else eval(compile(ast.Expression(last.value), str(NOTEBOOK), "eval"), names)
    outputs: list[dict[str, Any]] = []
    if said.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines(said.getvalue())})
    if value is not None:
        data = {"text/html": lines(value._repr_html_())} if hasattr(value, "_repr_html_") else {}
        data["text/plain"] = [type(value).__name__ if data else repr(value)]
        outputs.append({"data": data, "metadata": {}, "output_type": "display_data"})
    return outputs


def lines(text: str) -> list[str]:
    return text.splitlines(keepends=True)


def test_notebook_runs_and_its_outputs_are_current(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    names: dict[str, Any] = {"__name__": "__main__"}
    shown = [
        run_cell("".join(cell["source"]), names) if cell["cell_type"] == "code" else None for cell in notebook["cells"]
    ]
    assert sum("text/html" in output.get("data", {}) for outputs in shown for output in outputs or []) == 3
    if request.config.getoption("--overwrite-golden"):
        for cell, outputs in zip(notebook["cells"], shown, strict=True):
            if outputs is not None:
                cell["outputs"] = outputs
        NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    kept = [cell.get("outputs") for cell in notebook["cells"]]
    if is_older("transformers", "5.23"):  # its rotary embeddings are a product: other ops and seconds, the same bytes
        shown, kept = (re.findall(r"[\d.]+ [KMG]iB", json.dumps(outputs)) for outputs in (shown, kept))
        assert len(kept) > 20
    assert shown == kept
