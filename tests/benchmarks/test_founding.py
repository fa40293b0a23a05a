"""benchmarks/founding.py: experiments that are small enough for the test suite, and the published figures."""

from __future__ import annotations

import runpy
import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))

import itertools

from benchmarks.experiments import homework, stacks, traps
from benchmarks.experiments.common import Figure, case, kept, of_policies, predict
from benchmarks.experiments.stacks import linear_stack

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
    growth, peak = stacks.timeline(tmp_path).figures
    assert growth.ours == pytest.approx(4.2, rel=0.01)
    assert peak.note == "predicted: backward"
    assert (tmp_path / "linear_stack.png").stat().st_size > 1000


def test_gradients_are_recognized_without_an_optimizer() -> None:
    trace = predict(case(partial(linear_stack, 8, 4096), 256, 4096), "none", "t4")
    weights = 8 * 4096 * (4096 + 1) * 4
    assert trace.at_peak["parameters"] == trace.at_peak["gradients"] == weights


def test_segments_save_memory_in_a_linear_stack() -> None:
    job = case(partial(linear_stack, 4, 256), 32, 256)
    table, traces = of_policies(["none", "full", "segments:2"], job, case(partial(linear_stack, 4, 64), 32, 64), "t4")
    none, full, segments = map(kept, traces.values())
    assert none == full == 2 * segments - 1024  # less the bytes of the loss, which all keep
    assert all(fake == real for *_, fake, real, _ in (line.split("|") for line in table.splitlines()[2:]))


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


def test_checkpoint_sequential_does_not_checkpoint_its_last_segment() -> None:
    torchs, ours = stacks.sequential_rows(4, 64, 16, 2)
    assert (int(torchs[3]), int(ours[3])) == (2, 4)  # blocks run, of four in two segments
    assert torchs[4] == ours[4]  # peak bytes


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
    assert {line.split()[0] for line in listed.splitlines()} >= {"homework", "budgets", "traps"}
    code, _, said = run_script("--only", "home")
    assert code == 2
    assert "--only home: no such experiment" in said
