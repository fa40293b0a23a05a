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
import statistics
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.pages import table, write_section
from ckpt_ft import trace_step
from ckpt_ft.errors import UserError, run
from ckpt_ft.memory.gpus import calibrated
from ckpt_ft.memory.measure.calibrate import timer

Batch = dict[str, Tensor]
MOST = 0.25  # allowed relative error of a prediction


def text(rows: int, tokens: int, **more: Any) -> Batch:
    ids = torch.randint(1000, (rows, tokens))
    return {"input_ids": ids, "labels": ids.clone(), **more}


def images(rows: int, side: int) -> Batch:
    return {"pixel_values": torch.randn(rows, 3, side, side), "labels": torch.randint(10, (rows,))}


def llama(width: int, layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=width // 32,
        vocab_size=2000, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def lora() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(llama(512, 4), LoraConfig(r=8, target_modules="all-linear"))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(GPT2Config(n_embd=256, n_layer=6, n_head=4, vocab_size=2000, use_cache=False))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=256, num_hidden_layers=6, num_attention_heads=4, intermediate_size=1024, vocab_size=2000
    )
    return BertForMaskedLM(config)


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=256, d_kv=64, d_ff=1024, num_layers=4, num_heads=4, vocab_size=2000, decoder_start_token_id=0
    )
    return T5ForConditionalGeneration(config)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=192,
        num_hidden_layers=6,
        num_attention_heads=3,
        intermediate_size=768,
        image_size=96,
        num_labels=10,
    )  # fmt: skip
    return ViTForImageClassification(config)


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=32, hidden_sizes=[32, 64, 128, 256], depths=[2, 2, 2, 2], layer_type="basic", num_labels=10
    )
    return ResNetForImageClassification(config)


def unet() -> nn.Module:
    from diffusers import UNet2DModel

    return UNet2DModel(
        sample_size=32, block_out_channels=(32, 64), layers_per_block=1, norm_num_groups=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip


STEPS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Batch], bool]] = {  # name: model, batch, autocast
    "Llama, 4 blocks of 64, 2 x 32": (lambda: llama(64, 4), lambda: text(2, 32), False),
    "Llama, 4 blocks of 512, 4 x 128": (lambda: llama(512, 4), lambda: text(4, 128), False),
    "the same with LoRA": (lora, lambda: text(4, 128), False),
    "the same Llama in bf16 autocast": (lambda: llama(512, 4), lambda: text(4, 128), True),
    "GPT-2, 6 blocks of 256, 4 x 128": (gpt2, lambda: text(4, 128), False),
    "BERT, 6 blocks of 256, 8 x 64": (bert, lambda: text(8, 64), False),
    "T5, 4 + 4 blocks of 256, 4 x 64": (t5, lambda: text(4, 64), False),
    "ViT, 6 blocks of 192, 8 x 96 pixels": (vit, lambda: images(8, 96), False),
    "ResNet-18, half as wide, 4 x 96 pixels": (resnet, lambda: images(4, 96), False),
    "U-Net, 32 and 64 channels, 2 x 32 pixels": (
        unet, lambda: {"sample": torch.randn(2, 3, 32, 32), "timestep": torch.tensor([3, 7])}, False,
    ),
}  # fmt: skip


def seconds(make: Callable[[], nn.Module], batch: Batch, autocast: bool) -> tuple[float, float]:
    """Returns the measured and predicted seconds of a step."""
    torch.manual_seed(0)
    model = make().train()

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])

    def step(model: nn.Module, optimizer: Any) -> None:
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
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
    for name, (make, batch, autocast) in STEPS.items():
        measured, predicted = seconds(make, batch(), autocast)
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
