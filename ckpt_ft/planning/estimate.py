"""Estimates memory and time of a training step, and suggests how to lower its memory.

`suggest` looks for changes under which a step fits, the ones that cost least first, and traces each of them:
1. Another policy at the same batch size.
2. If no policy fits: a smaller batch under the policy that needs the fewest bytes, with more accumulation.
3. If not one sample fits: other settings, one after another until one fits: 8-bit optimizer states, half and a quarter
   of the tokens, the optimizer in host memory, parameters too, LoRA, LoRA on bf16 weights, LoRA on 4-bit weights. The
   adapters that come after the first that fits are traced as well.

A suggestion is an edit of the spec. It is offered only if the edited spec is valid, builds a model and was traced.
`less_padding` finds what less padding would save.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.cost.schedule import HOST, host_threads
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.memory.rules.cuda import same_kernels
from ckpt_ft.planning.batch_size import largest_in_room
from ckpt_ft.planning.budget import LESS, Candidate, MemoryBudget, memory_budget, seconds
from ckpt_ft.planning.methods import offloaded
from ckpt_ft.planning.results import Estimate, Fix, Suggestion, Suggestions
from ckpt_ft.planning.scaled_traces import Estimates
from ckpt_ft.planning.search import blocks_of, fewest_swapped, search, with_term
from ckpt_ft.planning.tracing import Tracer, on_card, refusal, run_tasks, trace_policies
from ckpt_ft.policy import Policy
from ckpt_ft.spec.command import command_for, recipe_command
from ckpt_ft.spec.flags import Edit
from ckpt_ft.spec.launch import Launch
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.units import format_at_least, format_bytes
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import with_rope_scaling
from ckpt_ft.workloads.workload import Workload, has_batch_norm

_HOLDERS = 8  # number of largest holders to list
_ALONE = "BatchNorm takes statistics over a batch: the recipe refuses a batch of 1; --batch-size 2 prints a command"


def estimate(spec: TrainingSpec) -> Estimate:
    """Predict peak memory and time of one training step, without a GPU and without weights.

    If the step does not fit into the spec's budget, or else into the GPU's memory, the estimate has suggestions:
    changes under which it fits, each traced, with its cost in time.

    Example:
        estimate(TrainingSpec.of("Qwen/Qwen2.5-0.5B", dtype="bfloat16", lora_r=16, device="t4")).peak_reserved

    Raises:
        UserError: an unknown model, or settings that do not match it.
    """
    found, trace = traced_estimate(spec, lambda line: None)
    return with_suggestions(spec, found, trace)


def traced_estimate(spec: TrainingSpec, report: Callable[[str], None]) -> tuple[Estimate, StepTrace]:
    """Returns the estimate of `spec`, without suggestions, and its trace; `report` gets a line per action."""
    gpu = gpu_of(spec.host.device)
    workload, policy, traces = _traced_run(spec, gpu, report)
    found = _of_run(spec, gpu, workload, policy, traces)
    return found, max(traces.values(), key=lambda trace: trace.peak_allocated)


def estimates_on(spec: TrainingSpec, cards: Sequence[GPU | None], report: Callable[[str], None]) -> Iterator[Estimate]:
    """Yields the estimate of `spec` on each card, without suggestions; cards with the same kernels share a trace."""
    known: dict[Any, tuple[Workload, Policy, dict[str, StepTrace]]] = {}
    for card in cards:
        kernels = card and same_kernels(card)
        if kernels not in known:
            known[kernels] = _traced_run(spec, card, report)
        workload, policy, traces = known[kernels]
        here = {name: on_card(trace, card) for name, trace in traces.items()}
        yield _of_run(spec, card, replace(workload, device=card or "cpu"), policy, here)


def estimates_of(specs: Sequence[TrainingSpec], report: Callable[[str], None]) -> list[Estimate]:
    """The estimates of several specs, without suggestions, each in a process of its own where the system can fork."""
    found = dict(run_tasks([partial(traced_estimate, spec) for spec in specs], 0, report))
    return [found[number][0] for number in range(len(specs))]


def _traced_run(
    spec: TrainingSpec, gpu: GPU | None, report: Callable[[str], None]
) -> tuple[Workload, Policy, dict[str, StepTrace]]:
    """The workload of `spec`, its policy, and the traces of the step (under "") and of the phases beside it."""
    report(f"building {spec.model.name} from its config")
    workload = load(spec, gpu or "cpu")
    report(f"tracing two steps of {type(workload.model).__name__} for {gpu.name if gpu else 'cpu'}")
    applied = apply_policy(workload.model, spec.policy)
    trace = workload.trace(spec.data.batch_size)
    trace = replace(trace, notes=[*applied.notes, *trace.notes])
    return workload, applied.policy, {"": trace, **workload.trace_phases(spec.data.batch_size)}


def _of_run(
    spec: TrainingSpec, gpu: GPU | None, workload: Workload, policy: Policy, traces: dict[str, StepTrace]
) -> Estimate:
    capacity = spec.host.budget or (gpu.memory if gpu else None)
    alone = spec.data.batch_size == 1 and workload.kind == "image-classification" and has_batch_norm(workload.model)
    more = [*[_ALONE] * alone, *_notes_on_seconds(spec, gpu, traces[""])]
    step = replace(traces[""], notes=[*traces[""].notes, *more])
    found = replace(
        of_trace(step, gpu_of(workload.device), workload.launch, capacity),
        model=workload.name,
        policy=str(policy),
        batch_size=spec.data.batch_size,
        accumulation=workload.accumulation,
        shape=workload.shape,
        command="" if alone else command_of(spec, workload),
        host_capacity=spec.host.host_memory,
    )
    return _with_phases(found, {name: trace for name, trace in traces.items() if name})


def with_suggestions(
    spec: TrainingSpec, found: Estimate, trace: StepTrace, report: Callable[[str], None] = lambda line: None
) -> Estimate:
    """Returns the estimate of `spec` with changes under which its step fits; `found` itself if it fits.

    trace: of the step. A phase beside the step that holds the peak (evaluation, say) has no suggestions.
    """
    misfits = any(left is not None and left < 0 for left in (found.headroom, found.host_headroom))
    held_by_phase = any(found.peaks.get(name) == found.peak_allocated for name in LESS)
    if not misfits or held_by_phase or found.capacity is None:
        return found
    report(f"does not fit by {format_bytes(-(found.headroom or 0))}; looking for what would fit")
    if "resolution" in found.shape and not spec.data.resolution:
        spec = spec.edit(resolution=found.shape["resolution"])
    gpu = gpu_of(spec.host.device)
    room = MemoryBudget(found.capacity, found.context, host=spec.host.host_memory)
    answer = suggest(partial(load, device=gpu or "cpu"), spec, found.policy, spec.data.batch_size, trace, room, report)
    return replace(found, answer=answer)


def _notes_on_seconds(spec: TrainingSpec, gpu: GPU | None, step: StepTrace) -> Iterator[str]:
    """Sentences on bfloat16, the time of copies to and from the host, and of the optimizer's step on the host."""
    if gpu is None:
        return
    if gpu.arch < (8, 0) and "bf" in (spec.precision.dtype[:2], spec.precision.mixed_precision[:2]):
        yield f"{gpu.name} computes bfloat16 by way of float32, slowly; --dtype float16 or --fp16 is faster"
    if not step.timed:
        return
    own, parts = gpu.calibration, step.seconds_parts
    measured = "as `ckpt-ft calibrate` measured"
    if parts.copying:
        rate = f"{gpu.host_bandwidth / 1e9:.3g} GB/s {measured if own and own.host_bandwidth else '(assumed)'}"
        waits = f"{parts.copies:.2g} s" if parts.copies > 1e-3 else "no time"
        yield f"copies between host and card take {parts.copying:.2g} s at {rate}; the step waits {waits} for them"
    took = sum(span.end - span.start for span in step.schedule() if span.stream == HOST)
    if took:
        threads = f"with OMP_NUM_THREADS={host_threads()}; `accelerate launch` sets 1, and more threads are faster"
        yield f"the host computes for {took:.2g} s {measured if own and own.host_memory else threads}"


def command_of(spec: TrainingSpec, workload: Workload) -> str:
    """The command of the recipe that trains `workload` as `spec` describes; "" if no recipe does."""
    if "seq_length" in workload.shape:
        spec = with_rope_scaling(spec, workload.model.config, workload.shape["seq_length"])
    return recipe_command(spec, workload.kind)


def _with_phases(found: Estimate, phases: Mapping[str, StepTrace]) -> Estimate:
    """Returns `found` with the phases of a run besides the training step; the highest of all is the peak."""
    for name, trace in phases.items():
        peaks = {**found.peaks, name: trace.peak_allocated}
        found = replace(found, peaks=peaks, peak_reserved=max(found.peak_reserved, trace.peak_reserved))
        if trace.peak_allocated > found.peak_allocated:
            note = f"the peak is that of {name}, which no policy changes: {LESS[name]}"
            found = replace(
                found,
                peak_allocated=trace.peak_allocated,
                at_peak=trace.at_peak,
                holders=trace.grouped_holders(_HOLDERS),
                notes=[*found.notes, note],
            )
    return found


def of_trace(trace: StepTrace, gpu: GPU | None, launch: Launch | None, capacity: int | None) -> Estimate:
    """The estimate that a trace gives; whoever knows the model and its batch fills them in."""
    parts = trace.seconds_parts if trace.timed and not (gpu and gpu.sized) else None
    return Estimate(
        model="",
        policy="",
        device=trace.device,
        batch_size=1,
        accumulation=1,
        shape={},
        peak_allocated=trace.peak_allocated,
        peak_reserved=trace.peak_reserved,
        peaks=trace.peaks,
        at_peak=trace.at_peak,
        holders=trace.grouped_holders(_HOLDERS),
        seconds=parts.total if parts else None,
        seconds_parts=parts.parts if parts else {},
        bound=parts.bound if parts else "",
        capacity=capacity,
        context=memory_budget(None, gpu, 0, launch).context if gpu else 0,
        launch=str(launch or ""),
        notes=trace.notes,
        peak_host=trace.peak_host,
        at_host_peak=trace.at_host_peak,
        host_kinds=trace.host_kinds,
    )


Load = Callable[[TrainingSpec], Workload]

LORA_R = 16
_POLICIES = ("none", "pointwise", "full")
_SMALLEST_POLICIES = ("full,head", "full")
_KEPT = ("parameters", "buffers", "gradients", "optimizer")
_SHOWN = 3
_SHORTEST = 128  # tokens: shorter sequences are never suggested


def suggest(
    load: Load,
    spec: TrainingSpec,
    policy: str,
    batch: int,
    asked: StepTrace,
    room: MemoryBudget,
    report: Callable[[str], None] = lambda line: None,
) -> Suggestions:
    """Changes under which the step of `spec` fits `room`, the quickest first.

    Changes that the bytes of weights, gradients and optimizer states rule out by themselves are not traced.

    Args:
        policy, batch, asked: those of the step that does not fit, and its trace.
        report: called with a line before each change is traced.
    """
    spec = spec.edit(policy=policy, batch_size=batch)
    workload = load(spec)
    tokens = workload.shape.get("seq_length", spec.data.tokens)  # as many as the model has positions
    per_sample = seconds(asked) / (batch * spec.data.accumulation)
    kept = {category: asked.at_peak.get(category, 0) for category in _KEPT}
    hopeless = sum(kept.values()) > room.limit  # under any policy, at any batch size

    def suggestion(trace: StepTrace, changes: dict[str, Any]) -> Suggestion:
        """The suggestion of `changes`, under which the step has this trace."""
        changes = {name: value for name, value in changes.items() if spec.get(name) != value}
        edited, length = spec.edit(**changes), changes.get("seq_length", tokens)
        # seconds are compared per token
        each = seconds(trace) / (edited.data.batch_size * edited.data.accumulation * length / tokens)
        slower, command = round(each / per_sample - 1, 4), command_for(edited, workload.kind, length)
        return Suggestion(Edit(changes).text(spec), trace.peak_reserved, slower, changes, command, trace.peak_host)

    traced = {policy: asked}
    if not hopeless:
        report("looking for a policy under which it fits")
        estimates = Estimates(Tracer(workload), room, batch=batch)
        found = search(estimates, _other_policies(policy), _SHOWN)
        if found:
            traces = {one.policy: estimates.tracer.trace_of(one.policy, batch) for one in found}
            ways = [suggestion(trace, {"policy": name}) for name, trace in traces.items()]
            return Suggestions(sorted(ways, key=lambda way: way.slower), 0)
        traced |= estimates.anchors
    smallest = min(traced, key=lambda name: traced[name].peak_reserved)
    if hopeless:
        smallest = next((name for name in _SMALLEST_POLICIES if not refusal(workload.model, name)), policy)
    elif batch > 1:
        several = replace(workload, accumulation=max(spec.data.accumulation, 2))
        _, largest, _ = largest_in_room(several, smallest, room, batch - 1)
        if largest:
            steps = -(-batch * spec.data.accumulation // largest)
            trace = _trace_alone(replace(several, accumulation=steps), smallest, largest)
            return Suggestions(
                [suggestion(trace, {"policy": smallest, "batch_size": largest, "accumulation": steps})], 0
            )
    needed = min(trace.peak_reserved for trace in traced.values())
    rungs: list[Suggestion] = []
    for changes, least in _smaller_steps(spec, workload, tokens, kept):
        if least > room.limit or (rungs and "lora_r" not in changes and "load_in_4bit" not in changes):
            continue
        changes = {"policy": smallest, "batch_size": 1, **changes}
        report(f"tracing {Edit(changes).text(spec)}")
        smaller = _traced_edit(load, spec, changes)
        if smaller is not None and room.holds(smaller):
            rungs.append(suggestion(smaller, changes))
        elif smaller is not None:
            needed = min(needed, smaller.peak_reserved)
    alone = Estimates(Tracer(workload), room, batch=1)
    blocks = 0 if Policy.parse(smallest).swap else fewest_swapped(alone, smallest)
    if blocks:
        name = with_term(smallest, f"swap:{blocks}")
        if room.holds(alone.anchors[name]):
            rungs.append(suggestion(alone.anchors[name], {"policy": name, "batch_size": 1}))
    if hopeless and not rungs:
        needed = min(needed, _trace_alone(workload, smallest, 1).peak_reserved)
    return Suggestions(sorted(rungs, key=lambda way: way.slower), 0 if rungs else room.context + room.margin + needed)


def _other_policies(policy: str) -> list[str]:
    """The policies that a suggestion may have in place of `policy`."""
    headed = [with_term(name, "head") for name in (policy, *_POLICIES) if "head" not in name]
    return [name for name in dict.fromkeys((*_POLICIES, *headed)) if name != policy]


def _trace_alone(workload: Workload, policy: str, batch: int, length: int | None = None) -> StepTrace:
    (trace,) = trace_policies(workload, [policy], workload.step(batch, length))
    assert isinstance(trace, StepTrace), "the policy suits the model"
    return trace


def _traced_edit(load: Load, spec: TrainingSpec, changes: dict[str, Any]) -> StepTrace | None:
    """The trace of the edited spec's step; None if the edited spec is refused by its own checks, its model or PEFT."""
    try:
        edited = spec.edit(**changes)
        workload = load(edited)
        (trace,) = trace_policies(workload, [edited.policy], workload.step(edited.data.batch_size))
    except UserError:
        return None
    return trace if isinstance(trace, StepTrace) else None


def _smaller_steps(
    spec: TrainingSpec, workload: Workload, tokens: int, kept: Mapping[str, int]
) -> Iterator[tuple[dict[str, Any], int]]:
    """Changes that lower the memory of `spec`, each with a lower bound of the bytes that remain.

    The first ones change the training least. kept: bytes that the step keeps without a change, by category.
    """
    weights, everything = kept.get("parameters", 0), sum(kept.values())
    if spec.optimizer.name in ("adamw", "adamw_fused") and not spec.adapter.trains:
        yield {"optimizer": "adamw_8bit"}, everything - kept.get("optimizer", 0) * 3 // 4
    for part in (2, 4):
        if spec.data.images:
            wide, high = (max(side // part, 1) for side in spec.data.image_size)
            yield {"image_size": (wide, high)}, everything
        elif "seq_length" in workload.shape and tokens // part >= _SHORTEST:
            yield {"seq_length": tokens // part}, everything
    if (away := offloaded(spec)) is not None:
        yield dict(away.changes), weights
    trains_all = not spec.adapter.trains and not spec.quantisation.bits
    if trains_all and "seq_length" in workload.shape and spec.launch.launch is None:
        yield {"launch": Launch("zero3", 1, mixed_precision="bf16").with_offload("all"), "asked": ("--offload", "all"),
               "mixed_precision": "bf16"}, 0  # fmt: skip
    lora = {} if spec.adapter.trains else {"lora_r": LORA_R}
    half = {"dtype": "bfloat16"} if spec.precision.dtype == "float32" else {}
    if lora:
        yield {**lora}, weights
    if half and not spec.quantisation.bits:
        yield {**lora, **half}, weights // 2
    if spec.quantisation.bits != 4:
        yield {**lora, **half, "load_in_4bit": True, "load_in_8bit": False}, 0


def no_policy_fits(estimates: Estimates, model: nn.Module) -> str:
    """The error message if nothing fits: by how much, and the smallest budget that works."""
    room, at = estimates.room, estimates.batch or 1
    if not estimates.anchors:
        return f"no policy suits {type(model).__name__}: " + "; ".join(estimates.rejected.values())
    smallest = estimates.smallest().policy
    estimates.tracer.trace(smallest, at)
    traced = estimates.estimate(smallest, at)
    asked = works = ""
    if room.host is not None and not room.host_holds(traced.host):
        asked, works = (f" and {format_bytes(nbytes)} of host memory" for nbytes in (room.host, traced.host))
    parameters = sum(p.nbytes for p in dict.fromkeys(model.parameters()))
    above = f"the parameters alone take {format_bytes(parameters)}, {format_bytes(parameters - room.budget)} more"
    below = f" ({above})" if parameters > room.budget else ""
    launch = estimates.tracer.workload.launch
    under = f"'{smallest}' with {launch}" if launch else f"'{smallest}'"
    blocks = "" if blocks_of(model).blocks else "; it has no repeated blocks to checkpoint"
    return (
        f"a budget of {format_bytes(room.budget)}{asked}: no policy fits a batch of {at}{below}; the smallest budget "
        f"that works is {format_at_least(room.needs(traced))}{works}, under {under}{blocks}"
    )


_WORTH = 0.01  # share of the bytes reserved; smaller savings are not listed
_FASTER = 0.05  # share of the seconds
_NEARLY_ALL = 0.99  # share of a dataset's rows; longer rows may be cut


def less_padding(workload: Workload, candidate: Candidate) -> list[Fix]:
    """Less padding, if it saves at least 1 % of the bytes or 5 % of the time of `candidate`, the largest saving first.

    Fewer bytes if the few longest rows are cut, less time if rows of similar length are grouped.
    """
    policy, batch, lengths = candidate.policy, candidate.batch, workload.lengths
    if lengths is None or lengths.unit != "tokens":
        return []
    found: list[Fix] = []
    cut = lengths.quantile(_NEARLY_ALL)
    if cut < lengths.longest:
        worst, usual = (_trace_alone(workload, policy, batch, n) for n in (cut, lengths.cut(cut).padded(batch)))
        slower = round(seconds(usual) / candidate.seconds - 1, 4)
        change = f"--max_length {cut}, which cuts the longest 1 % of the rows"
        found.append(Fix(change, candidate.reserved - worst.peak_reserved, slower))
    if not lengths.by_length and lengths.mean < lengths.padded(batch):
        grouped = _trace_alone(workload, policy, batch, round(lengths.mean))
        faster = round(seconds(grouped) / candidate.seconds - 1, 4)
        share = 1 - lengths.mean / lengths.padded(batch)
        change = f"--train_sampling_strategy group_by_length (or --packing): {share:.0%} of the tokens are padding"
        found.append(Fix(change, 0, faster))
    worth = [fix for fix in found if fix.saves >= _WORTH * candidate.reserved or fix.slower <= -_FASTER]
    return sorted(worth, key=lambda fix: -fix.saves)
