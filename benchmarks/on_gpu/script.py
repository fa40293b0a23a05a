"""A training script as people write them, for gpu.py: `python script.py trainer|plain|lora small|large [steps]`.

It knows nothing of this package. Its last line is a hash of the trained weights and the random state.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

kind, large, steps = sys.argv[1], sys.argv[2] == "large", int(sys.argv[3]) if len(sys.argv) > 3 else 8
set_seed(0)
torch.use_deterministic_algorithms(True, warn_only=True)
width, length, batch = (1024, 1024, 4) if large else (64, 64, 2)
config = LlamaConfig(
    vocab_size=16 * width, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=12 if large else 4,
    num_attention_heads=16, num_key_value_heads=8, attention_dropout=0.1,
)  # fmt: skip
model: Any = LlamaForCausalLM(config)
if kind == "lora":
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model.to(torch.bfloat16), LoraConfig(r=8, lora_dropout=0.1, task_type="CAUSAL_LM"))
rows: Any = [{"input_ids": ids, "labels": ids} for ids in torch.randint(config.vocab_size, (batch * steps, length))]
if kind == "plain":
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = model.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda")
    for step, one in enumerate(torch.utils.data.DataLoader(rows, batch, shuffle=True)):
        with torch.autocast(device.type, torch.float16 if device.type == "cuda" else torch.bfloat16):
            loss = model(**{name: value.to(device) for name, value in one.items()}).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        print(f"step {step}: {loss.item():.6f}")
else:
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=batch, bf16=kind == "trainer", report_to="none",
            disable_tqdm=True, logging_steps=2, save_strategy="no", use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        Trainer(model, arguments, train_dataset=rows).train()
state = hashlib.sha256()
for value in (*model.state_dict().values(), torch.get_rng_state()):
    state.update(value.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
print("hash", state.hexdigest()[:16])
