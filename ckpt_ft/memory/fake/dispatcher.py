"""FakeOps: computes the ops of a step that runs on fake tensors.

The memo keeps what ops return for arguments of given shapes, so that a repeated op costs microseconds. FakeTensorMode
has a cache of its own, which spends most of its time on symbolic shapes and several devices. A trace has one device
and no symbols. What an op returns (new tensors, views of an argument, or the argument itself) depends only on its
arguments' shapes, strides and dtypes, and on the default dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.tensors import FakeTensor, schema_of, storage_pointer
from ckpt_ft.errors import UserError
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
_Recipe = Callable[[Fakes, tuple[Any, ...]], Any]  # makes a result from the arguments
_Calls = dict[Any, tuple[_Recipe, Work]]  # by `call_key`
# By compute capability and whether fp32 may be rounded, for each op. Shared, as a plan traces one model many times.
_shared: dict[tuple[int, bool, bool], dict[Any, _Calls]] = {}


def _known_calls(arch: int) -> dict[Any, _Calls]:
    """The cached calls for a compute capability (0: the CPU), by op."""
    known = _shared.setdefault((arch, torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32), {})
    if sum(map(len, known.values())) > _LARGEST:
        known.clear()
    return known


def _depends_on_shapes(func: Any) -> bool:
    schema = schema_of(func)
    into_given = any(argument.is_out for argument in schema.arguments)  # `out=` is no new tensor
    return not (into_given or schema.name in _CHANGES_SHAPE or torch.Tag.inplace_view in func.tags)


def _homes(args: tuple[Any, ...]) -> dict[int, int | None]:
    """For each storage among the arguments, by address, the index of the argument that has it; None within a list."""
    homes: dict[int, int | None] = {}
    for at, value in enumerate(args):
        listed = [(item, None) for item in value] if isinstance(value, (list, tuple)) else [(value, at)]
        for item, place in listed:
            if type(item) is FakeTensor:
                homes.setdefault(storage_pointer(item.untyped_storage()), place)
    return homes


def _recipe(out: Any, args: tuple[Any, ...], homes: dict[int, int | None]) -> _Recipe:
    """Returns how to make the result of a call once more.

    Raises:
        Uncacheable: it depends on more than shapes.
    """
    if out is None or type(out) is int:  # attention returns lengths of sequences besides its output
        return lambda fakes, args: out
    if isinstance(out, (tuple, list)):
        kind, parts = type(out), [_recipe(item, args, homes) for item in out]
        return lambda fakes, args: kind([part(fakes, args) for part in parts])
    plain = type(out) is FakeTensor and out.fake_device == CPU and out.layout is torch.strided
    if not plain or out.constant is not None:
        raise Uncacheable
    storage, shape, stride, dtype = out.untyped_storage(), out.shape, out.stride(), out.dtype
    offset = int(out.storage_offset())
    if storage_pointer(storage) in homes:
        at = homes[storage_pointer(storage)]
        if at is None:
            raise Uncacheable
        same = next((place for place in range(at, len(args)) if args[place] is out), None)
        if same is not None:
            return lambda fakes, args: args[same]
        return lambda fakes, args: fakes.view(args[at], shape, stride, offset, dtype)
    span = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True)) if out.numel() else 0
    if offset or storage.nbytes() != span * out.itemsize or out.is_conj() or out.is_neg():
        raise Uncacheable
    return lambda fakes, args: fakes.new(shape, stride, dtype)


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
        self.values = Values()
        self.interrupts, self.streams = interrupts, streams
        self._by_data = DataDependentOps(recorder, self.values)
        capability = gpu.capability if gpu else 0
        recorder.splits_host = gpu is not None
        rules, self._after = cpu_kernels.FAKE_RULES, cpu_kernels.FAKE_AFTER
        if gpu:
            rules, self._after = cuda.RULES, cuda.extra_allocations(capability)
        self._rules: dict[Any, Rule] = {**fake_kernels.RULES, **self._by_data.answers, **rules}
        self._known = _known_calls(capability)
        self._fakes: dict[int, tuple[Tensor, Tensor]] = {}  # real tensors met in the step, by id

    def prepare(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
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
        op.calls = None if op.answered or not _depends_on_shapes(func) else self._known.setdefault(func, {})
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
        found = None if key is None else op.calls.get(key)
        if found is not None:
            out, work = found[0](self.fakes, args), found[1]
        else:
            out, work = super().call(op, func, args, kwargs)
            with suppress(Uncacheable):
                if key is not None:
                    op.calls[key] = _recipe(out, args, _homes(args)), work
        recorder = self.recorder
        if func is _COPY and recorder.is_on_host(args[0]) != recorder.is_on_host(args[1]):
            work = Work(nbytes=args[0].nbytes)  # over the bus, by a copy engine
        elif work.kernels and recorder.all_on_host(args):
            sizable = any(tensor.dim() for tensor in tensors(args))
            work = Work(nbytes=work.nbytes, on_host=True) if sizable else Work()
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
        return out, work

    def collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.streams.asynchronous() if is_asynchronous(func, args) else super().collective_stream(func, args)

    def faked(self, value: Any) -> Any:
        """`value` with fake tensors in place of real ones; each real tensor has one fake in a step."""
        if isinstance(value, Tensor) and type(value) is not FakeTensor:
            known = self._fakes.get(id(value))
            if known is None:
                torch.autocast_increment_nesting()  # below autocast, `is_autocast_enabled` says that it is off
                if torch.autocast_decrement_nesting() and value.is_meta and value.is_floating_point():
                    raise UserError(
                        f"the step computes with a tensor of {tuple(value.shape)} on 'meta', which autocast does not "
                        "cast; make it by torch.empty on the CPU, where it takes no memory until it is written"
                    )
                fake = self.fakes.of(value)
                self.values.keep(fake, value)
                known = self._fakes[id(value)] = value, fake
            return known[1]
        return type(value)(self.faked(item) for item in value) if isinstance(value, (tuple, list)) else value

    def forget_real_tensors(self) -> None:
        """Remove the fake gradients of real tensors that the step closed over."""
        for real, _ in self._fakes.values():
            if type(real.grad) is FakeTensor:
                real.grad = None
        self._fakes.clear()
