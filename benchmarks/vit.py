"""ViT-L/16 under every policy at 224 and 384 pixels: peak, time and the largest batch on an 80 GB card.

    python benchmarks/vit.py              # prints, and writes its section of docs/vision.md; about ten minutes
    python benchmarks/vit.py --no-write --policies none full --resolutions 224

Predictions by `trace_step` for an A100 of 80 GB, in Trainer's loop; peak and time are also measured if there is CUDA.
"""

from __future__ import annotations

import argparse
import functools
import sys
import warnings

import torch
from torch import nn
from vision import Measured, largest_batch, measure, table, write_section  # type: ignore[import-not-found]

from ckpt_ft import apply_policy
from ckpt_ft.errors import run
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.workload import Workload

MODEL, GPU, BATCH, SEARCHED = "google/vit-large-patch16-224", "a100-80gb", 32, 4096
RESOLUTIONS = (224, 384)
POLICIES = (
    "none", "pointwise", "modules:mlp", "modules:attention", "every:2", "save:attention+matmul", "save:matmul",
    "save:attention", "full", "segments:4", "sqrt", "offload", "full,offload",
)  # fmt: skip
TUTORIAL = {"none": 32, "full": 96}


def workload(resolution: int, precise: bool = False) -> Workload:
    """fp32 weights under bf16 autocast, SDPA, fused AdamW, clipping; `precise`: all in fp32, eager attention."""
    how = {"attn_implementation": "eager"} if precise else {"mixed_precision": "bf16"}
    return load(TrainingSpec.of(MODEL, resolution=resolution, **how), GPU)


def predicted(policy: str, batch: int, resolution: int, precise: bool = False) -> StepTrace:
    subject = workload(resolution, precise)
    apply_policy(subject.model, policy)
    return subject.trace(batch)


def measured(policy: str, resolution: int) -> Measured | None:
    """Measures the same step at `BATCH` on this machine's GPU, with random weights."""
    subject = workload(resolution)

    def model() -> nn.Module:
        made = type(subject.model)(subject.model.config).train()
        apply_policy(made, policy)
        return made

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        batch = {name: tensor.cuda() for name, tensor in subject.make_batch(BATCH, None).items()}
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad(set_to_none=True)

    return measure(model, step, subject.make_optimizer)


@functools.cache
def most(policy: str, resolution: int, precise: bool = False) -> int:
    """Returns the largest batch on the GPU."""
    print(f"largest batch at {resolution}: {policy}", file=sys.stderr, flush=True)
    return largest_batch(lambda size: predicted(policy, size, resolution, precise), find_gpu(GPU).usable, SEARCHED)


def every_policy(resolution: int, policies: list[str]) -> str:
    """Peak and seconds at `BATCH`, and the largest batch."""
    rows = []
    on_this_gpu = {policy: measured(policy, resolution) for policy in policies}
    plain = predicted("none", BATCH, resolution)
    plain_most = most("none", resolution)
    for policy in policies:
        found = plain if policy == "none" else predicted(policy, BATCH, resolution)
        size = plain_most if policy == "none" else most(policy, resolution)
        row = [f"`{policy}`", f"{found.peak_allocated / GIB:.2f}", f"{found.peak_reserved / GIB:.2f}"]
        row += [f"{100 * (1 - found.peak_allocated / plain.peak_allocated):.0f} %", f"{1000 * found.seconds:.0f}"]
        capped = " (the cap)" if size == SEARCHED else ""
        row += [f"{100 * (found.seconds / plain.seconds - 1):+.0f} %", f"{size}{capped}", f"{size / plain_most:.2f}"]
        if any(on_this_gpu.values()):
            measurement = on_this_gpu[policy]
            given = (measurement.allocated / GIB, 1000 * measurement.seconds) if measurement else ()
            row += [f"{value:.2f}" for value in given] or ["", ""]
        rows.append(row)
    header = ["policy", "allocated GiB", "reserved GiB", "saved", "ms", "time", "largest batch", "ratio"]
    if any(on_this_gpu.values()):
        header += [f"measured GiB ({torch.cuda.get_device_name()})", "measured ms"]
    return table(header, rows)


def beside_the_tutorial(resolutions: list[int]) -> str:
    """Largest batches without and with every block checkpointed; the tutorial gives 32 and 96 without settings."""
    rows = [["tutorial (settings not given)", "32", "96", "3.00"]]
    for resolution in resolutions:
        for precise, name in ((False, "bf16 autocast, SDPA"), (True, "fp32, eager attention")):
            sizes = [most(policy, resolution, precise) for policy in TUTORIAL]
            rows.append([f"{resolution} pixels, {name}", *map(str, sizes), f"{sizes[1] / sizes[0]:.2f}"])
    return table(["ViT-L/16 on 80 GB", "`none`", "`full`", "ratio"], rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES), help="compared to 'none'")
    parser.add_argument("--resolutions", nargs="+", type=int, default=list(RESOLUTIONS))
    parser.add_argument("--no-write", action="store_true", help="leave docs/vision.md as it is")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    tables = "\n".join(
        f"### {resolution} pixels\n\n{every_policy(resolution, arguments.policies)}"
        for resolution in arguments.resolutions
    )
    room = f"{find_gpu(GPU).usable / GIB:.2f} GiB"
    text = f"""## ViT-L/16 on an A100 of 80 GB

`trace_step` predicts the step of `Trainer`: fp32 weights under bf16 autocast, SDPA, fused AdamW on all weights,
gradients clipped. Peak and time are at batch {BATCH}. The largest batch, searched up to {SEARCHED}, is the
largest whose traced step fits in {room} (the card less its CUDA context) under the caching allocator's rules.

{tables}
### Beside the tutorial

{beside_the_tutorial(arguments.resolutions)}"""
    print(text)
    if not arguments.no_write:
        write_section("vit", text)
    return 0


if __name__ == "__main__":
    run(main)
