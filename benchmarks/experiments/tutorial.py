"""The tutorial's strategy table and its largest batches on an A100-80GB."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.batch_size import predict_max_batch_size
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

from .common import Case, Figure, Section, kept, mb, predict

SOURCE, GPU = "tutorial, A100-80GB", "a100-80gb"
SEARCHED = 4096  # upper limit of the search

# strategy -> (policy, memory reduction %, compute overhead %), as published by the tutorial
STRATEGIES = {
    "every block": ("full", 70, 50),
    "every 2 blocks": ("every:2", 50, 30),
    "attention only": ("modules:attention", 40, 15),
    "sqrt(L)": ("sqrt", 60, 25),
}
_LORA: dict[str, Any] = {"dtype": "bfloat16", "lora_r": 16, "lora_dropout": 0.0}
# name -> (model, our settings, batch without, with, saved %), as published by the tutorial, which gives no settings
BATCHES: dict[str, tuple[str, dict[str, Any], int, int, int]] = {
    "SD 2.1 U-Net": ("stabilityai/stable-diffusion-2-1", {"mixed_precision": "bf16"}, 4, 12, 62),
    "SDXL U-Net": ("stabilityai/stable-diffusion-xl-base-1.0", {"mixed_precision": "bf16"}, 1, 4, 68),
    "Llama-7B": ("meta-llama/Llama-2-7b-hf", {**_LORA, "seq_length": 2048}, 1, 4, 71),
    "ViT-L": ("google/vit-large-patch16-224", {"mixed_precision": "bf16"}, 32, 96, 58),
}


def strategies(images: Path, quick: bool) -> Section:
    """Memory reduction and compute overhead of four strategies on Llama-7B."""
    section = Section("The tutorial's strategies")
    name, length, batch = ("HuggingFaceTB/SmolLM2-135M", 64, 1) if quick else ("meta-llama/Llama-2-7b-hf", 2048, 4)
    section.text(
        f"The figures are predicted for `{name}` with LoRA (rank 16), bf16, {batch} x {length} tokens, SDPA, on an",
        'A100-80GB. The tutorial names neither model nor sizes, and does not define its memory. "Kept" is what the',
        'forward pass keeps for backward, "peak" that of the whole step.',
    )
    workload = load(TrainingSpec.of(name, **_LORA, seq_length=length), GPU)
    job = Case(lambda: workload.model, workload.step(batch), workload.make_optimizer)
    base = predict(job, "none", GPU)
    rows = [["none", *_sizes(base), "", "", "", "", ""]]
    for strategy, (policy, memory, compute) in STRATEGIES.items():
        trace = predict(job, policy, GPU)
        saved = 100 * (1 - trace.peak_allocated / base.peak_allocated)
        slower = 100 * (trace.seconds / base.seconds - 1)
        shares = [f"{100 * (1 - kept(trace) / kept(base)):.0f} %", f"{saved:.0f} %", f"{memory} %"]
        rows.append([f"{strategy}: `{policy}`", *_sizes(trace), *shares, f"{slower:.0f} %", f"{compute} %"])
        note = "of the whole peak; Llama-7B, LoRA, bf16: our settings"
        section.figures += [
            Figure(SOURCE, f"{strategy}: memory reduction", f"{memory} %", saved, memory, "%", note=note),
            Figure(SOURCE, f"{strategy}: compute overhead", f"{compute} %", slower, compute, "%", note="the same"),
        ]
    header = ["strategy", "kept MB", "peak MB", "ms", "kept, saved", "peak, saved", "tutorial", "slower", "tutorial"]
    section.table(header, rows)
    section.text(
        "A second forward run costs a third of a step if all weights are trained (backward takes as long as two",
        "forwards), and up to a half if backward computes no gradients of frozen weights, as with LoRA. sqrt(L)",
        "segments re-run as many blocks as a checkpoint for each block does, so their arithmetic does not explain the",
        "tutorial's figure, which is half of that overhead.",
    )
    return section


def _sizes(trace: StepTrace) -> list[str]:
    return [mb(kept(trace)), mb(trace.peak_allocated), f"{1e3 * trace.seconds:.0f}"]


def largest_batches(images: Path, quick: bool) -> Section:
    """The largest batch without and with checkpointing."""
    section = Section("The tutorial's largest batches")
    section.text(
        "The predicted largest batch on an A100-80GB is the largest whose traced step reserves at most the card's",
        "memory less its CUDA context and the planner's margin of 2 %. The tutorial gives no settings. Ours are",
        "U-Nets and ViT-L with all weights trained in fp32 under bf16 autocast, AdamW (fused), at 768, 1024 and 224",
        "pixels; Llama-7B with LoRA (rank 16), bf16, 2048 tokens. The savings are shares of the whole peak, at the",
        "largest batch without checkpointing.",
    )
    rows = []
    for name, (model, settings, *published) in list(BATCHES.items())[: 1 if quick else None]:
        if quick:
            model, settings = "HuggingFaceTB/SmolLM2-135M", {"lora_r": 4, "seq_length": 64}
        none, full, saved = _found(load(TrainingSpec.of(model, **settings), GPU), SEARCHED if not quick else 64)
        without, with_, less = published
        pairs = [(without, none), (with_, full), (f"{with_ / without:.1f}", f"{full / max(none, 1):.1f}")]
        pairs.append((f"{less} %", f"{saved:.0f} %"))
        rows.append([name, *(str(cell) for pair in pairs for cell in pair)])
        note = "settings not given by the tutorial; ours in the section"
        section.figures += [
            Figure(SOURCE, f"{name}: largest batch, none", str(without), none, without, "", note=note),
            Figure(SOURCE, f"{name}: largest batch, checkpointing", str(with_), full, with_, "", note=note),
            Figure(SOURCE, f"{name}: memory saved", f"{less} %", saved, less, "%", note=note),
        ]
    columns = ("without", "with `full`", "ratio", "saved")
    section.table(["model", *(f"{column}, {who}" for column in columns for who in ("tutorial", "predicted"))], rows)
    return section


def _found(workload: Workload, most: int) -> tuple[int, int, float]:
    """Returns the largest batch without and with `full`, and how many percent `full` saves at the former."""
    found = [
        predict_max_batch_size(workload, policy, max_batch_size=most).batch
        for policy in ("none", "full")
    ]  # fmt: skip
    job = Case(lambda: workload.model, workload.step(max(found[0], 1)), workload.make_optimizer)
    none, full = (predict(job, policy, GPU).peak_allocated for policy in ("none", "full"))
    return found[0], found[1], 100 * (1 - full / none)
