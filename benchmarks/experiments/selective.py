"""Selective checkpointing by lists of operators or submodules, and torch.compile's activation memory budget."""

from __future__ import annotations

import gc
import itertools
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from .common import Case, Section, kept, line_plot, policy_table, under
from .models import case, feed_forwards, transformer

# The documents' SAC policies by name, as policies of this project.
POLICIES = {
    "nothing checkpointed": "none",
    "full checkpointing": "full",
    "matmul list": "save:matmul",
    "all compute-intensive ops": "save:attention+matmul",
    "allow-list of one op": "save:aten.addmm",
    "every second matmul": "save:matmul/2",
    "attention kept only": "save:attention",
    "attention submodules only": "modules:attention",
    "MLP submodules only": "modules:mlp",
    "no block re-run": "pointwise",
}


def selective(images: Path, quick: bool) -> Section:
    """SAC policies on feed-forward blocks and on transformer blocks."""
    section = Section("Selective activation checkpointing")
    section.text(
        "The documents' policies have these names here: " + "; ".join(f"{k}: `{v}`" for k, v in POLICIES.items()) + "."
    )
    batch, width, length = (2, 64, 32) if quick else (8, 1024, 1024)
    everything = list(POLICIES.values())
    no_attention = [policy for policy in everything if "attention" not in policy and policy != "modules:mlp"]

    def half(make: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        return lambda: make().to(torch.bfloat16)

    section.text(f"Eight feed-forward blocks, width {width}, {batch} x {length} tokens, bf16, no optimizer:")
    ffn = policy_table(
        section,
        no_attention,
        case(half(lambda: feed_forwards(8, width)), batch, length, width),
        case(lambda: feed_forwards(4, 32), 2, 64, 32),
        "a100-40gb",
    )
    section.text("Eight transformer blocks of the same width, 16 heads, causal SDPA:")
    block = policy_table(
        section,
        everything,
        case(half(lambda: transformer(8, width, 16)), batch, length, width),
        case(lambda: transformer(4, 32, 4), 2, 64, 32),
        "a100-40gb",
    )
    order = sorted(block, key=lambda policy: kept(block[policy]))
    section.text(
        "From the fewest bytes kept to the most, on transformer blocks: "
        + ", ".join(f"`{policy}`" for policy in order)
        + "."
    )
    section.text(f"On feed-forward blocks alone `{min(ffn, key=lambda policy: kept(ffn[policy]))}` keeps the fewest.")
    return section


def budgets(images: Path, quick: bool) -> Section:
    """`budget:1.0 ... 0.0` under torch.compile: measured peaks, with non-monotonic points marked."""
    section = Section("torch.compile's activation memory budget")
    backend, reason = backend_here()
    section.text(
        "Transformer blocks compiled on the CPU; the peak is the largest running sum of the profiler's memory",
        f"events over a forward and backward, above what was allocated before. Backend: {backend} ({reason}).",
    )
    blocks, width, tokens = (2, 32, 16) if quick else (3, 64, 128)
    job = case(lambda: transformer(blocks, width, 4), 8, tokens, width)
    values = [1.0, 0.0] if quick else [1.0, 0.7, 0.5, 0.3, 0.0]
    peaks = {value: peak_of(job, f"budget:{value}", backend) for value in values}
    eager = {policy: peak_of(job, policy) for policy in ("none", "full")}
    rows = [[f"`budget:{value:g}`, compiled", str(peak), f"{peak / peaks[1.0]:.3f}"] for value, peak in peaks.items()]
    rows += [[f"`{policy}`, eager", str(peak), f"{peak / peaks[1.0]:.3f}"] for policy, peak in eager.items()]
    section.table(["policy", "peak bytes, measured (CPU)", "/ budget:1"], rows)
    line_plot(
        images / "budget.png",
        {"measured": (values, [float(peaks[value]) for value in values])},
        ("budget", "peak bytes (CPU)"),
    )
    section.picture("budget.png", "measured peak against the budget")
    rising = [
        f"{low:g} ({peaks[low]}) above {high:g} ({peaks[high]})"
        for high, low in itertools.pairwise(values)
        if peaks[low] > peaks[high]
    ]
    section.text(
        "The peak does not fall with the budget everywhere: " + "; ".join(rising) + "."
        if rising
        else "Here the peak never rises as the budget falls; it need not be so (pytorch#197838): measure."
    )
    return section


def backend_here() -> tuple[str, str]:
    """Returns inductor if there is a C++ compiler, otherwise the partitioner alone, which applies the budget."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler:
        return "inductor", f"C++ compiler found: {Path(compiler).name}"
    return (
        "aot_eager_decomp_partition",
        "no C++ compiler: inductor cannot generate code; the partitioner runs without it",
    )


def peak_of(job: Case, policy: str, backend: str = "") -> int:
    """Returns the peak bytes of a step of `job`'s model under `policy`, compiled by `backend` if given."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = job.build()
    with under(model, policy):
        return _profiled(job, torch.compile(model, backend=backend, dynamic=False) if backend else model)  # type: ignore[arg-type]


def _profiled(job: Case, model: nn.Module) -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            job.step(model, None)
        model.zero_grad(set_to_none=True)
        gc.collect()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
            job.step(model, None)
    events = [event for event in record.profiler.kineto_results.events() if event.name() == "[memory]"]
    running = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        running += event.nbytes()
        peak = max(peak, running)
    return peak
