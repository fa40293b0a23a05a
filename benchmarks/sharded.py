"""Sharded steps: one rank's trace compared with published FSDP2 runs, and Llama's memory on 1 to 64 GPUs.

python benchmarks/sharded.py --published    # the rows of benchmarks/data/fsdp2_*.csv
python benchmarks/sharded.py --scaling --write    # Llama-3.1-8B and -70B, all weights and LoRA, on 1 to 64 GPUs

Everything is predicted, on the CPU, without weights; the published rows were measured on 8 to 128 GPUs.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import torchtitan
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB, format_bytes
from ckpt_ft.workloads.load import load

DATA = Path(__file__).resolve().parent / "data"
EIGHT, MANY = DATA / "fsdp2_llama3_8b.csv", DATA / "fsdp2_many_gpus.csv"
COMPILED, PARALLEL = DATA / "fsdp2_compiled.csv", DATA / "fsdp2_parallel.csv"
POLICIES = {"selective op": "save:attention+matmul/2", "selective layer": "every:2", "none": "none", "full": "full"}
PAGE = Path(__file__).resolve().parents[1] / "docs" / "distributed.md"
BEGIN, END = "<!-- benchmarks/sharded.py --scaling --write -->", "<!-- to here -->"
REACHED = 0.9  # share of a network's rate (memory/cost/collectives.py)
# torchtitan's H100; torchao's rows, by the same authors, do not name theirs
CARDS = {"H100": "h100-500w", "H200": "h200", "A100": "a100-80gb"}


@dataclass(frozen=True)
class Row:
    """A published run; `reserved` in GiB, if published, and `seconds` of a step."""

    model: str
    gpus: int
    card: str
    batch: int
    tokens: int
    checkpointing: str
    keeps: bool  # gathered parameters after forward
    reserved: float | None
    seconds: float
    compiled: bool = False
    tp: int = 1
    float8: str = ""

    @property
    def shape(self) -> str:
        return f"{self.batch} x {self.tokens}"

    @property
    def resharding(self) -> str:
        return "kept" if self.keeps else "resharded"


def published(rows: Path) -> Iterator[tuple[Row, StepTrace]]:
    """Returns each row of a file with the trace of torchtitan's own model and loop."""
    with rows.open(encoding="utf-8") as file:
        for cells in csv.DictReader(file):
            batch, tokens, gpus = int(cells["batch_per_gpu"].split()[0]), int(cells["seq"]), int(cells["gpus"])
            took = batch * tokens / int(cells.get("tp", 1)) / float(cells["tokens_per_s_per_gpu"])
            kind, keeps = cells["activation_checkpointing"], cells["reshard_after_forward"] == "never"
            reserved = float(cells["reserved"]) if cells["reserved"] else None
            card, tp = cells["gpu"].split()[0], int(cells.get("tp", 1))
            compiled, float8 = cells.get("compiled") == "each block", cells.get("float8") or ""
            row = Row(cells["model"], gpus, card, batch, tokens, kind, keeps, reserved, took, compiled, tp, float8)
            model = torchtitan.llama(row.model, cells.get("norms") == "fused", float8, tp)
            like = "h100" if cells["gpu"] == "H100 SXM" else CARDS[card]
            loss_too = cells.get("loss") == "compiled"
            trace = torchtitan.trace(model, POLICIES[kind], batch, tokens, keeps, gpus, like, compiled, tp, loss_too)
            network = cells.get("network_of_a_machine")  # as "400 Gb/s"
            link = REACHED * float(network.split()[0]) * 1e9 / 8 if network else None
            launch = Launch("fsdp2", gpus, tp=tp, link=link)  # for the seconds of its collectives
            options = "" if cells["allocator"] == "not printed" else cells["allocator"]
            yield row, replace(trace, launch=launch, alloc_conf=options)


def print_published() -> None:
    """Prints the rows of all files, one per line."""
    print("| model, GPUs | batch x tokens | checkpointing | after forward | reserved GiB: published |", end="")
    print(" predicted | tokens/s/GPU: published | predicted |\n|---|---|---|---|---:|---:|---:|---:|")
    for row, trace in (row for file in (EIGHT, MANY, COMPILED, PARALLEL) for row in published(file)):
        reserved = f"{row.reserved or ''} | {trace.peak_reserved / GIB:.2f}"
        tokens = row.batch * row.tokens / row.tp
        compiled = ", compiled" * row.compiled + f", float8 {row.float8}" * bool(row.float8)
        print(
            f"| {row.model}, {row.gpus} {row.card}{compiled} | {row.shape} | {row.checkpointing} | {row.resharding} | "
            f"{reserved} | {tokens / row.seconds:.0f} | {tokens / trace.seconds:.0f} |",
            flush=True,
        )


def scaling(write: bool) -> None:
    """FSDP2 as accelerate wraps it, bf16, one row of 4,096 tokens per H100, `full`; machines of eight GPUs."""
    rows = [
        "| model | trained | GPUs | reserved on each | of it parameters and states | tokens/s/GPU | tokens/s |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    print(*rows, sep="\n")
    for name in ("meta-llama/Llama-3.1-8B", "meta-llama/Llama-3.1-70B"):
        for trained, more in (("all weights", {}), ("LoRA 16", {"lora_r": 16, "dtype": "bfloat16"})):
            settings = TrainingSpec.of(mixed_precision="bf16", seq_length=4096).edit(**more)
            workload = load(settings.edit(model=name), find_gpu("h100"))
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
