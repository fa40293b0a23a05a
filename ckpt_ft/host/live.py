"""`ckpt-ft run`: a training script as it is, under a policy, with its memory measured and reported at its end.

The script runs in this process. Before the first forward of its training step the policy is applied to the model and
measuring begins; from then on only two hooks of PyTorch are ours, so that nothing is slower between two steps.
Memory is predicted by a dry run of the same script, in a process of its own.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch.distributed as dist
from torch import nn

from ckpt_ft.errors import UserError, is_oom, never_fatal, one_line
from ckpt_ft.memory.gpus import GPU, gpu_of
from ckpt_ft.memory.measure.profiler import MemoryProfiler
from ckpt_ft.memory.measure.report import write_report
from ckpt_ft.policy import Policy
from ckpt_ft.units import format_bytes, parse_bytes

from .dry import under_policy
from .ranks import unwrapped
from .script import AS_IT_IS, OTHERWISE, Answer, Question, Script, ask, random_states, run_command
from .training_loop import TrainingLoop, before_saving, modules_alive, whole_model

_SAMPLE = 1000  # on a CPU, a measured step takes several times as long; larger batches are measured besides
_MOST_STEPS = 50  # that a dry run looks at, to reach the step that was the highest


@dataclass
class LiveRun:
    """One run of a script.

    Args:
        policy: None leaves the model as the script has it; "auto" takes the fastest policy that fits.
        budget: bytes for "auto", such as "20GiB"; by default the card's.
        reports: the kinds of report to write ("json", "md", "html", "png"); none only measures.
        folder: where they are written.
        predicts: whether a dry run predicts what is measured.
    """

    script: Script
    policy: str | None = None
    budget: str = ""
    reports: Sequence[str] = ("json", "html")
    folder: str = "."
    predicts: bool = True

    def __post_init__(self) -> None:
        self.alone = os.environ.get("WORLD_SIZE", "1") == "1"
        self.profiler: MemoryProfiler | None = None
        self.gpu: GPU | None = None
        self.model = ""
        self._randomness = random_states()
        self._phases = ExitStack()
        self._between = False  # a step has ended, and no forward in training mode has followed
        self._interrupted = ""  # by what ran since
        self._loop = TrainingLoop(self._begins, lambda batches: None)

    def run(self) -> int:
        """Run the script and report; return the exit code that the script has without us.

        Raises:
            UserError: no such script or policy, or "auto" finds nothing that fits.
        """
        self.script.check()
        if self.budget:
            parse_bytes(self.budget)
        if self.policy is not None and Policy.parse(self.policy).auto:
            self.policy = self._fastest()
        self._loop.watch()
        before_saving(self._saves)
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        code = 0
        failed: BaseException | None = None
        try:
            self.script.run()
        except UserError:
            raise
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
            if isinstance(stop.code, str):
                print(stop.code, file=sys.stderr)
            failed = stop if code > 128 else None
        except BaseException as error:
            failed, code = error, 128 + signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
            traceback.print_exception(_of_script(error))
        self._ends(failed)
        return code

    # -- before the run ---------------------------------------------------------------------------------------------

    def _fastest(self) -> str | None:
        """The policy that "auto" takes: the fastest that fits, or the mildest where seconds are not known."""
        if not self.alone:
            raise UserError("policy auto: several processes need a policy by name; `ckpt-ft dry-run` compares them")
        gpu = _card()
        if gpu is None and not self.budget:
            raise UserError("policy auto on a CPU: give --budget, such as --budget 24GiB")
        room = parse_bytes(self.budget) if self.budget else gpu.usable  # type: ignore[union-attr]
        answers = ask(Question(self.script, gpu, (AS_IT_IS, *OTHERWISE), randomness=self._randomness))
        if answers[0].trace is None:
            raise UserError(answers[0].error)
        fits = [one for one in answers if one.trace is not None and one.trace.peak_reserved <= room]
        if not fits:
            least = min(one.trace.peak_reserved for one in answers if one.trace is not None)
            raise UserError(f"policy auto: nothing fits {format_bytes(room)}; the leanest needs {format_bytes(least)}")
        chosen = min(fits, key=lambda one: (one.trace and one.trace.seconds) or 0)
        _say(f"policy auto: {chosen.policy or 'the script as it is'}")
        return chosen.policy or None

    # -- the script's steps -----------------------------------------------------------------------------------------

    def _begins(self, model: nn.Module) -> None:
        self._loop.release()
        trained = unwrapped(model)
        alive = modules_alive()
        whole = whole_model(trained, alive) if trained is model else trained
        self.model = type(whole).__name__
        if self.policy is not None:
            for note in under_policy(whole, self.policy):
                _say(note)
        inside = set(model.modules())
        beside = [one for one in alive if one not in inside]
        optimizer = self._loop.optimizers[-1] if self._loop.optimizers else None
        self.profiler = MemoryProfiler(None, trained, optimizer, sample=_SAMPLE, auxiliary_models=beside)
        self.gpu = _card() if self.profiler.device.type == "cuda" else None
        self.profiler.__enter__()
        model.register_forward_pre_hook(self._arrives, prepend=True)

    def _arrives(self, model: nn.Module, args: Any) -> None:
        """A forward of the model: of a step, or of an evaluation between two steps."""
        assert self.profiler is not None
        self._end_step()
        if not self._between:
            return
        if model.training:
            if self._interrupted:
                self._phases.close()
                self.profiler.begin_step()
            self._between, self._interrupted = False, ""
        elif self._interrupted != "evaluation":
            self._interrupted = "evaluation"
            self._phases.enter_context(self.profiler.phase("evaluation", between=True))

    def _saves(self) -> None:
        self._end_step()
        if self._between and self.profiler is not None:
            self._interrupted = self._interrupted or "saving"
            self.profiler.note_between("saving")

    def _end_step(self) -> None:
        if self._loop.stepped and self.profiler is not None:
            self._loop.stepped, self._between = False, True
            self.profiler.step()

    # -- after the run ----------------------------------------------------------------------------------------------

    def _ends(self, error: BaseException | None) -> None:
        """Report, whether the script has ended by itself or by `error`."""
        profiler = self.profiler
        if profiler is None:
            if error is None:
                _say("no training step was seen, so there is no report")
            return
        with never_fatal("the memory report"):
            self._phases.close()
            self._end_step()
            profiler.close(failed=error is not None)
            stopped = isinstance(error, (KeyboardInterrupt, SystemExit))
            answers: list[Answer] = []
            if error is not None and is_oom(error):
                _say(f"out of memory in step {profiler.steps + 1}: {one_line(error, 200)}")
                answers = self._answers((self.policy or AS_IT_IS, *OTHERWISE), profiler.steps + 1)
                self._print_ways(answers)
            elif self.predicts and not stopped and self.reports:
                answers = self._answers((self.policy or AS_IT_IS,), profiler.fullest)
            if profiler.steps and self.reports:
                found = answers[0] if answers else None
                notes = [] if error is None else [f"The script ended by {type(error).__name__}."]
                notes += [] if found is None or not found.error else [f"no prediction: {found.error}"]
                notes += [] if self.alone else ["no prediction: `ckpt-ft dry-run --launch` has one"]
                report = profiler.report(
                    found.trace if found else None, notes=notes, policy=self.policy, model=self.model,
                    script=self.script.name,
                )  # fmt: skip
                if not self.alone and error is None and dist.is_initialized():
                    ranks: list[Any] = [None] * dist.get_world_size()
                    dist.all_gather_object(ranks, report.ranks)
                    report = replace(report, ranks=[replace(r, rank=n) for n, (r,) in enumerate(ranks)])
                if os.environ.get("RANK", "0") == "0":
                    write_report(report, self.reports, self.folder)

    def _answers(self, policies: tuple[str, ...], step: int) -> list[Answer]:
        """What a dry run says; of the steps up to `step`, or if it is far off, of steps with the longest rows."""
        far = step * len(policies) > _MOST_STEPS
        steps = 3 if far else max(step, 3)
        asked = Question(self.script, self.gpu, policies, steps, longest=far, randomness=self._randomness)
        try:
            return ask(asked) if self.alone else []
        except UserError as error:
            return [Answer(policies[0], error=one_line(error))]

    def _print_ways(self, answers: Sequence[Answer]) -> None:
        """The policies that would have needed less."""
        traced = [one for one in answers if one.trace is not None]
        room = None if self.gpu is None else self.gpu.usable
        for one in traced[1:]:
            assert one.trace is not None
            needs = one.trace.peak_reserved
            if needs < traced[0].trace.peak_reserved and (room is None or needs <= room):  # type: ignore[union-attr]
                _say(f"  {format_bytes(needs)} predicted: {run_command(self.script, one.policy)}")


def _card() -> GPU | None:
    import torch

    return gpu_of("") if torch.cuda.is_available() else None


def _of_script(error: BaseException) -> BaseException:
    """`error` without the frames above the script's first one, as python prints it."""
    at = error.__traceback__
    while at is not None and "runpy" not in at.tb_frame.f_code.co_filename:
        at = at.tb_next
    while at is not None and "runpy" in at.tb_frame.f_code.co_filename:
        at = at.tb_next
    return error.with_traceback(at) if at is not None else error


def _say(text: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"ckpt-ft: {text}", file=sys.stderr, flush=True)
