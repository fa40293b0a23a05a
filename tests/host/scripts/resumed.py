"""A Trainer that saves after steps 2 and 4; `resumed.py FOLDER [kill|resume]`. Prints a hash of its weights."""

import hashlib
import os
import signal
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments, set_seed

folder, how = sys.argv[1], sys.argv[2]


class Kill(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if how == "kill" and state.global_step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


set_seed(0)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2, use_cache=False))
rows = [{"input_ids": torch.arange(16) + number, "labels": torch.arange(16) + number} for number in range(24)]
arguments = TrainingArguments(
    folder,
    max_steps=6,
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    save_steps=2,
    report_to="none",
    disable_tqdm=True,
    use_cpu=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[Kill()])
trainer.train(resume_from_checkpoint=True if how == "resume" else None)
seen = hashlib.sha256()
for value in (*model.state_dict().values(), torch.get_rng_state()):
    seen.update(value.contiguous().view(torch.uint8).numpy().tobytes())
print("numbers", seen.hexdigest())
