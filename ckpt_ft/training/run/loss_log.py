"""Writes the loss of every optimizer step, averaged over micro-batches and ranks, to `losses.jsonl` and trackers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from ckpt_ft.files import write
from ckpt_ft.workloads.workload import Batch, Forward, Loss

if TYPE_CHECKING:
    from accelerate import Accelerator

NAME = "losses.jsonl"


class LossLog:
    """Writes a line `{"step", "loss", "lr"}` per step. On resume, deletes the lines of steps that will be repeated.

    Args:
        step: the optimizer steps done so far; later lines come from steps after the checkpoint.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str, step: int) -> None:
        self.accelerator = accelerator
        self.path = Path(output_dir) / NAME
        self._losses: list[Tensor] = []
        if accelerator.is_main_process:
            kept = [line for line in read_losses(output_dir) if line["step"] <= step]
            write(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, loss: Tensor) -> None:
        """Add the loss of one micro-batch; this does not synchronize the device."""
        self._losses.append(loss.detach())

    def noting(self, compute_loss: Loss) -> Loss:
        """Returns `compute_loss` wrapped so that each value is added to the log."""

        def noted(model: Forward, batch: Batch) -> Tensor:
            loss = compute_loss(model, batch)
            self.add(loss)
            return loss

        return noted

    def step(self, step: int, learning_rate: float) -> float:
        """Write, track and return the mean loss since the last call, over all ranks. Called on every rank."""
        loss = self.accelerator.gather(torch.stack(self._losses).mean()).mean().item()
        self._losses.clear()
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss, "lr": learning_rate}) + "\n")
        self.accelerator.log({"train_loss": loss, "lr": learning_rate}, step=step)
        return loss


def read_losses(output_dir: str) -> list[dict[str, float]]:
    """Returns the lines of a run's log, without unreadable ones: a killed run leaves its last line unfinished."""
    path = Path(output_dir) / NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> dict[str, float] | None:
    try:
        return TypeAdapter(dict[str, int | float]).validate_json(line) if b'"step"' in line else None
    except ValidationError:
        return None
