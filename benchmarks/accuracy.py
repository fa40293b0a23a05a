"""Compares predictions with published measurements: every row, signed errors, medians, and a plot.

    python benchmarks/accuracy.py                     # prints, and writes docs/accuracy.md and README's table
    python benchmarks/accuracy.py --only t4 flux2     # prints these
    python benchmarks/accuracy.py --rows 3            # the first rows of each table, writes nothing

A run that `ckpt-ft estimate` describes is a row of data/published.json: its settings or its file, and what was
published. Runs of other loops have their own module, which traces them as their code does. Nothing is downloaded and
nothing runs: models are on the meta device. All rows take about 20 minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import torch
import transformers
import yaml
from peft.tuners.lora import layer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import flux2, kernels, loops, operators, pages, timm_steps, torchtitan
from benchmarks.pages import DATA, DOCS, prose
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.gpus import GPUS
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.estimate import traced_estimate
from ckpt_ft.planning.max_length import predict_max_length
from ckpt_ft.planning.results import Estimate
from ckpt_ft.spec.flags import fields_of
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_file import read_training_file
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load

PAGE, README = DOCS / "accuracy.md", DOCS.parent / "README.md"
BEGIN, END = "<!-- accuracy -->", "<!-- end of accuracy -->"
PICTURE = "img/accuracy_seconds.png"
UNITS = {"GiB": GIB, "GB": 10**9}
PROSE = prose("accuracy.md")
table = partial(pages.table, words=99)  # all columns aligned to the left


@dataclass
class Row:
    """A published run: the cells of its table, its signed errors by column, and its seconds.

    published, predicted: seconds of a step; 0 if none were published, None if the table has none.
    """

    name: str
    cells: list[str]
    errors: dict[str, float]
    published: float = 0.0
    predicted: float | None = None

    @property
    def line(self) -> list[str]:
        if not self.published:
            return [self.name, *self.cells, "", "" if self.predicted is None else f"{self.predicted:.4g}", ""]
        assert self.predicted is not None
        error = percent(self.predicted / self.published - 1)
        return [self.name, *self.cells, f"{self.published:.4g}", f"{self.predicted:.4g}", error]


@dataclass
class Group:
    """One table: `rows` makes its rows, and `run` traces them.

    unseen: whether no rule was chosen or changed with knowledge of these rows; a string names the figures concerned.
    target: median and worst error of the seconds.
    """

    title: str
    header: tuple[str, ...]
    rows: Callable[[], Iterator[Row]]
    unseen: bool | str = False
    target: tuple[float, float] | None = None
    found: list[Row] = field(default_factory=list)

    def run(self, most: int | None) -> Group:
        for row in islice(self.rows(), most):
            self.found.append(row)
            print(*row.line, sep="  ", flush=True)
        return self

    @property
    def seconds(self) -> dict[str, tuple[float, float]]:
        """Published and predicted seconds, by row."""
        return {row.name: (row.published, row.predicted or 0.0) for row in self.found if row.published}

    @property
    def errors(self) -> dict[str, list[float]]:
        """Signed errors, by column."""
        found: dict[str, list[float]] = {}
        for row in self.found:
            for column, error in row.errors.items():
                found.setdefault(column, []).append(error)
        timed = [predicted / published - 1 for published, predicted in self.seconds.values()]
        return found | ({"seconds": timed} if timed else {})

    def markdown(self, text: str) -> str:
        """The section of the page, with `text` behind the table."""
        header = (*self.header, "s: published", "predicted", "error")
        cells = map(median_and_worst, self.errors.values())
        said = table([f"{len(self.found)} rows: median / worst", *self.errors], [["", *cells]])
        return "\n\n".join([f"## {self.title}", table(header, [row.line for row in self.found]), said, text])


def percent(error: float) -> str:
    return f"{100 * error:+.2f} %"


def median_and_worst(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"{100 * statistics.median(sizes):.2f} / {100 * sizes[-1]:.2f} %"


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = ([sum((x < y) + (x <= y) for x in values) for y in values] for values in (a, b))
    return statistics.correlation(*ranks)


def compared(
    name: str, column: str, published: float, nbytes: float, unit: str, seconds: float, traced: float | None
) -> Row:
    """A row whose cells are published and predicted bytes, in `unit`, and the error."""
    predicted = nbytes / UNITS[unit]
    cells = [f"{published:.2f} {unit}", f"{predicted:.2f} {unit}", percent(predicted / published - 1)]
    return Row(name, cells, {column: predicted / published - 1}, seconds, traced)


# --- rows of data/published.json, by the public door


def published(group: str) -> list[dict[str, Any]]:
    """The rows of a group."""
    rows: list[dict[str, Any]] = json.loads((DATA / "published.json").read_text(encoding="utf-8"))
    return [row for row in rows if row["group"] == group]


def spec_of(row: dict[str, Any]) -> TrainingSpec:
    """The spec of a row: its fields, or what `ckpt-ft estimate --config` reads from its file."""
    os.environ["OMP_NUM_THREADS"] = "1"  # the default of `accelerate launch`, for the seconds of Adam on the host
    fields = dict(row.get("spec", {}))
    if "file" in row:
        with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
            file.write(yaml.safe_dump(row["file"]))
            file.flush()
            fields = fields_of({**read_training_file(file.name, row["kind"]).flags, "device": row["device"]})
        fields["model"] = row["file"]["base_model"]
    if "launch" in row:
        launch = Launch(**row["launch"])
        launch = launch.with_offload(row["offload"]) if "offload" in row else launch
        if row["group"].startswith("longest"):  # as in its configurations
            launch = replace(launch, zero=replace(launch.zero, seq_parallel_reduce="bf16"))
        fields["launch"] = launch
    return TrainingSpec.of(fields.pop("model"), **fields)


def predicted(spec: TrainingSpec) -> Estimate:
    return traced_estimate(spec, lambda line: None)[0]


def described(group: str) -> Iterator[Row]:
    """The rows of a group of data/published.json."""
    for row in published(group):
        # PEFT 0.20 multiplies the two factors of an adapter on experts before it adds them, in any precision.
        halves = ("bfloat16",) if row.get("peft") == "0.20" else ()
        with patch.object(layer, "UPCAST_DTYPES", (*layer.UPCAST_DTYPES, *halves)):
            found = predicted(spec_of(row))
        nbytes = {
            "allocated": found.peak_allocated,
            "reserved": found.peak_reserved,
            "device": found.peak_reserved + found.context,  # as NVML counts
        }[row["column"]]
        column = "bytes" if group == "host" else row["column"]
        yield compared(row["name"], column, row["published"], nbytes, row["unit"], row["seconds"], found.seconds)


def longest(group: str) -> Iterator[Row]:
    """Longest sequences that fit, beside published ones.

    At the published bytes is the length at which the predicted bytes equal the published ones, on the line through two
    traced lengths.
    """
    for row in published(group):
        spec, tokens = spec_of(row).edit(seq_length=16), row["published"]
        found = predict_max_length(load(spec, GPUS[row["spec"]["device"]]), [spec.policy]).ladder[0]
        errors = {"tokens": found.length / tokens - 1}
        if (known := row.get("first predicted")) is not None:
            errors = {"first predicted": known / tokens - 1}
        else:
            there = predicted(spec.edit(seq_length=tokens))
            slope = (found.peak_reserved - there.peak_reserved) / (found.length - tokens)
            known = tokens + (row["GiB of the device"] * GIB - there.context - there.peak_reserved) / slope
            errors["at the published bytes"] = known / tokens - 1
        cells = [f"{tokens:,}", f"{found.length:,}", percent(found.length / tokens - 1)]
        yield Row(row["name"], [*cells, f"{known:,.0f}", percent(known / tokens - 1)], errors)


# --- rows of other loops


def t4() -> Iterator[Row]:
    for row in loops.rows_of("t4_lora_steps"):
        trace = loops.t4_trace(row)
        errors = loops.t4_errors(row, trace)
        cells = [percent(error) for error in errors.values()]
        yield Row(loops.t4_label(row), cells, errors, float(row["step_seconds"]), trace.seconds)


def diffusion() -> Iterator[Row]:
    for name, row in flux2.published().items():
        if name == "frod default":  # its initialisation decomposes all weights together, in 22 GiB
            continue
        trace = flux2.trace(row)
        found = {"reserved by a step": trace.peak_reserved, "reserved by the run": flux2.reserved_by_run(row, trace)}
        errors = {column: had / row["max_reserved_bytes"] - 1 for column, had in found.items()}
        yield Row(name, [*map(percent, errors.values())], errors, row["step_seconds"], trace.seconds)


def reserved(name: str, published: float, trace: StepTrace, seconds: float, column: str = "reserved") -> Row:
    return compared(name, column, published, trace.peak_reserved, "GiB", seconds, trace.seconds)


def sharded() -> Iterator[Row]:
    for row, trace in torchtitan.published("fsdp2_llama3_8b"):
        assert row.reserved is not None
        yield reserved(f"{row.shape}, {row.checkpointing}, {row.resharding}", row.reserved, trace, row.seconds)


def many_gpus() -> Iterator[Row]:
    for row, trace in torchtitan.published("fsdp2_many_gpus"):
        assert trace.launch is not None
        elsewhere = replace(trace, launch=replace(trace.launch, link=None)).seconds
        theirs = f"{row.reserved:.2f} GiB" if row.reserved else ""
        cells = [theirs, f"{trace.peak_reserved / GIB:.2f} GiB", f"{elsewhere:.4g}"]
        name = f"{row.model}, {row.gpus} {row.card}, {row.shape}, {row.checkpointing}"
        yield Row(name, cells, {}, row.seconds, trace.seconds)


def compiled() -> Iterator[Row]:
    for row, trace in torchtitan.published("fsdp2_compiled"):
        assert row.reserved is not None
        how = "each block compiled" if row.compiled else "eager"
        how += f", float8 {row.float8}" * bool(row.float8)
        name = f"Llama 3 8B, {row.gpus} {row.card}, {row.shape}, {how}"
        yield reserved(name, row.reserved, trace, row.seconds, "bytes")
    yield from prime("compiled")
    optimizer = "adamw_fused"
    yield vit("ViT-huge, RTX 4070 Ti Super, batch 8, bf16 autocast, whole model", optimizer)


def vit(name: str, optimizer: str) -> Row:
    trace = loops.vit_trace(optimizer)
    return compared(name, "bytes", loops.VIT_GB[optimizer], trace.peak_allocated, "GB", 0.0, trace.seconds)


def prime(*kinds: str) -> Iterator[Row]:
    """The rows of prime-rl of these kinds; those of "compiled" were seen first."""
    for row in loops.rows_of("prime_rl"):
        if row["kind"] in kinds:
            model, gpus, gpu, column = row["model"].partition("/")[2], row["gpus"], row["gpu"], "reserved"
            name = f"{model}, {row['kind']}, {gpus} {gpu.upper()}, 2 x 1 x {row['tokens']}, `{row['checkpointing']}`"
            if row["kind"] == "compiled":
                column, name = "bytes", f"{model}, {gpus} {gpu}, 2 x 1 x {row['tokens']}, full, each block compiled"
            yield reserved(name, float(row["reserved_gib"]), loops.prime_trace(row), float(row["seconds"]), column)


def experts() -> Iterator[Row]:
    yield reserved("Qwen3-30B-A3B, 8 H200, 2 x 1 x 16384, full", 74.588, loops.prime_experts_trace(), 7.401)
    yield from described("experts")


def long() -> Iterator[Row]:
    yield from described("long")
    for row, trace in torchtitan.published("fsdp2_parallel"):
        assert row.reserved is not None
        name = f"{row.model} of torchtitan, {row.tokens:,} tokens, FSDP2 over {row.gpus // row.tp}"
        name += f" x tensor parallelism over {row.tp}" if row.tp > 1 else ", compiled, 8 bits" * row.compiled
        yield reserved(f"{name}: reserved", row.reserved, trace, row.seconds)


def host() -> Iterator[Row]:
    yield from described("host")
    for optimizer in loops.VIT_GB:
        yield vit(f"ViT-huge, RTX 4070 Ti Super, compiled, {optimizer}: allocated", optimizer)


def fp32() -> Iterator[Row]:
    """Forward and backward of BERT and GPT-2 in fp32 on four GPUs, for which no bytes were published."""
    for row in loops.rows_of("fp32_steps"):
        name = f"{row['model']}, {row['gpu']}, {row['rows']} x {row['tokens']}"
        yield Row(name, [], {}, float(row["seconds"]), loops.fp32_trace(row).seconds)


def bert() -> Iterator[Row]:
    """An epoch of 512 rows, of which a step takes four."""
    for row in loops.rows_of("bert_large_v100"):
        then, now, mib = loops.bert_trace(row), loops.bert_trace(row, as_then=False), int(row["mib"])
        error, today = (loops.bert_mib(trace) / mib - 1 for trace in (then, now))
        cells = [f"{mib:,}", f"{loops.bert_mib(then):,.0f}", percent(error), percent(today)]
        yield Row(row["name"], cells, {"device": today}, float(row["epoch"]) / 128, then.seconds)  # as first predicted


ROWS: dict[str, Callable[[], Iterator[Row]]] = {
    "t4": t4,
    "flux2": diffusion,
    "sharded": sharded,
    "many_gpus": many_gpus,
    "compiled": compiled,
    "prime_rl": partial(prime, "rl", "sft"),
    "experts": experts,
    "long": long,
    "host": host,
    "longest": partial(longest, "longest"),
    "longest_blind": partial(longest, "longest_blind"),
    "fp32": fp32,
    "bert": bert,
}
GROUPS = {
    name: Group(rows=ROWS[name], **group)
    for name, group in json.loads((DATA / "accuracy_groups.json").read_text(encoding="utf-8")).items()
}


def summary(groups: Iterable[Group], vision: str) -> str:
    """Returns a row per table, which rows were unseen, and the targets. `vision`: path of the page of timm's rows."""
    lines = []
    for group in groups:
        bytes_ = [
            f"{column.removeprefix('reserved by the ')} {median_and_worst(signed)}"
            for column, signed in group.errors.items()
            if column not in ("forward", "backward", "optimizer", "seconds")
        ]
        seen = group.unseen if isinstance(group.unseen, str) else "unseen" if group.unseen else "seen"
        cells = [group.title, str(len(group.found)), seen, ", ".join(bytes_)]
        lines.append([*cells, *_seconds(group.errors.get("seconds", []), group.target)])
    for called, half in timm_steps.halves(timm_steps.results()).items():
        name, signed = f"[timm's models on an RTX 3090]({vision})", [row.error for row in half]
        lines.append([name, str(len(half)), called, "", *_seconds(signed, (8, 25))])
    return table(("runs", "rows", "rows were", "bytes", "seconds", "target of seconds"), lines)


def _seconds(signed: list[float], target: tuple[float, float] | None) -> tuple[str, str]:
    """Returns the errors of the seconds, and the target with whether it is met."""
    if not signed or target is None:
        return median_and_worst(signed) if signed else "", ""
    sizes = sorted(map(abs, signed))
    met = 100 * statistics.median(sizes) <= target[0] and 100 * sizes[-1] <= target[1]
    return median_and_worst(signed), f"{target[0]:g} / {target[1]:g} %, {'met' if met else 'missed'}"


def draw(groups: Iterable[Group], path: Path) -> None:
    """Predicted against published seconds, log-log, with bands of 5 and 15 %."""
    from matplotlib import colormaps
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.2), layout="constrained")
    axes = figure.add_subplot()
    low, high = 0.05, 500.0
    for share, shade in ((0.15, "#eeeeee"), (0.05, "#dddddd")):
        below, above = ([end * factor for end in (low, high)] for factor in (1 - share, 1 + share))
        axes.fill_between([low, high], below, above, color=shade, lw=0)
    axes.plot([low, high], [low, high], color="#888888", lw=0.8)
    named: list[tuple[float, float]] = []
    for group, colour, mark in zip(groups, colormaps["tab10"].colors, "osD^vPX*hp", strict=False):  # type: ignore[attr-defined]
        measured, expected = zip(*group.seconds.values(), strict=True)
        axes.scatter(
            measured, expected, s=26, color=colour, marker=mark, lw=0, label=group.title, zorder=3, alpha=0.85
        )
        for name, (x, y) in group.seconds.items():
            if abs(y / x - 1) > 0.11:
                near = sum(abs(x / left - 1) < 0.1 and abs(y / down - 1) < 0.05 for left, down in named)
                side: dict[str, Any] = {"xytext": (5, -3 - 8 * near)} if y < x else {"xytext": (-5, 2), "ha": "right"}
                named.append((x, y))
                axes.annotate(name, (x, y), textcoords="offset points", fontsize=6.5, color="#444444", **side)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="seconds of a step, published")
    axes.set_ylabel("predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
    said = "Seconds of a step; the bands are 5 and 15 %, rows named that are further off than 11 %"
    axes.set_title(said, fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def document(groups: dict[str, Group]) -> str:
    """docs/accuracy.md."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    pairs = [pair for group in groups.values() for pair in group.seconds.values()]
    ranks = rank_correlation(*map(list, zip(*pairs, strict=True)))
    timed = kernels.errors()
    single = {
        "kernels": kernels.of_kinds(timed),
        "loaded": kernels.under_load(timed),
        "operators": operators.table_of_seconds(),
    }
    parts = [
        "# How true a trace is",
        PROSE["made"].format(versions=versions),
        summary(groups.values(), "vision.md"),
        f"![Predicted against published seconds]({PICTURE})",
        f"Over all {len(pairs)} rows the rank correlation of the seconds is {ranks:.3f}.",
        *(group.markdown(PROSE[name]) for name, group in groups.items()),
        PROSE["kernels"].format(**single),
        PROSE["live"],
    ]
    return "\n\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME", help=f"of {', '.join(GROUPS)}; writes nothing"
    )
    parser.add_argument("--rows", type=int, help="the first rows of each table; writes nothing")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(GROUPS):
        raise UserError(f"--only: no rows called {', '.join(sorted(unknown))} ({', '.join(GROUPS)})")
    warnings.simplefilter("ignore")
    groups = {name: GROUPS[name].run(arguments.rows) for name in arguments.only or GROUPS}
    if arguments.only or arguments.rows is not None:
        for name, group in groups.items():
            print(f"\n{group.markdown(PROSE[name])}")
        return 0
    draw([group for group in groups.values() if group.seconds], PAGE.parent / PICTURE)
    PAGE.write_text(document(groups), encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    said = summary(groups.values(), "docs/vision.md")
    README.write_text(f"{before}{BEGIN}\n{said}\n{END}{after}", encoding="utf-8")
    print(f"wrote {PAGE.name} and the table of {README.name}")
    return 0


if __name__ == "__main__":
    run(main)
