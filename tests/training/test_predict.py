"""What a Trainer's step was predicted to need is what the tracker measures of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt_ft.memory.measure.largest_batch import LargestBatch
from ckpt_ft.training.callback import ACCallback


@pytest.mark.parametrize("policy", ["none", "save:attention+matmul", "pointwise,head"])
def test_predicted_beside_measured(policy: str, tmp_path: Path) -> None:
    config = LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, vocab_size=512
    )
    ids = [torch.randint(0, 512, (64,)) for _ in range(16)]
    args = TrainingArguments(
        str(tmp_path), max_steps=2, per_device_train_batch_size=2, gradient_accumulation_steps=2, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), args, train_dataset=[{"input_ids": x, "labels": x} for x in ids])
    ACCallback(policy).attach(trainer)
    trainer.train()
    report = json.loads((tmp_path / "memory_report.json").read_text())
    measured = {phase: figures["allocated"] for phase, figures in report["ranks"][0]["peaks"].items()}
    predicted = report["predicted"]["peaks"]
    for phase in ("forward", "backward", "optimizer"):
        assert predicted[phase] == pytest.approx(measured[phase], rel=1e-3), phase
    assert report["provenance"]["shapes"] == {"input_ids": [2, 64], "labels": [2, 64]}


def test_the_largest_batch_is_kept_in_outline() -> None:
    batch = LargestBatch()
    batch.note((torch.ones(2, 3),), {"labels": torch.ones(4, dtype=torch.long), "flag": True})
    batch.note((torch.ones(1, 3),), {"labels": torch.ones(1, dtype=torch.long), "flag": False})
    assert batch.shapes == {"input 0": [2, 3], "labels": [4]}
    (x,), kwargs = batch.again()
    assert torch.equal(x, torch.zeros(2, 3))
    assert kwargs["flag"] is True
    assert torch.equal(kwargs["labels"], torch.ones(4, dtype=torch.long))
