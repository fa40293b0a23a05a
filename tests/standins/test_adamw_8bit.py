"""The stand-in for 8-bit AdamW holds what bitsandbytes documents, byte for byte."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.standins.adamw_8bit import AdamW8bit
from ckpt_ft.workloads.optimizers import make_optimizer


def test_state_bytes() -> None:
    large, small = nn.Parameter(torch.ones(100, 100)), nn.Parameter(torch.ones(4095))
    optimizer = AdamW8bit([large, small])
    large.grad, small.grad = torch.ones_like(large), torch.ones_like(small)
    optimizer.step()
    own = [{key: x.nbytes for key, x in optimizer.state[p].items() if "qmap" not in key} for p in (large, small)]
    sizes = [sum(state.values()) for state in own]
    assert sizes == [2 * (10_000 + 4 * 40), 2 * 4 * 4095]
    assert torch.equal(large, torch.ones_like(large))


def test_a_trace_counts_them_as_optimizer_state() -> None:
    with torch.device("meta"):
        model = nn.Linear(128, 128, bias=False)

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(torch.zeros(1, 128)).sum().backward()
        optimizer.step()
        model.zero_grad()

    trace = trace_step(model, step, make_optimizer=lambda model: AdamW8bit(model.parameters()), device="cpu")
    n = 128 * 128
    state = sum(s.nbytes for s in trace.storages if s.category == "optimizer")
    assert state == 2 * (n + 4 * n // 256) + 2 * 4 * 256


def test_embeddings_keep_float32_moments() -> None:
    """As Trainer tells bitsandbytes (transformers/trainer.py, create_optimizer), and a tied head with them."""
    model = nn.ModuleDict({"tokens": nn.Embedding(100, 64), "head": nn.Linear(64, 100, bias=False)})
    other = nn.Linear(64, 100, bias=False)
    model["head"].weight = model["tokens"].weight
    model["other"] = other
    optimizer = make_optimizer(model, "adamw_8bit")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    states = [optimizer.state[p]["state1"] for p in (model["tokens"].weight, other.weight)]
    assert [state.dtype for state in states] == [torch.float32, torch.uint8]
