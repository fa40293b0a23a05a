"""Host time of policies: forward and backward of models whose kernels take almost no time, in one thread.

    python benchmarks/host_overhead.py [--repeats 25] [--models llama qwen3 unet vit] [--json FILE]

Models of 32 layers with tiny widths (for the U-Net: 32 resnet and transformer blocks), so that the time is Python and
dispatch. All variants of a model take turns. CPU time of the process is measured, which other processes hardly change;
medians and ratios of medians are printed.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError, run

Step = Callable[[nn.Module], torch.Tensor]
KEEP = ("aten.mm.", "aten.addmm.", "aten.bmm.", "aten._scaled_dot_product")


def language_model(kind: str, layers: int, **more: int) -> tuple[nn.Module, Step]:
    """A language model of width 32 on 8 tokens."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 64, **more}
    config = transformers.AutoConfig.for_model(kind, num_hidden_layers=layers, use_cache=False, **sizes)
    ids = torch.randint(0, 64, (1, 8))
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


def measure(name: str, repeats: int, device: str = "cpu") -> dict[str, float]:
    """Returns the median milliseconds of forward + backward by variant: on a GPU, until all kernels are issued."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    runs: dict[str, tuple[nn.Module, Step]] = {}
    for variant, treat in VARIANTS.items():
        torch.manual_seed(0)
        with torch.device(device):
            model, step = MODELS[name]()
        treat(model.train())
        runs[variant] = model, step
    times: dict[str, list[float]] = {variant: [] for variant in runs}
    for repeat in range(repeats + 3):
        for variant, (model, step) in runs.items():
            model.zero_grad()
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            step(model).backward()
            if repeat >= 3:  # the first ones are warm-up
                times[variant].append((clock() - start) * 1e3)
    return {variant: statistics.median(values) for variant, values in times.items()}


def table(name: str, medians: dict[str, float]) -> str:
    """A Markdown table of one model."""
    rows = [f"| {name} | ms | / plain | / full | / save:attention+matmul |", "|---|---|---|---|---|"]
    for variant, ms in medians.items():
        ratios = [ms / medians[base] for base in ("plain", "full", "save:attention+matmul")]
        rows.append(f"| {variant} | {ms:.1f} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")
    return "\n".join(rows)


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=25)
    parser.add_argument("--models", nargs="+", default=list(MODELS))
    parser.add_argument("--json", type=Path, help="also write the medians and where they were measured")
    args = parser.parse_args()
    if unknown := set(args.models) - set(MODELS):
        raise UserError(f"--models: no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    where = {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "cpu": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
    }
    print(", ".join(f"{key} {value}" for key, value in where.items()))
    results = {}
    for name in args.models:
        results[name] = measure(name, args.repeats)
        print("\n" + table(name, results[name]), flush=True)
    if args.json:
        args.json.write_text(
            json.dumps({"where": where, "repeats": args.repeats, "median_ms": results}, indent=1) + "\n"
        )


if __name__ == "__main__":
    run(main)
