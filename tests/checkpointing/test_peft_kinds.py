"""Policies on every kind of PEFT adapter keep the numbers, or are refused in one line."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_kinds import KNOWN, LORA, adapted
from transformers import LlamaConfig, LlamaForCausalLM
from versions import slow_except

from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.adapters import adapt

POLICIES = ("full", "pointwise", "save:attention+matmul", "full,offload", "pointwise,offload", "segments:2", "head")
REFUSED = {"CPT": ("head",)}  # its loss needs logits

pytestmark = pytest.mark.filterwarnings("ignore")  # peft warns about its defaults


@pytest.mark.parametrize("kind", slow_except(KNOWN, "FROD", "SHIRA", "POLY", "alora"))
def test_policy_keeps_the_numbers_of_every_adapter(kind: str) -> None:
    """Some adapters have sparse tensors, or hooks that PEFT removes before backward."""
    model, batch = adapted(kind)
    for policy in POLICIES:
        if policy in REFUSED.get(kind, ()):
            with pytest.raises((UserError, AttributeError), match="computes no logits"):
                check_parity(model, batch, policy)
        else:
            parity = check_parity(model, batch, policy)
            assert parity.ok, parity


def test_second_run_mixes_adapters_of_xlora_as_the_first(tmp_path: Path) -> None:
    """X-LoRA passes each layer its mixing weights by hooks that exist during forward only."""
    shape = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, vocab_size=96,
        use_cache=False,
    )  # fmt: skip
    base = LlamaForCausalLM(shape)
    lora = {name: value for name, value in LORA.items() if name != "peft_type"}
    get_peft_model(base, LoraConfig(**lora, init_lora_weights=False)).save_pretrained(tmp_path)
    saved = {"0": str(tmp_path), "1": str(tmp_path)}
    mixed = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": 64, "xlora_depth": 1, "adapters": saved}
    model = adapt(LlamaForCausalLM(shape), TrainingSpec.of(peft=mixed))
    ids = torch.arange(32).view(2, 16)
    for policy in ("full", "save:matmul", "segments:2"):
        assert check_parity(model, {"input_ids": ids, "labels": ids}, policy).ok
