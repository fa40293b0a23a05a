"""The record of a script's step: what it makes on the card, or moves there, is fake, on the host real.

A script makes and indexes its data between steps, and decides by numbers of the host; these stay what they are. On the
card only shapes are known. A tensor that the script brings to the card has a fake there, with the values of small
integer tensors (fake/values.py). In a step on the CPU there is no other device: ops on real tensors run and are
recorded, and an op that meets a fake gives fakes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ckpt_ft.compat.tensors import FakeTensor, accumulated_hooks, gradient_hooks, swap_contents
from ckpt_ft.memory.cost.op_work import Work, measure, tensors
from ckpt_ft.memory.distributed.streams import Streams
from ckpt_ft.memory.fake.dispatcher import FakeOps
from ckpt_ft.memory.fake.faked_model import CPU, Fakes
from ckpt_ft.memory.fake.patches import Interrupts
from ckpt_ft.memory.fake.values import attach
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record.dispatch import Handling, wraps
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.record.tracker import RealOps, Tracker
from ckpt_ft.memory.rules.fake_kernels import of_values

aten = torch.ops.aten
# Ops on tensors of the card that also take tensors of the host.
_TAKES_HOST = {
    aten.copy_.default,
    aten.index.Tensor,
    aten.index_put.default,
    aten.index_put_.default,
    aten._index_put_impl_.default,
}
_MAKES = {
    aten.empty.memory_format, aten.empty_strided.default, aten.zeros.default, aten.ones.default, aten.full.default,
    aten.randn.default, aten.rand.default,
}  # fmt: skip
_SMALL = 1024  # elements, whose numbers a script may decide by
_FLOPS, _MOVED, _ALIVE, _SECONDS = 50 * 10**9, 20 << 30, 2 << 30, 20  # the most that steps compute; bytes


def has_fakes(values: Any) -> bool:
    """Whether there is a fake tensor among an op's arguments."""
    for value in values:  # noqa: SIM110 (once for every op: a generator is slower)
        if type(value) is FakeTensor or (isinstance(value, (tuple, list)) and has_fakes(value)):
            return True
    return False


def on_card(device: Any) -> bool:
    """Whether `device`, as an op or a user names it, is the card."""
    return device is not None and (isinstance(device, int) or torch.device(device).type == "cuda")


class ScriptOps(FakeOps):
    """Computes the ops of a script that have a fake tensor among their arguments, or make one on the card."""

    def __init__(self, recorder: Recorder, fakes: Fakes, gpu: GPU | None, streams: Streams) -> None:
        super().__init__(recorder, fakes, gpu, Interrupts(), streams)
        self._met: WeakValueDictionary[int, Tensor] = WeakValueDictionary()  # fakes of real tensors, by their id
        self.stepping = False  # the first step has begun
        self.depth = 0  # of ops that are being computed: `FakeTensor.device` is then PyTorch's own

    def prepare(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if self.stays_real(func, args, kwargs):
            return args, kwargs
        if "out" in kwargs:
            kwargs = {**kwargs, "out": self.faked(kwargs["out"])}
        if self.gpu is not None:
            for tensor in tensors(args):  # other ops would fail: C++ code of PyTorch has made them on the card
                if type(tensor) is not FakeTensor and (tensor.dim() == 0 or func in _TAKES_HOST):
                    self.recorder.ignore(self.faked(tensor))
        return super().prepare(func, args, kwargs)

    def stays_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether an op of a step on the CPU has only real tensors, and makes no large one of unknown numbers."""
        if self.gpu is not None or has_fakes(args):
            return False
        if func not in _MAKES:
            return True
        dtype = kwargs.get("dtype") or torch.get_default_dtype()
        return not dtype.is_floating_point or math.prod(args[0]) <= _SMALL

    def faked(self, value: Any) -> Any:
        """`value` with fake tensors in place of real ones; a fake keeps its real tensor alive, which is counted."""
        if not isinstance(value, Tensor) or type(value) is FakeTensor:
            return type(value)(map(self.faked, value)) if isinstance(value, (tuple, list)) else value
        fake = self._met.get(id(value))
        if fake is None:
            fake = self.fakes.of(value if value.is_leaf else value.detach())  # PyTorch fakes no history
            if value.dim() == 0:  # a number by which the script, or another rank, may decide
                attach(fake, value)
            else:
                self.values.keep(fake, value)
            self._met[id(value)] = fake
            fake.__dict__["_ckpt_ft_real"] = value
            if self.gpu is None:
                if self.recorder.index_of(value) is None:
                    self.recorder.follow(value, "activations", "")
                self.recorder.ignore(fake)
        return fake

    def call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        if self.stays_real(func, args, kwargs):
            out = func(*args, **kwargs)
            return out, measure(func, args, kwargs, out)
        self.depth += 1
        try:
            with self.fakes.mode:
                return super().call(op, func, args, kwargs)
        finally:
            self.depth -= 1

    def placed(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result of an op that names the device on which its result lies, such as the copy of a batch to the card.

        A copy on the host of numbers that are known is a real tensor.
        """
        card = on_card(kwargs["device"])
        source = next(iter(tensors(args)), None)
        known = source if type(source) is not FakeTensor else self.values.of(source)
        plain = {**kwargs, "device": CPU}
        plain.pop("pin_memory", None)
        if not card and known is not None and func is aten._to_copy.default:
            return func(known, **plain)
        self.depth += 1
        try:
            with self.fakes.mode:
                given = self.faked(args)
                if func is aten._to_copy.default:  # the fake kernel returns its argument: the device is the same
                    layout = plain.get("memory_format") or torch.preserve_format
                    kind = {"dtype": plain.get("dtype"), "memory_format": layout}
                    out = of_values(aten.empty_like.default, given, kind)
                else:
                    out = func(*given, **plain)
                self.values.follow(func, given, plain, out)
        finally:
            self.depth -= 1
        for tensor in tensors((out,)):
            self.recorder.follow(tensor, "activations", str(func), on_host="" if card else "pageable")
        return out

    def put(self, tensor: Tensor) -> None:
        """Turn `tensor` into a fake on the device, or on the host of a card, in place: its owners need not know.

        Its weights are dropped. Gradient hooks stay.
        """
        fake = self.fakes.parameter(tensor) if isinstance(tensor, nn.Parameter) else self.fakes.like(tensor)
        if not isinstance(tensor, nn.Parameter):
            self.values.keep(fake, tensor)
            fake.requires_grad_(tensor.requires_grad)
        hooks = gradient_hooks(tensor), accumulated_hooks(tensor)
        for found, register in zip(hooks, (fake.register_hook, fake.register_post_accumulate_grad_hook), strict=True):
            for hook in (found or {}).values():
                register(hook)  # before the exchange: a tensor that had hooks does not tell autograd of more
        swap(tensor, fake)
        if self.gpu is not None:
            self.recorder.ignore(tensor)


class SmallSteps(RealOps):
    """Computes the steps of a script on the CPU with their numbers; `give_up` is called if that is much work."""

    source = "predicted"
    stepping = True

    def __init__(self, recorder: Recorder, give_up: Callable[[], None]) -> None:
        super().__init__(recorder)
        self._give_up, self._until = give_up, time.process_time() + _SECONDS
        self._flops = self._moved = 0

    def call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        out, work = super().call(op, func, args, kwargs)
        self._flops += work.flops
        self._moved += work.nbytes
        much = self._flops > _FLOPS or self._moved > _MOVED or self.recorder.allocated > _ALIVE
        if much or time.process_time() > self._until:
            self._give_up()
        return out, work


def swap(one: Any, other: Any) -> None:
    """Exchange the contents of two tensors, which keep their identities.

    As `torch.utils.swap_tensors`, which refuses tensors with weak references; an LSTM has such to its weights.
    """
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    for name in getattr(type(one), "__slots__", ()):  # a DTensor's shard
        mine, its = getattr(one, name), getattr(other, name)
        setattr(one, name, its)
        setattr(other, name, mine)
    swap_contents(one, other)


class ScriptTracker(Tracker):
    """Records a script, from its start, on `gpu` or, if None, on the CPU."""

    dispatcher: ScriptOps

    def __init__(self, make_ops: Callable[[Recorder], ScriptOps], gpu: GPU | None) -> None:
        super().__init__(dispatcher=make_ops)
        self.gpu = gpu

    def compute(self, give_up: Callable[[], None]) -> None:
        """Run the steps, from here on, with their numbers."""
        self.dispatcher = SmallSteps(self.recorder, give_up)  # type: ignore[assignment]
        self._handled.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        fakes = has_fakes(args) or has_fakes(kwargs.values())
        if self.gpu is None and not self.dispatcher.stepping and not fakes:
            return func(*args, **kwargs)  # data that the script makes before its first step
        if self.gpu is None or wraps(types):
            return super().__torch_dispatch__(func, types, args, kwargs)
        device = kwargs.get("device")
        if device is not None and (on_card(device) != (fakes and not self.recorder.all_on_host(args))):
            return self.dispatcher.placed(func, args, kwargs) if fakes or on_card(device) else func(*args, **kwargs)
        if not fakes and not on_card(device):
            return func(*args, **kwargs)
        return super().__torch_dispatch__(func, types, args, kwargs)
