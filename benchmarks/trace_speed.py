"""Time of a trace, compared with `torch.distributed._tools.MemTracker` on the same step in the same process.

python benchmarks/trace_speed.py            # Llama-7B, AdamW, two steps; no weights
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
from unittest.mock import patch

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.errors import run
from ckpt_ft.memory.fake.dispatcher import forget
from ckpt_ft.memory.fake.faked_model import Fakes, faked_model, restored
from ckpt_ft.memory.fake.step import trace_step

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def llama_7b() -> tuple[nn.Module, Step]:
    """Llama-7B in bfloat16, fully trained; batch 1, 2048 tokens."""
    with torch.device("meta"):
        config = AutoConfig.for_model("llama", num_hidden_layers=32, use_cache=False)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).train()

    def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        ids = torch.randint(0, 32000, (1, 2048))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


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


def traces() -> None:
    """Times two steps: as a trace, and under torch's own tracker."""
    model, step = llama_7b()
    forget()
    ours = timed(lambda: trace_step(model, step, make_optimizer=adamw, device="a100-80gb"))
    show("Llama-7B, two steps", ours)
    theirs = timed(lambda: with_mem_tracker(model, step))
    show("Llama-7B, two steps, MemTracker", theirs, f"; {theirs[0] / ours[0]:.0f} times as long")


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
    parser.add_argument("--plans", action="store_true", help="time plans as well, which takes minutes")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    traces()
    with tempfile.TemporaryDirectory() as cache, patch.dict(os.environ, CKPT_FT_CACHE=cache):
        for name, words in {**QUICK, **(PLANS if arguments.plans else {})}.items():
            show(name, timed_command(words))
    return 0


if __name__ == "__main__":
    run(main)
