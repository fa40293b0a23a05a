"""A trace of one rank has the peaks of two or four real ranks under DDP, FSDP2 and parallelism."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from forked_ranks import run_ranks
from two_ranks import PROCESSES, cases, gradient_error, main, peaks_of, workload

from ckpt_ft.spec.launch import Launch


def measure(rank: int, out: str, few: str) -> None:
    main(out, few)


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_traced_rank_has_the_peaks_of_real_ranks(few: bool, tmp_path: Path) -> None:
    run_ranks(measure, str(tmp_path), "few" if few else "")
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    traced: dict[str, list[int]] = {}
    for name, launch, policy, kind, accumulation in cases(few):
        for number, rank in enumerate(ranks):
            if number == 0 or "uneven" in kind or launch.cp > 1:  # otherwise all ranks have the same trace
                trace = workload(replace(launch, rank=number), policy, kind, accumulation).trace(2)
                traced.setdefault(name, []).append(trace.peak_allocated)
            assert trace.peaks == pytest.approx(rank[name], rel=1e-3), (name, number)
    assert traced["fsdp2 uneven LoRA"][0] > traced["fsdp2 uneven LoRA"][1]  # an estimate is for the fullest rank
    for rank in ranks:
        assert rank["predicted by hand"] == pytest.approx(rank["by hand"], rel=1e-3)


FOUR = {
    "cp": Launch("fsdp2", 4, cp=4), "fsdp2 and cp": Launch("fsdp2", 4, cp=2), "fsdp2 and tp": Launch("fsdp2", 4, tp=2),
    "sp": Launch("zero1", 4, sp=4),
}  # fmt: skip


def measure_four(rank: int, out: str) -> None:
    peaks = peaks_of([(name, launch, "full", "llama", 1) for name, launch in FOUR.items() if launch.sp == 1])
    peaks["gradients"] = {name: gradient_error(launch, "full") for name, launch in FOUR.items()}  # type: ignore[misc]
    Path(out, f"{rank}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


@pytest.mark.slow
def test_traced_rank_has_the_peaks_of_four_real_ranks(tmp_path: Path) -> None:
    """Compares peaks of each phase, and gradients with those of one process; also with two parallel groups."""
    run_ranks(measure_four, str(tmp_path), ranks=4)
    for number in range(4):
        rank = json.loads((tmp_path / f"{number}.json").read_text())
        assert max(rank.pop("gradients").values()) < 1e-6
        for name, peaks in rank.items():
            trace = workload(replace(FOUR[name], rank=number), "full", "llama", 1).trace(2)
            assert trace.peaks == pytest.approx(peaks, rel=2e-3), (name, number)
