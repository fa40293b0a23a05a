"""An Accelerate loop on as many processes as there are."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

accelerator = Accelerator(gradient_accumulation_steps=2)
torch.manual_seed(0)
config = LlamaConfig(
    vocab_size=200, hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4,
    num_key_value_heads=2,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(200, (64, 32))]
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, 4, shuffle=True))
for batch in loader:
    with accelerator.accumulate(model):
        loss = model(**batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.gather_for_metrics(loss.detach()).mean().item()
