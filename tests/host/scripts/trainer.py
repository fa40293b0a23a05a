"""A Trainer with rows of different lengths, gradient accumulation and evaluation; `trainer.py FOLDER [POLICY]`."""

import random
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

config = LlamaConfig(
    vocab_size=200,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
)
random.seed(0)
rows = [{"input_ids": [5] * random.randint(4, 60)} for _ in range(64)]


def collate(batch):
    ids = [torch.tensor(row["input_ids"]) for row in batch]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    return {"input_ids": padded, "attention_mask": padded.ne(0).long(), "labels": padded}


arguments = TrainingArguments(
    sys.argv[1],
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    report_to="none",
    disable_tqdm=True,
    bf16=True,
    use_cpu=not torch.cuda.is_available(),
    remove_unused_columns=False,
    eval_strategy="steps",
    eval_steps=1,
)
model = LlamaForCausalLM(config)
trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4], data_collator=collate)
if len(sys.argv) > 2:
    from ckpt_ft import ACArguments, ACCallback

    ACCallback(ACArguments(ac_policy=sys.argv[2], ac_report="json")).attach(trainer)
trainer.train()
