"""The loss of every optimizer step, averaged over micro-batches and ranks: in `losses.jsonl` and at the trackers."""

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
    """Writes a line `{"step", "loss", "lr"}` per step. What a resumed run will repeat is cut off when it starts.

    Args:
        step: the steps made before; lines after it are those of a run that went on past the checkpoint.
    """

    def __init__(self, accelerator: Accelerator, output_dir: str, step: int) -> None:
        self.accelerator = accelerator
        self.path = Path(output_dir) / NAME
        self._losses: list[Tensor] = []
        if accelerator.is_main_process:
            kept = [line for line in read_losses(output_dir) if line["step"] <= step]
            write(self.path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, loss: Tensor) -> None:
        """The loss of one micro-batch; nothing waits for the device here."""
        self._losses.append(loss.detach())

    def noting(self, compute_loss: Loss) -> Loss:
        """`compute_loss`, of which each value is noted."""

        def noted(model: Forward, batch: Batch) -> Tensor:
            loss = compute_loss(model, batch)
            self.add(loss)
            return loss

        return noted

    def step(self, step: int, learning_rate: float) -> float:
        """The mean loss since the last call, over all ranks, written and tracked. Called on every rank."""
        loss = self.accelerator.gather(torch.stack(self._losses).mean()).mean().item()
        self._losses.clear()
        if self.accelerator.is_main_process:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"step": step, "loss": loss, "lr": learning_rate}) + "\n")
        self.accelerator.log({"train_loss": loss, "lr": learning_rate}, step=step)
        return loss


def read_losses(output_dir: str) -> list[dict[str, float]]:
    """The lines of a run's log, without those that cannot be read: a kill leaves the last one unfinished."""
    path = Path(output_dir) / NAME
    lines = path.read_bytes().splitlines() if path.exists() else []
    return [entry for line in lines if (entry := _entry(line)) is not None]


def _entry(line: bytes) -> dict[str, float] | None:
    try:
        return TypeAdapter(dict[str, int | float]).validate_json(line) if b'"step"' in line else None
    except ValidationError:
        return None
