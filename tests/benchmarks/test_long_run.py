"""Reserved bytes of a long run (benchmarks/flux2.py): a repeated traced step equals steps traced one by one."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn

from benchmarks import flux2
from ckpt_ft.memory.fake.step import Step, trace_step
from ckpt_ft.units import MIB


def model() -> nn.Module:
    with torch.device("meta"):
        return nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Gradients live until the next step, as in a loop that clears them before backward."""
    optimizer.zero_grad(set_to_none=True)
    model(torch.zeros(3000, 1024)).sum().backward()
    optimizer.step()


def emptying() -> Step:
    """Returns the same step in a loop that empties the cache after each stretch of steps."""
    done = 0

    def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        nonlocal done
        step(model, optimizer)
        done += 1
        if done >= 3 and (done - 3) % flux2.STEPS == 0:
            torch.cuda.empty_cache()

    return stepped


@pytest.mark.parametrize("stretches", [1, 3])
def test_repeated_step_equals_traced_steps(stretches: int) -> None:
    once = trace_step(model(), step, make_optimizer=adamw, warmup_steps=2)
    whole = trace_step(model(), emptying(), make_optimizer=adamw, warmup_steps=2 + flux2.STEPS * (stretches - 1))
    assert len(whole.emptied) == stretches
    assert flux2.peak_reserved(once, stretches) == whole.peak_reserved
    released = [before - after for before, after in pairwise(whole.replay.reserved) if after < before]
    assert len(released) == stretches - 1  # the last one is at the end of the record
    assert all(nbytes >= 40 * MIB for nbytes in released)
