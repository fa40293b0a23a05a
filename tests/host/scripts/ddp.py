"""A Trainer on every process that torchrun starts. The first one writes a hash of the weights to a file."""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(0)
config = LlamaConfig(
    vocab_size=200, hidden_size=32, intermediate_size=64, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(200, (32, 16))]
with tempfile.TemporaryDirectory() as folder:
    arguments = TrainingArguments(
        folder, max_steps=5, per_device_train_batch_size=2, report_to="none", disable_tqdm=True, use_cpu=True,
        save_strategy="no",
    )  # fmt: skip
    trainer = Trainer(LlamaForCausalLM(config), arguments, train_dataset=rows)
    trainer.train()
seen = hashlib.sha256()
for value in trainer.model.state_dict().values():
    seen.update(value.contiguous().view(torch.uint8).numpy().tobytes())
if os.environ["RANK"] == "0":
    Path(sys.argv[1]).write_text(seen.hexdigest())
