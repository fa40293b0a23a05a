"""Traces of a model under several policies and batch sizes, each made only once, on forked processes if asked."""

from __future__ import annotations

import copy
import ctypes
import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby, pairwise
from multiprocessing.queues import SimpleQueue
from typing import Any

import torch
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.errors import UserError
from ckpt_ft.memory.gpus import GPU, GPUS
from ckpt_ft.memory.record.trace import StepTrace
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch
from ckpt_ft.workloads.workload import Step, Workload


def split_steps(trace: StepTrace) -> list[StepTrace]:
    """Split a trace of several steps into one trace per step, each with the resident storages and the step twice.

    The first run is the warm-up, the second is the measured step. What a step leaves alive is freed in between.
    """
    starts = [at for at, name in trace.marks if name == "step"] + [len(trace.events)]
    alive: dict[int, None] = {}
    traces, at = [], 0
    for start, stop in pairwise(starts):
        for event in trace.events[at:start]:
            if event >= 0:
                alive[event] = None
            else:
                del alive[~event]
        at = start
        traces.append(_twice(trace, list(alive), start, stop))
    return traces


def _twice(trace: StepTrace, resident: list[int], start: int, stop: int) -> StepTrace:
    window = trace.events[start:stop]
    freed = {~event for event in window if event < 0}
    left = [event for event in window if event >= 0 and event not in freed]
    gone = [index for index in resident if index in freed]
    first = [event for event in window if event >= 0 or ~event not in gone]  # the second run frees these
    warm = [*resident, *first, *(~index for index in reversed(left))]
    number = {index: place for place, index in enumerate(dict.fromkeys(e if e >= 0 else ~e for e in [*warm, *window]))}
    events = [number[event] if event >= 0 else ~number[~event] for event in [*warm, *window]]
    shift = len(warm) - start
    return replace(
        trace,
        storages=[trace.storages[index] for index in number],
        events=events,
        ops=[op.later(shift) for op in trace.ops if start <= op.at < stop],
        marks=[(mark + shift, name) for mark, name in trace.marks if start <= mark < stop],
    )


Traced = StepTrace | str  # the trace, or the reason why there is none
Key = tuple[str, int]  # policy, batch size
Report = Callable[[str], None]


def trace_policies(workload: Workload, policies: Sequence[str], step: Step) -> list[Traced]:
    """The trace of `step` under each policy, or the reason why the policy does not suit the model.

    All policies share one session: one warm-up and the ops that it has seen. That is two to three times cheaper than a
    session each. The step under each policy then serves as its own warm-up, too.
    """
    return _traced(workload, [(policy, step) for policy in policies])


def _traced(workload: Workload, wanted: list[tuple[str, Step]]) -> list[Traced]:
    """As `trace_policies`, with a step for each policy. Under `swap` a step begins with weights in host memory."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            shared = iter(_in_one_session(workload, [one for one in wanted if not Policy.parse(one[0]).swap]))
        except UserError as error:
            if not workload.compile or wanted[0][0] == "none":  # otherwise the compiled step's policy is refused
                raise
            return [str(error)]
        return [_swapped(workload, *one) if Policy.parse(one[0]).swap else next(shared) for one in wanted]


def _swapped(workload: Workload, policy: str, step: Step) -> Traced:
    """A trace of its own."""
    try:
        applied = apply_policy(workload.model, policy)
    except UserError as error:
        return str(error)
    try:
        return workload.with_metadata(workload.trace_of([step, step]))
    except UserError as error:
        return str(error)
    finally:
        applied.remove()


def refusal(model: nn.Module, policy: str) -> str:
    """Why a policy does not suit the model; "" if it does."""
    try:
        apply_policy(model, policy).remove()
    except UserError as error:
        return str(error)
    return ""


def _in_one_session(workload: Workload, wanted: list[tuple[str, Step]]) -> list[Traced]:
    """As `_traced`, without `swap`. The first step whose policy suits the model also warms up."""
    refused: dict[str, str] = {}

    def run(policy: str, step: Step, model: nn.Module, optimizer: Any) -> None:
        """Run a step under its policy; the step of a refused policy does nothing."""
        try:
            applied = apply_policy(model, policy)
        except UserError as error:
            refused[policy] = str(error)
            return
        try:
            step(model, optimizer)
            idle = applied.never_fired()
        finally:
            applied.remove()
        if idle:
            refused[policy] = f"no operator of '{idle[0]}' runs in this model's blocks"

    reasons: list[Traced] = []
    while len(reasons) < len(wanted) and (reason := refusal(workload.model, wanted[len(reasons)][0])):
        reasons.append(reason)
    todo = wanted[len(reasons) :]
    if not todo:
        return reasons
    trace = workload.trace_of([partial(run, *one) for one in (todo[0], *todo)], twice=True)
    start = trace.start
    alone = replace(trace, ops=[op for op in trace.ops if op.at >= start])
    traces = [alone] if len(todo) == 1 else split_steps(trace)[1:]
    return reasons + [
        refused.get(policy) or workload.with_metadata(one) for (policy, _), one in zip(todo, traces, strict=True)
    ]


class Tracer:
    """Traces policies at batch sizes and keeps the traces; a context manager.

    Args:
        jobs: number of processes; 0 for one per core, 1 for this process alone. They are forked, so a step may be any
            closure. This process makes all traces if it cannot fork (see `can_fork`).
        report: called with one line before each trace.

    Attributes:
        fits: what was found to fit, for the report; a list, since the tracers of a search share it.
    """

    def __init__(self, workload: Workload, jobs: int = 1, report: Report | None = None) -> None:
        self.workload, self.report = workload, report or (lambda line: None)
        self.traced: dict[Key, Traced] = {}
        self.fits: list[str] = []
        self._alone: set[Key] = set()  # keys that were traced in separate sessions
        self.jobs = 1 if jobs == 1 or not can_fork() else jobs or cores()

    def __enter__(self) -> Tracer:
        self._collects = gc.isenabled()
        gc.disable()  # traces are millions of small objects without cycles
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._collects:
            gc.enable()

    @property
    def parallel(self) -> bool:
        """Whether several traces run at once."""
        return self.jobs > 1

    def trace(self, policy: str, batch: int) -> Traced:
        """One trace, or the reason why there is none."""
        return self.all([(policy, batch)])[0]

    def trace_of(self, policy: str, batch: int) -> StepTrace:
        """The trace of a policy that suits the model."""
        trace = self.trace(policy, batch)
        assert isinstance(trace, StepTrace), trace
        return trace

    def under(self, launch: Launch | None) -> Tracer:
        """A tracer of the same workload under `launch`, with traces of its own."""
        return self.of(replace(self.workload, launch=launch))

    def of(self, workload: Workload) -> Tracer:
        """A tracer of another workload, with as many processes and the same report."""
        other = copy.copy(self)
        other.workload, other.traced, other._alone = workload, {}, set()
        return other

    def all(self, wanted: Iterable[Key], alone: bool = False) -> list[Traced]:
        """A trace for each (policy, batch), in order.

        Policies of one batch size share a session, which shifts the bytes reserved by about a percent. They do not
        if `alone` is set, if the launch carries state from one step to the next (ZeRO-3), or if torch.compile would
        keep what it compiled for one policy beside that for another.
        """
        return trace_all([(self, wanted)], alone)[0]

    def _missing(self, wanted: Iterable[Key], alone: bool) -> list[list[Key]]:
        """The sessions for those of `wanted` that are not traced yet."""
        launch = self.workload.launch
        alone = alone or (launch is not None and launch.stage == 3) or bool(self.workload.compile)
        missing: dict[int, list[Key]] = {}
        for key in dict.fromkeys(wanted):
            if key not in (self._alone if alone else self.traced):
                missing.setdefault(key[1], []).append(key)
        if alone:
            return [[key] for keys in missing.values() for key in keys]
        # Dealt in turn to the processes: neighbours are similar policies that cost about the same.
        shares = [keys[start :: self.jobs] for keys in missing.values() for start in range(self.jobs)]
        return [share for share in shares if share]

    def trace_typical(self, wanted: Iterable[Key]) -> list[StepTrace]:
        """The trace of the step on a typical batch, for each (policy, batch) that has a trace."""
        found = dict(_run([(self, [key]) for key in wanted], typical=True))
        return [trace for _, (trace,) in sorted(found.items()) if isinstance(trace, StepTrace)]

    def session(self, keys: list[Key], typical: bool) -> list[Traced]:
        """The traces of a session, which this process makes."""
        traces = _session(self.workload, keys, typical)
        for trace in traces if self.parallel else ():
            if not isinstance(trace, str):
                trace.replay  # noqa: B018  cached in the trace, so that the parent need not compute it
                if trace.device != "cpu":
                    trace.seconds_parts  # noqa: B018
        return traces

    def say(self, keys: list[Key]) -> None:
        """Report that a session begins."""
        batches = ((batch, [policy for policy, _ in same]) for batch, same in groupby(keys, key=lambda key: key[1]))
        said = ", ".join(f"batch {batch} under {'; '.join(policies)}" for batch, policies in batches)
        launch = self.workload.launch
        self.report(f"{self.fits[-1] if self.fits else ''}tracing {said}{f' with {launch}' if launch else ''}")


def trace_all(asked: Sequence[tuple[Tracer, Iterable[Key]]], alone: bool = False) -> list[list[Traced]]:
    """Returns `tracer.all(wanted, alone)` for each (tracer, wanted); all of them start at once."""
    each = [(tracer, list(wanted)) for tracer, wanted in asked]
    sessions = [(tracer, keys) for tracer, wanted in each for keys in tracer._missing(wanted, alone)]
    for number, traces in _run(sessions):
        tracer, keys = sessions[number]
        if len(keys) == 1:
            tracer._alone.add(keys[0])
        tracer.traced.update(zip(keys, traces, strict=True))
    return [[tracer.traced[key] for key in wanted] for tracer, wanted in each]


def _run(sessions: Sequence[tuple[Tracer, list[Key]]], typical: bool = False) -> Iterator[tuple[int, list[Traced]]]:
    """The number and the traces of each session, as they end."""

    def task(number: int, tell: Callable[[int], None]) -> list[Traced]:
        tell(number)
        tracer, keys = sessions[number]
        return tracer.session(keys, typical)

    def say(number: int) -> None:
        tracer, keys = sessions[number]
        tracer.say(keys)

    jobs = max((tracer.jobs for tracer, _ in sessions), default=1)
    return run_tasks([partial(task, number) for number in range(len(sessions))], jobs, say)


def cores() -> int:
    """The number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def begin_process(ended_by: int = signal.SIGKILL) -> None:
    """In a forked process: have the kernel end it by a signal if its parent is killed, and use one thread.

    Threads of autograd that run at once in such a process would race for the pool of threads.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, ended_by)
    torch.set_num_threads(1)


def _session(workload: Workload, keys: list[Key], typical: bool) -> list[Traced]:
    steps = {batch: workload.typical_step(batch) if typical else workload.step(batch) for _, batch in keys}
    return _traced(workload, [(policy, steps[batch]) for policy, batch in keys])


def can_fork() -> bool:
    """Whether forked processes can run a backward.

    They cannot once autograd has started a thread for a card in this process, which only a fork can find out.
    """
    if "fork" not in multiprocessing.get_all_start_methods() or sys.platform != "linux":
        return False
    distributed = torch.distributed.is_available() and torch.distributed.is_initialized()
    if torch.cuda.is_initialized() or distributed or threading.active_count() > 2:
        return False
    child = os.fork()
    if not child:
        with suppress(RuntimeError):
            torch.zeros((), requires_grad=True).backward()
            os._exit(0)
        os._exit(1)
    return os.waitpid(child, 0)[1] == 0


def run_tasks(
    tasks: Sequence[Callable[[Callable[[Any], None]], Any]], jobs: int, tell: Callable[[Any], None] = lambda said: None
) -> Iterator[tuple[int, Any]]:
    """The number and result of each task, as they finish, on `jobs` forked processes (0: one for each core).

    A task is called with a function; what it passes to that function while it runs reaches `tell` in this process.
    Tasks are inherited, not pickled; results are pickled.
    """
    jobs = min(jobs or cores(), len(tasks))
    if jobs < 2 or not can_fork():
        yield from ((number, task(tell)) for number, task in enumerate(tasks))
        return
    global _MESSAGES, _TASKS
    fork = multiprocessing.get_context("fork")
    messages, _TASKS = fork.SimpleQueue(), tasks
    _MESSAGES, others = messages, multiprocessing.active_children()
    with ProcessPoolExecutor(jobs, fork, begin_process) as pool:
        running = {pool.submit(_run_task, number): number for number in range(len(tasks))}
        try:
            while running:
                done = wait(running, timeout=_POLL_SECONDS, return_when=FIRST_COMPLETED).done
                while not messages.empty():
                    tell(messages.get())
                yield from ((running.pop(task), task.result()) for task in done)
        except BaseException:  # otherwise a process continues its task, and after Ctrl-C starts the next one
            for process in set(multiprocessing.active_children()).difference(others):
                process.kill()
            raise
        finally:
            pool.shutdown(cancel_futures=True)
            _TASKS = ()  # they keep models alive


_POLL_SECONDS = 0.5  # seconds after which this process polls its tasks
_MESSAGES: SimpleQueue[Any] | None = None  # messages of forked processes, which inherit it
_TASKS: Sequence[Callable[[Callable[[Any], None]], Any]] = ()  # those of the forked processes


def _run_task(number: int) -> Any:
    """Runs a task in a forked process."""
    assert _MESSAGES is not None, "set by run_tasks"
    return _TASKS[number](_MESSAGES.put)


def on_card(trace: Any, card: GPU | None) -> Any:
    """The same step on a card with the same kernels; a reason why there is no trace, or a CPU's, stays what it is."""
    if not isinstance(trace, StepTrace) or card is None:
        return trace
    return replace(trace, device=card.name, gpu=None if GPUS.get(card.name) == card else card)
