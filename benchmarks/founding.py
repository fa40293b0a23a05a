"""The founding documents' experiments: predicted by the trace, and tracked on the CPU.

    python benchmarks/founding.py --all                  # runs every experiment and writes docs/founding.md, offline
    python benchmarks/founding.py --only homework traps  # prints these
    python benchmarks/founding.py --list

The documents: a deep dive into activation checkpointing, a ResNet-50 case study, a homework on sublayer checkpointing
(github.com/vinitvyas09/optimizers holds its notebook), a forum thread, a tutorial. Each experiment is one function,
which returns the values in its section of data/founding.md.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.experiments import case_study, homework, stacks, traps, tutorial
from benchmarks.experiments.common import Figure, Found
from benchmarks.pages import DOCS, made_by, prose, table
from ckpt_ft.errors import UserError, run

PAGE = DOCS / "founding.md"
# In the order of the page: folder of pictures -> what the section shows.
EXPERIMENTS: dict[str, Callable[[Path], Found]] = {
    "breakdown": stacks.breakdown,
    "timeline": stacks.timeline,
    "segments": stacks.segments,
    "depth": stacks.depth,
    "frequency": stacks.frequency,
    "sequential": stacks.sequential,
    "homework": homework.homework,
    "resnet": case_study.resnet,
    "selective": stacks.selective,
    "budgets": stacks.budgets,
    "strategies": tutorial.strategies,
    "largest_batches": tutorial.largest_batches,
    "traps": traps.traps,
}


def of_figures(found: list[Found]) -> str:
    """Returns every published figure with ours and the signed error, or the reason why there is none."""
    figures: list[Figure] = [figure for one in found for figure in one.figures]
    lines = table(["published by", "figure", "published", "ours", "error", ""], [f.line for f in figures], words=2)
    return lines.replace("---: |\n", "--- |\n", 1)  # the last column has words


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every experiment, written to docs/founding.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="print these, write no page")
    parser.add_argument("--list", action="store_true", help="name the experiments")
    arguments = parser.parse_args()
    if arguments.list or not (arguments.all or arguments.only):
        print("\n".join(f"{name:16s} {make.__doc__}" for name, make in EXPERIMENTS.items()))
        return 0
    for name in arguments.only:
        if name not in EXPERIMENTS:
            raise UserError(f"--only {name}: no such experiment ({', '.join(EXPERIMENTS)})")
    warnings.simplefilter("ignore")  # the deliberate errors warn
    sections, said, began = prose("founding.md"), [], time.perf_counter()
    found = []
    for name in arguments.only or EXPERIMENTS:
        torch.manual_seed(0)
        found.append(EXPERIMENTS[name](PAGE.parent / "img"))
        said.append(sections[name].format(**found[-1].values))
        print(f"{name}: {time.perf_counter() - began:.1f} s", file=sys.stderr, flush=True)
    if arguments.only:
        print("\n\n".join([*said, of_figures(found)]))
    else:
        head = sections["head"].format(made_by=made_by(), figures=of_figures(found))
        PAGE.write_text("\n\n".join([head, *said]) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    run(main)
