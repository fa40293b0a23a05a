"""One rank on fake tensors needs what each of two real ranks needs, under DDP and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from two_ranks import PROCESSES, cases, workload

HERE = Path(__file__).parent


@pytest.mark.parametrize("few", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_fake_rank_needs_what_real_ones_need(few: bool, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "two_ranks.py"), str(tmp_path), *(["few"] if few else [])],
        env=environment, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(PROCESSES)]
    traced: dict[str, list[int]] = {}
    for name, launch, policy, kind, accumulation in cases(few):
        for number, rank in enumerate(ranks):
            if number == 0 or "uneven" in kind:  # else one rank's trace is every rank's
                trace = workload(replace(launch, rank=number), policy, kind, accumulation).trace(2)
                traced.setdefault(name, []).append(trace.peak_allocated)
            assert trace.peaks == pytest.approx(rank[name], rel=1e-3), (name, number)
    assert traced["fsdp2 uneven LoRA"][0] > traced["fsdp2 uneven LoRA"][1]  # what is estimated is the fullest rank
    for rank in ranks:
        assert rank["predicted by hand"] == pytest.approx(rank["by hand"], rel=1e-3)
