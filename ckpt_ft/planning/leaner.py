"""What would make a step fit that does not: the changes that cost least come first, each traced, with its price.

1. Another policy at the batch size asked for.
2. Where none of them fits: a smaller batch under the leanest of them, with the accumulation that keeps the effective
   one.
3. Where not one sample fits: settings that hold less, one after another until one fits: 8-bit optimizer states, half
   and a quarter of the tokens, LoRA, LoRA on 4-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.workload import Workload

from .answer import Answer, Way
from .batch_size import largest_in_room
from .candidate import seconds
from .fitting import Room
from .proposals import with_term
from .tracing import trace_policies

Load = Callable[[TrainingSpec], Workload]

LORA_R = 16
_POLICIES = ("none", "pointwise", "full")
_SHOWN = 3
_SHORTEST = 128  # tokens: a shorter sequence is no answer


def ways_to_fit(load: Load, spec: TrainingSpec, policy: str, batch: int, asked: StepTrace, room: Room) -> Answer:
    """What would fit `room` in place of `asked`, the trace of `policy` at `batch` under `settings`, which does not.

    load: makes the workload of a model under any settings.
    """
    workload = load(spec)
    if not spec.data.images:  # the model's own limit, where none was asked for
        spec = spec.edit(seq_length=workload.shape.get("seq_length", spec.data.tokens))
    question = _Question(policy, batch, spec, seconds(asked) / (batch * spec.data.accumulation))
    traced = dict(_policies(workload, policy, batch))
    fitting = {name: trace for name, trace in traced.items() if trace.peak_reserved <= room.limit}
    quickest = sorted(fitting, key=lambda name: seconds(fitting[name]))[:_SHOWN]
    alone = {name: _one(workload, name, batch) for name in quickest}  # a shared session shifts what is reserved
    ways = [question.way(trace, name) for name, trace in alone.items() if trace.peak_reserved <= room.limit]
    if ways:
        return Answer(sorted(ways, key=lambda way: way.slower), 0)
    leanest = min(traced, key=lambda name: traced[name].peak_reserved, default=policy)
    if batch > 1:
        several = replace(workload, accumulation=max(spec.data.accumulation, 2))
        _, largest, _ = largest_in_room(several, leanest, room, batch - 1)
        if largest:
            steps = -(-batch * spec.data.accumulation // largest)
            trace = _one(replace(several, accumulation=steps), leanest, largest)
            return Answer(
                [question.way(trace, leanest, largest, f"--accumulation {steps}", samples=largest * steps)], 0
            )
    needed = asked.peak_reserved
    for change, leaner in _leaner(spec, workload):
        trace = _one(load(leaner), leanest, 1)
        if trace.peak_reserved <= room.limit:
            samples = spec.data.accumulation * leaner.data.tokens / spec.data.tokens
            return Answer([question.way(trace, leanest, 1, change, samples=samples)], 0)
        needed = min(needed, trace.peak_reserved)
    return Answer([], room.context + room.margin + needed)


@dataclass(frozen=True)
class _Question:
    """The step that does not fit; `seconds`: of one of its samples."""

    policy: str
    batch: int
    spec: TrainingSpec
    seconds: float

    def way(
        self, trace: StepTrace, policy: str, batch: int | None = None, change: str = "", *, samples: float = 0
    ) -> Way:
        """`trace` as a way out. samples: that its step makes, as long as those asked for; 0 for as many."""
        options = [
            f"--policy {policy}" if policy != self.policy else "",
            f"--batch-size {batch}" if batch not in (None, self.batch) else "",
            change,
        ]
        each = seconds(trace) / (samples or self.batch * self.spec.data.accumulation)
        said = " ".join(option for option in options if option)
        return Way(said, trace.peak_reserved, round(each / self.seconds - 1, 4))


def _policies(workload: Workload, policy: str, batch: int) -> Iterator[tuple[str, StepTrace]]:
    """The traces of policies beside `policy`, those of which the model has."""
    plain = [name for name in _POLICIES if name != policy]
    headed = [with_term(name, "head") for name in dict.fromkeys((policy, *_POLICIES)) if "head" not in name]
    names = [name for name in dict.fromkeys((*plain, *headed)) if name != policy]
    for name, trace in zip(names, trace_policies(workload, names, workload.step(batch)), strict=True):
        if isinstance(trace, StepTrace):
            yield name, trace


def _one(workload: Workload, policy: str, batch: int) -> StepTrace:
    (trace,) = trace_policies(workload, [policy], workload.step(batch))
    assert isinstance(trace, StepTrace), "the policy suits the model"
    return trace


def _leaner(spec: TrainingSpec, workload: Workload) -> Iterator[tuple[str, TrainingSpec]]:
    """Leaner and leaner settings, each with the options that say it."""
    if spec.optimizer.name.startswith("adamw") and spec.optimizer.name != "adamw_8bit" and not spec.adapter.lora_r:
        yield "--optimizer adamw_8bit", spec.edit(optimizer="adamw_8bit")
    for part in (2, 4):
        tokens = spec.data.tokens // part
        if spec.data.images:
            wide, high = (max(side // part, 1) for side in spec.data.image_size)
            yield f"--image-size {wide}x{high}", spec.edit(image_size=(wide, high))
        elif "seq_length" in workload.shape and tokens >= _SHORTEST:
            yield f"--seq-length {tokens}", spec.edit(seq_length=tokens)
    rank = spec.adapter.lora_r or LORA_R
    if not spec.adapter.lora_r:
        yield f"--lora {rank}", spec.edit(lora_r=rank)
    if not spec.quantisation.load_in_4bit:
        half = "bfloat16" if spec.precision.dtype == "float32" else spec.precision.dtype
        change = f"--lora {rank} --load-in-4bit --dtype {half}"
        yield change, spec.edit(lora_r=rank, load_in_4bit=True, dtype=half)
