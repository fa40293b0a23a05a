"""Diffusion U-Nets under every policy: peak, bytes kept after forward, seconds, and the largest batch on two GPUs.

    python benchmarks/unet_policies.py                                 # all; writes docs/unet_policies.md and its plot
    python benchmarks/unet_policies.py --no-write --models sdxl --methods lora --policies none pointwise

Predicted by `trace_step` from configurations alone: LoRA of rank 16 on the attention projections of a frozen bf16
U-Net, or full fine-tuning of fp32 weights, both under bf16 autocast with fused AdamW.
"""

from __future__ import annotations

import argparse
import datetime
import functools
import sys
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

from vision import made_by, table  # type: ignore[import-not-found]

from ckpt_ft import apply_policy
from ckpt_ft.errors import run
from ckpt_ft.planning.batch_size import predict_max_batch_size
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

MODELS = {
    "sd15": ("stable-diffusion-v1-5/stable-diffusion-v1-5", 512),
    "sd21": ("stabilityai/stable-diffusion-2-1", 768),
    "sdxl": ("stabilityai/stable-diffusion-xl-base-1.0", 1024),
}
METHODS = {
    "lora": TrainingSpec.of(dtype="bfloat16", mixed_precision="bf16", lora_r=16),
    "full": TrainingSpec.of(dtype="float32", mixed_precision="bf16"),
}
POLICIES = (
    "none", "pointwise", "modules:mlp", "modules:mlp,pointwise", "modules:attention,pointwise", "every:2,pointwise",
    "save:attention+matmul+conv", "save:attention+conv", "every:2", "full", "stages",
)  # fmt: skip
LARGEST = ("none", "modules:mlp,pointwise", "full")  # GPUs for the largest batch
BATCH, DEVICE, CARDS = 4, "a100-80gb", ("rtx-4090", "a100-80gb")
PAGE = Path(__file__).parents[1] / "docs" / "unet_policies.md"
PLOT = PAGE.parent / "img" / "unet_frontier.png"


@dataclass(frozen=True)
class Result:
    """Predicted bytes and seconds of one policy on one model."""

    model: str
    method: str
    policy: str
    peak: int
    kept: int
    seconds: float
    batches: tuple[int, ...] = ()


@functools.cache
def workload(model: str, method: str) -> Workload:
    name, resolution = MODELS[model]
    return load(METHODS[method].edit(model=name, resolution=resolution), DEVICE)


def predict(model: str, method: str, policy: str, batch: int, batches: bool) -> Result:
    subject = workload(model, method)
    applied = apply_policy(subject.model, policy)
    trace = subject.trace(batch)
    applied.remove()
    largest = tuple(largest_batch(subject, policy, card) for card in CARDS) if batches else ()
    kept = sum(trace.module_activations().values())
    return Result(model, method, policy, trace.peak_allocated, kept, trace.seconds, largest)


def largest_batch(subject: Workload, policy: str, card: str) -> int:
    return predict_max_batch_size(replace(subject, device=card), policy).batch


def rows(results: list[Result]) -> list[list[str]]:
    plain = results[0]
    return [
        [
            f"`{r.policy}`",
            f"{r.peak / GIB:.2f}",
            f"{r.kept / GIB:.2f}",
            f"{1 - r.kept / plain.kept:.0%}",
            f"{r.seconds * 1e3:.0f}",
            f"{r.seconds / plain.seconds - 1:+.0%}",
            *(str(batch) for batch in r.batches or ("",) * len(CARDS)),
        ]
        for r in results
    ]


def page(groups: list[list[Result]], batch: int) -> str:
    header = ["policy", "peak GiB", "kept GiB", "saved", "ms", "time", *(f"batch on {card}" for card in CARDS)]
    sections = [
        f"## {group[0].model}, {MODELS[group[0].model][1]} px, {group[0].method}\n\n{table(header, rows(group))}"
        for group in groups
    ]
    return "\n".join(
        [
            "# Diffusion U-Nets under every policy",
            "",
            f"All figures are predicted by traces, none is measured, for a step on {batch} images on an {DEVICE}:",
            "peak allocated, activations kept for backward after the forward pass, milliseconds, and for some",
            "policies the largest batch that fits a card. `full` checkpoints every block, including those that",
            "diffusers' own switch leaves out. With fewer images the host bounds a step on such a card, and a policy",
            "costs more time.",
            "",
            "![kept activations against step time](img/unet_frontier.png)",
            "",
            *sections,
            made_by(),
            "",
        ]
    )


def plot(groups: list[list[Result]]) -> None:
    """Plots kept activations against step time, each relative to no policy; one panel per model and method."""
    from matplotlib.figure import Figure

    across = min(2, len(groups))
    down = -(-len(groups) // across)
    figure = Figure(figsize=(5 * across, 3.6 * down), layout="constrained")
    panels = figure.subplots(down, across, sharex=True, sharey=True, squeeze=False).flat
    for axes, results in zip(panels, groups, strict=False):
        plain = results[0]
        points = [(r.kept / plain.kept, r.seconds / plain.seconds) for r in results]
        axes.scatter(*zip(*points, strict=True), s=18)
        for (x, y), result in zip(points, results, strict=True):
            axes.annotate(result.policy, (x, y), fontsize=6, xytext=(3, 3), textcoords="offset points")
        axes.axvline(0.5, color="grey", linewidth=0.6, linestyle=":")
        axes.axhline(1.15, color="grey", linewidth=0.6, linestyle=":")
        axes.set(title=f"{plain.model}, {plain.method}", xlim=(0, 1.3))
    figure.supxlabel("activations kept / none (predicted)")
    figure.supylabel("step time / none (predicted)")
    PLOT.parent.mkdir(exist_ok=True)
    figure.savefig(PLOT, dpi=110)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument(
        "--policies", nargs="+", default=list(POLICIES), help="the first is what others are held against"
    )
    parser.add_argument("--batch-size", type=int, default=BATCH)
    parser.add_argument("--no-batches", action="store_true", help="leave the largest batches out: most of the time")
    parser.add_argument("--no-write", action="store_true", help="print only")
    return parser


def main() -> None:
    args = make_parser().parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # warnings of libraries about each other
    groups = []
    for model in args.models:
        for method in args.methods:
            print(f"{datetime.datetime.now():%H:%M:%S} {model} {method}", file=sys.stderr)
            asked = () if args.no_batches or method == "full" else LARGEST
            groups.append(
                [predict(model, method, policy, args.batch_size, policy in asked) for policy in args.policies]
            )
            for row in rows(groups[-1]):
                print(model, method, *row, sep="  ", flush=True)
    if not args.no_write:
        PAGE.write_text(page(groups, args.batch_size), encoding="utf-8")
        plot(groups)


if __name__ == "__main__":
    run(main)
