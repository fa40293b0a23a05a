"""Sharded steps: one rank's trace against published FSDP2 runs, and how Llama's memory divides over GPUs.

python benchmarks/sharded.py --published    # five rows of benchmarks/data/fsdp2_llama3_8b.csv
python benchmarks/sharded.py --scaling --write    # Llama-3.1-8B and -70B, all weights and LoRA, on 1 to 64 GPUs

Everything is predicted, on the CPU, without weights; the published rows were measured on eight H100.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ckpt_ft.checkpointing.apply import apply_policy, remove_policy
from ckpt_ft.memory.distributed.group import rank_of
from ckpt_ft.memory.distributed.launch import Launch
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.units import GIB, format_bytes
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.settings import Settings

ROWS = Path(__file__).resolve().parent / "data" / "fsdp2_llama3_8b.csv"
POLICIES = {"selective op": "save:attention+matmul/2", "none": "none", "full": "full"}
PROCESSES = 8
PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- benchmarks/sharded.py --scaling --write -->", "<!-- to here -->"
CARD = "h100-500w"  # what torchtitan's rows were measured on; those of torchao do not say, by the same authors


@dataclass(frozen=True)
class Row:
    """A published run; `reserved` in GiB, `seconds` of a step."""

    batch: int
    tokens: int
    checkpointing: str
    keeps: bool  # gathered parameters after forward
    reserved: float
    seconds: float

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.tokens}"

    @property
    def resharding(self) -> str:
        return "kept" if self.keeps else "resharded"


def published() -> Iterator[tuple[Row, StepTrace]]:
    """torchtitan's loop: each block sharded, then the rest; the logits whole and in fp32; fused AdamW, clipping."""
    model = llama3_8b()
    with ROWS.open(encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            batch, tokens = int(cells["batch_per_gpu"].split()[0]), int(cells["seq"])
            took = batch * tokens / float(cells["tokens_per_s_per_gpu"])
            kind, keeps = cells["activation_checkpointing"], cells["reshard_after_forward"] == "never"
            row = Row(batch, tokens, kind, keeps, float(cells["reserved"]), took)
            yield row, torchtitan_step(model, POLICIES[kind], batch, tokens, keeps)


def print_published() -> None:
    """The table of `published`."""
    print("| batch x tokens | checkpointing | after forward | reserved GiB: published | predicted | error |", end="")
    print(" tokens/s/GPU: published | predicted |\n|---|---|---|---:|---:|---:|---:|---:|")
    for row, trace in published():
        reserved, tokens = trace.peak_reserved / GIB, row.batch * row.tokens
        print(
            f"| {row.shape} | {row.checkpointing} | {row.resharding} | {row.reserved:.2f} | {reserved:.2f} | "
            f"{reserved / row.reserved - 1:+.1%} | {tokens / row.seconds:.0f} | {tokens / trace.seconds:.0f} |",
            flush=True,
        )


def llama3_8b() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model: nn.Module = LlamaForCausalLM(config)
    return model.train()


def torchtitan_step(model: Any, policy: str, batch: int, tokens: int, keeps: bool) -> StepTrace:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

    def make_optimizer(model: Any) -> torch.optim.Optimizer:
        last = model.model.layers[-1]
        for block in model.model.layers:
            after = not keeps and block is not last  # the last one is needed again at once
            fully_shard(block, mesh=mesh, mp_policy=precision, reshard_after_forward=after)
        fully_shard(model, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
        return torch.optim.AdamW(model.parameters(), fused=True)

    def step(model: Any, optimizer: Any) -> None:
        ids = torch.zeros(batch, tokens, dtype=torch.long)
        labels = ids.clone()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):  # what the PyTorch of these runs took on Hopper
            logits = model(input_ids=ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))
        del logits
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    apply_policy(model, policy)
    try:
        with rank_of(PROCESSES) as mesh:
            trace = trace_step(
                model, step, make_optimizer=make_optimizer, device=CARD, alloc_conf="expandable_segments:True"
            )
            return replace(trace, launch=Launch("fsdp2", PROCESSES))  # for the seconds of its collectives
    finally:
        remove_policy(model)


def scaling(write: bool) -> None:
    """FSDP2 as accelerate wraps it, bf16, one row of 4,096 tokens on each H100, `full`; machines of eight."""
    rows = [
        "| model | trained | GPUs | reserved on each | of it parameters and states | tokens/s/GPU | tokens/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print(*rows, sep="\n")
    for name in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"):
        for trained, more in (("all weights", {}), ("LoRA 16", {"lora_r": 16, "dtype": "bfloat16"})):
            settings = Settings(mixed_precision="bf16", seq_length=4096, **more)  # type: ignore[arg-type]
            workload = load(name, settings, find_gpu("h100"))
            apply_policy(workload.model, "full")
            for processes in (1, 2, 4, 8, 16, 32, 64):
                machines = max(processes // 8, 1)
                launch = Launch("fsdp2", processes, machines, mixed_precision="bf16") if processes > 1 else None
                trace = replace(workload, launch=launch, alloc_conf="expandable_segments:True").trace(1)
                held = sum(trace.at_peak[kind] for kind in ("parameters", "optimizer", "gradients"))
                speed = 4096 / trace.seconds
                reserved = format_bytes(trace.peak_reserved)
                rows.append(
                    f"| {name.partition('/')[2]} | {trained} | {processes} | {reserved} | {format_bytes(held)} | "
                    f"{speed:,.0f} | {speed * processes:,.0f} |"
                )
                print(rows[-1], flush=True)
    if write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        after = rest.partition(END)[2]
        PAGE.write_text("\n".join([before + BEGIN, "", *rows, "", END]) + after, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", action="store_true")
    parser.add_argument("--scaling", action="store_true")
    parser.add_argument("--write", action="store_true", help="put the scaling table into docs/distributed.md")
    asked = parser.parse_args()
    if asked.published or not asked.scaling:
        print_published()
    if asked.scaling:
        scaling(asked.write)


if __name__ == "__main__":
    main()
