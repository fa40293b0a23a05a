"""Tracker: records a StepTrace while tensors, real or fake, are dispatched.

A dispatch mode sees every operator below autograd. Each storage that an operator returns is followed until it dies
(storages.py), and told where in the step it was made (position.py). Nothing is hooked onto tensors or gradients, so
that what autograd keeps and steals stays as it is without the tracker.

What dispatch cannot see it does not count: scratch that a kernel allocates inside (but for scratch.KERNELS), and the
states of random generators that a checkpoint keeps (5,056 bytes each on the CPU).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch.optim.optimizer import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .accumulation import IN_PLACE, is_in_place, owners_of_a_sum
from .dispatched import handed_on, in_parts, is_composite
from .events import EMPTIED, Op
from .growing import Growing
from .opinfo import After, Handling, Rule, Work, collective_bytes, describe, measure, tensors, wraps
from .scratch import measured
from .storages import Storages
from .trace import StepTrace
from .uncompiled import leave_uncompiled

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ckpt_ft.memory.gpus import GPU

_LIFT = torch.ops.aten.lift_fresh.default


def _apart(wait: Callable[..., bool]) -> Callable[..., bool]:
    """Waiting for a collective, gloo copies out of a buffer of its own, which is none of the step's."""

    def waited(work: Any, *args: Any, **kwargs: Any) -> bool:
        with _disable_current_modes():
            return wait(work, *args, **kwargs)

    return waited


class Tracker(Storages, TorchDispatchMode):
    """Record what happens inside `with tracker:`; ask `trace()` for it, there or after.

    Args:
        model: names the modules and marks parameters, buffers and gradients; a module outside it counts as its caller.
        optimizer: marks state that exists already; new state of any torch optimizer is found when it steps.
        limit: bytes; the allocation that would pass it raises torch.OutOfMemoryError, as a card of that size would.
        rules: what to call instead of an op, by overload (rules/cuda.py); real kernels are asked for their scratch.
        after: what to call once an op's results are recorded, by overload (rules/cuda.py).
        ops: record `Op`s too; a long real run has no use for them.
    """

    source = "measured"  # what the record is called
    fake_mode: FakeTensorMode | None = None  # the one that the step runs under, if it does

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        limit: int | None = None,
        rules: Mapping[Any, Rule] | None = None,
        after: Mapping[Any, After] | None = None,
        ops: bool = True,
    ) -> None:
        super().__init__(limit)
        owners_of_a_sum()
        kernels, scratch = measured()
        self.record_ops = ops
        self.rules = kernels if rules is None else rules
        self.after = scratch if after is None else after
        self.notes: list[str] = []
        self._handled: dict[Any, Handling] = {}  # by overload
        self._model: nn.Module | None = None
        self._owners: dict[int, str] = {}  # of parameters, by id: the module that has it
        if model is not None:
            self.add_model(model)
        if optimizer is not None:
            self._mark_state(optimizer)

    def _clear(self) -> None:
        super()._clear()
        self._ops: list[Op] = []
        self._marks: list[tuple[int, str]] = []  # how many events came before, and what begins there
        self._between: tuple[int, int, int, int] | None = None  # where what may be the optimizer's begins

    # -- what the caller says ---------------------------------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Names of `model`'s modules from here on; its tensors are resident."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self.add_resident(model.parameters(), "parameters")
        self.add_resident(model.buffers(), "buffers")
        parameters = dict(model.named_parameters())
        self._owners = {id(tensor): name.rpartition(".")[0] for name, tensor in parameters.items()}
        for name, tensor in [*parameters.items(), *model.named_buffers()]:
            self._own(tensor, name.rpartition(".")[0])
        self._mark_gradients()

    def start_step(self) -> None:
        """Open a step: the views of a trace are of the last one opened."""
        self._end_backward()
        self._marks.append((len(self._events), "step"))
        self._phase, self._recompute, self._between = "forward", False, None
        self._marks.append((len(self._events), "forward"))

    def after_backward(self) -> None:
        """The record stands as when a backward has ended."""
        self._phase, self._recompute, self._between = "backward", False, None
        self._zone += 1

    def empty_cache(self) -> None:
        """Record that torch.cuda.empty_cache() is called here."""
        self._marks.append((len(self._events), EMPTIED))

    def trace(self, device: str = "cpu", gpu: GPU | None = None) -> StepTrace:
        """What was recorded so far."""
        self._end_backward()
        late = len(self._residents)  # found on sight, yet there before the first event
        ops = [op.later(late) for op in self._ops] if late else list(self._ops)
        marks = [(at + late, name) for at, name in self._marks]
        storages = [storage.copy() for storage in self._storages]
        events = self._residents + self._events
        return StepTrace(device, storages, events, ops, marks, list(self.notes), gpu, source=self.source)

    @property
    def growing(self) -> Growing:
        """The record itself, as long as it grows."""
        return Growing(self._ops, self._storages, self._events, self._marks)

    def synchronise(self, what: str, number: int, stream: str) -> None:
        """Record what happens about event `number`: "record" in `stream`, or a "wait" of `stream` for it."""
        if self.record_ops:
            self._ops.append(Op(f"event.{what}", 0, 0, "", self._phase, str(number), len(self._events), 0, stream))

    def await_device(self, device: Any = None) -> None:
        """Record that the host waits until the device has done all that it was given."""
        self.synchronise("await", 0, "")

    # -- where the step moves on (see Position) ----------------------------------------------------------------------

    def _begin(self, phase: str) -> None:
        """Mark where a phase begins.

        What comes between a backward and an optimizer step, with no module called (a loss read, gradients scaled or
        clipped by hand), looks like a forward until the optimizer steps: then it has been the optimizer's all along.
        """
        self._end_backward()
        at = len(self._node_starts), len(self._marks), len(self._storages), len(self._ops)
        if phase == "optimizer" and self._between is not None and self._between[0] == at[0]:
            _, mark, storage, op = self._between
            self._marks[mark] = self._marks[mark][0], phase
            for made in self._storages[storage:]:
                if made.phase == "forward":
                    made.phase = phase
                    made.category = "temporary" if made.category == "activations" else made.category
            for done in self._ops[op:]:
                done.phase = phase
        else:
            self._marks.append((len(self._events), phase))
        outside = phase == "forward" and self._phase == "backward" and not self._stack
        self._between = at if outside else None

    def _end_backward(self) -> None:
        """Tell gradients from what was temporary where no optimizer comes after backward."""
        if self._phase == "backward":
            self._mark_gradients()

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        self._mark_gradients(p for group in optimizer.param_groups for p in group["params"])

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        self._mark_state(optimizer)

    def _mark_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Those of `parameters`; by default of the model's as they are now (FSDP2 puts sharded ones there)."""
        if parameters is None:
            parameters = () if self._model is None else self._model.parameters()
        for parameter in parameters:
            if parameter.grad is not None:
                self._mark(parameter.grad, "gradients", self._owners.get(id(parameter), ""))

    def _mark_state(self, optimizer: Optimizer) -> None:
        for parameter, state in optimizer.state.items():
            for tensor in tensors((list(state.values()),)):
                self._mark(tensor, "optimizer", self._owners.get(id(parameter), ""))

    # -- the mode ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        leave_uncompiled()
        self._add_hooks()
        self._patches: list[Any] = [patch.object(torch.UntypedStorage, "resize_", self._resize)]
        if torch.distributed.is_available():
            self._patches.append(patch.object(torch.distributed.Work, "wait", _apart(torch.distributed.Work.wait)))
        for one in self._patches:
            one.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        for one in self._patches:
            one.stop()
        self._remove_hooks()
        self._end_backward()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if wraps(types):
            return NotImplemented  # what a DTensor does to its shard comes by here in its turn
        if self.fake_mode is None and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor works out shapes on fake tensors of its own
        if torch.is_inference_mode_enabled() and is_composite(func):
            return in_parts(self, func, args, kwargs)
        op = self._handled.get(func)
        if op is None:
            op = self._handled[func] = self._handling(func)
        if op.silent:
            return func(*args, **kwargs)
        self._locate()
        live = self._live
        given = (*args, kwargs["out"]) if "out" in kwargs else args if func is not _LIFT else ()
        for tensor in tensors(given):  # torch.tensor(...) puts one into _LIFT and gets it out
            if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in live:
                self._meet(tensor)
        if op.collective:
            self._mark_sent(tensors(args))
        at = len(self._events)
        out, work = self._call(op, func, args, kwargs)
        if self._phase == "backward" and op.name in IN_PLACE and is_in_place(func, args, self.made_by):
            self._reuse(args[0], out)
        module = self._module()
        category = "activations" if self._phase == "forward" or self._recompute else "temporary"
        if isinstance(out, torch.Tensor):
            self._follow(out, category, op.name, module)
        else:
            for tensor in tensors((out,)):
                self._follow(tensor, category, op.name, module)
        if op.after is not None:
            op.after(self, func, args, kwargs, out)
        if self.record_ops:
            here = self._phase, module
            stream, wire = self.stream, 0
            if op.collective:
                wire = collective_bytes(func, args)
                stream = self._collective_stream(func, args)
            flops, nbytes, dtype, kernels, shape = work
            around = "mode" if handed_on() else "hooks" if self._recompute else ""
            self._ops.append(Op(op.name, flops, nbytes, dtype, *here, at, kernels, stream, wire, shape, around))
        return out

    def _handling(self, func: Any) -> Handling:
        """What to do about an operator."""
        name, kind = describe(func)[0], func.namespace
        return Handling(name, self.rules.get(func), self.after.get(func), kind == "c10d", kind == "profiler")

    def _call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        """The op's result and what it asks of a GPU."""
        out = func(*args, **kwargs) if op.rule is None else op.rule(func, args, kwargs)
        return out, measure(func, args, kwargs, out) if self.record_ops else Work()

    def _collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        """The stream that a collective runs on."""
        return self.stream

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code runs here, and the wrapper that guards against it costs as much as an op

    def _meet(self, tensor: torch.Tensor) -> None:
        """A tensor made elsewhere: it was there all along if this is the first step, else it came just now.

        A second model's parameters, such as those of a reference in preference training, come this way.
        """
        first = sum(name == "step" for _, name in self._marks) <= 1
        category = "parameters" if isinstance(tensor, nn.Parameter) else "activations"
        self._follow(tensor, category, "", resident=first)
