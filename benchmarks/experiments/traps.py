"""Common checkpointing errors, made on purpose: what `check_parity` reports, or what the tracker counts."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.pages import table
from ckpt_ft.checkpointing.parity import Parity, check_parity
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker

from .common import Found

Forward = Callable[[Tensor], Tensor]
Run = Callable[[Forward, Tensor], Tensor]


class TrapBlock(nn.Module):
    """Linear, optional BatchNorm, ReLU, dropout, residual."""

    def __init__(self, dropout: float, norm: bool) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(16, 16), nn.Dropout(dropout)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.dropout(torch.relu(self.norm(self.linear(x))))
        return out


class TrapModel(nn.Module):
    """Four such blocks and a linear head."""

    def __init__(self, dropout: float = 0.0, norm: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(TrapBlock(dropout, norm) for _ in range(4))
        self.head = nn.Linear(16, 4)

    def features(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.features(x))
        return out


def each_block(model: nn.Module, run: Run) -> None:
    """Runs every block of `model` through `run`."""
    for block in model.blocks:  # type: ignore[union-attr]
        block.forward = partial(run, block.forward)


def reentrant(forward: Forward, x: Tensor) -> Tensor:
    """Reentrant checkpointing of inputs without gradients: PyTorch warns once, and nothing inside is trained."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out: Tensor = checkpoint(forward, x, use_reentrant=True)
    return out


def without_rng(forward: Forward, x: Tensor) -> Tensor:
    """The recomputation draws other dropout masks than forward."""
    out: Tensor = checkpoint(forward, x, use_reentrant=False, preserve_rng_state=False)
    return out


def plain(forward: Forward, x: Tensor) -> Tensor:
    """torch's own checkpoint: BatchNorm sees each batch twice."""
    out: Tensor = checkpoint(forward, x, use_reentrant=False)
    return out


def without_gradients(forward: Forward, x: Tensor) -> Tensor:
    """no_grad around a region "to save memory"."""
    with torch.no_grad():
        return forward(x)


def nested(model: nn.Module) -> None:
    """A checkpoint around all blocks, each of which is a checkpoint itself."""
    each_block(model, plain)
    model.features = partial(plain, model.features)  # type: ignore[assignment,arg-type]


# name -> a function that makes the error in a model, and the model's options
TRAPS: dict[str, tuple[Callable[[nn.Module], None], dict[str, Any]]] = {
    "the frozen front that trains nothing": (partial(each_block, run=reentrant), {}),
    "dropout without RNG": (partial(each_block, run=without_rng), {"dropout": 0.5}),
    "BatchNorm twice": (partial(each_block, run=plain), {"norm": True}),
    "no_grad inside a region": (partial(each_block, run=without_gradients), {}),
    "nested checkpoints": (nested, {}),
}


def spring(name: str) -> tuple[Parity, Parity]:
    """Returns the parity of one error, and of this project's `full` on the same model."""
    install, options = TRAPS[name]
    torch.manual_seed(0)
    model, x = TrapModel(**options), torch.randn(8, 16)
    return check_parity(model, x, install), check_parity(model, x, "full")


def kept_references(keep: bool) -> list[int]:
    """Returns the peak bytes of five steps of a loop that keeps each loss tensor, or only its number."""
    torch.manual_seed(0)
    model, history, peaks = TrapModel(), [], []
    each_block(model, plain)
    with Tracker(model) as tracker:
        for _ in range(5):
            tracker.restart()
            model.zero_grad()
            loss = model(torch.randn(64, 16)).square()  # without reduction: a kept loss holds its graph
            loss.mean().backward(retain_graph=keep)
            history.append(loss if keep else float(loss.detach().mean()))
            del loss
            peaks.append(tracker.recorder.peak)
    return peaks


def runs_of_linears(install: Callable[[nn.Module], None]) -> int:
    """Returns how often the blocks' four linear layers run in one step of forward and backward."""
    model = TrapModel()
    install(model)
    with Tracker(model) as tracker:
        tracker.start_step()
        model(torch.randn(8, 16)).square().mean().backward()
    trace: StepTrace = tracker.trace()
    return sum(op.name == "aten.addmm.default" for op in trace.ops) - 1  # the head


def traps(images: Path) -> Found:
    """All errors."""
    rows = []
    for name in TRAPS:
        trapped, ours = spring(name)
        said = "; ".join(trapped.causes) or "nothing differs"
        rows.append([name, "same" if trapped.ok else "DIFFERS", said, "same" if ours.ok else "DIFFERS"])
    held, let_go = kept_references(keep=True), kept_references(keep=False)
    peaks = [["losses kept with their graph", *map(str, held)], ["their numbers kept", *map(str, let_go)]]
    return Found(
        {
            "table": table(["trap", "check_parity", "what it says", "`full` on the same model"], rows, words=4),
            "kept": table(["kept references: peak bytes (measured, CPU) of step", *map(str, range(1, 6))], peaks),
            "each": runs_of_linears(partial(each_block, run=plain)), "nested": runs_of_linears(nested),
        }
    )  # fmt: skip
