"""Traces the table that `ckpt-ft where --device CARD` answers from (ckpt_ft/planning/card_table.json).

python benchmarks/card_table.py --minutes 10    # goes on where an earlier call ended; about 80 CPU minutes in all
python benchmarks/card_table.py --fresh         # begins anew, after a change of what is predicted
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from functools import partial
from itertools import product
from typing import Any

from ckpt_ft.errors import run
from ckpt_ft.files import write
from ckpt_ft.memory.gpus import GPU, GPUS
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.budget import memory_budget
from ckpt_ft.planning.card_table import LENGTHS, PAGE, POLICY, SPEED_AT, SWAPPED_AT, TABLE, kernels_of, spec_of
from ckpt_ft.planning.methods import METHODS
from ckpt_ft.planning.search import blocks_to_swap
from ckpt_ft.planning.tracing import on_card, run_tasks, trace_policies
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import trained_positions
from ckpt_ft.workloads.workload import Workload

MODELS = (
    "Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "Qwen/Qwen3-1.7B", "meta-llama/Llama-3.2-3B", "Qwen/Qwen3-4B",
    "meta-llama/Llama-3.1-8B", "Qwen/Qwen3-8B", "Qwen/Qwen3-14B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-70B",
)  # fmt: skip


def cards_of() -> dict[str, list[GPU]]:
    """The cards by their kernels, the one with the most memory first; the most common kernels first."""
    found: dict[str, list[GPU]] = {}
    for card in sorted(GPUS.values(), key=lambda card: -card.memory):
        found.setdefault(kernels_of(card), []).append(card)
    return dict(sorted(found.items(), key=lambda pair: -len(pair[1])))


def traced(workload: Workload, policy: str, length: int) -> StepTrace:
    (trace,) = trace_policies(workload, [policy], workload.step(1, length))
    assert isinstance(trace, StepTrace), trace
    return trace


def limit(card: GPU) -> int:
    return memory_budget(None, card).limit


def entry(model: str, method: str, cards: list[GPU], tell: Any = None) -> dict[str, Any]:
    """The bytes of every length that fits the largest of these cards and of the next one, and the speed on each."""
    warnings.simplefilter("ignore")
    workload = load(spec_of(model, method, LENGTHS[0], cards[0]), cards[0])
    longest = trained_positions(workload.model.config)
    traces: list[StepTrace] = []
    swapped, blocks = None, blocks_to_swap(workload)[0]
    sizes: list[int] = []
    for length in (length for length in LENGTHS if length <= longest):
        trace = traced(workload, POLICY, length)
        traces += [trace] if length <= SPEED_AT else []
        sizes.append(trace.peak_reserved)
        if sizes[-1] > limit(cards[0]):
            break
    if blocks and sizes[0] > min(map(limit, cards)):
        swapped = traced(workload, f"{POLICY},swap:{blocks}", SWAPPED_AT)
    speed: dict[str, float] = {}
    for card in (card for card in cards if not card.sized):
        fitting = [at for at, nbytes in enumerate(sizes) if nbytes <= limit(card)]
        if fitting:
            at = min(fitting[-1], len(traces) - 1)
            speed[card.name] = float(f"{LENGTHS[at] / on_card(traces[at], card).seconds:.4g}")
        elif swapped is not None and swapped.peak_reserved <= limit(card):
            speed[card.name] = float(f"{SWAPPED_AT / on_card(swapped, card).seconds:.4g}")
    assert not any(nbytes % PAGE for nbytes in sizes)
    swap = [] if swapped is None else [blocks, swapped.peak_reserved // PAGE]
    return {"pages": [nbytes // PAGE for nbytes in sizes], "swap": swap, "speed": speed}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=600)
    parser.add_argument("--jobs", type=int, default=0)
    parser.add_argument("--fresh", action="store_true")
    asked = parser.parse_args()
    table: dict[str, Any] = {} if asked.fresh or not TABLE.is_file() else json.loads(TABLE.read_text())
    cards, end = cards_of(), time.monotonic() + 60 * asked.minutes
    combined = [(model, method, kernels) for kernels, model, method in product(cards, MODELS, METHODS)]
    missing = [key for key in combined if key[2] not in table.get(key[0], {}).get(key[1], {})]
    done = 0
    while missing[done:] and time.monotonic() < end:
        batch = missing[done : done + 8]
        for number, found in run_tasks([partial(entry, model, way, cards[k]) for model, way, k in batch], asked.jobs):
            model, method, kernels = batch[number]
            table.setdefault(model, {}).setdefault(method, {})[kernels] = found
            print(f"{model}, {method}, {cards[kernels][0].name}: {found['pages']}", flush=True)
        done += len(batch)
        lines = [f" {json.dumps(model)}: {json.dumps(table[model], separators=(',', ':'))}" for model in table]
        write(TABLE, "{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(missing) - min(done, len(missing))} of {len(combined)} are left")
    return 0


if __name__ == "__main__":
    run(main)
