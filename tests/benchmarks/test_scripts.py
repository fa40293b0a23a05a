"""Every script of benchmarks/ imports in the environment that `make` creates."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TRAINS = ROOT / "benchmarks" / "on_gpu" / "script.py"  # as people's scripts do, at once
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py") if path != TRAINS)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_script_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `python benchmarks/x.py` finds its modules, or as a part of the package that founding.py imports."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    if script.parent.name == "benchmarks":
        runpy.run_path(str(ROOT / script), run_name="script_of_benchmarks")
    else:
        importlib.import_module(".".join(script.with_suffix("").parts))


def test_rank_correlation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    correlation = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))["rank_correlation"]
    assert correlation([1.0, 2.0, 5.0], [10.0, 20.0, 21.0]) == pytest.approx(1)
    assert correlation([1.0, 2.0, 3.0, 4.0], [1.0, 3.0, 2.0, 4.0]) == pytest.approx(0.8)  # 1 - 6 * 2 / (4 * 15)
    assert correlation([1.0, 1.0, 2.0], [3.0, 1.0, 2.0]) == pytest.approx(0)  # ranks 1.5 1.5 3 and 3 1 2


def test_row_of_the_accuracy_page_without_seconds() -> None:
    page = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))
    rows = [
        page["Row"]("timed", ["1"], {"reserved": -0.25}, 2.0, 3.0),
        page["Row"]("not timed", ["2"], {"reserved": 0.05}, 0.0, 4.0),
    ]
    group = page["Group"]("Title", ("row", "GiB"), lambda: iter(rows)).run(None)
    assert [row.line for row in rows] == [["timed", "1", "2", "3", "+50.00 %"], ["not timed", "2", "", "4", ""]]
    assert group.seconds == {"timed": (2.0, 3.0)}
    assert "|  | 15.00 / 25.00 % | 50.00 / 50.00 % |" in group.markdown("Text")


@pytest.mark.slow
def test_axolotls_example_has_the_published_memory() -> None:
    """Within 4 %: includes its evaluation, and adapters on experts as in the PEFT version that axolotl pins."""
    rows = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))["described"]("experts")
    assert [row.errors["reserved"] for row in rows] == pytest.approx([24.27 / 24 - 1, 34.48 / 34 - 1], abs=2e-3)
