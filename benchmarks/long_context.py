"""Predicted peak by sequence length with each combination of policies and GPUs, for docs/long_context.md.

    python benchmarks/long_context.py    # prints the table, writes docs/img/long_context.png; minutes of one CPU core

Llama-3.1-8B with LoRA of rank 16 in bf16, batch 1, on one H100; the last rung on eight, which share each sequence.
"""

from __future__ import annotations

import warnings
from pathlib import Path

from ckpt_ft.errors import run
from ckpt_ft.planning.estimate import traced_estimate
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB

MODEL = "meta-llama/Llama-3.1-8B"
LENGTHS = [2**power for power in range(12, 20)]  # tokens: 4,096 to 524,288
RUNGS = {  # name: policy, GPUs that share a sequence
    **{rung: (rung, 1) for rung in ("none", "full", "full,head", "full,head,offload", "full,head,offload,tile:16")},
    "full,head,offload --cp 8": ("full,head,offload", 8),
}
PICTURE = Path(__file__).resolve().parents[1] / "docs" / "img" / "long_context.png"
CARD = 80  # GB


def peak(rung: str, length: int) -> tuple[float, float]:
    """Returns the GiB allocated at the peak of one GPU, and the seconds of a step."""
    policy, gpus = RUNGS[rung]
    ring = {"launch": Launch("fsdp2", gpus, mixed_precision="bf16", cp=gpus), "mixed_precision": "bf16"}
    spec = TrainingSpec.of(
        MODEL, dtype="bfloat16", lora_r=16, seq_length=length, device="h100", rope_scaling="none", policy=policy,
        **(ring if gpus > 1 else {}),
    )  # fmt: skip
    found, _ = traced_estimate(spec, lambda line: None, suggests=False)
    return found.peak_allocated / GIB, found.seconds or 0.0


def draw(peaks: dict[str, list[float]]) -> None:
    """Plots peak against length, log-log, with the GPU's memory."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 4.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    colours = "#999999", "#d55e00", "#e69f00", "#0072b2", "#009e73", "#cc79a7"
    for (rung, values), colour in zip(peaks.items(), colours, strict=True):
        axes.plot(LENGTHS, values, "o-", color=colour, markersize=3.5, label=rung)
    axes.axhline(CARD, color="#444444", lw=0.8, ls="--")
    axes.text(LENGTHS[1], CARD * 1.06, "H100, 80 GB", fontsize=8, color="#444444")
    axes.set(xscale="log", yscale="log", xlabel="tokens of a sequence", ylabel="peak allocated, GiB (predicted)")
    axes.set_xticks(LENGTHS, [f"{length // 1024}k" for length in LENGTHS])
    axes.minorticks_off()
    gib = [5 * 2**power for power in range(9)]
    axes.set_yticks(gib, map(str, gib))
    axes.set_ylim(4, 2000)
    axes.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(0.0, 0.93))
    axes.grid(alpha=0.25)
    figure.savefig(PICTURE, dpi=110)


def main() -> None:
    """Traces, prints and plots."""
    warnings.filterwarnings("ignore")
    peaks: dict[str, list[float]] = {}
    print("| policy | " + " | ".join(f"{length:,}" for length in LENGTHS) + " | s, longest |")
    print("|---|" + "---:|" * (len(LENGTHS) + 1))
    for rung in RUNGS:
        found = [peak(rung, length) for length in LENGTHS]
        peaks[rung] = [gib for gib, _ in found]
        print(f"| `{rung}` | " + " | ".join(f"{gib:.1f}" for gib, _ in found) + f" | {found[-1][1]:.0f} |", flush=True)
    draw(peaks)


if __name__ == "__main__":
    run(main)
