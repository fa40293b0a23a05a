"""One rank on fake tensors needs what each of two real ranks needs, under DDP and FSDP2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from two_ranks import PROCESSES, cases, workload

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, dict[str, int]]]:
    """Peaks of each rank by case and phase."""
    out = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(PROCESSES)]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(HERE / "two_ranks.py"), str(out)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(PROCESSES)]


@pytest.mark.filterwarnings("ignore:policy 'head'. the logits of FSDP:UserWarning")  # gathered with the last norm
@pytest.mark.parametrize(("name", "launch", "policy", "lora", "accumulation"), [*cases()], ids=str)
def test_a_fake_rank_needs_what_real_ones_need(name, launch, policy, lora, accumulation, measured) -> None:
    trace = workload(launch, policy, lora, accumulation).trace(2)
    for rank in measured:
        for phase, nbytes in rank[name].items():
            assert trace.peaks[phase] == pytest.approx(nbytes, rel=1e-3), (phase, trace.peaks, rank[name])
