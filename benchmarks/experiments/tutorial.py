"""The tutorial's strategy table and its largest batches on an A100-80GB, for which it gives no settings."""

from __future__ import annotations

from pathlib import Path

from benchmarks.pages import table
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.planning.batch_size import predict_max_batch_size
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load

from .common import PUBLISHED, Case, Figure, Found, kept, mb, predict

SOURCE, GPU = "tutorial, A100-80GB", "a100-80gb"


def strategies(images: Path) -> Found:
    """Memory reduction and compute overhead of four strategies on Llama-7B."""
    workload = load(TrainingSpec.of(**PUBLISHED["largest batches"]["Llama-7B"][0]), GPU)
    job = Case(lambda: workload.model, workload.step(4), workload.make_optimizer)
    base, figures = predict(job, "none", GPU), []
    rows = [["none", *_sizes(base), "", "", "", "", ""]]
    for strategy, (policy, memory, compute) in PUBLISHED["strategies"].items():
        trace = predict(job, policy, GPU)
        saved = 100 * (1 - trace.peak_allocated / base.peak_allocated)
        slower = 100 * (trace.seconds / base.seconds - 1)
        shares = [f"{100 * (1 - kept(trace) / kept(base)):.0f} %", f"{saved:.0f} %", f"{memory} %"]
        rows.append([f"{strategy}: `{policy}`", *_sizes(trace), *shares, f"{slower:.0f} %", f"{compute} %"])
        note = "of the whole peak; Llama-7B, LoRA, bf16: our settings"
        figures.append(Figure(SOURCE, f"{strategy}: memory reduction", f"{memory} %", saved, memory, "%", note))
        figures.append(
            Figure(SOURCE, f"{strategy}: compute overhead", f"{compute} %", slower, compute, "%", "the same")
        )
    header = ["strategy", "kept MB", "peak MB", "ms", "kept, saved", "peak, saved", "tutorial", "slower", "tutorial"]
    return Found({"table": table(header, rows)}, figures)


def _sizes(trace: StepTrace) -> list[str]:
    return [mb(kept(trace)), mb(trace.peak_allocated), f"{1e3 * trace.seconds:.0f}"]


def largest_batches(images: Path) -> Found:
    """The largest batch without and with checkpointing."""
    rows, figures, policies = [], [], ("none", "full")
    for name, (settings, without, with_, less) in PUBLISHED["largest batches"].items():
        workload = load(TrainingSpec.of(**settings), GPU)
        none, full = (predict_max_batch_size(workload, p, max_batch_size=4096).batch for p in policies)
        job = Case(lambda w=workload: w.model, workload.step(max(none, 1)), workload.make_optimizer)  # type: ignore[misc]
        plain, saving = (predict(job, policy, GPU).peak_allocated for policy in policies)
        saved, note = 100 * (1 - saving / plain), "settings not given by the tutorial; ours in the section"
        pairs = [(without, none), (with_, full), (f"{with_ / without:.1f}", f"{full / max(none, 1):.1f}")]
        rows.append([name, *(str(cell) for pair in pairs for cell in pair), f"{less} %", f"{saved:.0f} %"])
        figures += [
            Figure(SOURCE, f"{name}: largest batch, none", str(without), none, without, "", note),
            Figure(SOURCE, f"{name}: largest batch, checkpointing", str(with_), full, with_, "", note),
            Figure(SOURCE, f"{name}: memory saved", f"{less} %", saved, less, "%", note),
        ]
    columns = ("without", "with `full`", "ratio", "saved")
    header = ["model", *(f"{column}, {who}" for column in columns for who in ("tutorial", "predicted"))]
    return Found({"table": table(header, rows)}, figures)
