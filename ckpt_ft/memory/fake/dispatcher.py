"""FakeOps: answers the ops of a step that runs on fake tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map_only

from ckpt_ft.memory.cost.op_work import Work, is_asynchronous, measure
from ckpt_ft.memory.distributed.streams import Streams
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record import cpu_kernels
from ckpt_ft.memory.record.dispatch import Handling, Rule, call_key
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.record.tracker import handling_of
from ckpt_ft.memory.rules import cuda, fake_kernels

from .data_dependent_ops import DataDependentOps
from .fakes import CPU, Fakes, are_fakes
from .memo import Memo, Remembered
from .patches import Interrupts
from .values import Values

aten = torch.ops.aten
_META = torch.device("meta")
_ASKS_DEVICE = torch.ops.prim.device.default
_COPY, _LIFT = aten.copy_.default, aten.lift_fresh.default


def compute_capability(gpu: GPU) -> int:
    """As one number: 75 for (7, 5)."""
    return 10 * gpu.arch[0] + gpu.arch[1]


@dataclass(frozen=True, eq=False, slots=True)
class _FakeHandling(Handling):
    """How to treat an op on fake tensors, besides."""

    calls: Remembered | None = None  # earlier calls; None where results depend on more than shapes
    answered: bool = False  # by values.py or data_dependent_ops.py
    observe: Callable[[tuple[Any, ...], Any], None] | None = None  # what data_dependent_ops.py learns of a call
    on_host: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None  # which of its results are


class FakeOps:
    """Dispatcher of fake tensors (see record/tracker.py): an op is answered by the first of these that can.

    1. Known values, or a stated case, where the result depends on data (values.py, data_dependent_ops.py).
    2. The memo, where the same op was called on the same shapes before (memo.py).
    3. A rule, where CUDA's result or a real kernel's differs from that of the fake CPU kernel (rules/).
    4. PyTorch's fake kernel.

    Real tensors are replaced by fake ones, and requests for other devices are answered on the CPU. In a trace for a
    GPU, pinned memory and 0-dim tensors made from Python numbers (Adam's step counts) are the host's and left out.

    gpu: the card whose rules apply; None for the CPU's.
    """

    source = "predicted"
    takes_fakes = True

    def __init__(
        self, recorder: Recorder, fakes: Fakes, gpu: GPU | None, interrupts: Interrupts, streams: Streams
    ) -> None:
        self.recorder, self.fakes, self.gpu = recorder, fakes, gpu
        self.interrupts, self.streams = interrupts, streams
        self.values = Values()
        self._by_data = DataDependentOps(recorder, self.values)
        capability = compute_capability(gpu) if gpu else 0
        rules, self._after = (
            (cuda.RULES, cuda.after(capability)) if gpu else (cpu_kernels.FAKE_RULES, cpu_kernels.FAKE_AFTER)
        )
        self._rules: dict[Any, Rule] = {**fake_kernels.RULES, **self._by_data.answers, **rules}
        self._memo = Memo(fakes, capability)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors met in the step, by id

    def prepare(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # torch's C++ lets no exception out of a question for the device: the process would abort
        if self.interrupts.waiting and func is not _ASKS_DEVICE:
            self.interrupts.deliver()
        if func is not _LIFT and not are_fakes(args):
            args = self.faked(args)
        device = kwargs.get("device")
        if device is not None and torch.device(device) not in (CPU, _META):
            kwargs = {**kwargs, "device": CPU}
        return args, kwargs

    def handling(self, func: Any) -> Handling:
        if func is _ASKS_DEVICE:
            return Handling(str(func), lambda func, args, kwargs: args[0].fake_device, silent=True)
        known = handling_of(func, self._rules.get(func), self._after.get(func))
        answered = func in self._by_data.answers
        return _FakeHandling(
            known.name,
            known.rule,
            known.after,
            known.collective,
            known.silent,
            None if answered else self._memo.of(func),
            answered,
            self._by_data.observers.get(func),
            cuda.ON_HOST.get(func) if self.gpu else None,
        )

    def call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        assert isinstance(op, _FakeHandling)
        pinned = kwargs.pop("pin_memory", False)
        if op.answered:
            out, work = self._run(op, func, args, kwargs)
            return out, Work() if self.recorder.all_ignored(args) else work
        key = None if op.calls is None else call_key(args, kwargs)
        known = None if op.calls is None or key is None else op.calls.get(key, args)
        if known is None:
            known = self._run(op, func, args, kwargs)
            if op.calls is not None and key is not None:
                op.calls.keep(key, args, *known)
        recorder = self.recorder
        if func is _COPY and recorder.is_ignored(args[0]) != recorder.is_ignored(args[1]):
            known = known[0], Work(nbytes=args[0].nbytes)  # over the bus, by a copy engine
        elif known[1].kernels and recorder.all_ignored(args):
            known = known[0], Work()  # the host computes it
        out = known[0]
        self.values.follow(func, args, kwargs, out)
        if op.observe is not None:
            op.observe(args, out)
        if op.on_host is not None:
            for index in op.on_host(args):
                recorder.ignore(out[index])
        elif self.gpu and isinstance(out, Tensor) and self._is_on_host(func, args, out, pinned):
            recorder.ignore(out)
        return known

    def _is_on_host(self, func: Any, args: tuple[Any, ...], out: Tensor, pinned: bool) -> bool:
        return pinned or (out.dim() == 0 and (func is _LIFT or self.recorder.all_ignored(args)))

    def collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.streams.asynchronous() if is_asynchronous(func, args) else self.recorder.stream

    def faked(self, value: Any) -> Any:
        """`value` with fake tensors in place of real ones; each real tensor has one fake in a step."""
        if isinstance(value, Tensor) and type(value) is not FakeTensor:
            known = self._fakes.get(id(value))
            if known is None:
                fake = self.fakes.mode.from_tensor(value) if value.device == CPU else self.fakes.like(value)
                self.values.keep(fake, value)
                known = self._fakes[id(value)] = value, fake
            return known[1]
        if isinstance(value, (tuple, list)):
            return type(value)(self.faked(item) for item in value)
        return value

    def fake_meta_inputs(
        self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """A forward pre-hook that replaces tensors on "meta": autocast, which comes before dispatch, ignores them."""
        made: tuple[tuple[Any, ...], dict[str, Any]] = tree_map_only(Tensor, self._off_meta, (args, kwargs))
        return made

    def _off_meta(self, tensor: Tensor) -> Tensor:
        on_meta = type(tensor) is not FakeTensor and tensor.is_meta
        return self.faked(tensor) if on_meta else tensor

    def forget_real_tensors(self) -> None:
        """Remove the fake gradients of real tensors that the step closed over."""
        for real, _ in self._fakes.values():
            if type(real.grad) is FakeTensor:
                real.grad = None
        self._fakes.clear()

    def _run(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        out = func(*args, **kwargs) if op.rule is None else op.rule(func, args, kwargs)
        return out, measure(func, args, kwargs, out) if self.recorder.keeps_ops else Work()
