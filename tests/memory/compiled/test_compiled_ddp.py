"""Compiled steps under DDP: dynamo splits their graphs at its buckets, in the trace as on real gloo ranks."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from accelerate.utils.other import compile_regions
from forked_ranks import run_ranks
from test_compiled_steps import assert_buffers_are_the_codes, generated_code, steady_peak, traced_with_buffers
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from trace_models import Loss, adamw, training_step

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.memory.fake.compiled.lowering import compiling
from ckpt_ft.spec.launch import Launch

pytestmark = pytest.mark.filterwarnings("ignore")  # of torch's own imports
LAUNCH = Launch("ddp", 2)


class Wide(nn.Module):
    """Its last matrix fills DDP's first bucket of 1 MiB, the other one is in the next."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(256, 1024), nn.Linear(1024, 256), nn.LayerNorm(256)

    def forward(self, hidden):
        return self.norm(hidden + self.down(nn.functional.gelu(self.up(hidden))))


class Stack(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide() for _ in range(blocks))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def build(blocks: int, policy: str) -> tuple[nn.Module, Loss]:
    torch.manual_seed(0)
    model, hidden = Stack(blocks), torch.randn(2048, 256)
    apply_policy(model, policy)
    return model, lambda model: model(hidden).pow(2).mean()


def on_rank(model: nn.Module, what: str) -> nn.Module:
    """The model as accelerate prepares it (accelerator.py, prepare_model)."""
    ddp = DistributedDataParallel(model)
    return compile_regions(ddp) if what == "regional" else torch.compile(ddp)


def write_codes(rank: int, out: str, what: str, blocks: int, policy: str) -> None:
    dist.init_process_group("gloo")
    model, loss = build(blocks, policy)
    Path(out).write_text(json.dumps(generated_code(on_rank(model, what), training_step(loss))))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("what", "blocks", "policy"), [pytest.param("whole", 2, "full", marks=pytest.mark.slow), ("regional", 1, "none")]
)
def test_graphs_and_their_buffers_are_those_of_ddp(what: str, blocks: int, policy: str, tmp_path: Path) -> None:
    """A region of two halves, which end with a checkpoint or within a block; no kernel is compiled."""
    model, loss = build(blocks, policy)
    with compiling(model, what):
        trace, replayed = traced_with_buffers(model, training_step(loss), LAUNCH)
    out = tmp_path / "codes.json"
    run_ranks(write_codes, str(out), what, blocks, policy, ranks=1)
    codes = json.loads(out.read_text())
    assert len(codes) == 4
    assert_buffers_are_the_codes(codes, replayed)
    assert any("compiled: 4 graphs" in note for note in trace.notes)
    backward = [op.name for op in trace.ops if op.phase == "backward"]
    first = next(at for at, name in enumerate(backward) if "allreduce" in name)
    assert any(name.startswith("cpp_fused") for name in backward[first:])  # the first bucket does not wait for them


def write_peak(rank: int, out: str, what: str, policy: str) -> None:
    from torch._inductor import compile_fx

    dist.init_process_group("gloo")
    model, loss = build(2, policy)
    lowered = mock.Mock(wraps=compile_fx.compile_fx_inner)
    with mock.patch.object(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=lowered)):
        peak = steady_peak(training_step(loss), on_rank(model, what))
    Path(out, f"{rank}.json").write_text(json.dumps([peak, lowered.call_count]))
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["none", "full", "save:matmul"])
@pytest.mark.parametrize("what", ["whole", "regional"])
def test_peak_and_graphs_are_those_of_two_ranks(what: str, policy: str, tmp_path: Path) -> None:
    model, loss = build(2, policy)
    with compiling(model, what):
        trace = trace_step(model, training_step(loss), make_optimizer=adamw, device="cpu", launch=LAUNCH)
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    run_ranks(write_peak, str(tmp_path), what, policy)
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    print(f"{what}, {policy}: {predicted} predicted, {ranks} recorded")
    assert ranks[0] == ranks[1]
    recorded, graphs = ranks[0]
    assert predicted == pytest.approx(recorded, rel=0.02)
    assert any(f"compiled: {graphs} graphs" in note for note in trace.notes)
