"""The tables of predictions in the docs: one runner and one writer for all of them.

    python benchmarks/tables.py                            # all, into the docs; about an hour of one core
    python benchmarks/tables.py --only vit --no-write      # prints one

data/tables.json has, for each table, its page, its columns, and sections of rows: the settings that a section shares,
as of `TrainingSpec.of`, and those of each row, which `ckpt-ft estimate` takes as well.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import DATA, DOCS, table, write_section
from ckpt_ft import apply_policy
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.batch_size import predict_max_batch_size
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

TABLES = json.loads((DATA / "tables.json").read_text(encoding="utf-8"))
Settings = dict[str, Any]


def kept(trace: StepTrace) -> int:
    """Bytes of activations that forward keeps for backward."""
    return sum(trace.module_activations().values())


def held(trace: StepTrace) -> int:
    """Bytes of weights, gradients and states at the peak."""
    return sum(trace.at_peak[kind] for kind in ("parameters", "optimizer", "gradients"))


def speed(trace: StepTrace, row: Settings) -> float:
    """Tokens a second of one GPU."""
    return row["seq_length"] * row.get("batch_size", 1) / trace.seconds


def hashed(trace: StepTrace, plain: StepTrace, row: Settings) -> float:
    """Share of a step's seconds that hashes take: elementwise kernels that read twice what a plain step saves."""
    gpu = find_gpu(row["device"])
    return 2 * kept(plain) / (gpu.bandwidth * gpu.bandwidth_efficiency) / trace.seconds


# column -> (trace of the row, of the first row of the section, settings of the row) -> its cell
COLUMNS: dict[str, Callable[[StepTrace, StepTrace, Settings], str]] = {
    "peak GiB": lambda trace, first, row: f"{trace.peak_allocated / GIB:.2f}",
    "reserved GiB": lambda trace, first, row: f"{trace.peak_reserved / GIB:.2f}",
    "of it weights and states": lambda trace, first, row: f"{held(trace) / GIB:.2f}",
    "kept GiB": lambda trace, first, row: f"{kept(trace) / GIB:.2f}",
    "kept, saved": lambda trace, first, row: f"{1 - kept(trace) / kept(first):.0%}",
    "peak, saved": lambda trace, first, row: f"{1 - trace.peak_allocated / first.peak_allocated:.0%}",
    "ms": lambda trace, first, row: f"{trace.seconds * 1e3:.0f}",
    "s": lambda trace, first, row: f"{trace.seconds:.0f}",
    "time": lambda trace, first, row: f"{trace.seconds / first.seconds - 1:+.0%}",
    "verified": lambda trace, first, row: f"{hashed(trace, first, row):+.1%}" if row["policy"] != "none" else "",
    "tokens/s/GPU": lambda trace, first, row: f"{speed(trace, row):,.0f}",
    "tokens/s": lambda trace, first, row: f"{speed(trace, row) * row.get('launch', {}).get('processes', 1):,.0f}",
}
OF_A_ROW = "name", "policy", "launch", "largest", "batch_size"  # what the model does not depend on
BATCH_ON = "batch on "  # column of the largest batch on a card; only rows with "largest" have it


@functools.lru_cache(maxsize=2)
def built(settings: str) -> Workload:
    fields = json.loads(settings)
    return load(TrainingSpec.of(**fields), find_gpu(fields["device"]))


def workload_of(row: Settings) -> Workload:
    own = {name: value for name, value in row.items() if name not in OF_A_ROW}
    launch = Launch(**row["launch"]) if "launch" in row else None
    return replace(built(json.dumps(own)), launch=launch, alloc_conf=row.get("alloc_conf", ""))


def traced(row: Settings) -> StepTrace:
    subject = workload_of(row)
    applied = apply_policy(subject.model, row["policy"])
    try:
        return subject.trace(row.get("batch_size", 1))
    finally:
        applied.remove()


def cells(columns: list[str], trace: StepTrace, first: StepTrace, row: Settings) -> list[str]:
    found = []
    for column in columns:
        if not column.startswith(BATCH_ON):
            found.append(COLUMNS[column](trace, first, row))
        elif row.get("largest"):
            card = replace(workload_of(row), device=find_gpu(column.removeprefix(BATCH_ON)))
            found.append(str(predict_max_batch_size(card, row["policy"]).batch))
        else:
            found.append("")
    return found


def section(columns: list[str], given: Settings, points: dict[str, list[tuple[str, StepTrace]]]) -> str:
    """One section, printed row by row; its traces are added to `points`."""
    over: dict[str, list[int]] = given.get("over", {})  # one column of peaks for each value of a setting
    ((setting, values),) = over.items() or (("", [0]),)
    header = [given.get("first column", "policy"), *(f"{value:,}" for value in values if over), *columns]
    lines = []
    for changes in given["rows"]:
        row = {**given["spec"], **changes}
        traces = [traced({**row, setting: value} if over else row) for value in values]
        points.setdefault(given.get("title", ""), []).append((row["policy"], traces[-1]))
        first = points[given.get("title", "")][0][1]
        peaks = [COLUMNS["peak GiB"](trace, first, row) for trace in traces] if over else []
        lines.append([row.get("name") or f"`{row['policy']}`", *peaks, *cells(columns, traces[-1], first, row)])
        print("| " + " | ".join(lines[-1]) + " |", flush=True)
    title = f"### {given['title']}\n\n" if "title" in given else ""
    return title + table(header, lines)


def draw(points: dict[str, list[tuple[str, StepTrace]]], path: Path) -> None:
    """Plots kept activations against step time, each relative to the first row; one panel for each section."""
    from matplotlib.figure import Figure

    down = -(-len(points) // 2)
    figure = Figure(figsize=(10, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, 2, sharex=True, sharey=True, squeeze=False).flat
    for axes, (title, rows) in zip(panels, points.items(), strict=False):
        plain = rows[0][1]
        places = [(kept(trace) / kept(plain), trace.seconds / plain.seconds) for _, trace in rows]
        axes.scatter(*zip(*places, strict=True), s=18)
        for (x, y), (policy, _) in zip(places, rows, strict=True):
            axes.annotate(policy, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.axvline(0.5, color="grey", linewidth=0.6, linestyle=":")
        axes.axhline(1.15, color="grey", linewidth=0.6, linestyle=":")
        axes.set(title=title, xlim=(0, 1.3))
    figure.supxlabel("activations kept / none (predicted)")
    figure.supylabel("step time / none (predicted)")
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=list(TABLES), help=f"of {', '.join(TABLES)}")
    parser.add_argument("--rows", type=int, help="the first rows of each section; writes nothing")
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    if unknown := set(given.only) - set(TABLES):
        raise UserError(f"--only: no table {', '.join(sorted(unknown))} ({', '.join(TABLES)})")
    warnings.simplefilter("ignore")
    for name in given.only:
        asked, points = TABLES[name], dict[str, list[tuple[str, StepTrace]]]()
        chosen = [{**part, "rows": part["rows"][: given.rows]} for part in asked["sections"]]
        text = "\n\n".join(section(asked["columns"], part, points) for part in chosen)
        if given.no_write or given.rows:
            continue
        if "picture" in asked:
            draw(points, DOCS / asked["picture"])
        write_section(asked["page"], name, text)


if __name__ == "__main__":
    run(main)
