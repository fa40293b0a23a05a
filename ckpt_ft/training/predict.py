"""What a Trainer's step was predicted to cost, for the report's column beside what it was measured to cost.

The step is the Trainer's own in order and lifetimes: micro-batches forward and backward, the outputs dropped as soon
as the loss is there, clipping, the optimizer, gradients freed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ckpt_ft.memory.fake.step import trace_step

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from ckpt_ft.memory.gpus import GPU
    from ckpt_ft.memory.measure.largest_batch import LargestBatch
    from ckpt_ft.memory.record.trace import StepTrace


def predict_trainer(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: LargestBatch,
    settings: TrainingArguments,
    device: str | GPU,
) -> StepTrace:
    """Trace one optimizer step of a Trainer on the largest batch that it saw, the policy standing on `model`.

    Raises:
        UserError: the step depends on data in a way that a trace cannot answer.
    """

    def step(model: nn.Module, twin: torch.optim.Optimizer) -> None:
        batches = [batch.again() for _ in range(settings.gradient_accumulation_steps)]  # a Trainer fetches all at once
        for args, kwargs in batches:
            loss = model(*args, **kwargs).loss
            loss.backward()
        if settings.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), settings.max_grad_norm)
        twin.step()
        model.zero_grad()

    optimizer = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
    trainable = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    groups = [{**group, "params": [trainable[id(p)] for p in group["params"]]} for group in optimizer.param_groups]

    def make_twin(model: nn.Module) -> torch.optim.Optimizer:
        named = dict(model.named_parameters())
        kind: Any = type(optimizer)
        return kind([{**group, "params": [named[name] for name in group["params"]]} for group in groups])

    return trace_step(model, step, make_optimizer=make_twin, device=device)
