"""Small traces for tests of exports: one made by hand, one recorded."""

from __future__ import annotations

import torch
from torch import nn

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.events import Op, Storage
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import KIB, MIB

HOSTILE = "<img src=x onerror=alert(1)>"
MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def layered(layers: int, device: str = "t4", prefix: str = "model", waves: int = 1) -> StepTrace:
    """Returns a step whose forward saves activations and whose backward frees them, `waves` times, in a model of
    `layers` layers.

    Each module has 2 MiB of weights; its forward saves 1 MiB and allocates 256 KiB temporarily.
    """
    names = [f"{prefix}.layers.{i}.{module}" for i in range(layers) for module in MODULES]
    storages = [Storage(2 * MIB, "parameters", "", "", "", owner=name) for name in names]
    events = list(range(len(storages)))
    start = len(events)
    ops: list[Op] = []

    def make(nbytes: int, category: str, name: str, phase: str) -> int:
        ops.append(Op("aten.mm.default", 2 * 10**9, 3 * nbytes, "bfloat16", phase, name, len(events)))
        storages.append(Storage(nbytes, category, "aten.mm.default", name, phase))
        events.append(len(storages) - 1)
        return len(storages) - 1

    kept = []
    for name in names * waves:
        events.append(~make(256 * KIB, "temporary", name, "forward"))
        kept.append(make(MIB, "activations", name, "forward"))
    backward = len(events)
    for name, index in zip(names[::-1] * waves, kept[::-1], strict=True):
        temporary = make(512 * KIB, "temporary", name, "backward")
        events.extend((~temporary, ~index))
    marks = [(start, "step"), (start, "forward"), (backward, "backward")]
    return StepTrace(device, storages, events, ops, marks, source="predicted")


def traced() -> StepTrace:
    """Returns a traced step of two linear layers under AdamW on a T4."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(32, 64)

    def one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return trace_step(model, one, make_optimizer=lambda m: torch.optim.AdamW(m.parameters()), device="t4")
