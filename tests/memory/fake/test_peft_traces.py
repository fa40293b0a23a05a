"""A step with every kind of PEFT adapter: the traced peak equals the one that PyTorch records on the CPU."""

from __future__ import annotations

import pytest
import torch
from peft_kinds import KNOWN, adapted
from trace_models import adamw, peak_of_a_second_step, training_step
from versions import slow_except

from ckpt_ft.memory.fake.step import trace_step

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns about its defaults


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("kind", slow_except(KNOWN, "FROD", "SHIRA", "SHADOW", "HIRA"))
def test_peak_with_adapters_equals_the_profilers(kind: str, dtype: torch.dtype) -> None:
    model, batch = adapted(kind, dtype)
    step = training_step(lambda model: model(**batch).loss)
    trace = trace_step(model, step, make_optimizer=adamw, device="cpu")
    predicted = trace.peak_allocated - trace.replay.allocated[trace.start - 1]
    allowed = 1e-3 if kind == "CPT" else 1e-4  # a step of CPT asks for the unique values in a batch
    assert predicted == pytest.approx(peak_of_a_second_step(step, model), rel=allowed)
