"""Predicted and measured seconds of ten training steps on this machine's CPU, after `ckpt-ft calibrate`.

    ckpt-ft calibrate
    python benchmarks/calibrated.py           # prints, and writes its section of docs/planning.md; two minutes
    python benchmarks/calibrated.py --no-write

A step is forward, backward and AdamW. The measured seconds are the minimum of several steps. Both clocks are those of
`calibrate`: with one thread, the CPU time of the process.
The exit code is 1 if a step is predicted more than 25 % off.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import AutoConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import DATA, table, write_section
from ckpt_ft import trace_step
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.gpus import calibrated
from ckpt_ft.memory.measure.calibrate import timer

Batch = dict[str, Tensor]
MOST = 0.25  # allowed relative error of a prediction

# name -> type of model, its head, sizes, rows, tokens or pixels, and "lora" or "autocast"
STEPS = json.loads((DATA / "calibrated_steps.json").read_text(encoding="utf-8"))


def built(kind: str, head: str, sizes: dict[str, Any], rows: int, length: int, how: str) -> tuple[nn.Module, Batch]:
    """Returns the model and the batch of a step."""
    if kind == "unet":
        from diffusers import UNet2DModel

        model: nn.Module = UNet2DModel(
            sample_size=length, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
            down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        )  # fmt: skip
        return model, {"sample": torch.randn(rows, 3, length, length), "timestep": torch.tensor([3, 7])}
    images = head == "ImageClassification"
    more = {"num_labels": 10} if images else {"use_cache": False} if head == "CausalLM" else {}
    config = AutoConfig.for_model(kind, **sizes, **more)
    model = getattr(transformers, f"AutoModelFor{head}").from_config(config)
    if how == "lora":
        model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear"))
    if images:
        pixels = torch.randn(rows, 3, length, length)
        return model, {"pixel_values": pixels, "labels": torch.randint(10, (rows,))}
    ids = torch.randint(1000, (rows, length))
    return model, {"input_ids": ids, "labels": ids.clone()}


def seconds(*asked: Any) -> tuple[float, float]:
    """Returns the measured and predicted seconds of a step."""
    torch.manual_seed(0)
    model, batch = built(*asked)
    model.train()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in asked):
            output = model(**batch)
        loss = output.loss if "labels" in batch else output.sample.square().mean()
        loss.backward()
        optimizer.step()

    predicted = trace_step(model, step, make_optimizer=adamw, device="cpu").seconds
    optimizer = adamw(model)
    step(model, optimizer)
    return min(timer(lambda: step(model, optimizer), 3.0).times), predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--no-write", action="store_true", help="print only")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    card = calibrated("cpu")
    if card is None or card.calibration is None:
        raise UserError("the CPU of this machine is not calibrated: run `ckpt-ft calibrate`")
    rows, errors = [], []
    for name, asked in STEPS.items():
        measured, predicted = seconds(*asked)
        errors.append(predicted / measured - 1)
        rows.append([name, f"{1e3 * measured:.1f}", f"{1e3 * predicted:.1f}", f"{errors[-1]:+.1%}"])
        print(*rows[-1], sep="  ", flush=True)
    median, worst = statistics.median(map(abs, errors)), max(map(abs, errors))
    rows.append(["median and worst", "", "", f"{median:.1%}, {worst:.1%}"])
    text = table(["step", "measured ms", "predicted ms", "error"], rows)
    if not given.no_write:
        write_section("planning.md", "calibrated", text)
    if worst > MOST:
        sys.exit(f"{sum(abs(error) > MOST for error in errors)} of {len(errors)} steps are more than {MOST:.0%} off")


if __name__ == "__main__":
    run(main)
