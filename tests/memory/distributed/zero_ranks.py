"""One of two real CPU ranks (gloo) of DeepSpeed's engine, recorded as it runs.

torchrun --nproc_per_node 2 zero_ranks.py OUT [few]: writes {case: {phase: peak bytes}} of each rank to OUT/RANK.json,
for all cases or for those that differ most.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from two_ranks import waiting_for_gloo, workload

from ckpt_ft.memory.distributed.sequence_parallel import of_one_rank
from ckpt_ft.memory.distributed.zero import host_optimizer
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.spec.launch import Launch

# ZeRO-3 records the order of its gathers in the first step and prefetches by it in later ones. gloo releases sent
# tensors late, so the minimum over several steps is what the step itself needs.
STEPS = 6


FEW = ("zero2 LoRA", "zero3 accumulated", "zero3 LoRA", "zero3 sp", "zero3 offload")
Case = tuple[str, int, str, str, bool, int, dict[str, Any]]


def cases(few: bool = False) -> list[Case]:
    """Returns the cases: name, stage, precision, policy, LoRA, micro-batches, options of zero_optimization."""
    return [case for case in _all() if not few or case[0] in FEW]


def _all() -> Iterator[Case]:
    small = {"reduce_bucket_size": 20_000}
    yield "zero1 accumulated", 1, "no", "none", False, 3, {**small, "overlap_comm": True}
    yield "zero2", 2, "no", "full", False, 1, small
    yield "zero2 LoRA", 2, "bf16", "head", True, 2, small
    few = {
        **small, "stage3_prefetch_bucket_size": 10_000, "stage3_max_live_parameters": 60_000,
        "stage3_max_reuse_distance": 60_000, "stage3_param_persistence_threshold": 100,
    }  # fmt: skip
    yield "zero3", 3, "no", "full", False, 1, few
    yield "zero3 accumulated", 3, "bf16", "save:attention+matmul", False, 2, {**few, "sub_group_size": 30_000}
    yield "zero3 LoRA", 3, "no", "full", True, 1, few
    away = {"offload_optimizer": {"device": "cpu"}}
    yield "zero1 offload", 1, "bf16", "none", False, 2, {**small, **away}
    yield "zero2 offload", 2, "bf16", "full", False, 2, {**small, **away}
    yield "zero3 offload", 3, "bf16", "full", False, 2, {**few, **away, "offload_param": {"device": "cpu"}}
    yield "zero3 sp", 3, "no", "full", False, 1, few


def spans(trace: StepTrace, updates: int) -> dict[str, int]:
    """Returns the measured step's peaks before its first backward, then until the event `updates`, then after it."""
    backward = next(at for at, phase in trace.marks if phase == "backward" and at >= trace.start)
    bounds = {"forward": (trace.start, backward), "backward": (backward, updates), "optimizer": (updates, None)}
    return {phase: trace.replay.peak_allocated(*bound) for phase, bound in bounds.items()}


def without_gloo(trace: StepTrace) -> StepTrace:
    """Returns the trace without memory that no operator allocated: gloo's copies, which do not exist on a GPU."""
    made = [bool(storage.op) or storage.category != "temporary" for storage in trace.storages]
    storages = [s if by_an_op else replace(s, nbytes=0) for s, by_an_op in zip(trace.storages, made, strict=True)]
    return replace(trace, storages=storages)


def main(out: str, few: str = "") -> None:
    import deepspeed
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    gc.disable()
    torch.set_num_threads(1)
    os.environ["DS_ACCELERATOR"] = "cpu"
    # its compilation takes more than a minute
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    dist.init_process_group("gloo")
    deepspeed.init_distributed("gloo", verbose=False)
    peaks: dict[str, dict[str, int]] = {}
    for name, stage, precision, policy, lora, accumulation, options in cases(bool(few)):
        asked = workload(None, policy, lora, accumulation)
        config = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": accumulation,
            "gradient_clipping": 1.0,
            "bf16": {"enabled": precision == "bf16"},
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage, **options},
        }
        shared = Launch(f"zero{stage}", 2, sp=2 if name.endswith("sp") else 1)
        optimizer = asked.make_optimizer(asked.model)
        if "offload_optimizer" in options:  # accelerate would use an optimizer for the host, which would be compiled
            config["zero_force_ds_cpu_optimizer"], optimizer = False, host_optimizer(optimizer)
        engine, *_ = deepspeed.initialize(
            model=asked.model,
            optimizer=optimizer,
            config=config,
            mpu=UlyssesSPAttentionHF.register_with_transformers(asked.model, "sdpa", shared.sp, 2),
        )
        with waiting_for_gloo(), Tracker(engine.module, ops=False) as tracker:
            tracker.recorder.add_resident(
                [value for name, value in vars(engine.optimizer).items() if name.startswith("temp_grad_buffer")],
                "communication",
            )
            found = []
            for number in range(STEPS):
                gc.collect()
                tracker.start_step()
                batches = [of_one_rank(asked.make_batch(2, None), shared) for _ in range(accumulation)]
                for batch in batches:
                    loss = asked.compute_loss(engine, batch)
                    engine.backward(loss)
                    updates = len(tracker.trace().events)
                    engine.step()
                    del loss
                if number:
                    found.append(spans(without_gloo(tracker.trace()), updates))
        peaks[name] = {phase: min(step[phase] for step in found) for phase in found[0]}
        engine.destroy()
        ALL_ATTENTION_FUNCTIONS._local_mapping.clear()
        dist.barrier()
        del engine, asked
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
