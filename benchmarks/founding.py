"""The founding documents' experiments: predicted by the trace, and tracked on the CPU.

    python benchmarks/founding.py --all                  # runs every experiment and writes docs/founding.md, offline
    python benchmarks/founding.py --only homework traps  # prints these
    python benchmarks/founding.py --list

The documents: a deep dive into activation checkpointing, a ResNet-50 case study, a homework on sublayer checkpointing
(github.com/vinitvyas09/optimizers holds its notebook), a forum thread, a tutorial.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for modules that import one another
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from benchmarks.experiments import case_study, compositions, homework, selective, spacing, stacks, traps, tutorial
from benchmarks.experiments.common import Figure, Section
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.measure.report import provenance

PAGE = Path(__file__).resolve().parents[1] / "docs" / "founding.md"
SEED = 0
HOW_TO_READ = (
    '"Predicted" figures are `trace_step`\'s on fake tensors, for the named GPU; the step never ran. "Measured" '
    "steps ran on the CPU with every storage followed (`Tracker`). MB is 1e6 bytes, "
    "as in the documents. Errors are signed: ours over published, less one; of percentages, the difference in "
    "points. If a document leaves settings open, its section states ours. The tutorial gives none, so an error "
    "there is a difference between two settings and says nothing about the trace."
)

# In the order of the page: (folder of pictures, whether at toy size) -> a section.
EXPERIMENTS: dict[str, Callable[[Path, bool], Section]] = {
    "breakdown": stacks.breakdown,
    "timeline": stacks.timeline,
    "segments": stacks.segments,
    "depth": spacing.depth,
    "frequency": spacing.frequency,
    "sequential": spacing.sequential,
    "homework": homework.homework,
    "resnet": case_study.resnet,
    "selective": selective.selective,
    "budgets": selective.budgets,
    "strategies": tutorial.strategies,
    "largest_batches": tutorial.largest_batches,
    "traps": traps.traps,
    "compositions": compositions.compositions,
}


def seed_table(figures: list[Figure]) -> str:
    """Returns every published figure with ours and the signed error, or the reason why there is none."""
    lines = ["| published by | figure | published | ours | error | |", "| --- | --- | ---: | ---: | ---: | --- |"]
    for figure in figures:
        ours = "" if figure.ours is None else f"{_number(figure)} ({figure.kind})"
        unit = f" {figure.unit}" if figure.unit and figure.unit not in figure.published else ""
        lines.append(
            f"| {figure.source} | {figure.what} | {figure.published}{unit} | {ours} | {figure.error} | {figure.note} |"
        )
    return "\n".join(lines)


def _number(figure: Figure) -> str:
    assert figure.ours is not None
    digits = 0 if figure.unit in ("", "%") or figure.ours >= 1000 else 1
    return f"{figure.ours:.{digits}f}{' ' + figure.unit if figure.unit else ''}"


def made_by(command: str, minutes: float) -> str:
    """Returns command, versions and machine as one line."""
    versions = provenance()["versions"]
    named = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "transformers") if name in versions)
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    machine = f"{platform.system()} {platform.machine()}, {os.cpu_count()} CPU cores, {gpu}"
    return f"Made by `{command}` in {minutes:.1f} minutes with {named} on {machine}, {datetime.date.today()}."


def page(sections: list[Section], minutes: float) -> str:
    """Returns docs/founding.md."""
    figures = [figure for section in sections for figure in section.figures]
    parts = [
        "# The founding documents, reproduced",
        made_by("python benchmarks/founding.py --all", minutes),
        HOW_TO_READ,
        "## Every published figure",
        seed_table(figures),
    ]
    for section in sections:
        parts += [f"## {section.title}", *section.parts]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every experiment, written to docs/founding.md")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="print these, write no page")
    parser.add_argument("--quick", action="store_true", help="at toy size: shows that the code runs, and nothing else")
    parser.add_argument("--list", action="store_true", help="name the experiments")
    parser.add_argument("--output", type=Path, default=PAGE, help="the page; pictures go to img beside it")
    arguments = parser.parse_args()
    if arguments.list or not (arguments.all or arguments.only):
        print("\n".join(f"{name:16s} {make.__doc__}" for name, make in EXPERIMENTS.items()))
        return 0
    for name in arguments.only:
        if name not in EXPERIMENTS:
            raise UserError(f"--only {name}: no such experiment ({', '.join(EXPERIMENTS)})")
    warnings.simplefilter("ignore")  # the deliberate errors warn
    images = arguments.output.parent / "img"
    images.mkdir(parents=True, exist_ok=True)
    sections, began = [], time.perf_counter()
    for name in arguments.only or EXPERIMENTS:
        torch.manual_seed(SEED)
        start = time.perf_counter()
        sections.append(EXPERIMENTS[name](images, arguments.quick))
        print(f"{name}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)
    if arguments.only:
        print("\n\n".join(f"## {section.title}\n\n" + "\n\n".join(section.parts) for section in sections))
        print("\n" + seed_table([figure for section in sections for figure in section.figures]))
        return 0
    arguments.output.write_text(page(sections, (time.perf_counter() - began) / 60), encoding="utf-8")
    print(f"wrote {arguments.output.name}")
    return 0


if __name__ == "__main__":
    run(main)
