"""Batches that ckpt_ft and accelerate's find_executable_batch_size find on one budgeted CPU: steps, OOMs, seconds.

python benchmarks/batch_finders.py
"""

from __future__ import annotations

import time

import torch
from accelerate.utils import find_executable_batch_size
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.planning.batch_size import find_max_batch_size
from ckpt_ft.units import MIB, format_bytes


def main() -> None:
    config = LlamaConfig(
        vocab_size=2048, hidden_size=128, intermediate_size=344, num_hidden_layers=4, num_attention_heads=4
    )
    model = LlamaForCausalLM(config).train()

    def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, size: int) -> None:
        ids = torch.zeros(size, 128, dtype=torch.long)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        model.zero_grad()

    def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), lr=0.0)

    print("| budget | policy | finder | batch | steps run | OOMs | seconds |\n|---|---|---|---:|---:|---:|---:|")
    for budget, policy in ((150 * MIB, "none"), (150 * MIB, "full"), (400 * MIB, "none"), (400 * MIB, "full")):
        apply_policy(model, policy)
        began = time.perf_counter()
        ours = find_max_batch_size(
            model,
            lambda size: lambda m, o: step(m, o, size),
            budget,
            make_optimizer=make_optimizer,
            max_batch_size=256,
        )
        ooms = sum(not trial.fits for trial in ours.trials)
        row = f"| {format_bytes(budget)} | {policy} |"
        print(
            f"{row} ckpt_ft | {ours.batch} | {len(ours.trials)} | {ooms} | {time.perf_counter() - began:.1f} |",
            flush=True,
        )

        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=256)
        def shrink(size: int) -> int:
            tried.append(size)  # noqa: B023  called before the loop goes on
            optimizer = make_optimizer(model)
            for _ in range(2):
                model.zero_grad()
                with Tracker(model, optimizer, limit=budget, ops=False):  # noqa: B023
                    step(model, optimizer, size)
            return size

        began = time.perf_counter()
        batch = shrink()
        seconds = time.perf_counter() - began
        print(f"{row} accelerate | {batch} | {len(tried) + 1} | {len(tried) - 1} | {seconds:.1f} |", flush=True)


if __name__ == "__main__":
    main()
