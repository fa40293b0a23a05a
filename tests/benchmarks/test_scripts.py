"""Every script of benchmarks/ runs in the environment that `make` makes: it imports."""

from __future__ import annotations

import importlib
import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in (ROOT / "benchmarks").rglob("*.py"))


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_it_imports(script: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
