"""One of two real CPU ranks (gloo): the same model, launch and step as the trace, recorded as it runs.

torchrun --nproc_per_node 2 two_ranks.py OUT: writes {case: {phase: peak bytes}} of each rank to OUT/RANK.json.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.distributed.launch import Launch
from ckpt_ft.workloads.transformers_models import own_loss
from ckpt_ft.workloads.workload import Batch, Workload

PROCESSES, STEPS = 2, 6


def cases() -> Iterator[tuple[str, Launch, str, bool, int]]:
    """Name, launch, policy, LoRA, micro-batches."""
    ddp, fsdp = Launch("ddp", PROCESSES), Launch("fsdp2", PROCESSES)
    yield "fsdp2 kept", Launch("fsdp2", PROCESSES, reshard_after_forward=False), "full", False, 1
    for name, launch in (("ddp", ddp), ("fsdp2", fsdp)):
        for policy in ("full", "save:attention+matmul", "pointwise", "head"):
            yield f"{name} {policy}", launch, policy, False, 1
    yield "ddp LoRA", ddp, "full", True, 1
    yield "fsdp2 LoRA", fsdp, "full", True, 1
    yield "ddp accumulated", ddp, "none", False, 3
    yield "fsdp2 accumulated", fsdp, "none", False, 3


def workload(launch: Launch | None, policy: str, lora: bool, accumulation: int) -> Workload:
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=176, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, use_cache=False,
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(config)
    if lora:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    apply_policy(model.train(), policy)

    def make_batch(samples: int, length: int | None) -> Batch:
        ids = torch.arange(samples * 64).reshape(samples, 64) % 300
        return {"input_ids": ids, "labels": ids.clone()}

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)

    return Workload(
        model, make_batch, own_loss, make_optimizer, "cpu", accumulation=accumulation, max_grad_norm=1.0, launch=launch
    )


def main(out: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.parallel import DistributedDataParallel

    from ckpt_ft.memory.distributed.wrap import share
    from ckpt_ft.memory.record.tracker import Tracker

    gc.disable()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (PROCESSES,), mesh_dim_names=("dp_shard",))
    peaks: dict[str, dict[str, int]] = {}
    for name, launch, policy, lora, accumulation in cases():
        asked = workload(launch, policy, lora, accumulation)
        model: nn.Module = asked.model
        if launch.strategy == "ddp":
            model = DistributedDataParallel(model, gradient_as_bucket_view=launch.gradient_as_bucket_view)
        else:
            share(model, launch, mesh)
        assert asked.make_optimizer is not None
        optimizer = asked.make_optimizer(model)
        step = asked.step(2)
        found = []
        with Tracker(model, optimizer) as tracker:
            for number in range(STEPS):
                gc.collect()  # as a trace does: when Python frees cycles is up to chance
                tracker.start_step()
                step(model, optimizer)
                if number:  # DDP arranges its buckets anew after the first
                    found.append(tracker.trace().peaks)
        # gloo's thread lets go of what it sent when it comes to it: the least is what the step itself needs
        peaks[name] = {phase: min(step[phase] for step in found) for phase in found[0]}
        dist.barrier()
        del model, asked
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
