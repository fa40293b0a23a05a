"""Training steps of BERT-large on a V100 of 16 GB, as in Hugging Face's documentation.

huggingface.co/docs/transformers/v4.21.0/perf_train_gpu_one: `bert-large-uncased` for sequence classification, rows of
512 tokens, an epoch of 512 rows by the Trainer in January 2022; its transformers.AdamW takes one parameter at a time.
Published are the epoch's seconds and the device's memory by NVML after it.

Two things were different then, and are so in `traced` unless `as_then` is False: PyTorch 1.10 saved the input of a
softmax besides its result (derivatives.yaml; since 1.11 only its dtype), and transformers 4.15 added a mask in float32
to the scores even if no row was padded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertForSequenceClassification

from ckpt_ft import trace_step
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.standins.optimizers import LAYOUTS, Tabulated
from ckpt_ft.units import MIB
from ckpt_ft.workloads.optimizers import make_optimizer

SIZES = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
CARD, STEPS = "v100-16gb", 128
CONTEXT = 1341  # MiB of the device: a process with one small tensor, whose segment has 2, uses 1,343


@dataclass(frozen=True)
class Row:
    """One published run: MiB of the device, and seconds of a step."""

    name: str
    batch: int
    mib: int
    epoch: float
    checkpointing: bool = False
    fp16: bool = False
    optimizer: str = "adamw_hf"

    @property
    def seconds(self) -> float:
        return self.epoch / STEPS


ROWS = (
    Row("4 rows", 4, 14949, 57.82),
    Row("4 x 1 row", 1, 8681, 66.03),
    Row("4 x 1 row, checkpointing", 1, 6775, 85.47, checkpointing=True),
    Row("4 rows, fp16", 4, 13939, 27.46, fp16=True),
    Row("4 x 1 row, checkpointing, fp16", 1, 7275, 50.76, checkpointing=True, fp16=True),
    Row("4 rows, Adafactor", 4, 12295, 64.31, optimizer="adafactor"),
    Row("4 x 1 row, checkpointing, fp16, Adafactor", 1, 4847, 56.54, True, True, "adafactor"),
    Row("4 rows, 8-bit Adam", 4, 13085, 55.95, optimizer="adamw_8bit"),
    Row("4 x 1 row, checkpointing, fp16, 8-bit Adam", 1, 5363, 49.46, True, True, "adamw_8bit"),
)


class AdamW(torch.optim.Optimizer):
    """The update of transformers.AdamW 4.15, with a temporary tensor per parameter."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 5e-5})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for parameter in (p for group in self.param_groups for p in group["params"]):
            gradient, state = parameter.grad, self.state[parameter]
            if not state:
                state["mean"], state["square"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
            state["mean"].mul_(0.9).add_(gradient, alpha=0.1)
            state["square"].mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            parameter.addcdiv_(state["mean"], state["square"].sqrt().add_(1e-6), value=-5e-5)


class _Softmax(torch.autograd.Function):
    """Softmax that saves its input for the backward pass, as PyTorch 1.10 did."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, dim: int) -> Tensor:
        out = scores.softmax(dim)
        ctx.save_for_backward(scores, out)
        ctx.dim = dim
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        scores, out = ctx.saved_tensors
        return torch._softmax_backward_data(gradient, out, ctx.dim, scores.dtype), None


def _optimizer(name: str) -> Callable[[nn.Module], Any]:
    if name == "adamw_hf":
        return lambda model: AdamW(model.parameters())
    if name == "adamw_8bit":  # created directly, without the Trainer's exception for embeddings
        return lambda model: Tabulated(model, replace(LAYOUTS[name], whole_embeddings=False), on_cpu=False)
    return lambda model: make_optimizer(model, name)


def traced(row: Row, as_then: bool = True) -> StepTrace:
    """Traces the row's step with the mask and softmax of 2022, or those of today."""
    with torch.device("meta"):
        model = BertForSequenceClassification(BertConfig(**SIZES, attn_implementation="eager")).train()
    if row.checkpointing:
        model.gradient_checkpointing_enable()
    ids, labels = torch.randint(100, 30000, (row.batch, 512)), torch.zeros(row.batch, dtype=torch.long)
    scaler = torch.amp.GradScaler("cuda", enabled=row.fp16)
    softmax = nn.functional.softmax

    def old_softmax(scores: Tensor, dim: int, dtype: torch.dtype | None = None) -> Any:
        return _Softmax.apply(scores + torch.zeros(scores.shape[-1]), dim)

    def step(model: nn.Module, optimizer: Any) -> None:
        micro_batches = 4 // row.batch
        with patch.object(nn.functional, "softmax", old_softmax if as_then else softmax):
            for _ in range(micro_batches):
                with torch.autocast("cuda", torch.float16, enabled=row.fp16):
                    loss = model(input_ids=ids, labels=labels).loss / micro_batches
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=False)

    return trace_step(model, step, make_optimizer=_optimizer(row.optimizer), device=CARD)


def device_mib(trace: StepTrace) -> float:
    """Returns the MiB of the device that NVML reports."""
    return trace.peak_reserved / MIB + CONTEXT
