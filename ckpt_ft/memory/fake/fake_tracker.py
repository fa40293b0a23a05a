"""FakeTracker: records a step of fake tensors, and answers what they cannot."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from ckpt_ft.memory.distributed.streams import Streams
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.opinfo import Handling, Work, is_asynchronous, wraps
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.memory.rules import cuda, fake_kernels
from ckpt_ft.standins.library_layers import left_on_host

from . import cpu_scratch
from .again import Again
from .balanced import Balanced
from .fakes import CPU, Fakes, are_fakes
from .interrupts import Interrupts
from .memo import Memo, Remembered, call_key
from .skipping import Skipping
from .values import Values

aten = torch.ops.aten
_META = torch.device("meta")
_ASKS_DEVICE = torch.ops.prim.device.default
_COPY, _LIFT = aten.copy_.default, aten.lift_fresh.default


def sm(gpu: GPU) -> int:
    """Compute capability as one number: 75 for (7, 5)."""
    return 10 * gpu.arch[0] + gpu.arch[1]


@dataclass(frozen=True, eq=False, slots=True)
class FakeHandling(Handling):
    """What is done, besides, about an operator on fake tensors."""

    calls: Remembered | None = None  # those met before; None where results depend on more than shapes
    answered: bool = False  # by values.py or balanced.py
    observe: Callable[[tuple[Any, ...], Any], None] | None = None  # what balanced.py learns of a call
    on_host: Callable[[tuple[Any, ...]], tuple[int, ...]] | None = None  # which of its results are


class FakeTracker(Tracker):
    """A Tracker of fake tensors that stands between the step and FakeTensorMode.

    Real tensors are taken as fake ones; requests for another device are answered on the fake one; what depends on
    data is answered by values.py where it is known and by balanced.py where not. On a GPU, pinned memory and 0-dim
    tensors made from Python numbers (Adam's step counts) are the host's and left out.
    """

    source = "predicted"
    skipping: Skipping | None = None
    again: Again | None = None

    def __init__(
        self, fakes: Fakes, model: nn.Module, gpu: GPU | None, interrupts: Interrupts, streams: Streams
    ) -> None:
        super().__init__(after=cuda.after(sm(gpu)) if gpu else cpu_scratch.AFTER)
        self.fakes, self.fake_mode = fakes, fakes.mode
        self.gpu, self.interrupts, self.streams = gpu, interrupts, streams
        self.values = Values()
        self.balanced = Balanced(self, self.values)
        self.rules = {**fake_kernels.RULES, **self.balanced.answers, **(cuda.RULES if gpu else cpu_scratch.RULES)}
        self._memo = Memo(fakes, sm(gpu) if gpu else 0)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors met in the step, by id
        for weight in left_on_host(model) if gpu else ():
            self.ignore(weight)
        self.add_model(model)

    def _begin(self, phase: str) -> None:
        if phase == "optimizer" and self.again is not None:
            self.again.backward_is_over()
        super()._begin(phase)
        if phase == "backward" and self.skipping is not None:
            self.skipping.backward_begins()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is _ASKS_DEVICE:
            return args[0].fake_device if type(args[0]) is FakeTensor else args[0].device
        if wraps(types):
            return NotImplemented  # what a DTensor does to its shard comes by here in its turn
        if self.interrupts.waiting:
            self.interrupts.deliver()
        kwargs = kwargs or {}
        if func is not _LIFT and not are_fakes(args):
            args = self._faked(args)
        device = kwargs.get("device")
        if device is not None and torch.device(device) not in (CPU, _META):
            kwargs = {**kwargs, "device": CPU}
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _handling(self, func: Any) -> FakeHandling:
        known, answered = super()._handling(func), func in self.balanced.answers
        return FakeHandling(
            known.name,
            known.rule,
            known.after,
            known.collective,
            known.silent,
            None if answered else self._memo.of(func),
            answered,
            self.balanced.observers.get(func),
            cuda.ON_HOST.get(func) if self.gpu else None,
        )

    def _call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        assert isinstance(op, FakeHandling)
        pinned = kwargs.pop("pin_memory", False)
        if op.answered:
            out, work = super()._call(op, func, args, kwargs)
            return out, Work() if self.all_ignored(args) else work
        key = None if op.calls is None else call_key(args, kwargs)
        known = None if op.calls is None or key is None else op.calls.get(key, args)
        if known is None:
            known = super()._call(op, func, args, kwargs)
            if op.calls is not None and key is not None:
                op.calls.keep(key, args, *known)
        if func is _COPY and self.is_ignored(args[0]) != self.is_ignored(args[1]):
            known = known[0], Work(nbytes=args[0].nbytes)  # over the bus, by a copy engine
        elif known[1].kernels and self.all_ignored(args):
            known = known[0], Work()  # the host computes it
        out = known[0]
        self.values.follow(func, args, kwargs, out)
        if op.observe is not None:
            op.observe(args, out)
        if op.on_host is not None:
            for index in op.on_host(args):
                self.ignore(out[index])
        elif self.gpu and isinstance(out, Tensor) and (pinned or out.dim() == 0) and self._on_host(func, args, pinned):
            self.ignore(out)
        return known

    def _collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.streams.asynchronous() if is_asynchronous(func, args) else self.stream

    def _on_host(self, func: Any, args: tuple[Any, ...], pinned: bool) -> bool:
        return pinned or func is _LIFT or self.all_ignored(args)

    def _faked(self, value: Any) -> Any:
        if isinstance(value, Tensor) and type(value) is not FakeTensor:
            known = self._fakes.get(id(value))
            if known is None:
                assert self.fake_mode is not None
                fake = self.fake_mode.from_tensor(value) if value.device == CPU else self.fakes.like(value)
                self.values.keep(fake, value)
                known = self._fakes[id(value)] = value, fake
            return known[1]
        if isinstance(value, (tuple, list)):
            return type(value)(self._faked(item) for item in value)
        return value

    def let_go(self) -> None:
        """Take fake gradients off the real tensors that the step closed over."""
        for real, _ in self._fakes.values():
            if type(real.grad) is FakeTensor:
                real.grad = None
        self._fakes.clear()
