"""One of two real CPU ranks (gloo), recorded as it runs the same model, launch and step as the trace.

torchrun --nproc_per_node 2 two_ranks.py OUT [few]: writes {case: {phase: peak bytes}} of each rank to OUT/RANK.json,
for all cases or for those that differ most. The last case is a model that is sharded by hand and traced inside the
real ranks.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM
from versions import is_older

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.memory.distributed.wrap import library_patches, separate_meshes, share
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.spec.launch import Launch
from ckpt_ft.workloads.transformers_models import own_loss
from ckpt_ft.workloads.workload import Batch, Step, Workload, optimizer_step

PROCESSES = 2
# DDP rebuilds its buckets after the first step; the minimum over the other steps is what the step itself needs
STEPS = 6
FEW = "fsdp2 kept", "fsdp2 accumulated", "fsdp2 uneven LoRA", "ddp head", "cp", "tp", "ep"
OLD = is_older("transformers", "5.23")  # which divides no model that is loaded already
Case = tuple[str, Launch, str, str, int]


def cases(few: bool = False) -> list[Case]:
    """Returns the cases: name, launch, policy, kind of model, micro-batches."""
    found = [case for case in _all() if not few or case[0] in FEW]
    return [case for case in found if not (OLD and case[1].by_transformers)]


def _all() -> Iterator[Case]:
    ddp, fsdp = Launch("ddp", PROCESSES), Launch("fsdp2", PROCESSES)
    kept, viewed = replace(fsdp, reshard_after_forward=False), replace(ddp, gradient_as_bucket_view=True)
    yield "fsdp2 kept", kept, "full", "llama", 1
    for name, launch in (("ddp", ddp), ("fsdp2", fsdp)):
        for policy in ("full", "save:attention+matmul", "pointwise", "head"):
            yield f"{name} {policy}", launch, policy, "llama", 1
        yield f"{name} LoRA", launch, "full", "lora", 1
        yield f"{name} accumulated", launch, "none", "llama", 3
        yield f"{name} accumulated in step", launch, "none", "llama, in step", 3
        yield f"{name} tied", launch, "full", "tied", 1
    yield "fsdp2 segments", fsdp, "segments:1", "llama", 1
    yield "fsdp2 kept segments", kept, "segments:2", "llama", 1
    yield "fsdp2 kept LoRA accumulated", kept, "none", "lora", 3
    yield "fsdp2 uneven", fsdp, "full", "uneven", 1
    yield "fsdp2 uneven LoRA", fsdp, "full", "uneven lora", 1
    yield "fsdp2 half precision", replace(fsdp, mixed_precision="bf16"), "full", "llama", 1
    yield "fsdp2 experts", fsdp, "none", "experts", 1
    yield "cp", replace(fsdp, cp=2), "full", "llama", 1
    yield "cp alltoall", replace(fsdp, cp=2, rotation="alltoall"), "save:attention", "llama", 1
    yield "cp accumulated", replace(fsdp, cp=2), "none", "llama", 3
    yield "tp", replace(ddp, tp=2), "full,head,tile:2", "llama", 1
    yield "tp tied", replace(ddp, tp=2), "none", "tied", 1
    yield "ep", replace(fsdp, ep=2), "full", "experts", 1
    yield "ep LoRA", replace(fsdp, ep=2), "full", "experts lora", 1
    yield "ep tp", replace(ddp, tp=2, ep=2), "none", "experts", 1
    yield "ddp viewed", viewed, "none", "llama", 1
    yield "ddp viewed accumulated", viewed, "none", "llama", 3
    yield "ddp unused", replace(ddp, find_unused_parameters=True), "full", "llama", 1
    yield "ddp batch norm", ddp, "none", "batch norm", 1


def build(kind: str) -> Any:
    more: dict[str, Any] = {"tie_word_embeddings": "tied" in kind}
    if "uneven" in kind:
        more |= {"vocab_size": 301, "intermediate_size": 177}
    config: dict[str, Any] = {
        "vocab_size": 300, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "use_cache": False, **more,
    }  # fmt: skip
    torch.manual_seed(0)
    if kind == "batch norm":
        return Convolutions()
    if "experts" in kind:
        model: Any = MixtralForCausalLM(MixtralConfig(**config, num_local_experts=4))
    else:
        model = LlamaForCausalLM(LlamaConfig(**config))
    if "lora" in kind:
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(model, LoraConfig(r=3 if "uneven" in kind else 4, target_modules=["q_proj", "v_proj"]))
    return model


class Convolutions(nn.Module):
    """Six convolutions with BatchNorm, whose statistics DDP broadcasts."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(300, 64)
        layers = [nn.Sequential(nn.Conv1d(64, 64, 3, padding=1), nn.BatchNorm1d(64), nn.ReLU()) for _ in range(6)]
        self.layers = nn.Sequential(*layers)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        out = self.layers(self.embedding(input_ids).transpose(1, 2))
        return SimpleNamespace(loss=(out.mean(1) - labels).square().mean())


def workload(launch: Launch | None, policy: str, kind: str | bool, accumulation: int) -> Workload:
    """Returns the workload of a case.

    kind: an argument of `build`, or whether LoRA is used; "in step" reduces gradients after each micro-batch.
    """
    kind = kind if isinstance(kind, str) else "lora" if kind else "llama"
    model = build(kind.partition(",")[0])
    apply_policy(model.train(), policy, verify="never")

    def make_batch(samples: int, length: int | None) -> Batch:
        ids = torch.arange(samples * 64).reshape(samples, 64) % 300
        return {"input_ids": ids, "labels": ids.clone()}

    def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3, fused=True)

    def in_step(samples: int, length: int | None) -> Step:
        def step(model: nn.Module, optimizer: Any) -> None:
            batches = [make_batch(samples, length) for _ in range(accumulation)]
            optimizer_step(model, optimizer, batches, own_loss, max_grad_norm=1.0)

        return step

    return Workload(
        model, make_batch, own_loss, make_optimizer, "cpu", accumulation=accumulation, max_grad_norm=1.0,
        launch=launch, loop=in_step if kind.endswith("in step") else None,
    )  # fmt: skip


def shard_by_hand(model: Any) -> None:
    """Shards a model as users' loops do: computes in bf16, reduces in fp32, and keeps the last block after forward."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.model.layers:
        fully_shard(block, mp_policy=precision, reshard_after_forward=block is not model.model.layers[-1])
    fully_shard([model.model.norm, model.lm_head], mp_policy=precision)
    fully_shard(model, mp_policy=precision)
    first, second, third = model.model.layers
    first.set_modules_to_forward_prefetch([second, third])


@contextmanager
def waiting_for_gloo() -> Iterator[None]:
    """Makes each collective of FSDP2 or Ulysses return only after gloo's thread has released its tensors."""

    def wait_after(collective: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, torch.Tensor)]
            storages = [arg.untyped_storage()._cdata for arg in given]
            before = [torch._C._storage_Use_Count(storage) for storage in storages]
            work = collective(*args, **kwargs)
            if work is not None:  # a gather that a segment started early has finished when it is needed
                work.wait()
                return work
            while [torch._C._storage_Use_Count(storage) for storage in storages] != before:
                time.sleep(1e-4)  # lets gloo's thread run
            return work

        return call

    names = ["all_gather_single", "reduce_scatter_single"]
    if not hasattr(dist, names[0]):
        names = ["all_gather_into_tensor", "reduce_scatter_tensor"]  # their names in FSDP2 before torch 2.13
    with patch.multiple(dist, **{name: wait_after(getattr(dist, name)) for name in (*names, "all_to_all_single")}):
        yield


@waiting_for_gloo()
def measured(asked: Workload, model: nn.Module, steps: int) -> dict[str, int]:
    """Returns the peaks of each phase: the minimum over several steps."""
    assert asked.make_optimizer is not None
    optimizer = asked.make_optimizer(model)
    separate_meshes(optimizer)
    step = asked.step(2)
    found = []
    with Tracker(model, optimizer, ops=False) as tracker:
        for number in range(steps):
            gc.collect()  # as a trace does: Python frees cycles at any time
            tracker.start_step()
            step(model, optimizer)
            if number:
                found.append(tracker.trace().peaks)
    # gloo's thread releases sent tensors later
    return {phase: min(step[phase] for step in found) for phase in found[0]}


# The experts that routers choose, in turn.
EXPERTS = [0, 1, 2, 3]


@contextmanager
def routing() -> Iterator[None]:
    """Makes routers choose `EXPERTS`; the even choice, with equal tokens per rank, is what a trace assumes."""
    choose = torch.topk

    def choose_experts(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        found = choose(x, *args, **kwargs)
        if x.shape[-1] == 4:
            numbers = torch.tensor(EXPERTS)
            chosen = numbers.repeat(found.indices.numel() // len(numbers) + 1)[: found.indices.numel()]
            found.indices.data.copy_(chosen.view(found.indices.shape))
        return found

    with patch.object(torch, "topk", choose_experts):
        yield


def gradient_error(launch: Launch, policy: str, kind: str = "llama") -> float:
    """Returns the relative difference of gradients under `launch`, summed over ranks, to those of one process."""
    torch.manual_seed(1)
    ids = torch.randint(300, (2, 64))
    targets, positions = nn.functional.pad(ids, (0, 1), value=-100)[:, 1:], torch.arange(64).expand(2, -1)
    rank, alone, model = dist.get_rank(), build(kind), build(kind)
    apply_policy(model.train(), policy, verify="never")

    def backward(model: Any, ids: torch.Tensor, targets: torch.Tensor, positions: torch.Tensor) -> None:
        logits = model(input_ids=ids, position_ids=positions).logits.flatten(0, 1)
        (nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum") / 126).backward()

    backward(alone, ids, targets, positions)
    mesh = init_device_mesh("cpu", tuple(launch.mesh.values()), mesh_dim_names=tuple(launch.mesh))
    part, own, rows = rank % launch.ranks_of_a_sample, torch.arange(64), slice(None)
    if launch.processes > launch.ranks_of_a_sample:  # each group has its own samples
        row = rank // launch.ranks_of_a_sample
        rows = slice(row, row + 1)
    if launch.cp > 1:  # each rank has a piece from the start and one from the end
        pieces = own.chunk(2 * launch.cp)
        own = torch.cat([pieces[part], pieces[-1 - part]])
    if launch.sp > 1:
        own = own.chunk(launch.sp)[part]
    share(model, launch, mesh, ExitStack())
    with library_patches(model, launch, mesh):
        backward(model, ids[rows, own], targets[rows, own], positions[rows, own])
    expected = dict(alone.named_parameters())
    found = 0.0
    for name, parameter in model.named_parameters():
        gradient: Any = parameter.grad
        gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        if launch.sp > 1:
            dist.all_reduce(gradient)
        elif launch.strategy == "fsdp2":
            gradient = gradient * (launch.processes // launch.tp)  # data-parallel ranks average gradients
        found = max(found, float((gradient - expected[name].grad).norm() / expected[name].grad.norm()))
    return found


def main(out: str, few: str = "") -> None:
    steps = 4 if few else STEPS
    peaks = peaks_of(cases(bool(few)), steps)
    asked = workload(None, "full", "llama", 1)
    shard_by_hand(asked.model)
    peaks["predicted by hand"] = asked.trace(2).peaks
    peaks["by hand"] = measured(asked, asked.model, steps)
    dist.barrier()
    fsdp = Launch("fsdp2", PROCESSES)
    shared = {
        "cp": replace(fsdp, cp=2), "cp alltoall": replace(fsdp, cp=2, rotation="alltoall"),
        "tp": Launch("ddp", PROCESSES, tp=2), "sp": Launch("zero1", PROCESSES, sp=2), "ep": replace(fsdp, ep=2),
    }  # fmt: skip
    policies = {"cp": ("full,tile:4",) if few else ("none", "full,tile:4"), "tp": ("full,head,tile:4",)}
    if few:
        del shared["cp alltoall"]
    shared = {name: launch for name, launch in shared.items() if not (OLD and launch.by_transformers)}
    for name, launch in shared.items():
        for policy in policies.get(name, ("full",)):
            assert (far := gradient_error(launch, policy, "experts" if name == "ep" else "llama")) < 1e-6, (
                name,
                policy,
                far,
            )
    Path(out, f"{dist.get_rank()}.json").write_text(json.dumps(peaks))
    dist.destroy_process_group()


def peaks_of(cases: list[Case], steps: int = STEPS) -> dict[str, dict[str, int]]:
    """Returns the peaks of this rank in each case."""
    from torch.nn.parallel import DistributedDataParallel

    gc.disable()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    peaks: dict[str, dict[str, int]] = {}
    for name, launch, policy, kind, accumulation in cases:
        asked = workload(launch, policy, kind, accumulation)
        model: nn.Module = asked.model
        mesh = init_device_mesh("cpu", tuple(launch.mesh.values()), mesh_dim_names=tuple(launch.mesh))
        if launch.strategy == "ddp" and launch.tp == 1:
            options = {name: getattr(launch, name) for name in ("gradient_as_bucket_view", "find_unused_parameters")}
            model = DistributedDataParallel(model, **options)
            # the checkpointed model copies outputs itself
            asked = replace(asked, launch=replace(launch, find_unused_parameters=False))
        else:
            share(model, launch, mesh, ExitStack())
        with library_patches(model, launch, mesh), routing():
            peaks[name] = measured(asked, model, steps)
        dist.barrier()
        del model, asked
    return peaks


if __name__ == "__main__":
    main(*sys.argv[1:])
