"""Steps with states, weights or activations in host memory, or with small states, compared with published ones.

    python benchmarks/offloaded.py

ArcticTraining's ALST (projects/sequence-parallelism, `run-h*-sp1-llama-8b*.yml`): Llama-3.1-8B, ZeRO-3 on one GPU with
parameters and Adam in host memory. Its lengths and bytes are those of these files. A published "GB" is 2**30 bytes,
used on the whole device as NVML counts (arctic_training/debug/utils.py: get_mem_metrics), so the CUDA context is added
to what the trace reserves, here with expandable segments.

Hugging Face's blog on Ulysses: Qwen3-4B under ZeRO-3. torchao's README on optimizers: the ViT of compiled.py.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks import compiled
from ckpt_ft.memory.gpus import GPUS
from ckpt_ft.planning.estimate import traced_estimate
from ckpt_ft.planning.max_length import predict_max_length
from ckpt_ft.planning.results import Estimate
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import GIB
from ckpt_ft.workloads.load import load


@dataclass(frozen=True)
class Row:
    """A published run and its prediction, in units of `unit` bytes."""

    name: str
    published: float
    predicted: float
    seconds: float
    unit: str

    @property
    def error(self) -> float:
        return self.predicted / self.published - 1


# GPU, tokens, GiB of the device, policy, whether with Liger's kernels
_ALST = (
    ("h100", 32_000, 71.91, "full", False),
    ("h200", 65_000, 137.36, "full", False),
    ("h200", 300_000, 134.96, "full", True),
    ("h200", 650_000, 126.81, "full,offload", True),
    ("h200", 1_200_000, 136.15, "full,offload,tile:32", True),
)
# GPU, GPUs that share the sequence, longest published, policy, whether with Liger; then the published GiB of the
# device, or the length that was predicted before the published one was known
_LONGEST = (
    ("h200", 1, 65_000, "full", False, 137.36),
    ("h200", 1, 300_000, "full", True, 134.96),
    ("h200", 1, 650_000, "full,offload", True, 126.81),
    ("h200", 1, 1_200_000, "full,offload,tile:32", True, 136.15),
)
_LONGEST_BLIND = (
    ("h100", 1, 500_000, "full,offload,tile:32", True, 569_088),
    ("h100", 8, 3_700_000, "full,offload,tile:32", True, 4_301_056),
    ("h100", 8, 1_100_000, "full", True, 1_309_952),
    ("h100", 8, 1_200_000, "full,tile:32", True, 1_510_144),  # the only one with sdpa
    ("h100", 8, 2_400_000, "full,offload", True, 2_854_144),
)
_ULYSSES = ((1, 8192, 76.4), (4, 8192, 23.4), (4, 65536, 50.5))  # GPUs that share a sequence, tokens, GB allocated
_VIT = (("adamw_fused", 12.23), ("adamw_8bit", 8.32), ("ao_adamw_8bit", 8.33), ("ao_adamw_4bit", 7.72))  # GB allocated


def rows() -> Iterator[Row]:
    """Returns every published run with its prediction."""
    for card, tokens, device, policy, liger in _ALST:
        launch = Launch("zero3", 1, mixed_precision="bf16").with_offload("all")
        found = _estimate("meta-llama/Llama-3.1-8B", card, tokens, policy, launch, use_liger_kernel=liger)
        used = (found.peak_reserved + found.context) / GIB
        name = f"Llama-3.1-8B, {card.upper()}, {tokens:,} tokens, `{policy}`{', Liger' * liger}: whole device"
        yield Row(name, device, used, found.seconds or 0.0, "GiB")
    for gpus, tokens, allocated in _ULYSSES:
        launch = Launch("zero3", gpus, mixed_precision="bf16", sp=gpus)
        found = _estimate("Qwen/Qwen3-4B", "h100", tokens, "full", launch, accumulation=8)
        name = f"Qwen3-4B, {gpus} H100, {tokens:,} tokens, `full`, Adam on the card: allocated"
        yield Row(name, allocated, found.peak_allocated / 1e9, found.seconds or 0.0, "GB")
    for optimizer, allocated in _VIT:
        trace = compiled.vit(optimizer)
        name = f"ViT-huge, RTX 4070 Ti Super, compiled, {optimizer}: allocated"
        yield Row(name, allocated, trace.peak_allocated / 1e9, trace.seconds, "GB")


@dataclass(frozen=True)
class Longest:
    """A published longest sequence and the longest that fits by prediction, in tokens.

    Attributes:
        at_known_bytes: the length at which the predicted bytes equal the published ones, by linear interpolation of
            two traced lengths; of blind rows, the length that was predicted first.
    """

    name: str
    published: int
    predicted: int
    at_known_bytes: float


def longest(blind: bool) -> Iterator[Longest]:
    """ALST's longest sequences of Llama-3.1-8B, with published bytes, or those that were predicted blind."""
    for card, gpus, published, policy, liger, known in _LONGEST_BLIND if blind else _LONGEST:
        launch = Launch("zero3", gpus, mixed_precision="bf16", sp=gpus)
        launch = launch.with_offload("all" if gpus == 1 else "optimizer")
        launch = replace(launch, zero=replace(launch.zero, seq_parallel_reduce="bf16"))  # as in its configurations
        spec = _spec("meta-llama/Llama-3.1-8B", card, 16, policy, launch, use_liger_kernel=liger)
        if policy == "full,tile:32":
            spec = spec.edit(attn_implementation="sdpa")
        found = predict_max_length(load(spec, GPUS[card]), [policy]).ladder[0]
        at_known_bytes = known
        if not blind:
            at_published = _estimate(
                "meta-llama/Llama-3.1-8B", card, published, policy, launch, use_liger_kernel=liger
            )
            slope = (found.peak_reserved - at_published.peak_reserved) / (found.length - published)
            at_known_bytes = published + (known * GIB - at_published.context - at_published.peak_reserved) / slope
        name = f"Llama-3.1-8B, {f'{gpus} x ' * (gpus > 1)}{card.upper()}, `{policy}`{', Liger' * liger}"
        yield Longest(name, published, found.length, at_known_bytes)


def _estimate(model: str, card: str, tokens: int, policy: str, launch: Launch, **more: Any) -> Estimate:
    return traced_estimate(_spec(model, card, tokens, policy, launch, **more), lambda line: None, suggests=False)[0]


def _spec(model: str, card: str, tokens: int, policy: str, launch: Launch, **more: Any) -> TrainingSpec:
    os.environ["OMP_NUM_THREADS"] = "1"  # the default of `accelerate launch`, for the seconds of Adam on the host
    return TrainingSpec.of(
        model, dtype="bfloat16", mixed_precision="bf16", seq_length=tokens, policy=policy, device=card, launch=launch,
        attn_implementation="flash_attention_2", alloc_conf="expandable_segments:True", rope_scaling="none", **more
    )  # fmt: skip


def main() -> None:
    for row in rows():
        print(
            f"{row.name}: {row.published} {row.unit} published, {row.predicted:.2f} predicted "
            f"({100 * row.error:+.1f} %), {row.seconds:.4g} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
