"""Steps in their users' own words: inference, optimizers and contexts of many kinds, calls of the device itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from trace_models import language_model, real_trace, story

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.units import MIB

IDS = torch.arange(64).view(2, 32)
Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def test_a_step_under_inference_mode_is_traced_op_by_op() -> None:
    """There composite ops are not taken apart before they are dispatched, `.item()` among them."""

    def step(mode: Callable[[], AbstractContextManager[object]]) -> Step:
        def stepped(model: nn.Module, optimizer: object) -> None:
            with mode():
                (model(input_ids=IDS, use_cache=False).logits.float() > 0).all().item()

        return stepped

    model, _ = language_model()
    inference = trace_step(model.eval(), step(torch.inference_mode), device="cpu")
    assert story(inference) == story(trace_step(model, step(torch.no_grad), device="cpu"))
    assert story(inference) == story(real_trace(model, step(torch.inference_mode)))


def test_save_on_cpu_leaves_the_device() -> None:
    """Of twelve layers' 4 MiB each, the last one is held by the step and one is fetched at a time."""

    def step(where: Callable[[], AbstractContextManager[object]]) -> Step:
        def stepped(model: nn.Module, optimizer: object) -> None:
            with where():
                out = model(torch.ones(1024, 1024, requires_grad=True))
            out.sum().backward()

        return stepped

    model = nn.Sequential(*(nn.Sigmoid() for _ in range(12)))
    kept, saved = (trace_step(model, step(where)) for where in (nullcontext, torch.autograd.graph.save_on_cpu))
    assert kept.peaks["backward"] - saved.peaks["backward"] == (12 - 2) * 4 * MIB
    assert saved.seconds_parts.copying > 20 * 4 * MIB / 16e9


def test_a_sparse_gradient_goes_through() -> None:
    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(IDS).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    embedding = nn.Embedding(1000, 64, sparse=True)
    trace = trace_step(embedding, step, make_optimizer=lambda model: torch.optim.SparseAdam(model.parameters()))
    assert trace.peak_allocated > 3 * 1000 * 64 * 4
