"""Time of a step under policies, and of its verification: variants of a model take turns, in one thread.

    python benchmarks/host_overhead.py [--repeats 25] [--models llama qwen3 unet vit] [--json FILE]
    python benchmarks/host_overhead.py --verify

The host's time is that of forward and backward of models of 32 layers with tiny widths (for the U-Net: 32 resnet and
transformer blocks), so that it is Python and dispatch. CPU time of the process is measured, which other processes
hardly change; medians and ratios of medians are printed. Verification is timed in a Llama of 4 layers, 512 wide, on
4 x 256 tokens; the fastest step counts.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import made_by, table
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError, run

Step = Callable[[nn.Module], torch.Tensor]
KEEP = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten._scaled_dot_product")
VERIFIED = ("full", "save:attention+matmul", "segments:2", "pointwise", "full,offload")


def language_model(kind: str, layers: int, shape: tuple[int, int] = (1, 8), **more: int) -> tuple[nn.Module, Step]:
    """A language model, by default of width 32."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64, **more}
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, use_cache=False, **sizes)
    ids = torch.randint(0, sizes["vocab_size"], shape)
    model = transformers.AutoModelForCausalLM.from_config(config)
    return model, lambda m: m(input_ids=ids, labels=ids).loss


def vit() -> tuple[nn.Module, Step]:
    """A ViT of 32 layers, width 32, 5 tokens."""
    config = transformers.ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=32, num_attention_heads=4, image_size=16, patch_size=8
    )
    pixels, labels = torch.randn(1, 3, 16, 16), torch.tensor([1])
    model = transformers.AutoModelForImageClassification.from_config(config)
    return model, lambda m: m(pixel_values=pixels, labels=labels).loss


def unet() -> tuple[nn.Module, Step]:
    """A conditional U-Net of Stable Diffusion's shape, 8 channels, 8x8 latents; 22 resnets and 16 transformers."""
    from diffusers import UNet2DConditionModel

    model = UNet2DConditionModel(
        sample_size=8, block_out_channels=(8, 8, 8, 8), layers_per_block=2, cross_attention_dim=8,
        attention_head_dim=4, norm_num_groups=4,
    )  # fmt: skip
    latents, when, text = torch.randn(1, 4, 8, 8), torch.tensor([3]), torch.randn(1, 4, 8)
    return model, lambda m: m(latents, when, text).sample.square().mean()


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "llama": lambda: language_model("llama", 32),
    "qwen3": lambda: language_model("qwen3", 28, num_key_value_heads=2, head_dim=8),
    "unet": unet,
    "vit": vit,
}


def _keep(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if str(op).startswith(KEEP) else CheckpointPolicy.PREFER_RECOMPUTE


def library_checkpointing(model: nn.Module, selective: bool) -> None:
    """Enables the library's own checkpointing with torch's checkpoint, full or selective."""
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if selective:
        kwargs["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)
    if isinstance(model, transformers.PreTrainedModel):
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable(kwargs)
    else:
        model.enable_gradient_checkpointing(functools.partial(checkpoint, **kwargs))  # type: ignore[operator]


VARIANTS: dict[str, Callable[[nn.Module], Any]] = {
    "plain": lambda model: None,
    "library's full": lambda model: library_checkpointing(model, selective=False),
    "full": lambda model: apply_policy(model, "full"),
    "torch's SAC": lambda model: library_checkpointing(model, selective=True),
    "save:attention+matmul": lambda model: apply_policy(model, "save:attention+matmul"),
    "pointwise": lambda model: apply_policy(model, "pointwise"),
}


def timed(
    build: Callable[[], tuple[nn.Module, Step]], variants: dict[str, Callable[[nn.Module], Any]], repeats: int,
    device: str, warmup: int, kernels: bool,
) -> dict[str, list[float]]:  # fmt: skip
    """Returns the seconds of forward and backward by variant, which take turns: of CPU time, or on a GPU until all
    kernels are issued, with `kernels` until they have ended."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    wait = torch.cuda.synchronize if device != "cpu" else lambda: None
    runs: dict[str, tuple[nn.Module, Step]] = {}
    for variant, treat in variants.items():
        torch.manual_seed(0)
        with torch.device(device):
            model, step = build()
        treat(model.train())
        runs[variant] = model, step
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for repeat in range(repeats + warmup):
        for variant, (model, step) in runs.items():
            model.zero_grad()
            wait()
            start = clock()
            step(model).backward()
            if kernels:
                wait()
            if repeat >= warmup:
                times[variant].append(clock() - start)
    return times


def measure(name: str, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Returns the median milliseconds of forward + backward by variant: on a GPU, until all kernels are issued."""
    times = timed(MODELS[name], VARIANTS, repeats, device, warmup=3, kernels=False)
    return {variant: 1e3 * statistics.median(values) for variant, values in times.items()}


def measure_verified(policy: str, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Returns the seconds of a step by `verify=`, "never" and "always": of CPU time, or on a GPU with its kernels."""
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_attention_heads": 8, "vocab_size": 1000}
    build = functools.partial(language_model, "llama", 4, (4, 256), **sizes)
    variants = {v: functools.partial(apply_policy, policy=policy, verify=v) for v in ("never", "always")}
    return {v: min(found) for v, found in timed(build, variants, repeats, device, warmup=1, kernels=True).items()}  # type: ignore[arg-type]


def verification(repeats: int) -> None:
    """Prints what verification costs here."""
    print("| policy | step, s | verified, s | more |\n|---|---|---|---|")
    for policy in VERIFIED:
        never, always = measure_verified(policy, repeats).values()
        print(f"| {policy} | {never:.2f} | {always:.2f} | {always / never - 1:+.0%} |", flush=True)


def of_model(name: str, medians: dict[str, float]) -> str:
    """A Markdown table of one model."""
    bases = "plain", "full", "save:attention+matmul"
    rows = [[v, f"{ms:.1f}", *(f"{ms / medians[base]:.2f}" for base in bases)] for v, ms in medians.items()]
    return table([name, "ms", *(f"/ {base}" for base in bases)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, help="25; 4 with --verify")
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--json", type=Path, help="also write the medians and where they were measured")
    parser.add_argument("--verify", action="store_true", help="the cost of verification instead")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        raise UserError(f"--models: no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    if args.verify:
        return verification(args.repeats or 4)
    print(made_by())
    results, repeats = {}, args.repeats or 25
    for name in args.models:
        results[name] = measure(name, repeats)
        print("\n" + of_model(name, results[name]), flush=True)
    if args.json:
        found = {"where": made_by(), "repeats": repeats, "median_ms": results}
        args.json.write_text(json.dumps(found, indent=1) + "\n")
    return None


if __name__ == "__main__":
    run(main)
