"""Time of a trace, compared with `torch.distributed._tools.MemTracker` on the same step in the same process.

python benchmarks/trace_speed.py            # Llama-7B and SDXL's U-Net, AdamW, two steps; real sizes, no weights
python benchmarks/trace_speed.py --plans    # and whole plans

Then how long the command line takes, each command in a process of its own, its imports included.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.errors import run
from ckpt_ft.memory.fake.dispatcher import forget
from ckpt_ft.memory.fake.faked_model import Fakes, faked_model, restored
from ckpt_ft.memory.fake.step import trace_step, trace_steps
from ckpt_ft.units import GIB

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def llama_7b(lora: bool = False) -> tuple[nn.Module, Step]:
    """Llama-7B in bfloat16, fully trained or with LoRA on q, k, v and o; batch 1, 2048 tokens."""
    config = AutoConfig.for_model("llama", num_hidden_layers=32, use_cache=False)
    adapters = LoraConfig(r=16, task_type="CAUSAL_LM", target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()
        model = get_peft_model(model, adapters) if lora else model

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.randint(0, 32000, (1, 2048))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def sdxl_unet() -> tuple[nn.Module, Step]:
    """SDXL's U-Net in bfloat16, fully trained; batch 1, 1024 pixels."""
    from diffusers import UNet2DConditionModel

    with torch.device("meta"):
        model = UNet2DConditionModel(
            sample_size=128, block_out_channels=(320, 640, 1280), layers_per_block=2, cross_attention_dim=2048,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=(5, 10, 20),
            transformer_layers_per_block=(1, 2, 10), use_linear_projection=True, addition_embed_type="text_time",
            addition_time_embed_dim=256, projection_class_embeddings_input_dim=2816,
        ).to(torch.bfloat16).train()  # fmt: skip

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        texts, text, ids = torch.randn(1, 77, 2048), torch.randn(1, 1280), torch.randn(1, 6)
        latents, times = torch.randn(1, 4, 128, 128), torch.randint(0, 1000, (1,))
        added = {"text_embeds": text.bfloat16(), "time_ids": ids.bfloat16()}
        out = model(latents.bfloat16(), times, encoder_hidden_states=texts.bfloat16(), added_cond_kwargs=added).sample
        out.float().pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


MODELS: dict[str, Callable[[], tuple[nn.Module, Step]]] = {
    "llama-7b-lora": lambda: llama_7b(lora=True),
    "llama-7b": llama_7b,
    "sdxl": sdxl_unet,
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])


def with_mem_tracker(model: nn.Module, step: Step) -> None:
    """Runs two steps under torch's own tracker on fake tensors."""
    with FakeTensorMode() as mode, restored(model), faked_model(model, Fakes(mode)):
        optimizer = adamw(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                step(model, optimizer)
                tracker.reset_mod_stats()  # otherwise it makes no second step


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Returns the CPU and wall seconds of `call` in this process."""
    begin = time.process_time(), time.perf_counter()
    call()
    return time.process_time() - begin[0], time.perf_counter() - begin[1]


def timed_command(words: Sequence[str]) -> tuple[float, float]:
    """Returns the CPU and wall seconds of a command in its own process, including all processes that it starts."""
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - begin
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, wall


def show(what: str, times: tuple[float, float], more: str = "") -> None:
    print(f"{what}: {times[0]:.2f} s of CPU, {times[1]:.2f} s{more}", flush=True)


def traces(names: Sequence[str], alone: bool) -> None:
    """Times two steps of each model: with skipped blocks, with every block, and under torch's own tracker."""
    for name in names:
        model, step = MODELS[name]()
        options: Any = {"make_optimizer": adamw, "device": "a100-80gb"}
        forget()
        once = timed(lambda: trace_steps(model, [step, step], **options))  # noqa: B023
        forget()
        every = timed(lambda: trace_step(model, step, **options))  # noqa: B023
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        show(f"{name}, two steps, alike blocks once", once)
        show(f"{name}, two steps, every block", every, f"; the process held {memory:.2f} GiB at most")
        if not alone and all(p.requires_grad for p in model.parameters()):  # MemTracker fails on frozen parameters
            theirs = timed(lambda: with_mem_tracker(model, step))  # noqa: B023
            show(f"{name}, two steps, MemTracker", theirs, f"; {theirs[0] / once[0]:.0f} times as long")


RECIPES = Path(__file__).parents[1] / "recipes"
LORA = ("--dtype", "bfloat16", "--lora", "16", "--seq-length", "2048", "--device", "a100-80gb")
QUICK = {
    "import ckpt_ft": ("-c", "import ckpt_ft"),
    "import torch, peft and transformers' Llama": (
        "-c",
        "import torch, peft, transformers.models.llama.modeling_llama",
    ),
    "ckpt-ft --help": ("-m", "ckpt_ft.cli", "--help"),
    **{f"recipes/{script.name} --help": (str(script), "--help") for script in sorted(RECIPES.glob("*.py"))},
    "estimate of Llama-2-7B, LoRA": ("-m", "ckpt_ft.cli", "estimate", "meta-llama/Llama-2-7b-hf", *LORA),
    "that estimate again": ("-m", "ckpt_ft.cli", "estimate", "meta-llama/Llama-2-7b-hf", *LORA),
}
_SDXL = ("stabilityai/stable-diffusion-xl-base-1.0", "--lora", "16", "--dtype", "bfloat16", "--device", "a100-80gb")
PLANS = {
    "plan of Llama-3.1-8B, LoRA, 2,048 tokens": ("-m", "ckpt_ft.cli", "plan", "meta-llama/Llama-3.1-8B", *LORA),
    "that plan again": ("-m", "ckpt_ft.cli", "plan", "meta-llama/Llama-3.1-8B", *LORA),
    "plan of SDXL's U-Net, LoRA": ("-m", "ckpt_ft.cli", "plan", *_SDXL),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS), help="one of the traces, and no command")
    parser.add_argument("--alone", action="store_true", help="leave MemTracker out")
    parser.add_argument("--plans", action="store_true", help="time plans as well, which takes minutes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    traces([arguments.only] if arguments.only else list(MODELS), arguments.alone)
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, CKPT_FT_CACHE=cache):
        for name, words in ({} if arguments.only else {**QUICK, **(PLANS if arguments.plans else {})}).items():
            show(name, timed_command(words))
    return 0


if __name__ == "__main__":
    run(main)
