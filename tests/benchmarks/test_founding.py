"""benchmarks/founding.py: experiments that are small enough for the test suite, and the published figures."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import itertools

from benchmarks.experiments import homework, spacing, stacks, traps
from benchmarks.experiments.common import Figure, predict
from benchmarks.experiments.models import case, linear_stack

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_homework_peaks_are_within_two_percent() -> None:
    """There are nine published peaks; those without flash attention are within 0.25 %."""
    peaks = homework.predict_all("a100-40gb", homework.Size())
    published = [figure for cell in homework.CELLS for figure in cell]
    for (variant, megabytes), peak in zip(published, peaks, strict=True):
        assert peak / 1e6 == pytest.approx(megabytes, rel=0.022 if variant.flash else 0.0025)


def test_homework_prediction_equals_the_measurement() -> None:
    size = homework.Size(depth=2, width=16, heads=2, length=32)
    assert homework.predict_all("cpu", size) == homework.measure_all(size)


def test_growth_of_a_linear_stack(tmp_path: Path) -> None:
    growth, peak = stacks.timeline(tmp_path, quick=False).figures
    assert growth.ours == pytest.approx(4.2, rel=0.01)
    assert peak.note == "predicted: backward"
    assert (tmp_path / "linear_stack.png").stat().st_size > 1000


def test_gradients_are_recognized_without_an_optimizer() -> None:
    trace = predict(case(partial(linear_stack, 8, 4096), 256, 4096), "none", "t4")
    weights = 8 * 4096 * (4096 + 1) * 4
    assert trace.at_peak["parameters"] == trace.at_peak["gradients"] == weights


def test_segments_save_memory_in_a_linear_stack(tmp_path: Path) -> None:
    (figure,) = stacks.segments(tmp_path, quick=True).figures
    assert figure.ours == 0.0
    assert figure.note == "segments:2 saves 50 %"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("the frozen front that trains nothing", "gradients are cut off: 8 parameters"),
        ("dropout without RNG", "dropout without RNG"),
        ("BatchNorm twice", "BatchNorm twice"),
        ("no_grad inside a region", "no_grad inside a region"),
    ],
)
def test_trap_is_named_and_full_avoids_it(name: str, said: str) -> None:
    trapped, ours = traps.spring(name)
    assert said in " ".join(trapped.causes)
    assert ours.ok


def test_traps_that_parity_does_not_detect() -> None:
    assert traps.spring("nested checkpoints")[0].ok
    assert traps.runs_of_linears(traps.nested) > traps.runs_of_linears(partial(traps.each_block, run=traps.plain)) == 8
    held, released = traps.kept_references(keep=True), traps.kept_references(keep=False)
    assert len(set(released)) == 1
    assert all(later > earlier for earlier, later in itertools.pairwise(held))


def test_checkpoint_sequential_does_not_checkpoint_its_last_segment(tmp_path: Path) -> None:
    section = spacing.sequential(tmp_path, quick=True)
    torchs, ours = (row.split("|") for row in section.parts[0].splitlines()[2:4])
    assert (int(torchs[4]), int(ours[4])) == (2, 4)  # blocks run, of four in two segments
    assert torchs[5] == ours[5]  # peak bytes


def test_errors_are_signed() -> None:
    assert Figure("", "", "", 90.0, 100.0).error == "-10.0 %"
    assert Figure("", "", "", 52.0, 50.0, "%").error == "+2 points"
    assert Figure("", "", "", None).error == ""


def test_script_lists_its_experiments(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def run_script(*words: str) -> tuple[int | str | None, str, str]:
        monkeypatch.setattr(sys, "argv", ["founding.py", *words])
        with pytest.raises(SystemExit) as left:
            runpy.run_path(str(ROOT / "benchmarks" / "founding.py"), run_name="__main__")
        return left.value.code, *capsys.readouterr()

    code, listed, _ = run_script("--list")
    assert code == 0
    assert {line.split()[0] for line in listed.splitlines()} >= {"homework", "budgets", "traps", "compositions"}
    code, _, said = run_script("--only", "home")
    assert code == 2
    assert "--only home: no such experiment" in said
