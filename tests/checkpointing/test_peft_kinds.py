"""Policies on every kind of adapter that PEFT has: no number changes, or one line says why it does not go."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft_kinds import LORA, adapted, quick_or_slow
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.parity import check_parity
from ckpt_ft.errors import UserError
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.adapters import adapt

POLICIES = ("full", "pointwise", "save:attention+matmul", "full,offload", "pointwise,offload", "segments:2", "head")
RE_RUN = ("full", "save:attention+matmul", "full,offload", "segments:2")
REFUSED = {"CARTRIDGE": RE_RUN, "PREFIX_TUNING": RE_RUN, "CPT": ("head",)}  # a cache of theirs; a loss over logits

pytestmark = pytest.mark.filterwarnings("ignore")  # of peft about its defaults


@pytest.mark.parametrize("kind", quick_or_slow("FROD", "SHIRA", "POLY", "alora"))
def test_a_policy_changes_no_number_of_adapters(kind: str) -> None:
    """With sparse tensors, and with hooks that PEFT takes off before backward."""
    model, batch = adapted(kind)
    for policy in POLICIES:
        if policy in REFUSED.get(kind, ()):
            with pytest.raises((UserError, AttributeError), match="past_key_values in training|computes no logits"):
                check_parity(model, batch, policy)
        else:
            parity = check_parity(model, batch, policy)
            assert parity.ok, parity


def test_adapters_that_are_mixed_are_so_in_the_second_run(tmp_path: Path) -> None:
    """X-LoRA hands each layer its shares by hooks of one forward."""
    shape = LlamaConfig(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=96,
        use_cache=False,
    )
    base = LlamaForCausalLM(shape)
    lora = {name: value for name, value in LORA.items() if name != "peft_type"}
    get_peft_model(base, LoraConfig(**lora, init_lora_weights=False)).save_pretrained(tmp_path)
    saved = {"0": str(tmp_path), "1": str(tmp_path)}
    mixed = {"peft_type": "XLORA", "task_type": "CAUSAL_LM", "hidden_size": 64, "xlora_depth": 1, "adapters": saved}
    model = adapt(LlamaForCausalLM(shape), TrainingSpec.of(peft=mixed))
    ids = torch.arange(32).view(2, 16)
    for policy in ("full", "save:matmul", "segments:2"):
        assert check_parity(model, {"input_ids": ids, "labels": ids}, policy).ok
