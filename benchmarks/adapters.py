"""How far `trace_step` is from published runs of many fine-tuning methods on a diffusion transformer.

    python benchmarks/adapters.py                  # every row of benchmarks/data/flux2_klein_peft.json
    python benchmarks/adapters.py --only lora      # rows whose name holds "lora"

FLUX.2-klein-4B on an L40S; the loop is the one that benchmarks/data/README.md describes. Needs diffusers.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import warnings
from pathlib import Path
from typing import Any

import torch
from diffusers import Flux2Transformer2DModel
from peft import PeftModel, get_peft_config, get_peft_model
from torch import Tensor, nn

from ckpt_ft import apply_policy, trace_step
from ckpt_ft.errors import run
from ckpt_ft.memory.record.trace import StepTrace

ROWS = Path(__file__).parent / "data" / "flux2_klein_peft.json"
EVALUATOR = 86_580_480  # parameters of a DINOv2-base in fp32, resident in the published runs
IMAGES, BATCH = 14, 2


class Run(nn.Module):
    """What lies on the card: the transformer, with its adapter, and the model that judges its images."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer
        self.evaluator = nn.Parameter(torch.empty(EVALUATOR, device="meta"), requires_grad=False)


def build(config: dict[str, Any] | None) -> Run:
    """The transformer in bf16 on the meta device, its adapter in fp32, every block checkpointed."""
    with torch.device("meta"):
        transformer: nn.Module = Flux2Transformer2DModel(
            num_layers=5,
            num_single_layers=20,
            num_attention_heads=24,
            attention_head_dim=128,
            joint_attention_dim=7680,
            guidance_embeds=False,
        ).to(torch.bfloat16)
        if config is not None:
            transformer = get_peft_model(transformer, get_peft_config(copy.deepcopy(config)))
    apply_policy(transformer, "full")
    return Run(transformer).train()


class Step:
    """The published step: rows picked from cached latents and prompts, flow matching, clipped gradients."""

    def __init__(self) -> None:
        self.latents = torch.empty(IMAGES, 128, 32, 32, dtype=torch.bfloat16, device="meta")
        self.prompts = torch.empty(IMAGES, 512, 7680, dtype=torch.bfloat16, device="meta")
        self.text_ids = torch.empty(IMAGES, 512, 4, dtype=torch.bfloat16, device="meta")
        self.image_ids = torch.empty(BATCH, 1024, 4, dtype=torch.bfloat16, device="meta")
        self.rows = torch.zeros(BATCH, dtype=torch.long)
        self.count = 0

    def loss(self, transformer: nn.Module) -> Tensor:
        latents, prompts, text_ids = (
            t.index_select(0, self.rows) for t in (self.latents, self.prompts, self.text_ids)
        )
        noise = torch.randn_like(latents)
        sigma = torch.rand(BATCH, 1, 1, 1, dtype=latents.dtype, device=latents.device)
        noisy = (1 - sigma) * latents + sigma * noise
        packed = noisy.flatten(2).transpose(1, 2)
        out = transformer(
            hidden_states=packed,
            timestep=sigma.flatten(),
            guidance=None,
            encoder_hidden_states=prompts,
            txt_ids=text_ids,
            img_ids=self.image_ids,
            return_dict=False,
        )[0]
        target = (noise - latents).flatten(2).transpose(1, 2)
        return nn.functional.mse_loss(out.float(), target.float())

    def __call__(self, run: Run, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=True)
        self.loss(run.transformer).backward()
        nn.utils.clip_grad_norm_([p for p in run.parameters() if p.requires_grad], 1.0)
        optimizer.step()


def adamw(run: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in run.parameters() if p.requires_grad], lr=1e-4)


def trace(config: dict[str, Any] | None) -> StepTrace:
    """One row's step, as it would run on its card."""
    return trace_step(build(config), Step(), make_optimizer=adamw, device="l40s")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="rows whose name holds this")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    errors: dict[str, tuple[float, float]] = {}
    for name, row in json.loads(ROWS.read_text()).items():
        if arguments.only not in name:
            continue
        step = trace(row["peft_config"])
        errors[name] = (step.peak_reserved / row["max_reserved_bytes"] - 1, step.seconds / row["step_seconds"] - 1)
        print(f"{name:40} reserved {errors[name][0]:+8.2%}  seconds {errors[name][1]:+8.2%}", flush=True)
    for column, what in enumerate(("reserved", "seconds")):
        sizes = [abs(pair[column]) for pair in errors.values()]
        print(f"{what}: median {statistics.median(sizes):.2%}, worst {max(sizes):.2%} of {len(sizes)} rows")
    return 0


if __name__ == "__main__":
    run(main)
