"""Plots are drawn with every matplotlib backend that the environment names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.export import plots
from ckpt_ft.export.holders import Holder
from ckpt_ft.export.timeline import Timeline
from ckpt_ft.units import MIB

HELD = [Holder("layers.*.mlp", "aten.mm.default", "activations", 6 * MIB, 2)]
MARKS = [(0, "forward"), (2, "backward")]
STEP = Timeline([0, 1, 2, 4], {"activations": [0, 6 * MIB, MIB, 0]}, MARKS, 1, HELD, "predicted")

DRAW = """
from test_plots import STEP
from ckpt_ft.export.plots import draw_step
draw_step(PATH, STEP, "a step")
import matplotlib, os, sys
print(os.environ.get("MPLBACKEND"), "matplotlib.pyplot" in sys.modules, matplotlib.rcParams._get("backend"))
"""


@pytest.mark.parametrize(
    ("backend", "error"),
    [
        ("module://matplotlib_inline.no_backend", ""),  # Jupyter's, in a process that cannot import it
        ("svg", ""),
        ("no such thing", "UserError: matplotlib: Key backend: 'no such thing' is not a valid value"),
    ],
)
def test_plot_under_a_backend_of_the_environment(backend: str, error: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "new" / "step.png"
    environment = {
        **os.environ,
        "MPLBACKEND": backend,
        "PYTHONPATH": os.pathsep.join([*sys.path, str(Path(__file__).parent)]),
    }
    code = DRAW.replace("PATH", repr(str(path)))
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if error:
        assert error in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert path.read_bytes().startswith(b"\x89PNG")
    assert done.stdout.strip() == f"{backend} False {backend}"  # the user's pyplot will select it


@pytest.mark.parametrize("name", ["step.txt", "step"])
def test_suffix_of_no_image_format_is_refused(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    with pytest.raises(UserError, match=f"{name}: a plot is a PNG, SVG or PDF by its suffix"):
        plots.draw_step(tmp_path / name, STEP)
    assert list(tmp_path.iterdir()) == []


def test_plot_names_phases_and_holders(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    text = plots.draw_step(tmp_path / "step.svg", STEP, "a step").read_text()
    for words in ("a step", "forward", "backward", "peak 6.0 MiB", "6.0 MiB  activations layers.*.mlp mm"):
        assert f"<!-- {words} -->" in text or words in text, (
            words
        )  # glyphs are drawn as paths, with the text beside them
