"""The work of each process of gpu.py: on CUDA, or dry on the CPU. Each function returns plain data for JSON."""

from __future__ import annotations

import gc
import itertools
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.utils._pytree import tree_map_only

from benchmarks import host_overhead
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.offload import CopyStream, Parking
from ckpt_ft.checkpointing.parity import check_parity, outcome_of
from ckpt_ft.checkpointing.swap import Swapper
from ckpt_ft.errors import WorkFailed
from ckpt_ft.memory.fake.compiled.lowering import compiling
from ckpt_ft.memory.gpus import GPU, current_gpu
from ckpt_ft.memory.measure import calibrate
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.memory.measure.report import Prediction
from ckpt_ft.planning.batch_size import find_max_batch_size
from ckpt_ft.planning.plan import plan
from ckpt_ft.policy import Policy
from ckpt_ft.workloads.workload import Batch, Workload

from .workloads import Spec

WARM_UP, TIMED, PROFILED = 2, 5, 10
_LATE = 20_000_000  # cycles by which copies of a racing step are late: about 10 ms


def device_facts() -> dict[str, Any]:
    """Returns the GPU as the trace sees it, with facts of the driver; empty without a GPU."""
    gpu = current_gpu()
    if gpu is None:
        return {}
    properties = torch.cuda.get_device_properties(0)
    return {"gpu": asdict(gpu), "name": properties.name, "memory": properties.total_memory, "cuda": torch.version.cuda}


def numbers(spec: Spec) -> dict[str, Any]:
    """Compares a step under each policy of `spec` with the plain step: loss, gradients, buffers and random state.

    A policy is `equal` if they have the same bits, or agree within the tolerance of a policy that reorders sums. On
    CUDA two plain steps may differ already; then the notes say so.
    """
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batch, loss = _numeric(spec)
    found: dict[str, Any] = {}
    for policy in spec.policies:
        parity = check_parity(model, batch, policy, loss=loss)
        differences = {row.what: row.difference for row in parity.rows}
        exact = Policy.parse(policy).reorders or not any(differences.values())
        found[policy] = {"equal": parity.ok and exact, "differences": differences, "notes": parity.notes}
    return found


def races(spec: Spec) -> dict[str, Any]:
    """Gradients under `offload` and `swap` while copies start late and memory is overwritten when it is freed."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    model, batch, loss = _numeric(spec)
    plain = outcome_of(model, batch, loss, 0)
    found: dict[str, Any] = {}
    for policy in spec.policies:
        apply_policy(model, policy, verify="never")
        with late_and_poisoned() as counts:
            raced = [outcome_of(model, batch, loss, 0) for _ in range(3)]
        equal = all(
            torch.equal(plain.loss, one.loss)
            and plain.gradients.keys() == one.gradients.keys()
            and all(torch.equal(g, one.gradients[name]) for name, g in plain.gradients.items())
            for one in raced
        )
        found[policy] = {"equal": equal, **counts}
    return found


@contextmanager
def late_and_poisoned() -> Iterator[dict[str, int]]:
    """Delays every copy on a side stream, and fills memory with NaN as soon as `offload` or `swap` has freed it.

    Yields the numbers of delayed copies and of poisoned bytes.
    """
    counts = {"late": 0, "poisoned": 0}
    start, release, drop = CopyStream.start, Parking.release, Swapper.drop

    def poison(sizes: list[int], device: torch.device) -> None:
        # the allocator gives a freed block to the next request of its size on the same stream
        blocks = [torch.full((size // 4,), float("nan"), device=device) for size in sizes]
        counts["poisoned"] += sum(block.nbytes for block in blocks)

    def started(self: CopyStream, *copies: Any) -> Any:
        counts["late"] += 1
        if self.streams is torch.cuda:
            with torch.cuda.stream(self.side):
                torch.cuda._sleep(_LATE)
        return start(self, *copies)

    def released(self: Parking) -> None:
        given = [(flat.nbytes, flat.device) for flat, _ in self.leaving]
        release(self)
        if given:
            poison([nbytes for nbytes, _ in given], given[0][1])

    def dropped(self: Swapper, number: int) -> None:
        given = [(p.untyped_storage().nbytes(), p.device) for _, p in self.weights(number)]
        drop(self, number)
        if given:
            poison([nbytes for nbytes, _ in given if nbytes], given[0][1])

    with (
        patch.object(CopyStream, "start", started),
        patch.object(Parking, "release", released),
        patch.object(Swapper, "drop", dropped),
    ):
        yield counts


def predict(spec: Spec, policy: str, gpu: dict[str, Any] | None) -> dict[str, Any]:
    """Returns the trace's figures for `gpu` (None: for the CPU)."""
    torch.set_num_threads(1)
    began = time.perf_counter()
    workload = spec.load()
    apply_policy(workload.model, policy)
    trace = replace(workload, device=TypeAdapter(GPU).validate_python(gpu) if gpu else "cpu").trace(spec.batch)
    return {**asdict(Prediction.from_trace(trace)), "trace_seconds": time.perf_counter() - began}


def measure(spec: Spec, policy: str) -> dict[str, Any]:
    """Returns the peaks of each phase over ten steps, those of every step, and the median seconds of a step."""
    with _step(spec, policy) as (model, optimizer, step):
        seconds = _timed(lambda: step(model, optimizer))
        with MemoryProfiler(model=model, optimizer=optimizer, sample=1) as profiler:
            for _ in range(PROFILED):
                step(model, optimizer)
                profiler.step()
    rank = profiler.report(policy=policy).ranks[0]
    figures = {figure: rank.peak(figure) for figure in ("allocated", "reserved", "active")}
    times = {"seconds": statistics.median(seconds), "all_seconds": seconds}
    history = {**rank.history.allocated, "reserved": rank.history.reserved}
    return {**figures, **times, "phases": rank.peaks, "history": history, "host": rank.host, "retries": rank.retries}


def overlap(spec: Spec, policy: str) -> dict[str, Any]:
    """Returns seconds of a step's timeline: kernels, copies, copies under kernels, and idle time between kernels."""
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    with _step(spec, policy) as (model, optimizer, step):
        seconds = statistics.median(_timed(lambda: step(model, optimizer)))
        activities = [ProfilerActivity.CUDA] if torch.cuda.is_available() else [ProfilerActivity.CPU]
        with profile(activities=activities) as profiler:
            step(model, optimizer)
            _synchronize()
        spans: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
        for event in profiler.events():
            if event.device_type == DeviceType.CUDA and event.time_range.elapsed_us() > 0:
                host = "Memcpy" in event.name and ("DtoH" in event.name or "HtoD" in event.name)
                spans[host].append((event.time_range.start / 1e6, event.time_range.end / 1e6))
    copies, kernels = _union(spans[True]), _union(spans[False])
    busy = sum(end - start for start, end in kernels)
    copied = sum(end - start for start, end in copies)
    hidden = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in copies for b in kernels)
    idle = kernels[-1][1] - kernels[0][0] - busy if kernels else 0.0
    return {"seconds": seconds, "kernels": busy, "copies": copied, "hidden": hidden, "idle": idle}


def _union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Merges spans that overlap."""
    merged: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(end, merged[-1][1])
        else:
            merged.append((start, end))
    return merged


def host_time(model: str, repeats: int) -> dict[str, float]:
    """Returns milliseconds of forward and backward by policy, of a model with negligible kernels."""
    torch.set_num_threads(1)
    return host_overhead.measure(model, repeats, _device())


def verification(policy: str, repeats: int) -> dict[str, float]:
    """Returns seconds of a step without and with verification."""
    return host_overhead.measure_verified(policy, repeats, _device())


def calibrated() -> dict[str, Any]:
    """Returns this machine's card as `ckpt-ft calibrate` measures it."""
    return asdict(calibrate.calibrate())


def largest_batch(spec: Spec, policy: str, budget: str) -> dict[str, Any]:
    """Returns the results of `find_max_batch_size` within `budget`: predicted, proved, and the steps taken."""
    workload = spec.load()
    model = real_model(workload)
    apply_policy(model, policy)
    found = find_max_batch_size(really(workload, model), budget, max_batch_size=512)
    trials = [asdict(trial) for trial in found.trials]
    return {"predicted": found.predicted, "proved": found.batch, "trials": trials, "budget": budget}


def planned(spec: Spec, gpu: dict[str, Any] | None, budget: str, count: int) -> list[dict[str, Any]]:
    """Returns the first `count` rows of the planner within `budget`, its pick first, each with measured figures."""
    workload = replace(spec.load(), name=spec.name, device=TypeAdapter(GPU).validate_python(gpu) if gpu else "cpu")
    made = plan(workload, budget, max_batch_size=64, policies=None if gpu else ["none", "full"])
    rows = []
    for row in made.candidates[:count]:
        seen = measure(replace(spec, batch=row.batch), str(row.policy))
        rows.append({**asdict(row), "predicted_rate": row.samples_per_second, "rate": row.batch / seen["seconds"]})
    return rows


def script(kind: str, policy: str, size: str) -> dict[str, Any]:
    """Runs script.py alone and by `ckpt-ft run`: are weights and random state equal, and the peaks as predicted?

    An empty policy leaves the script as it is. The plain run tells nothing of a policy that reorders sums.
    """
    words = [str(Path(__file__).with_name("script.py")), kind, size]
    alone = _printed([sys.executable, *words])
    with tempfile.TemporaryDirectory() as folder:
        ours = ["-m", "ckpt_ft.run", *(["--policy", policy] if policy else []), "--report", "json"]
        hosted = _printed([sys.executable, *ours, "--report-dir", folder, *words])
        report = json.loads((Path(folder) / "memory_report.json").read_text("utf-8"))
    (rank,) = report["ranks"]
    predicted = rank["predicted"] or {}
    return {
        "equal": bool(alone) and alone == hosted,
        "allocated": max(phase["allocated"] for phase in rank["peaks"].values()),
        "reserved": max(phase.get("reserved") or 0 for phase in rank["peaks"].values()),
        "predicted": {name: predicted.get(name) for name in ("allocated", "reserved", "seconds")},
        "seconds": rank["seconds"],
        "notes": report["notes"],
    }


def _printed(command: list[str]) -> list[str]:
    """Returns the lines with numbers that a script prints.

    Raises:
        WorkFailed: it has failed.
    """
    root = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "PYTHONPATH": paths})
    if done.returncode:
        raise WorkFailed(f"exit code {done.returncode}: {done.stderr[-300:]}")
    return re.findall(r"^(?:step \d+: \S+|hash \S+)$", done.stdout, re.MULTILINE)


@contextmanager
def _step(spec: Spec, policy: str) -> Iterator[tuple[nn.Module, Any, Any]]:
    """Yields model, optimizer and step of a workload under a policy, after the warm-up."""
    workload = spec.load()
    model = real_model(workload)
    apply_policy(model, policy)
    optimizer = None if workload.make_optimizer is None else workload.make_optimizer(model)
    step = really(workload, model).step(spec.batch)
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()  # building a model reserves more than keeping it; the trace starts here
    with compiling(model, workload.compile):
        for _ in range(WARM_UP):
            step(model, optimizer)
        yield model, optimizer, step


def _numeric(spec: Spec) -> tuple[nn.Module, Batch, Any]:
    """Returns the real model, one batch, and the loss of a step."""
    torch.manual_seed(0)
    workload = spec.load()
    model = real_model(workload)
    for p in model.parameters():  # PEFT starts with adapters that do nothing
        if not p.any():
            nn.init.normal_(p, std=0.02)
    real = really(workload, model)
    return model, real.make_batch(spec.batch, None), real.loss_of


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


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
