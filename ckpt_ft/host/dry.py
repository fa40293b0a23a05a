"""`ckpt-ft dry-run`: the memory and time of a script's training step on a card, without the card, weights or a run.

The script runs in a process of its own, on fake tensors (ops.py), up to the first forward of its training step. There
the process forks once for each policy that is asked for. Each fork applies its policy, lets the script make a few
steps and ends; the script's savers are not reached, and what it has written is taken back.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import os
import pickle
import queue
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn
from weakref import WeakSet

import torch
from torch import nn

from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.compat.tensors import DataDependentOutputException, DynamicOutputShapeException, FakeTensor, no_modes
from ckpt_ft.errors import UserError, one_line
from ckpt_ft.memory.distributed.fsdp2 import gathers_in_8_bits, host_copies, offloaded_parameters
from ckpt_ft.memory.distributed.streams import Streams, streams_are_followed
from ckpt_ft.memory.fake import patches
from ckpt_ft.memory.fake.step import torch_like
from ckpt_ft.memory.gpus import GPUS
from ckpt_ft.planning.tracing import begin_process, cores
from ckpt_ft.policy import STREAMS
from ckpt_ft.spec.launch import Launch
from ckpt_ft.standins import flash_attention, fused_head, liger, liger_kernels

from .card import show_card, show_tensors
from .generation import generate_longest
from .kept_files import KeptFiles
from .longest import longest_first
from .ops import ScriptOps, ScriptTracker
from .ranks import as_wrapped, buckets_of, environment_of, join_ranks, unwrapped
from .script import AS_IT_IS, OUTPUT, Answer, Question, random_states, set_random_states
from .training_loop import TrainingLoop, before_saving, modules_alive, whole_model
from .weightless import load_no_weights, when_imported

_SMALL = 64 << 20  # bytes of models whose steps on the CPU are computed
_EAGER = "torch.compile is left out: the answer is that of the eager step"


def main(path: str) -> NoReturn:
    """Answer the question in the file `path`, in this process, which then ends."""
    begin_process(signal.SIGTERM)
    if "" in sys.path:
        sys.path.remove("")  # the folder of `python -c`
    _DryRun(pickle.loads(Path(path).read_bytes()), Path(path).parent).run()


class _DryRun:
    """A script that is looked at."""

    def __init__(self, question: Question, folder: Path) -> None:
        self.question, self.folder = question, folder
        self.policy, self.model = question.policies[0], ""
        self.best: Answer | None = None
        self.launch: Launch | None = None
        self.steps = self.number = 0
        self.computes = False  # the steps are computed with their numbers
        alone = question.gpu is None and question.launch is None
        self.small = _SMALL if alone and question.computes else 0
        self.stack = contextlib.ExitStack()
        self.loop = TrainingLoop(self._begins, self._next_step)

    # -- before the first step --------------------------------------------------------------------------------------

    def run(self) -> NoReturn:
        """Run the script to the end of what is looked at."""
        gpu, launch = self.question.gpu, self.question.launch
        for name in (
            "transformers.integrations.moe",
            "trl.kernels.chunked_logprob",
            "bitsandbytes",  # it looks for a GPU when it is imported
        ):  # before their kernels are replaced
            with contextlib.suppress(ImportError):
                __import__(name)
        with torch.device("cpu"):
            torch.empty(0)  # PyTorch lists here what obeys such a context: its own functions, before ours replace some
        fakes = self.stack.enter_context(torch_like(gpu))
        fakes.mode.__exit__(None, None, None)  # only ops that meet a fake run under it
        gc.enable()
        self.streams = self.stack.enter_context(streams_are_followed())
        self.tracker = ScriptTracker(partial(ScriptOps, fakes=fakes, gpu=gpu, streams=self.streams), gpu)
        self.streams.recorder = self.tracker.recorder
        setattr(fakes.mode, STREAMS, self.streams)
        show_tensors(self.tracker)
        if gpu is not None:
            show_card(gpu, self.tracker, self.streams, launch.processes // launch.machines if launch else 1)
        _leave_out(self.tracker.recorder.note, self.question.longest)
        self.files = KeptFiles(self.folder)
        signal.signal(signal.SIGTERM, self._killed)
        self._track(self.tracker, self.streams)
        before_saving(self._saves)
        load_no_weights(self._put, self.small)
        generate_longest(self.tracker.recorder.note)
        self.loop.watch()
        error: BaseException | None = None
        try:
            if launch is not None:
                os.environ.update(environment_of(self.question.launcher, launch, gpu is None))
                join_ranks(gpu is None, self.tracker.recorder.note)
            set_random_states(self.question.randomness)
            self.question.script.run()
        except BaseException as raised:
            error = raised
        self._ended(error)

    def _killed(self, number: int, frame: Any) -> NoReturn:
        self.files.restore()
        os._exit(128 + number)

    def _track(self, tracker: ScriptTracker, streams: Streams) -> None:
        recorder, ops = tracker.recorder, tracker.dispatcher
        enter = self.stack.enter_context
        enter(tracker)
        enter(patches.device_calls(recorder))
        enter(patches.triton_launches(recorder))
        enter(patches.lists_of_fakes(recorder, ops.values))
        enter(host_copies(recorder, streams))
        enter(gathers_in_8_bits(recorder, ops.fakes))

    def _put(self, model: nn.Module) -> None:
        """Turn what a model holds into fakes: on the CPU, or on the host of a card."""
        for tensor in (*model.parameters(), *model.buffers()):
            if type(tensor) in (torch.Tensor, nn.Parameter):
                self.tracker.dispatcher.put(tensor)

    def _begins(self, called: nn.Module) -> None:
        """The script has come to its training step: fork for each policy, and go on in the forks."""
        modules = modules_alive()
        model = whole_model(called, modules)
        wrapped, model = model, unwrapped(model)
        self.model = type(model).__name__
        gpu, launch = self.question.gpu, self.question.launch
        if launch is not None:
            self.launch = as_wrapped(launch, modules)
        if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in self.loop.optimizers):
            raise UserError("LBFGS decides by the loss how often it runs the model, and a dry run has no loss")
        away = list(offloaded_parameters(model))
        if gpu is not None and not away and all(parameter.device.type == "cpu" for parameter in model.parameters()):
            raise UserError(
                "its model is on the CPU, though the script sees a card; an option of the script may choose the "
                "device, and --device cpu asks about the CPU"
            )
        self._fork()
        if gpu is None and not self._computes(modules):
            for module in modules:
                self._put(module)
        notes = []
        if self.policy != AS_IT_IS:
            notes = under_policy(model, self.policy)
        for note in notes:
            self.tracker.recorder.note(note)
        enter = self.stack.enter_context
        if not self.computes:
            enter(patches.unnoticed())
        enter(flash_attention.for_live_models())
        enter(liger.for_live_models())
        if gpu is not None:
            enter(fused_head.on_gpu())
            enter(liger_kernels.on_card(gpu.sms, gpu.capability))
        gc.collect()
        gc.disable()  # cycles are collected between steps
        self.tracker.dispatcher.stepping = True
        self.tracker.restart()
        self.tracker.add_model(model)
        self.tracker.recorder.put_on_host(away, "parameters", "pinned")
        self.tracker.recorder.add_resident(buckets_of(modules), "communication")
        own = set(wrapped.modules())
        self.tracker.add_beside(module for module in modules if module not in own)
        self.tracker.start_step()

    def _fork(self) -> None:
        """Fork for each policy and return in the forks. This process waits for them and ends."""
        policies, children, statuses = list(self.question.policies), [], []
        for number, policy in enumerate(policies):
            child = os.fork()
            if not child:
                begin_process(signal.SIGTERM)
                queues: Any = queue.Queue
                queues.join = lambda waited: None  # its threads are left in the parent
                self.policy, self.number = policy, number
                self.files.begin()
                return
            children.append(child)
            decides = number == 0 and bool(self.question.otherwise)
            if decides or len(children) >= cores():
                statuses.append(os.waitpid(children.pop(0), 0)[1])
            if decides and self._misses():
                policies += self.question.otherwise
        statuses += [os.waitpid(child, 0)[1] for child in children]
        self.files.restore()
        os._exit(max(128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0 for status in statuses))

    def _computes(self, modules: Sequence[nn.Module]) -> bool:
        """Whether this process computes its steps with their numbers: a fork does, if the script's model is small.

        Its answer is that of a live run, whatever the numbers decide. Without one, this process has none either.
        """
        tensors = {id(tensor): tensor for one in modules for tensor in (*one.parameters(), *one.buffers())}.values()
        if any(type(tensor) is FakeTensor for tensor in tensors) or sum(one.nbytes for one in tensors) >= self.small:
            return False
        child = os.fork()
        if not child:
            begin_process(signal.SIGTERM)
            self.files.begin()
            self.tracker.compute(self._give_up)
            self.computes = True
            return True
        os.waitpid(child, 0)
        if self._file(self.number).exists():
            os._exit(0)
        return False

    def _give_up(self) -> NoReturn:
        self.files.restore()
        os._exit(0)

    def _misses(self) -> bool:
        """Whether the first policy's step does not fit."""
        path, capacity = self._file(0), self.question.capacity
        if capacity is None or not path.exists():
            return False
        trace = pickle.loads(path.read_bytes()).trace
        return trace is not None and trace.peak_reserved > capacity

    def _file(self, number: int) -> Path:
        return self.folder / f"answer-{number:03}"

    # -- steps ------------------------------------------------------------------------------------------------------

    def _next_step(self, batches: Sequence[dict[str, tuple[int, ...]]]) -> None:
        """A step has ended, and a module is about to be called."""
        self._keep(batches)
        if self.steps == self.question.steps:
            self._finish()
        gc.collect(1)
        self.tracker.start_step()

    def _keep(self, batches: Sequence[dict[str, tuple[int, ...]]]) -> None:
        """Keep the record if the step that has ended is the highest; the first one is a warm-up."""
        self.steps += 1
        gpu = self.question.gpu
        trace = self.tracker.trace(gpu.name if gpu else "cpu", None if gpu in GPUS.values() else gpu)
        trace = replace(trace, ops=flash_attention.renamed(trace.ops), launch=self.launch)
        best = self.best
        if best is None or best.trace is None or best.step == 1 or trace.peak_allocated > best.trace.peak_allocated:
            self.best = Answer(self.policy, self.model, trace, self.steps, batches=list(batches))

    @property
    def _done(self) -> int:
        """The steps that have ended, with the one behind which no module has been called yet."""
        return self.steps + self.loop.stepped

    def _saves(self) -> None:
        """The script saves tensors: end if two steps have ended; the first one alone lacks the optimizer's states."""
        if self._done > 1:
            self._finish()

    def _finish(self) -> None:
        """Write the answer and end, if a step has ended."""
        if self.loop.stepped:
            self._keep(self.loop.batches)
        if self.best is not None:
            self._end(replace(self.best, steps=self.steps))

    def _ended(self, error: BaseException | None) -> NoReturn:
        """The script has ended, by `error` or by itself."""
        if self._done > 1 or error is None or isinstance(error, SystemExit):
            self._finish()  # a first step alone lacks the states of the optimizer
        name = self.question.script.name
        if error is not None and not isinstance(error, SystemExit):
            traceback.print_exception(error)
        if isinstance(error, (DataDependentOutputException, DynamicOutputShapeException)):
            said = f"its step calls {error.func}, whose result depends on values that a dry run does not have"
        elif isinstance(error, UserError):
            said = str(error)
        elif isinstance(error, ModuleNotFoundError):
            said = f"it needs the package {error.name}, which is not installed"
        elif error is None or isinstance(error, SystemExit):
            code = getattr(error, "code", None)
            last = self._last_line() if isinstance(code, int) else code
            said = (
                f"it ended without a training step{f' ({one_line(last, 200)})' if code else ''}: a step calls a model "
                "in training mode, and then the step() of an optimizer that holds its parameters, in this process"
            )
        else:
            when = f"in step {self._done + 1}" if self.loop.model is not None else "before its first training step"
            said = f"{when}, {_where(error, name)} raised {type(error).__name__}: {one_line(error, 300)}"
        self._end(Answer(self.policy, error=f"{name}: {said}"))

    def _last_line(self) -> str:
        """The last line that the script has printed."""
        sys.stdout.flush()
        sys.stderr.flush()
        lines = (self.folder / OUTPUT).read_text(errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "")

    def _end(self, answer: Answer) -> NoReturn:
        sys.stdout.flush()
        sys.stderr.flush()
        if self.computes and answer.trace is None:
            self._give_up()
        self.files.restore()
        self._file(self.number).write_bytes(pickle.dumps(answer))
        os._exit(0)


def under_policy(model: nn.Module, policy: str) -> list[str]:
    """Apply `policy` in place of the script's own checkpointing, or blocks would be run again twice; returns notes."""
    own: list[Any] = [one for one in model.modules() if getattr(one, "gradient_checkpointing", False) is True]
    for module in own:
        module.gradient_checkpointing = False
    replaced = [f"policy '{policy}' replaces the script's own gradient checkpointing"] if own else []
    return [*replaced, *apply_policy(model, policy).notes]


def _where(error: BaseException, name: str) -> str:
    """The last line of the script itself on the way to `error`."""
    script = Path(name).resolve()
    at = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename).resolve() == script]
    return f"line {at[-1].lineno}" if at else "it"


def _leave_out(note: Callable[[str], None], longest: bool) -> None:
    """Leave out torch.compile, processes that load data, and with `longest` the order of the rows.

    Also the graph that a SummaryWriter draws of a model: it runs the model under torch.jit, which takes no fakes.
    """

    def compile(model: Any = None, **kwargs: Any) -> Any:
        note(_EAGER)
        return model if model is not None else lambda function: function

    def compile_module(module: nn.Module, *args: Any, **kwargs: Any) -> None:
        note(_EAGER)

    def draw_no_graph() -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        SummaryWriter.add_graph = lambda *args, **kwargs: None  # type: ignore[method-assign]

    def script(written: Any, *args: Any, **kwargs: Any) -> Any:
        """As `torch.jit.script`; what it cannot compile stays Python: it does not know our functions for torch's."""
        try:
            made = compiled(written, *args, **kwargs)
        except Exception:
            made = written
        if made is written and not written.__module__.startswith("torch."):
            note("torch.jit is left out: what it fuses is counted op by op")
        return made

    jit: Any = torch.jit
    compiled, jit.script = jit.script, script
    when_imported("torch.utils.tensorboard.writer", draw_no_graph)
    loaders: Any = torch.utils.data.DataLoader
    loader, iterate = loaders.__init__, loaders.__iter__
    in_workers = WeakSet[Any]()

    def load(self: Any, *args: Any, **kwargs: Any) -> None:
        alone = {"num_workers": 0, "pin_memory": False, "persistent_workers": False, "prefetch_factor": None}
        given = inspect.signature(loader).bind(self, *args, **{**kwargs, "multiprocessing_context": None}).arguments
        if given.get("num_workers"):
            in_workers.add(self)
        loader(**{**(longest_first(given, note) if longest else given), **alone, "timeout": 0})

    def iterator(self: Any) -> Iterator[Any]:
        return _apart(iterate(self)) if self in in_workers else iterate(self)

    torch.compile, nn.Module.compile = compile, compile_module  # type: ignore[assignment, method-assign]
    loaders.__init__, loaders.__iter__ = load, iterator


def _apart(batches: Iterator[Any]) -> Iterator[Any]:
    """Batches that workers make: outside of this process, so that they draw no random numbers of it."""
    end = object()
    while True:
        with no_modes():
            states = random_states()
            batch = next(batches, end)
            set_random_states(states)
        if batch is end:
            return
        yield batch
