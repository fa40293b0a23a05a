"""CPU kernels copy operands of other dtypes: each kernel's copies as PyTorch records them, and those of a step."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from test_tracker import profiled_peak, tracked
from trace_models import adamw, language_model, step_events, training_step

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.record.cpu_kernels import CASTS, converted, observed

aten = torch.ops.aten
OPERANDS = {
    "bf16": torch.rand(64, 256).bfloat16() + 1, "fp32": torch.rand(64, 256) + 1, "row": torch.rand(256) + 1,
    "fp16 column": torch.ones(64, 1).half(), "bool": torch.rand(64, 256) > 0.5, "number": torch.tensor(2.0),
    "expanded": torch.rand(1, 256).bfloat16().expand(64, 256), "whole": torch.arange(256),
    "transposed": torch.rand(256, 64).t(), "scalar": 2.0,
}  # fmt: skip
SMALL = 64  # bytes: numbers, whose copies are ignored


@pytest.mark.parametrize("func", CASTS, ids=str)
def test_rule_predicts_the_copies_of_a_kernel(func: Any) -> None:
    compared = 0
    for args in _calls(func):
        try:
            out, taken = observed(lambda args=args: func(*args))
        except (RuntimeError, TypeError):
            continue  # no such kernel: an integer divided in place, the mean of bools
        assert converted(func, args, out) == pytest.approx(taken, abs=SMALL), args
        compared += 1
    assert compared > 3


def _calls(func: Any) -> list[tuple[Any, ...]]:
    tensors = [x for x in OPERANDS.values() if isinstance(x, torch.Tensor)]
    dense = [x for x in tensors if 0 not in x.stride()]
    if func is aten.linalg_vector_norm.default:
        return [(x, 2, [-1]) for x in tensors]
    if func in (aten.cumsum.default, aten.sum.dim_IntList, aten.mean.dim):
        return [(x, 0 if func is aten.cumsum.default else [0]) for x in tensors if x.dim()]
    if func in (aten.sum.default, aten.mean.default):
        return [(x,) for x in dense]
    if func is aten.pow.Tensor_Scalar:
        return [(x, power) for x, power in product(tensors, (2, 0.5))]
    if func is aten.where.self:
        return [(OPERANDS["bool"], *pair) for pair in product(tensors, repeat=2)]
    if func in (aten.addcmul.default, aten.addcdiv.default):
        return list(product(tensors[:4], repeat=3))
    return list(product(tensors, OPERANDS.values()))


def test_lora_in_float32_on_a_bfloat16_base() -> None:
    """Each LoRA layer adds a tensor of another dtype to the base's output; the copies are 2 % of the step's peak."""
    base, loss = language_model(hidden_size=128, intermediate_size=256)
    lora = LoraConfig(r=4, target_modules=["q_proj", "up_proj", "gate_proj"])
    model = get_peft_model(base.bfloat16(), lora).train()  # type: ignore[arg-type]
    step, optimizer = training_step(loss), adamw(model)
    trace = tracked(model, step, optimizer)
    measured = profiled_peak(lambda: step(model, optimizer))
    assert trace.peak_allocated - trace.replay.allocated[trace.start - 1] == pytest.approx(measured, rel=1e-3)
    fake = trace_step(model, step, make_optimizer=adamw, device="cpu")
    assert step_events(fake) == step_events(trace)
    copies = [s for s in trace.storages if s.op == "aten.add.Tensor" and s.nbytes == 4 * 2 * 64 * 256]
    # in each of the two steps a copy and a sum, for two layers in each of three blocks
    assert len(copies) == 2 * 2 * (2 * 3)
