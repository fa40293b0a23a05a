"""Every script of benchmarks/ imports in the environment that `make` creates."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))


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
    group = runpy.run_path(str(ROOT / "benchmarks" / "accuracy.py"))["Group"]("Title", "Text", ("row", "GiB"))
    group.add("timed", ["1"], 2.0, 3.0, reserved=-0.25)
    group.add("not timed", ["2"], 0.0, 4.0, reserved=0.05)
    assert group.lines == [["timed", "1", "2", "3", "+50.00 %"], ["not timed", "2", "", "4", ""]]
    assert group.seconds == {"timed": (2.0, 3.0)}
    assert "|  | 15.00 / 25.00 % | 50.00 / 50.00 % |" in group.markdown()


@pytest.mark.slow
def test_axolotls_example_has_the_published_memory() -> None:
    """Within 4 %: includes its evaluation, and adapters on experts as in the PEFT version that axolotl pins."""
    rows = runpy.run_path(str(ROOT / "benchmarks" / "experts.py"))["ROWS"]
    found = {gib: trace().peak_reserved / 2**30 for gib, seconds, trace in rows.values() if not seconds}
    assert found == pytest.approx({24: 24.27, 34: 34.48}, rel=2e-3)
