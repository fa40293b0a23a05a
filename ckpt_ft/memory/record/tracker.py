"""Tracker: records a StepTrace while tensors, real or fake, are dispatched.

A dispatch mode sees every operator below autograd; each storage that an operator returns is followed by a weak
reference until it dies. Nothing is hooked onto tensors or gradients, so that what autograd keeps and steals stays as
it is without the tracker: the phase is read from autograd's graph task, and a backward op belongs to the module whose
forward made its node, found by the node's sequence number (torch/csrc/autograd/function.h).

What dispatch cannot see it does not count: scratch that a kernel allocates inside (but for scratch.KERNELS), sparse
tensors, and the states of random generators that a checkpoint keeps (5,056 bytes each on the CPU).
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from threading import get_ident
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch
from torch import nn
from torch._C import _get_dispatch_mode, _TorchDispatchModeKey
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass_type

from ckpt_ft.units import format_bytes

from .accumulation import ADD, adds_in_place, owners_of_a_sum
from .events import Op, Storage
from .opinfo import After, Rule, collective_bytes, describe, measure, plain, tensors
from .scratch import measured
from .trace import StepTrace

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from ckpt_ft.memory.gpus import GPU

_LIFT = torch.ops.aten.lift_fresh.default


class _Seen(weakref.ref):
    """A followed storage: its address, its index in the record, and the zone that it was allocated in."""

    __slots__ = ("address", "index", "zone")
    address: int
    index: int
    zone: int


class Tracker(TorchDispatchMode):
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
    stream = ""  # CUDA stream that is issued to, "" for the one that computes

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
        super().__init__()
        owners_of_a_sum()
        kernels, scratch = measured()
        self.limit, self.record_ops = limit, ops
        self.rules = kernels if rules is None else rules
        self.after = scratch if after is None else after
        self.allocated = 0  # bytes, unrounded, right now
        self.peak = 0  # the most that `allocated` has been since `restart`
        self.notes: list[str] = []
        self._live: dict[int, _Seen] = {}
        self._stack: list[str] = []  # modules whose forward is running
        self._node_starts: list[int] = []  # from this sequence number on, nodes belong to ...
        self._node_modules: list[str] = []  # ... this module
        self._kept_nodes = 0
        self._phase, self._recompute, self._stepping = "forward", False, False
        self._zone = 0  # counts changes of phase: what dies in the zone it was made in was only temporary
        self._between: tuple[int, int, int, int] | None = None  # where what may be the optimizer's begins
        self._clear()
        self._names: dict[int, str] = {}
        self._model: nn.Module | None = None
        if model is not None:
            self.add_model(model)
        if optimizer is not None:
            self._mark_state(optimizer)

    # -- what the caller says ---------------------------------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Names of `model`'s modules from here on; its tensors are resident."""
        self._names = {id(module): name for name, module in model.named_modules()}
        self._model = model
        self.add_resident(model.parameters(), "parameters")
        self.add_resident(model.buffers(), "buffers")
        self._mark_gradients()

    def add_resident(self, values: Iterable[torch.Tensor], category: str) -> None:
        """Follow tensors that exist already."""
        for value in values:
            for tensor in plain(value):
                seen = self._live.get(tensor.untyped_storage()._cdata)
                if seen is not None and seen.index >= 0:
                    self._storages[seen.index].category = category
                else:
                    self._follow(tensor, category, "", resident=True)

    def start_step(self) -> None:
        """Open a step: the views of a trace are of the last one opened."""
        self._end_backward()
        self._marks.append((len(self._events), "step"))
        self._phase, self._recompute, self._between = "forward", False, None
        self._marks.append((len(self._events), "forward"))

    def restart(self) -> None:
        """Forget the past; what lives becomes resident. Keeps the record of a long run short."""
        live, storages = [seen for seen in self._live.values() if seen.index >= 0], self._storages
        self._clear()
        for seen in live:
            storage = storages[seen.index]
            seen.index = len(self._storages)
            self._storages.append(replace(storage))
            self._residents.append(seen.index)
        self.peak = self.allocated

    def trace(self, device: str = "cpu", gpu: GPU | None = None) -> StepTrace:
        """What was recorded so far."""
        self._end_backward()
        late = len(self._residents)  # found on sight, yet there before the first event
        ops = [replace(op, at=op.at + late) for op in self._ops] if late else list(self._ops)
        marks = [(at + late, name) for at, name in self._marks]
        storages = [replace(storage) for storage in self._storages]
        events = self._residents + self._events
        return StepTrace(device, storages, events, ops, marks, list(self.notes), gpu, source=self.source)

    def allocate(self, nbytes: int, category: str, op: str) -> int:
        """Record memory that no tensor holds (a library's workspace); returns the index to `free` it by."""
        index = self._record(nbytes, category, op)
        self._events.append(index)
        return index

    def free(self, index: int) -> None:
        """Record the end of what `allocate` recorded."""
        self._events.append(~index)
        self.allocated -= self._storages[index].nbytes

    def scratch(self, nbytes: int, op: str) -> None:
        """Record memory that a kernel takes and gives back while it runs."""
        self.free(self.allocate(nbytes, "temporary", op))

    def _resized(self, storage: torch.UntypedStorage) -> None:
        """Record that a storage was given other bytes, or none: so FSDP2 frees and refills gathered parameters."""
        seen = self._live.get(storage._cdata)
        op = "aten.empty.memory_format"
        if seen is not None and seen.index >= 0:
            op = self._storages[seen.index].op or op
            self._freed(seen)
        if storage.nbytes():
            self._locate()
            self._hold(storage, self._record(storage.nbytes(), "communication", op), self._events)

    @property
    def _resize(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        resize = torch.UntypedStorage.resize_

        def followed(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            result: torch.UntypedStorage = resize(storage, nbytes)
            self._resized(storage)
            return result

        return followed

    def synchronise(self, what: str, number: int, stream: str) -> None:
        """Record that event `number` is recorded in `stream`, or that `stream` waits for it."""
        if self.record_ops:
            self._ops.append(Op(f"event.{what}", 0, 0, "", self._phase, str(number), len(self._events), 0, stream))

    @property
    def phase(self) -> str:
        """Where the step is: "forward", "backward" or "optimizer"."""
        return self._phase

    def ignore(self, tensor: torch.Tensor) -> None:
        """Leave a tensor out of the record: it is not on the device."""
        storage = tensor.untyped_storage()
        seen = self._live[storage._cdata] = _Seen(storage, self._freed)
        seen.address, seen.index, seen.zone = storage._cdata, -1, self._zone

    def is_ignored(self, tensor: torch.Tensor) -> bool:
        seen = self._live.get(tensor.untyped_storage()._cdata)
        return seen is not None and seen.index < 0

    def made_by(self, tensor: torch.Tensor) -> str:
        """The op whose storage `tensor` lives in, "" if unknown."""
        seen = self._live.get(tensor.untyped_storage()._cdata)
        return "" if seen is None or seen.index < 0 else self._storages[seen.index].op

    # -- storages ---------------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        self._storages: list[Storage] = []
        self._events: list[int] = []
        self._residents: list[int] = []
        self._ops: list[Op] = []
        self._marks: list[tuple[int, str]] = []
        self._between = None

    def _record(self, nbytes: int, category: str, op: str) -> int:
        if self.limit is not None and self.allocated + nbytes > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {format_bytes(nbytes)} for {op or 'what is resident'}; of the "
                f"limit of {format_bytes(self.limit)} set for this run, {format_bytes(self.allocated)} are allocated"
            )
        if self.stream and category in ("activations", "temporary"):
            category = "communication"
        module, phase = (self._module(), self._phase) if op else ("", "")
        self._storages.append(Storage(nbytes, category, op, module, phase, self.stream if op else ""))
        self.allocated += nbytes
        self.peak = max(self.peak, self.allocated)
        return len(self._storages) - 1

    def _follow(self, tensor: torch.Tensor, category: str, op: str, resident: bool = False) -> None:
        if tensor.layout is not torch.strided:
            return
        storage = tensor.untyped_storage()
        address, nbytes = storage._cdata, storage.nbytes()
        seen = self._live.get(address)
        if seen is not None:
            if seen.index < 0 or self._storages[seen.index].nbytes == nbytes:
                return
            self._freed(seen)  # resized: CUDA allocates anew and frees the old
        if not nbytes:
            return
        index = self._record(nbytes, category, op)
        self._hold(storage, index, self._residents if resident else self._events)

    def _hold(self, storage: torch.UntypedStorage, index: int, events: list[int]) -> None:
        seen = self._live[storage._cdata] = _Seen(storage, self._freed)
        seen.address, seen.index, seen.zone = storage._cdata, index, self._zone
        events.append(index)

    def _reuse(self, old: torch.Tensor, new: torch.Tensor) -> None:
        """`new` is what `old` would have become in place."""
        seen, storage = self._live.pop(old.untyped_storage()._cdata), new.untyped_storage()
        again = self._live[storage._cdata] = _Seen(storage, self._freed)
        again.address, again.index, again.zone = storage._cdata, seen.index, seen.zone

    def _freed(self, seen: _Seen) -> None:
        if self._live.get(seen.address) is not seen:
            return
        del self._live[seen.address]
        if seen.index < 0:
            return
        self._locate(dispatching=False)
        storage = self._storages[seen.index]
        if storage.category == "activations" and seen.zone == self._zone:
            storage.category = "temporary"
        self._events.append(~seen.index)
        self.allocated -= storage.nbytes

    def _mark(self, value: torch.Tensor, category: str) -> None:
        for tensor in plain(value):
            seen = self._live.get(tensor.untyped_storage()._cdata)
            if seen is None:
                self._follow(tensor, category, "", resident=not self._events)
            elif seen.index >= 0:
                self._storages[seen.index].category = category

    def _mark_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Those of `parameters`; by default of the model's as they are now (FSDP2 puts sharded ones there)."""
        if parameters is None:
            parameters = () if self._model is None else self._model.parameters()
        for parameter in parameters:
            if parameter.grad is not None and parameter.grad.layout is torch.strided:
                self._mark(parameter.grad, "gradients")

    def _mark_state(self, optimizer: Optimizer) -> None:
        for tensor in tensors(list(state.values()) for state in optimizer.state.values()):
            self._mark(tensor, "optimizer")

    # -- where we are -----------------------------------------------------------------------------------------------

    def _locate(self, dispatching: bool = True) -> None:
        """Bring phase and zone up to date. A free alone never begins a forward: what backward used dies after it."""
        recompute = False
        if self._stepping:
            phase = "optimizer"
        elif torch._C._current_graph_task_id() >= 0:
            phase = "backward"
            recompute = bool(self._stack) or torch.is_grad_enabled()  # a checkpoint's forward, inside backward
        elif not self._stack and (
            self._phase == "optimizer" or (self._phase == "backward" and not torch.is_grad_enabled())
        ):
            phase = "optimizer"  # unscaling, clipping, zero_grad: around the optimizer, until a module runs
        elif dispatching:
            phase = "forward"
        else:
            return
        if phase != self._phase or recompute != self._recompute:
            if self._phase == "backward" and phase != "backward":
                self._mark_gradients()
            if phase != self._phase:
                self._begin(phase)
            self._phase, self._recompute = phase, recompute
            self._zone += 1

    def _begin(self, phase: str) -> None:
        """Mark where a phase begins.

        What comes between a backward and an optimizer step, with no module called (a loss read, gradients scaled or
        clipped by hand), looks like a forward until the optimizer steps: then it has been the optimizer's all along.
        """
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

    def _module(self) -> str:
        if self._stack:
            return self._stack[-1]
        if self._phase != "backward":
            return ""
        node = torch._C._current_autograd_node()
        if node is None:
            return ""
        number = node._sequence_nr()
        last = len(self._node_starts) - 1
        if last < 0 or number >= 2**63:  # AccumulateGrad has no place in the order
            return ""
        return self._node_modules[max(bisect_right(self._node_starts, number) - 1, 0)]

    # Module and optimizer hooks are the whole process's: those of other threads are not this record's.

    def _enter_module(self, module: nn.Module, args: Any) -> None:
        if get_ident() != self._thread:
            return
        name = self._names.get(id(module))
        self._stack.append(self._module() if name is None else name)
        self._note_node()

    def _leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        if get_ident() != self._thread:
            return
        self._stack.pop()
        self._note_node()

    def _note_node(self) -> None:
        self._node_starts.append(_get_sequence_nr())
        self._node_modules.append(self._stack[-1] if self._stack else "")

    def _before_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._locate()
        self._mark_gradients(p for group in optimizer.param_groups for p in group["params"])
        self._stepping = True
        self._locate()

    def _after_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._mark_state(optimizer)
        self._stepping = False
        # Nodes from before the last optimizer step are dead: forget whose they were.
        del self._node_starts[: self._kept_nodes], self._node_modules[: self._kept_nodes]
        self._kept_nodes = len(self._node_starts)

    # -- the mode ---------------------------------------------------------------------------------------------------

    def __enter__(self) -> Tracker:
        self._thread = get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._before_optimizer),
            register_optimizer_step_post_hook(self._after_optimizer),
        ]
        self._resizes = patch.object(torch.UntypedStorage, "resize_", self._resize)
        self._resizes.start()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._resizes.stop()
        for hook in self._hooks:
            hook.remove()
        self._end_backward()

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(is_traceable_wrapper_subclass_type(kind) for kind in types):
            return NotImplemented  # what a DTensor does to its shard comes by here in its turn
        if self.fake_mode is None and _get_dispatch_mode(_TorchDispatchModeKey.FAKE) is not None:
            return func(*args, **kwargs)  # DTensor works out shapes on fake tensors of its own
        if func.namespace == "profiler":  # record_function: no tensor, no work
            return func(*args, **kwargs)
        self._locate()
        live = self._live
        for tensor in tensors(args) if func is not _LIFT else ():  # torch.tensor(...) puts one in and gets it out
            if tensor.layout is torch.strided and tensor.untyped_storage()._cdata not in live:
                self._meet(tensor)
        at = len(self._events)
        out, (flops, nbytes, dtype, kernels) = self._call(func, args, kwargs)
        if func is ADD and self._phase == "backward" and adds_in_place(args):
            self._reuse(args[0], out)
        name = describe(func)[0]
        category = "activations" if self._phase == "forward" or self._recompute else "temporary"
        if isinstance(out, torch.Tensor):
            self._follow(out, category, name)
        else:
            for tensor in tensors((out,)):
                self._follow(tensor, category, name)
        if func in self.after:
            self.after[func](self, func, args, kwargs, out)
        if self.record_ops:
            wire = collective_bytes(func, args) if func.namespace == "c10d" else 0
            here = self._phase, self._module()
            self._ops.append(Op(name, flops, nbytes, dtype, *here, at, kernels, self.stream, wire))
        return out

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[int, int, str, int]]:
        """The op's result and what it costs (see opinfo.measure)."""
        rule = self.rules.get(func)
        out = func(*args, **kwargs) if rule is None else rule(func, args, kwargs)
        return out, measure(func, args, kwargs, out) if self.record_ops else (0, 0, "", 0)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code runs here, and the wrapper that guards against it costs as much as an op

    def _meet(self, tensor: torch.Tensor) -> None:
        """A tensor made elsewhere: it was there all along if this is the first step, else it came just now."""
        first = sum(name == "step" for _, name in self._marks) <= 1
        self._follow(tensor, "activations", "", resident=first)
