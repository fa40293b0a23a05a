"""How long a trace takes, beside `torch.distributed._tools.MemTracker` on the same step in the same process.

python benchmarks/trace_speed.py            # Llama-7B and SDXL's U-Net, AdamW, two steps; real sizes, no weights
python benchmarks/trace_speed.py --help-times   # of the recipes
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from transformers import AutoConfig, AutoModelForCausalLM

from ckpt_ft.errors import run
from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.fake.surroundings import faked_model
from ckpt_ft.units import GIB

Step = Callable[[nn.Module, torch.optim.Optimizer], None]


def llama_7b(lora: bool = False) -> tuple[nn.Module, Step]:
    """Llama-7B in bfloat16, all of it trained or LoRA on q, k, v and o; batch 1, 2048 tokens."""
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
    """SDXL's U-Net in bfloat16, all of it trained; batch 1, 1024 pixels."""
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
    """Two steps under torch's own tracker, on fake tensors."""
    with FakeTensorMode(), faked_model(model):
        optimizer = adamw(model)
        tracker = MemTracker()
        tracker.track_external(model, optimizer)
        with tracker:
            for _ in range(2):
                step(model, optimizer)
                tracker.reset_mod_stats()  # it takes no second step otherwise


def seconds(call: Callable[[], object]) -> float:
    begin = time.process_time()
    call()
    return time.process_time() - begin


def help_seconds(script: Path) -> float:
    """CPU seconds of a recipe's `--help`, Python's own start included."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, str(script), "--help"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=list(MODELS), help="one of them")
    parser.add_argument("--alone", action="store_true", help="leave MemTracker out")
    parser.add_argument("--help-times", action="store_true", help="of the recipes, and nothing else")
    arguments = parser.parse_args()
    if arguments.help_times:
        for script in sorted((Path(__file__).parents[1] / "recipes").glob("*.py")):
            print(f"{script.name} --help: {help_seconds(script):.2f} s of CPU time", flush=True)
        return 0
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for name in [arguments.only] if arguments.only else MODELS:
        model, step = MODELS[name]()
        ours = seconds(lambda: trace_step(model, step, make_optimizer=adamw, device="a100-80gb"))  # noqa: B023
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB
        line = f"{name}: two steps traced in {ours:.1f} s of one core; the process held {memory:.2f} GiB at most"
        if not arguments.alone and all(p.requires_grad for p in model.parameters()):  # MemTracker fails on frozen ones
            theirs = seconds(lambda: with_mem_tracker(model, step))  # noqa: B023
            line += f"; MemTracker {theirs:.1f} s, {theirs / ours:.1f} times as long"
        print(line, flush=True)
    return 0


if __name__ == "__main__":
    run(main)
