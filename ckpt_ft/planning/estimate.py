"""Estimates memory and time of a training step, and suggests changes if it does not fit. Loading needs no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from ckpt_ft.export.holders import Holder
from ckpt_ft.memory.gpus import GPU, asked_gpu, gpu_of
from ckpt_ft.policy import Policy
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.validation import Bytes, Count, Seconds, read_json

from .results import Suggestions

if TYPE_CHECKING:
    from ckpt_ft.memory.record.trace import StepTrace
    from ckpt_ft.workloads.workload import Workload

_HOLDERS = 8  # number of largest holders to list


@dataclass(frozen=True)
class Estimate:
    """The predicted memory and time of one training step.

    Attributes:
        model, policy, device, launch: as requested; `launch` is "" for one process.
        batch_size: samples of a micro-batch.
        accumulation: micro-batches of the step.
        shape: sizes of a sample, `{"seq_length": 1024}`.
        peak_allocated, peak_reserved: bytes on each device.
        peaks: bytes allocated at the peak of each phase: of the step, and of what runs between steps.
        at_peak: bytes at the step's peak by category.
        holders: the largest holders of the peak, in descending order.
        peak_host: bytes in host memory of each process at most: what is offloaded, without the process itself.
        at_host_peak: these bytes by category.
        seconds: time of the step; None for a CPU, whose speed is not modelled.
        seconds_parts: the step's time by part.
        bound: what limits the step's speed.
        capacity: bytes that the process may use, None without a limit.
        context: bytes of the CUDA context, with NCCL's buffers.
        notes: assumptions of the estimate, one sentence each.
        answer: suggestions if the step does not fit.
        command: the command of the recipe that trains so; "" if no recipe does.
    """

    model: str
    policy: str
    device: str
    batch_size: Count
    accumulation: Count
    shape: dict[str, int]
    peak_allocated: Bytes
    peak_reserved: Bytes
    peaks: dict[str, Bytes]
    at_peak: dict[str, Bytes]
    holders: list[Holder]
    seconds: Seconds | None
    seconds_parts: dict[str, float]
    bound: str
    capacity: Bytes | None
    context: Bytes
    notes: list[str]
    launch: str = ""
    answer: Suggestions | None = None
    command: str = ""
    peak_host: Bytes = 0
    at_host_peak: dict[str, Bytes] = field(default_factory=dict)

    @property
    def headroom(self) -> int | None:
        """Bytes left on the device; negative if the step does not fit, None without a capacity."""
        return None if self.capacity is None else self.capacity - self.context - self.peak_reserved

    @classmethod
    def from_json(cls, text: bytes, source: str) -> Estimate:
        """Reads an estimate saved as JSON; raises UserError for other text."""
        return read_json(cls, text, source, "an estimate")


def estimate(spec: TrainingSpec) -> Estimate:
    """Predict peak memory and time of one training step, without a GPU and without weights.

    If the step does not fit into the spec's budget, or else into the GPU's memory, the estimate has suggestions:
    changes under which it fits, each traced, with its cost in time.

    Example:
        estimate(TrainingSpec.of("Qwen/Qwen2.5-0.5B", dtype="bfloat16", lora_r=16, device="t4")).peak_reserved

    Raises:
        UserError: an unknown model, or settings that do not match it.
    """
    return traced_estimate(spec, lambda line: None)[0]


def traced_estimate(spec: TrainingSpec, report: Callable[[str], None]) -> tuple[Estimate, StepTrace]:
    """Returns the estimate of `spec` and the trace behind it; `report` is called with a line per action."""
    from ckpt_ft.checkpointing.apply import apply_policy
    from ckpt_ft.workloads.load import load

    gpu = asked_gpu(spec.host.device, spec.host.gpu_memory, spec.host.gpu_like)
    capacity = spec.host.budget or (gpu.memory if gpu else None)
    report(f"building {spec.model.name} from its config")
    workload = load(spec, gpu or "cpu")
    report(f"tracing two steps of {type(workload.model).__name__} for {gpu.name if gpu else 'cpu'}")
    applied = apply_policy(workload.model, spec.policy)
    trace = workload.trace(spec.data.batch_size)
    trace = replace(trace, notes=[*applied.notes, *trace.notes])
    found = _estimate(workload, applied.policy, spec.data.batch_size, trace, capacity)
    phases = workload.trace_phases(spec.data.batch_size)
    found = _with_phases(replace(found, command=_command(spec, workload)), phases)
    highest = max([trace, *phases.values()], key=lambda trace: trace.peak_allocated)
    if found.headroom is None or capacity is None or found.headroom >= 0 or highest is not trace:
        return found, highest
    from .budget import MemoryBudget
    from .suggestions import suggest

    report("looking for what would fit")
    room = MemoryBudget(capacity, found.context)
    rebuild = partial(load, device=gpu or "cpu")
    answer = suggest(rebuild, spec, found.policy, spec.data.batch_size, trace, room)
    return replace(found, answer=answer), trace


def _command(spec: TrainingSpec, workload: Workload) -> str:
    from ckpt_ft.spec.command import recipe_command
    from ckpt_ft.workloads.positions import with_rope_scaling

    if "seq_length" in workload.shape:
        spec = with_rope_scaling(spec, workload.model.config, workload.shape["seq_length"])
    return recipe_command(spec, workload.kind)


def _with_phases(found: Estimate, phases: Mapping[str, StepTrace]) -> Estimate:
    """Returns `found` with the phases of a run besides the training step; the highest of all is the peak."""
    for name, trace in phases.items():
        peaks = {**found.peaks, name: trace.peak_allocated}
        found = replace(found, peaks=peaks, peak_reserved=max(found.peak_reserved, trace.peak_reserved))
        if trace.peak_allocated > found.peak_allocated:
            note = f"the peak is that of {name}, which no policy changes"
            found = replace(
                found,
                peak_allocated=trace.peak_allocated,
                at_peak=trace.at_peak,
                holders=trace.grouped_holders(_HOLDERS),
                notes=[*found.notes, note],
            )
    return found


def _estimate(workload: Workload, policy: Policy, batch_size: int, trace: StepTrace, capacity: int | None) -> Estimate:
    from ckpt_ft.memory.cost.collectives import nccl_bytes

    gpu: GPU | None = gpu_of(workload.device)
    parts = trace.seconds_parts if gpu else None
    return Estimate(
        model=workload.name,
        policy=str(policy),
        device=trace.device,
        batch_size=batch_size,
        accumulation=workload.accumulation,
        shape=workload.shape,
        peak_allocated=trace.peak_allocated,
        peak_reserved=trace.peak_reserved,
        peaks=trace.peaks,
        at_peak=trace.at_peak,
        holders=trace.grouped_holders(_HOLDERS),
        seconds=trace.seconds if gpu else None,
        seconds_parts=parts.parts if parts else {},
        bound=parts.bound if parts else "",
        capacity=capacity,
        context=0 if gpu is None else gpu.context + (0 if workload.launch is None else nccl_bytes(gpu)),
        launch=str(workload.launch or ""),
        notes=trace.notes,
        peak_host=trace.peak_host,
        at_host_peak=trace.at_host_peak,
    )
