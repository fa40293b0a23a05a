"""FakeOps: computes the ops of a step that runs on fake tensors.

The memo keeps what ops return for arguments of given shapes, so that a repeated op costs microseconds. FakeTensorMode
has a cache of its own, which spends most of its time on symbolic shapes and several devices. A trace has one device
and no symbols. What an op returns (new tensors, views of an argument, or the argument itself) depends only on its
arguments' shapes, strides and dtypes, and on the default dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import FakeTensor, is_traceable_wrapper_subclass, schema_of, storage_pointer, tree_map_only
from ckpt_ft.memory.cost.op_work import Work, is_asynchronous, is_wait, tensors
from ckpt_ft.memory.distributed.streams import Streams
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.memory.record import cpu_kernels
from ckpt_ft.memory.record.dispatch import Handling, Rule, Uncacheable, call_key
from ckpt_ft.memory.record.recorder import Recorder
from ckpt_ft.memory.record.tracker import ASKS_DEVICE, RealOps
from ckpt_ft.memory.rules import cuda, fake_kernels

from .data_dependent_ops import DataDependentOps
from .faked_model import CPU, Fakes, are_fakes
from .patches import Interrupts
from .values import Values

_CHANGES_SHAPE = {"aten::set_", "aten::resize_", "aten::resize_as_", "aten::lift_fresh", "aten::_local_scalar_dense"}


_LARGEST = 100_000  # cached calls for one kind of device, about 100 MB
_Calls = dict[Any, tuple[Any, Any]]  # key -> recipe, and the `more` of `keep`
# By compute capability and whether fp32 may be rounded, for each op. Shared, as a plan traces one model many times.
_shared: dict[tuple[int, bool, bool], dict[Any, _Calls]] = {}


def forget() -> None:
    """Empty the cache, as in a new process."""
    _shared.clear()


class Memo:
    """Results of fake ops by op and arguments, shared by all traces for one compute capability (0: the CPU)."""

    def __init__(self, fakes: Fakes, arch: int) -> None:
        self.fakes = fakes
        rounds = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        self._known = _shared.setdefault((arch, *rounds), {})
        if sum(map(len, self._known.values())) > _LARGEST:
            self._known.clear()

    def of(self, func: Any) -> Remembered | None:
        """The cached calls of one op; None if its result depends on more than shapes."""
        schema = schema_of(func)
        into_given = any(argument.is_out for argument in schema.arguments)  # `out=` is no new tensor
        if into_given or schema.name in _CHANGES_SHAPE or torch.Tag.inplace_view in func.tags:
            return None
        return Remembered(self.fakes, self._known.setdefault(func, {}))


class Remembered:
    def __init__(self, fakes: Fakes, known: _Calls) -> None:
        self._fakes, self._known = fakes, known

    def get(self, key: Any, args: tuple[Any, ...]) -> tuple[Any, Any] | None:
        """New results like those of a cached call, and the `more` that was kept with it; None if the call is new."""
        known = self._known.get(key)
        if known is None:
            return None
        return self._make(known[0], args), known[1]

    def keep(self, key: Any, args: tuple[Any, ...], out: Any, more: Any) -> None:
        """Cache how to make `out` again; does nothing if the result depends on more than shapes."""
        with suppress(Uncacheable):
            self._known[key] = _recipe(out, args, _homes(args)), more

    def _make(self, recipe: Any, args: tuple[Any, ...]) -> Any:
        kind = recipe[0]
        if kind == "tensor":
            _, source, shape, stride, offset, dtype = recipe
            if source is None:
                return self._fakes.new(shape, stride, dtype)
            return self._fakes.view(args[source], shape, stride, offset, dtype)
        if kind == "argument":
            return args[recipe[1]]
        if kind == "sequence":
            return recipe[1]([self._make(item, args) for item in recipe[2]])
        return recipe[1]


def _homes(args: tuple[Any, ...]) -> dict[int, int | None]:
    """For each storage among the arguments, by address, the index of the argument that has it; None within a list."""
    homes: dict[int, int | None] = {}
    for at, value in enumerate(args):
        for item, place in [(value, at)] if isinstance(value, Tensor) else [(item, None) for item in _listed(value)]:
            if type(item) is FakeTensor:
                homes.setdefault(storage_pointer(item.untyped_storage()), place)
    return homes


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else ()


def _recipe(out: Any, args: tuple[Any, ...], homes: dict[int, int | None]) -> Any:
    if out is None or type(out) is int:  # attention returns lengths of sequences besides its output
        return "plain", out
    if isinstance(out, (tuple, list)):
        return "sequence", type(out), [_recipe(item, args, homes) for item in out]
    if (
        type(out) is not FakeTensor
        or out.constant is not None
        or out.fake_device != CPU
        or out.layout is not torch.strided
    ):
        raise Uncacheable
    storage = out.untyped_storage()
    if storage_pointer(storage) in homes:
        at = homes[storage_pointer(storage)]
        if at is None:
            raise Uncacheable
        same = next((place for place in range(at, len(args)) if args[place] is out), None)
        if same is not None:
            return "argument", same
        return "tensor", at, out.shape, out.stride(), out.storage_offset(), out.dtype
    span = 1 + sum((n - 1) * step for n, step in zip(out.shape, out.stride(), strict=True)) if out.numel() else 0
    if out.storage_offset() or storage.nbytes() != span * out.itemsize or out.is_conj() or out.is_neg():
        raise Uncacheable
    return "tensor", None, out.shape, out.stride(), 0, out.dtype


aten = torch.ops.aten
_META = torch.device("meta")
_COPY, _LIFT = aten.copy_.default, aten.lift_fresh.default


class FakeOps(RealOps):
    """Dispatcher of fake tensors. The first of these that applies computes an op:

    1. Known values, or a fixed assumption, if the result depends on data (values.py, data_dependent_ops.py).
    2. The memo, if the same op was called on the same shapes before.
    3. A rule, if CUDA's result or a real kernel's differs from that of the fake CPU kernel (rules/).
    4. PyTorch's fake kernel.

    Real tensors are replaced by fake ones, and requests for other devices are answered on the CPU. In a trace for a
    GPU, pinned memory and what kernels make of it are host memory. 0-dim tensors made from Python numbers (Adam's step
    counts) are left out.

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
        capability = gpu.capability if gpu else 0
        recorder.splits_host = gpu is not None
        rules, self._after = cpu_kernels.FAKE_RULES, cpu_kernels.FAKE_AFTER
        if gpu:
            rules, self._after = cuda.RULES, cuda.extra_allocations(capability)
        self._rules: dict[Any, Rule] = {**fake_kernels.RULES, **self._by_data.answers, **rules}
        self._memo = Memo(fakes, capability)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors met in the step, by id

    def prepare(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        # an exception in a call for the device from torch's C++ would abort the process
        if self.interrupts.waiting and func is not ASKS_DEVICE:
            self.interrupts.deliver()
        if func is not _LIFT and not are_fakes(args):
            args = self.faked(args)
        device = kwargs.get("device")
        if device is not None and torch.device(device) not in (CPU, _META):
            kwargs = {**kwargs, "device": CPU}
        return args, kwargs

    def handling(self, func: Any) -> Handling:
        if func is ASKS_DEVICE:
            return Handling(str(func), lambda func, args, kwargs: args[0].fake_device, silent=True)
        op = super().handling(func)
        op.answered = func in self._by_data.answers
        op.calls = None if op.answered else self._memo.of(func)
        op.observe = self._by_data.observers.get(func)
        op.on_host = cuda.ON_HOST.get(func) if self.gpu else None
        return op

    def call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        pinned = kwargs.pop("pin_memory", False)
        if is_wait(func):
            self.streams.await_collectives()
        if op.answered:
            out, work = super().call(op, func, args, kwargs)
            return out, Work() if self.recorder.all_on_host(args) else work
        key = None if op.calls is None else call_key(args, kwargs)
        known = None if op.calls is None or key is None else op.calls.get(key, args)
        if known is None:
            known = super().call(op, func, args, kwargs)
            if op.calls is not None and key is not None:
                op.calls.keep(key, args, *known)
        recorder = self.recorder
        out, work = known
        if func is _COPY and recorder.is_on_host(args[0]) != recorder.is_on_host(args[1]):
            known = out, Work(nbytes=args[0].nbytes)  # over the bus, by a copy engine
        elif work.kernels and recorder.all_on_host(args):
            sizable = any(tensor.dim() for tensor in tensors(args))
            known = out, Work(nbytes=work.nbytes, on_host=True) if sizable else Work()
            for tensor in tensors((out,)) if self.gpu else ():
                if tensor.dim():
                    recorder.follow(tensor, "temporary", op.name, on_host="pageable")
        self.values.follow(func, args, kwargs, out)
        if op.observe is not None:
            op.observe(args, out)
        if op.on_host is not None:
            for index in op.on_host(args):
                recorder.ignore(out[index])
        elif self.gpu and isinstance(out, Tensor):
            if pinned:
                recorder.follow(out, "activations", op.name, on_host="pinned")
            elif out.dim() == 0 and (func is _LIFT or recorder.all_on_host(args)):
                recorder.ignore(out)
        return known

    def collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.streams.asynchronous() if is_asynchronous(func, args) else super().collective_stream(func, args)

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

    def off_meta(self, value: Any) -> Any:
        """`value` with fakes in place of tensors on "meta"; of one that requires a gradient, a fake view."""
        return tree_map_only(Tensor, self._off_meta, value)

    def _off_meta(self, tensor: Tensor) -> Tensor:
        if type(tensor) is FakeTensor or not tensor.is_meta or is_traceable_wrapper_subclass(tensor):
            return tensor
        return tensor.view_as(tensor) if tensor.requires_grad else self.faked(tensor)

    def forget_real_tensors(self) -> None:
        """Remove the fake gradients of real tensors that the step closed over."""
        for real, _ in self._fakes.values():
            if type(real.grad) is FakeTensor:
                real.grad = None
        self._fakes.clear()
