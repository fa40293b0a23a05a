"""Work of each process: predict a step, measure it, find the largest batch, plan; on CUDA, or dry on the CPU."""

from __future__ import annotations

import gc
import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import WorkFailed
from ckpt_ft.memory.gpus import GPU, current_gpu
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.memory.measure.report import Prediction
from ckpt_ft.planning.batch_size import find_max_batch_size
from ckpt_ft.planning.plan import plan
from ckpt_ft.workloads.workload import Batch, Workload

from .workloads import Spec

WARM_UP, TIMED, PROFILED = 2, 5, 2


def device_facts() -> dict[str, Any]:
    """Returns the GPU as the trace sees it, with facts of the driver; empty without a GPU."""
    gpu = current_gpu()
    if gpu is None:
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": asdict(gpu), "name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}


def predict(spec: Spec, policy: str, gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the trace's figures for `gpu` (None: for the CPU)."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    workload = spec.load()
    apply_policy(workload.model, policy)
    trace = replace(workload, device=GPU(**gpu) if gpu else "cpu").trace(spec.batch)
    return {**asdict(Prediction.from_trace(trace)), "trace_seconds": time.perf_counter() - began}


def measure(spec: Spec, policy: str) -> dict[str, Any]:
    """Returns the counted peaks of each phase, and the median seconds of a step after the warm-up."""
    workload = spec.load()
    model = real_model(workload)
    apply_policy(model, policy)
    optimizer = None if workload.make_optimizer is None else workload.make_optimizer(model)
    step = really(workload, model).step(spec.batch)
    _empty_cache()
    for _ in range(WARM_UP):
        step(model, optimizer)
    seconds = _timed(lambda: step(model, optimizer))
    with MemoryProfiler(model=model, optimizer=optimizer, sample=1) as profiler:
        for _ in range(PROFILED):
            step(model, optimizer)
            profiler.step()
    rank = profiler.report(policy=policy).ranks[0]
    figures = {figure: rank.peak(figure) for figure in ("allocated", "reserved", "active")}
    return {
        **figures,
        "phases": rank.peaks,
        "seconds": statistics.median(seconds),
        "all_seconds": seconds,
        "retries": rank.retries,
    }


def largest_batch(spec: Spec, policy: str, budget: str) -> dict[str, Any]:
    """Returns the results of `find_max_batch_size` within `budget`: predicted, proved, and the steps taken."""
    workload = spec.load()
    model = real_model(workload)
    apply_policy(model, policy)
    found = find_max_batch_size(really(workload, model), budget, max_batch_size=512)
    trials = [asdict(trial) for trial in found.trials]
    return {"predicted": found.predicted, "proved": found.batch, "trials": trials, "budget": budget}


def make_plan(spec: Spec, gpu: dict[str, Any] | None, budget: str, policies: list[str] | None) -> list[dict[str, Any]]:
    """Returns the planner's rows within `budget`, its pick first."""
    workload = spec.load()
    workload = replace(workload, name=spec.name, device=GPU(**gpu) if gpu else "cpu")
    made = plan(workload, budget, max_batch_size=64, policies=policies)
    return [{**asdict(row), "samples_per_second": row.samples_per_second} for row in made.candidates]


def real_model(workload: Workload) -> nn.Module:
    """Returns the workload's model with random weights, created on its device: copying 8B parameters takes minutes.

    Raises:
        WorkFailed: the model differs from the traced one.
    """
    meta: Any = workload.model
    adapted = hasattr(meta, "peft_config")
    base: Any = meta.get_base_model() if adapted else meta
    default = torch.get_default_dtype()
    try:
        torch.set_default_dtype(base.dtype)
        with torch.device(_device()):
            kind = type(base)
            real: Any = kind.from_config(base.config) if hasattr(kind, "from_config") else kind(base.config)
    finally:
        torch.set_default_dtype(default)
    if adapted:
        from peft import get_peft_model

        real = get_peft_model(real, meta.peft_config["default"])
        for p in real.parameters():
            if p.requires_grad:
                p.data = p.data.float()
    mine, theirs = ([(n, p.shape, p.dtype, p.requires_grad) for n, p in m.named_parameters()] for m in (real, meta))
    if mine != theirs:
        differing = next((pair for pair in zip(mine, theirs, strict=False) if pair[0] != pair[1]), "their number")
        raise WorkFailed(f"{workload.name}: the model that runs is not the one that is traced: {differing}")
    made: nn.Module = real.train()
    return made


def really(workload: Workload, model: nn.Module) -> Workload:
    """Returns the workload with `model` on random data, because a GPU is faster on zeros."""

    def make_batch(samples: int, length: int | None) -> Batch:
        with torch.device(_device()):
            batch = workload.make_batch(samples, length)
        filled: Batch = tree_map_only(
            torch.Tensor, lambda x: x.normal_() if x.is_floating_point() else x.random_(2), batch
        )
        return filled

    return replace(workload, model=model, make_batch=make_batch, device=current_gpu() or "cpu")


def _timed(run: Callable[[], None]) -> list[float]:
    """Returns the seconds of each of `TIMED` runs, by CUDA events if there is CUDA."""
    if not torch.cuda.is_available():
        seconds = []
        for _ in range(TIMED):
            began = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - began)
        return seconds
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(TIMED + 1)]
    torch.cuda.synchronize()
    marks[0].record()
    for mark in marks[1:]:
        run()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) / 1e3 for before, after in itertools.pairwise(marks)]


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def _empty_cache() -> None:
    """Empties the cache, because building a model reserves more than keeping it. Measurement and trace start here."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
