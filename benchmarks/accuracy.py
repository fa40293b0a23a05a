"""Compares `trace_step` with published measurements: every row, signed errors, medians, and a plot.

    python benchmarks/accuracy.py                     # prints, and writes docs/accuracy.md and README's table
    python benchmarks/accuracy.py --only t4 flux2     # prints these
    python benchmarks/accuracy.py --rows 3            # the first rows of each table, writes nothing

Nothing is downloaded and nothing runs: models are on the meta device. It takes about 20 minutes of one CPU core.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import accuracy_prose as prose
from benchmarks import bert_large, experts, kernels, offloaded, operators, prime_rl, t4_lora, timm_steps
from benchmarks import compiled as others
from benchmarks import figures as toys
from benchmarks import flux2 as klein
from benchmarks import sharded as llama
from ckpt_ft import trace_step
from ckpt_ft.errors import UserError, run
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec

ROOT = Path(__file__).resolve().parents[1]
PAGE, README = ROOT / "docs" / "accuracy.md", ROOT / "README.md"
BEGIN, END = "<!-- accuracy -->", "<!-- end of accuracy -->"
PICTURE = "img/accuracy_seconds.png"


@dataclass
class Group:
    """The rows of one table, with published and predicted seconds of each.

    unseen: whether no rule was chosen or changed with knowledge of these rows; a string names the figures concerned.
    target: median and worst error of the seconds.
    """

    title: str
    text: str
    header: tuple[str, ...]
    unseen: bool | str = False
    target: tuple[float, float] | None = None
    lines: list[list[str]] = field(default_factory=list)
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)  # name -> published, predicted
    errors: dict[str, list[float]] = field(default_factory=dict)  # column -> signed errors

    def add(self, name: str, cells: Sequence[str], published: float, predicted: float, **errors: float) -> None:
        """Adds a row; `errors` are those of its other columns, and `published` is 0 if no seconds were published."""
        said = ["", f"{predicted:.4g}", ""]
        if published:
            errors["seconds"] = predicted / published - 1
            self.seconds[name] = published, predicted
            said = [f"{published:.4g}", f"{predicted:.4g}", percent(errors["seconds"])]
        self.lines.append([name, *cells, *said])
        for column, value in errors.items():
            self.errors.setdefault(column, []).append(value)
        print(*self.lines[-1], sep="  ", flush=True)

    def markdown(self) -> str:
        """The section of the page."""
        header = (*self.header, "s: published", "predicted", "error")
        cells = map(median_and_worst, self.errors.values())
        said = table([f"{len(self.lines)} rows: median / worst", *self.errors], [["", *cells]])
        return "\n\n".join([f"## {self.title}", table(header, self.lines), said, self.text])


def percent(error: float) -> str:
    return f"{100 * error:+.2f} %"


def median_and_worst(errors: Iterable[float]) -> str:
    sizes = sorted(map(abs, errors))
    return f"{100 * statistics.median(sizes):.2f} / {100 * sizes[-1]:.2f} %"


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
        lines.append(
            [group.title, str(len(group.lines)), seen, ", ".join(bytes_), *_seconds(group.errors, group.target)]
        )
    for called, half in timm_steps.halves(timm_steps.results()).items():
        errors = {"seconds": [row.error for row in half]}
        name = f"[timm's models on an RTX 3090]({vision})"
        lines.append([name, str(len(half)), called, "", *_seconds(errors, (8, 25))])
    return table(("runs", "rows", "rows were", "bytes", "seconds", "target of seconds"), lines)


def _seconds(errors: dict[str, list[float]], target: tuple[float, float] | None) -> tuple[str, str]:
    """Returns the errors of the seconds, and the target with whether it is met."""
    signed = errors.get("seconds", [])
    if not signed or target is None:
        return median_and_worst(signed) if signed else "", ""
    sizes = sorted(map(abs, signed))
    met = 100 * statistics.median(sizes) <= target[0] and 100 * sizes[-1] <= target[1]
    return median_and_worst(signed), f"{target[0]:g} / {target[1]:g} %, {'met' if met else 'missed'}"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Spearman's rank correlation; equal values share the mean of their ranks."""
    ranks = ([sum((x < y) + (x <= y) for x in values) for y in values] for values in (a, b))
    return statistics.correlation(*ranks)


def t4(most: int | None) -> Group:
    """LoRA steps on a T4."""
    columns = ("allocated", "reserved", "forward", "backward", "optimizer")
    group = Group("LoRA steps on a T4", prose.T4, ("row", *columns), target=(5.6, 22))
    for row in islice(t4_lora.published(), most):
        trace = t4_lora.trace(row)
        found = {name.removeprefix("peak_"): error for name, error in t4_lora.errors(row, trace).items()}
        errors = {column: found[column] for column in columns}
        group.add(
            t4_lora.label(row), [*map(percent, errors.values())], float(row["step_seconds"]), trace.seconds, **errors
        )
    return group


def flux2(most: int | None) -> Group:
    """31 fine-tuning methods on FLUX.2-klein."""
    columns = ("reserved by a step", "reserved by the run")
    title = "Fine-tuning methods of a diffusion transformer on an L40S"
    group = Group(title, prose.FLUX2, ("method", *columns), target=(2.4, 10.1))
    for name, row in islice(klein.published().items(), most):
        trace = klein.trace(row)
        found = trace.peak_reserved, klein.reserved_by_run(row, trace)
        errors = {name: had / row["max_reserved_bytes"] - 1 for name, had in zip(columns, found, strict=True)}
        group.add(name, [*map(percent, errors.values())], row["step_seconds"], trace.seconds, **errors)
    return group


def figures(most: int | None) -> Group:
    """ResNet-50 on a T4, and twelve blocks on an A100, for which no seconds were published."""
    group = Group(
        "ResNet-50 on a T4, twelve blocks on an A100",
        prose.FIGURES,
        ("workload", "published MB", "traced MB", "error"),
    )
    for name, published, traced, step in islice((*toys.resnet(), *toys.twelve_blocks()), most):
        cells = [f"{published:.0f}", f"{traced:.0f}", percent(traced / published - 1)]
        policy = name.removeprefix("ResNet-50, ")
        if policy in toys.RESNET and policy != name:
            group.add(name, cells, toys.RESNET[policy][1] / 1e3, step.seconds, allocated=traced / published - 1)
        else:
            group.lines.append([name, *cells, "", f"{step.seconds:.4g}", ""])
            print(*group.lines[-1], sep="  ", flush=True)
    return group


def sharded(most: int | None) -> Group:
    """Llama 3 8B under FSDP2 on eight H100."""
    row_name = "batch x tokens, checkpointing, after forward"
    header = (row_name, "reserved GiB: published", "predicted", "error")
    group = Group("Sharded steps on eight H100", prose.SHARDED, header, target=(5, 12))
    for row, trace in islice(llama.published(llama.EIGHT), most):
        reserved, theirs = trace.peak_reserved / 2**30, row.reserved
        assert theirs is not None
        error = reserved / theirs - 1
        name = f"{row.shape}, {row.checkpointing}, {row.resharding}"
        cells = [f"{theirs:.2f}", f"{reserved:.2f}", percent(error)]
        group.add(name, cells, row.seconds, trace.seconds, reserved=error)
    return group


def many_gpus(most: int | None) -> Group:
    """Llama 2 and 3 under FSDP2 on 64 A100 and 128 H100; for most of them no bytes were published."""
    header = (
        "model, GPUs, batch x tokens, checkpointing",
        "reserved GiB: published",
        "predicted",
        "s over a DGX's links",
    )
    group = Group("Sharded steps on 64 and 128 GPUs", prose.MANY_GPUS, header, unseen=True, target=(5, 12))
    for row, trace in islice(llama.published(llama.MANY), most):
        launch = trace.launch
        assert launch is not None
        elsewhere = replace(trace, launch=replace(launch, link=None)).seconds
        theirs = f"{row.reserved:.2f}" if row.reserved else ""
        name = f"{row.model}, {row.gpus} {row.card}, {row.shape}, {row.checkpointing}"
        cells = [theirs, f"{trace.peak_reserved / 2**30:.2f}", f"{elsewhere:.4g}"]
        group.add(name, cells, row.seconds, trace.seconds)
    return group


def compiled(most: int | None) -> Group:
    """Llama, Qwen3 and a ViT under torch.compile."""
    header = ("run", "published", "predicted", "error")
    group = Group("Compiled steps", prose.COMPILED, header)
    for row, trace in islice(llama.published(llama.COMPILED), most):
        assert row.reserved is not None
        error = trace.peak_reserved / 2**30 / row.reserved - 1
        how = "each block compiled" if row.compiled else "eager"
        how += f", float8 {row.float8}" * bool(row.float8)
        name = f"Llama 3 8B, {row.gpus} {row.card}, {row.shape}, {how}"
        cells = [f"{row.reserved:.2f} GiB", f"{trace.peak_reserved / 2**30:.2f} GiB", percent(error)]
        group.add(name, cells, row.seconds, trace.seconds, bytes=error)
    for model, tokens, gpus, card, reserved, seconds in islice(others.QWEN, most):
        trace = prime_rl.trace(model, tokens, gpus, card)
        error = trace.peak_reserved / 2**30 / reserved - 1
        name = f"{model.partition('/')[2]}, {gpus} {card}, 2 x 1 x {tokens}, full, each block compiled"
        cells = [f"{reserved:.2f} GiB", f"{trace.peak_reserved / 2**30:.2f} GiB", percent(error)]
        group.add(name, cells, seconds, trace.seconds, bytes=error)
    trace = others.vit()
    error = trace.peak_allocated / others.VIT_ALLOCATED - 1
    cells = [f"{others.VIT_ALLOCATED / 1e9:.2f} GB", f"{trace.peak_allocated / 1e9:.2f} GB", percent(error)]
    group.lines.append([others.VIT, *cells, "", f"{trace.seconds:.4g}", ""])
    group.errors["bytes"].append(error)
    return group


def blocks(most: int | None) -> Group:
    """prime-rl's other steps, on one and eight GPUs."""
    header = ("run", "reserved GiB: published", "predicted", "error")
    group = Group("Checkpointed steps of prime-rl", prose.PRIME_RL, header, unseen="bytes unseen, seconds seen")
    for row in islice(prime_rl.rows(), most):
        trace = row.trace()
        error = trace.peak_reserved / 2**30 / row.reserved_gib - 1
        cells = [f"{row.reserved_gib:.2f}", f"{trace.peak_reserved / 2**30:.2f}", percent(error)]
        group.add(row.name, cells, row.seconds, trace.seconds, reserved=error)
    return group


def mixtures(most: int | None) -> Group:
    """Qwen3-30B-A3B under FSDP2 on eight H200, and GLM-4.7-Flash in 4 bits on one GPU."""
    header = ("row", "reserved GiB: published", "predicted", "error")
    group = Group("Mixtures of experts", prose.EXPERTS, header)
    for name, (gib, seconds, trace) in islice(experts.ROWS.items(), most):
        found = trace()
        error = found.peak_reserved / 2**30 / gib - 1
        cells = [f"{gib:g}", f"{found.peak_reserved / 2**30:.2f}", percent(error)]
        group.add(name, cells, seconds, found.seconds or 0.0, reserved=error)
    return group


# name, GiB, seconds of a step (0: not published), model, tokens, policy, and other settings
LONG: tuple[tuple[str, float, float, str, int, str, dict[str, Any]], ...] = (
    ("Qwen3-4B, 98,304 tokens, chunked loss", 59.9, 0.0, "Qwen/Qwen3-4B", 98304, "full,head", {}),
    ("the same, inputs of blocks in host memory", 48.8, 0.0, "Qwen/Qwen3-4B", 98304, "full,head,offload", {}),
    (
        "Qwen3-8B, 1,048,576 tokens on 8 GPUs in a ring, inputs of blocks in host memory",
        56.2, 373.0, "Qwen/Qwen3-8B", 2**20, "full,head,offload",
        {"launch": Launch("fsdp2", 8, mixed_precision="bf16", cp=8), "mixed_precision": "bf16"},
    ),
)  # fmt: skip


def long(most: int | None) -> Group:
    """TRL's long runs on one GPU and with context parallelism, and torchtitan's with tensor parallelism."""
    header = ("run", "allocated GiB: published", "predicted", "error")
    group = Group("Long sequences", prose.LONG, header)
    for name, gib, seconds, model, length, policy, more in islice(LONG, most):
        spec = TrainingSpec.of(
            model, dtype="bfloat16", seq_length=length, policy=policy, device="h100", rope_scaling="none", **more
        )
        found = estimate(spec)
        error = found.peak_allocated / 2**30 / gib - 1
        cells = [f"{gib:.1f}", f"{found.peak_allocated / 2**30:.2f}", percent(error)]
        group.add(name, cells, seconds, found.seconds or 0.0, allocated=error)
    for row, trace in islice(llama.published(llama.PARALLEL), most):
        assert row.reserved is not None
        name = f"{row.model} of torchtitan, {row.tokens:,} tokens, FSDP2 over {row.gpus // row.tp}"
        name += f" x tensor parallelism over {row.tp}" if row.tp > 1 else ", compiled, 8 bits" * row.compiled
        error = trace.peak_reserved / 2**30 / row.reserved - 1
        cells = [f"{row.reserved:.2f} reserved", f"{trace.peak_reserved / 2**30:.2f}", percent(error)]
        group.add(name, cells, row.seconds, trace.seconds, reserved=error)
    return group


def host(most: int | None) -> Group:
    """Parameters, Adam and activations in host memory, and small states of optimizers; no seconds were published."""
    header = ("run", "published", "predicted", "error")
    group = Group("Host memory and small optimizer states", prose.HOST, header)
    for row in islice(offloaded.rows(), most):
        cells = [f"{row.published:.2f} {row.unit}", f"{row.predicted:.2f} {row.unit}", percent(row.error)]
        group.lines.append([row.name, *cells, "", f"{row.seconds:.4g}", ""])
        group.errors.setdefault("bytes", []).append(row.error)
        print(*group.lines[-1], sep="  ", flush=True)
    return group


def longest(most: int | None, blind: bool = False) -> Group:
    """The longest sequences of Llama-3.1-8B that ALST published, without seconds."""
    figures_at = "first predicted" if blind else "at the published bytes"
    header = ("run", "tokens: published", "predicted to fit", "error", figures_at, "error")
    title, text = ("Longest sequences, blind", prose.LONGEST_BLIND) if blind else ("Longest sequences", prose.LONGEST)
    group = Group(title, text, header, unseen=blind)
    for row in islice(offloaded.longest(blind), most):
        now, other = (tokens / row.published - 1 for tokens in (row.predicted, row.at_known_bytes))
        cells = [
            f"{row.published:,}",
            f"{row.predicted:,}",
            percent(now),
            f"{row.at_known_bytes:,.0f}",
            percent(other),
        ]
        group.lines.append([row.name, *cells, "", "", ""])
        for column, error in ((figures_at, other),) if blind else (("tokens", now), (figures_at, other)):
            group.errors.setdefault(column, []).append(error)
        print(*group.lines[-1], sep="  ", flush=True)
    return group


def fp32(most: int | None) -> Group:
    """BERT and GPT-2 in fp32 on four GPUs, for which no bytes were published."""
    group = Group(
        "Forward and backward in fp32 on four cards", prose.FP32, ("model, card, rows x tokens",), target=(5, 12)
    )
    with (Path(__file__).parent / "data" / "fp32_steps.csv").open(encoding="utf-8") as file:
        for row in islice(csv.DictReader(file), most):
            rows, tokens = int(row["rows"]), int(row["tokens"])
            ids = torch.zeros(rows, tokens, dtype=torch.long)

            def step(model: nn.Module, optimizer: object, ids: torch.Tensor = ids) -> None:
                model.zero_grad()
                model(input_ids=ids).logits.sum().backward()

            with torch.device("meta"):
                model = FP32_MODELS[row["model"]]().train()
            name = f"{row['model']}, {row['gpu']}, {rows} x {tokens}"
            group.add(name, [], float(row["seconds"]), trace_step(model, step, device=row["gpu"]).seconds)
    return group


def bert(most: int | None) -> Group:
    """BERT-large on a V100, in fp32 and fp16, with three optimizers."""
    header = ("run", "MiB of the device: published", "predicted", "error", "with today's softmax")
    group = Group("BERT-large on a V100", prose.BERT, header, unseen=True, target=(5, 12))
    for row in islice(bert_large.ROWS, most):
        then, now = (bert_large.traced(row, as_then) for as_then in (True, False))
        error, today = (bert_large.device_mib(trace) / row.mib - 1 for trace in (then, now))
        cells = [f"{row.mib:,}", f"{bert_large.device_mib(then):,.0f}", percent(error), percent(today)]
        group.add(row.name, cells, row.seconds, then.seconds, device=today)  # as first predicted
    return group


def _bert_large() -> nn.Module:
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
    return transformers.BertForMaskedLM(transformers.BertConfig(**sizes, attn_implementation="eager"))


def _gpt2_large() -> nn.Module:
    config = transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20, use_cache=False, attn_implementation="eager")
    return transformers.GPT2LMHeadModel(config)


FP32_MODELS: dict[str, Callable[[], nn.Module]] = {"bert-large": _bert_large, "gpt2-large": _gpt2_large}

GROUPS: dict[str, Callable[[int | None], Group]] = {
    "t4": t4,
    "flux2": flux2,
    "figures": figures,
    "sharded": sharded,
    "many_gpus": many_gpus,
    "compiled": compiled,
    "prime_rl": blocks,
    "experts": mixtures,
    "long": long,
    "host": host,
    "longest": longest,
    "longest_blind": partial(longest, blind=True),
    "fp32": fp32,
    "bert": bert,
}


def draw(groups: Iterable[Group], path: Path) -> None:
    """Predicted against published seconds, log-log, with bands of 5 and 15 %."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 6.2), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    low, high = 0.05, 500.0
    for share, shade in ((0.15, "#eeeeee"), (0.05, "#dddddd")):
        below, above = ([end * factor for end in (low, high)] for factor in (1 - share, 1 + share))
        axes.fill_between([low, high], below, above, color=shade, lw=0)
    axes.plot([low, high], [low, high], color="#888888", lw=0.8)
    named: list[tuple[float, float]] = []
    colours = (
        "#d55e00",
        "#0072b2",
        "#009e73",
        "#cc79a7",
        "#7a5195",
        "#e69f00",
        "#56b4e9",
        "#999999",
        "#000000",
        "#8c564b",
        "#bcbd22",
    )
    for group, colour, mark in zip(groups, colours, "osD^vPX*hp<", strict=True):
        published, predicted = zip(*group.seconds.values(), strict=True)
        axes.scatter(published, predicted, s=26, c=colour, marker=mark, lw=0, label=group.title, zorder=3, alpha=0.85)
        for name, (x, y) in group.seconds.items():
            if abs(y / x - 1) > 0.11:
                near = sum(abs(x / left - 1) < 0.1 and abs(y / down - 1) < 0.05 for left, down in named)
                side: dict[str, Any] = {"xytext": (5, -3 - 8 * near)} if y < x else {"xytext": (-5, 2), "ha": "right"}
                named.append((x, y))
                axes.annotate(name, (x, y), textcoords="offset points", fontsize=6.5, color="#444444", **side)
    ticks = [0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 400]
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high), xlabel="seconds of a step, published")
    axes.set_ylabel("predicted")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_ticks(ticks, [f"{tick:g}" for tick in ticks])
        axis.set_ticks([], minor=True)
    axes.set_title(
        "Seconds of a step; the bands are 5 and 15 %, rows named that are further off than 11 %",
        fontsize=9,
        loc="left",
    )
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def document(groups: Sequence[Group]) -> str:
    """docs/accuracy.md."""
    versions = f"torch {torch.__version__}, transformers {transformers.__version__}, peft {peft.__version__}"
    pairs = [pair for group in groups for pair in group.seconds.values()]
    ranks = rank_correlation(*map(list, zip(*pairs, strict=True)))
    timed = kernels.errors()
    parts = [
        "# How true a trace is",
        prose.MADE.format(versions=versions),
        summary(groups, "vision.md"),
        f"![Predicted against published seconds]({PICTURE})",
        f"Over all {len(pairs)} rows the rank correlation of the seconds is {ranks:.3f}.",
        *(group.markdown() for group in groups),
        prose.KERNELS.format(
            kernels=kernels.table(timed), loaded=kernels.under_load(timed), operators=operators.table()
        ),
        prose.LIVE,
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
    groups = [GROUPS[name](arguments.rows) for name in arguments.only or GROUPS]
    if arguments.only or arguments.rows is not None:
        for group in groups:
            print(f"\n{group.markdown()}")
        return 0
    draw([group for group in groups if group.seconds], PAGE.parent / PICTURE)
    PAGE.write_text(document(groups), encoding="utf-8")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    after = rest.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n{summary(groups, 'docs/vision.md')}\n{END}{after}", encoding="utf-8")
    print(f"wrote {PAGE.name} and the table of {README.name}")
    return 0


if __name__ == "__main__":
    run(main)
