"""Tracker: a dispatch mode that records a training step, on real or on fake tensors.

It sees every op below autograd and consists of three parts: a dispatcher computes the op (with real kernels here, with
fake ones in fake/dispatcher.py), a `StepContext` tells the current phase and module, a `Recorder` records the events.

Two kinds of memory are not counted, because dispatch does not see them: scratch that a kernel allocates inside, except
by the rules of cpu_kernels.py and rules/cuda.py; and the states of random generators that a checkpoint keeps (5,056
bytes each on the CPU).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ckpt_ft.compat.patches import patched
from ckpt_ft.compat.tensors import FakeTensor, TorchDispatchMode, storage_pointer
from ckpt_ft.memory.cost.op_work import Work, collective_bytes, group_of, is_collective, measure, tensors
from ckpt_ft.memory.gpus import GPU
from ckpt_ft.policy import SWAPPED

from .cpu_kernels import real_kernels
from .dispatch import Handling, from_python_dispatch, in_parts, is_composite, leave_uncompiled, unrecorded, wraps
from .in_place_gradients import IN_PLACE, counts_of_a_sum, is_in_place
from .recorder import Recorder
from .step_context import StepContext
from .trace import StepTrace

_LIFT = torch.ops.aten.lift_fresh.default
ASKS_DEVICE = torch.ops.prim.device.default
# Makes a tensor that waits for a functional collective at its first use, and wraps its result: no storage of its own.
_WRAPS = "_c10d_functional::_wrap_tensor_autograd"


class RealOps:
    """Dispatcher of real tensors: PyTorch's own kernels, with the scratch that CPU kernels allocate inside.

    Attributes:
        source: the source of the record: "measured" or "predicted".
        takes_fakes: whether the step itself runs on fake tensors. If not, DTensor runs ops on fake tensors to find
            shapes, and they are not recorded.
    """

    source = "measured"
    takes_fakes = False

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder
        self._rules, self._after = real_kernels()

    def prepare(self, func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, kwargs

    def handling(self, func: Any) -> Handling:
        unseen = func.namespace == "profiler" or func.name() == _WRAPS
        return Handling(str(func), self._rules.get(func), self._after.get(func), is_collective(func), unseen)

    def call(self, op: Handling, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Work]:
        """The op's result, and the flops and bytes that it takes."""
        out = func(*args, **kwargs) if op.rule is None else op.rule(func, args, kwargs)
        return out, measure(func, args, kwargs, out) if self.recorder.keeps_ops else Work()

    def collective_stream(self, func: Any, args: tuple[Any, ...]) -> str:
        return self.recorder.stream


class Tracker(TorchDispatchMode):
    """Records what happens inside `with tracker:`; call `trace()` there or after.

    Args:
        model: names the modules and marks parameters, buffers and gradients; a module outside it counts as its caller.
        optimizer: marks state that exists already; new state of any torch optimizer is found when it steps.
        limit, ops: `limit` and `keeps_ops` of the Recorder.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        *,
        limit: int | None = None,
        ops: bool = True,
        dispatcher: Callable[[Recorder], RealOps] = RealOps,
    ) -> None:
        super().__init__()
        counts_of_a_sum()
        self.context = StepContext()
        self.recorder = Recorder(self.context, limit, ops)
        self.dispatcher = dispatcher(self.recorder)
        self.context.phase_listeners.append(self._phase_begins)
        self.context.before_optimizer, self.context.after_optimizer = self._before_optimizer, self._label_state
        self._handled: dict[int, Handling] = {}  # by the id of the overload
        self._model: nn.Module | None = None
        self._owners: dict[int, str] = {}  # of parameters, by id: the module that has it
        # Set while a "forward" may turn out to be the optimizer's: module calls, marks, storages and ops before it.
        self._between: tuple[int, int, int, int] | None = None
        if model is not None:
            self.add_model(model)
        if optimizer is not None:
            self._label_state(optimizer)

    # -- before and after a step ------------------------------------------------------------------------------------

    def add_model(self, model: nn.Module) -> None:
        """Names modules as in `model` from here on; its tensors are resident."""
        self.context.name_modules(model)
        self._model = model
        self.add_beside([model])
        parameters = dict(model.named_parameters())
        self._owners = {id(tensor): name.rpartition(".")[0] for name, tensor in parameters.items()}
        for name, tensor in [*parameters.items(), *model.named_buffers()]:
            self.recorder.set_owner(tensor, name.rpartition(".")[0])
        for parameter, waiting in swapped_weights(model):
            owner = self.recorder.swapped[storage_pointer(parameter.untyped_storage())] = self._owners[id(parameter)]
            self.recorder.add_resident([waiting], "parameters")
            self.recorder.put_on_host([waiting], "parameters", "pinned", packed=True)
            self.recorder.set_owner(waiting, owner)
        if spare := self.recorder.splits_host and _spare_of_swapped(model):
            self._spare = torch.empty(spare, dtype=torch.uint8)
            self.recorder.put_on_host([self._spare], "parameters", "pinned", packed=True)
        self._label_gradients()

    def add_beside(self, models: Iterable[nn.Module]) -> None:
        """Count models on the device that are not trained, such as text encoders, as resident."""
        for model in models:
            self.recorder.add_resident(model.parameters(), "parameters")
            self.recorder.add_resident(model.buffers(), "buffers")

    def start_step(self) -> None:
        """Begin a step: a trace's figures are of the last one begun."""
        self._end_backward()
        self.recorder.mark("step")
        self.enter("forward")

    def enter(self, phase: str) -> None:
        """Begin a phase that the ops do not reveal, such as the generation of text."""
        self._end_backward()
        self.context.phase, self.context.recomputing = "forward", False
        self._between = None
        self.recorder.mark(phase)

    def resume_before_update(self) -> None:
        """Continue in the optimizer's phase: what comes before the update was copied from an earlier step."""
        self.context.phase, self.context.recomputing = "optimizer", False
        self.context.zone += 1
        self._between = None

    def restart(self) -> None:
        """Forget the past: storages that are alive become residents. Keeps the record of a long run short."""
        self.recorder.restart()
        self._between = None

    def trace(self, device: str = "cpu", gpu: GPU | None = None) -> StepTrace:
        self._end_backward()
        return self.recorder.trace(device, gpu, self.dispatcher.source)

    def __enter__(self) -> Tracker:
        leave_uncompiled()
        # The context's hooks tell which module runs. A compiled module's calls them twice; once is enough.
        warnings.filterwarnings("ignore", message=r"Using `torch\.compile\(module\)` when there are global hooks")
        self.context.__enter__()
        own: dict[str, Any] = {"resize": self.recorder.resizing(torch.UntypedStorage.resize_)}
        if torch.distributed.is_available():
            own["wait_for_work"] = unrecorded(torch.distributed.Work.wait)
        self._patches = patched(**own)
        self._patches.__enter__()
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)
        self._patches.__exit__(*exception)
        self.context.__exit__(*exception)
        self._end_backward()

    # -- categories of what the model and the optimizer hold --------------------------------------------------------

    def _phase_begins(self, phase: str) -> None:
        """Mark the beginning of a phase.

        Ops between a backward and an optimizer step that call no module (reading a loss, scaling or clipping gradients
        by hand) look like a forward until the optimizer steps; then they count as the optimizer's.
        """
        self._end_backward()
        context, recorder = self.context, self.recorder
        at = context.calls_seen, len(recorder.marks), len(recorder.storages), len(recorder.ops)
        if phase == "optimizer" and self._between is not None and self._between[0] == at[0]:
            _, mark, storage, op = self._between
            recorder.marks[mark] = recorder.marks[mark][0], phase
            for made in recorder.storages[storage:]:
                if made.phase == "forward":
                    made.phase = phase
                    made.category = "temporary" if made.category == "activations" else made.category
            for done in recorder.ops[op:]:
                done.phase = phase
        else:
            recorder.mark(phase)
        self._between = at if phase == "forward" and context.phase == "backward" and not context.stack else None

    def _end_backward(self) -> None:
        """Label gradients if no optimizer step follows a backward."""
        if self.context.phase == "backward":
            self._label_gradients()

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        held = [p for group in optimizer.param_groups for p in group["params"]]
        for parameter in held:
            if self.recorder.is_on_host(parameter) and id(parameter) not in self._owners:
                self.recorder.label(parameter, "optimizer", "")  # torchao's copy of a parameter
        self._label_gradients(held)

    def _label_gradients(self, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Label gradients of `parameters`; by default of the model's current ones (FSDP2 replaces them by shards)."""
        if parameters is None and self._model is not None:
            parameters = self._model.parameters()
        for parameter in parameters or ():
            if parameter.grad is not None:
                self.recorder.label(parameter.grad, "gradients", self._owners.get(id(parameter), ""))

    def _label_state(self, optimizer: Optimizer) -> None:
        whole = getattr(optimizer, "optimizer", optimizer)  # accelerate's wrapper
        for own in (whole, *getattr(whole, "optimizer_dict", {}).values()):  # one for each parameter, updated in hooks
            in_groups = [group.get("state", {}) for group in own.param_groups]  # GrokAdamW's
            for parameter, state in chain.from_iterable(states.items() for states in (own.state, *in_groups)):
                inside = [list(vars(value).values()) for value in state.values() if hasattr(value, "project")]
                for tensor in tensors((list(state.values()), *inside)):  # and in projectors of GaLore and APOLLO
                    self.recorder.label(tensor, "optimizer", self._owners.get(id(parameter), ""))
                    if getattr(tensor, "is_paged", False):  # by bitsandbytes
                        self.recorder.put_on_host([tensor], "optimizer", "managed")

    # -- ops --------------------------------------------------------------------------------------------------------

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is ASKS_DEVICE and type(args[0]) is FakeTensor:  # autograd asks twice for each op
            return args[0].fake_device
        kwargs = kwargs or {}
        if wraps(types):
            return NotImplemented  # a DTensor's ops on its shard are dispatched separately
        dispatcher, recorder, context = self.dispatcher, self.recorder, self.context
        if not dispatcher.takes_fakes and isinstance(torch.empty(0), FakeTensor):
            return func(*args, **kwargs)  # DTensor computes shapes on its own fake tensors
        args, kwargs = dispatcher.prepare(func, args, kwargs)
        op = self._handled.get(id(func))  # its own hash is slow Python
        if op is None:
            op = self._handled[id(func)] = dispatcher.handling(func)
        if op.silent:
            return func(*args, **kwargs) if op.rule is None else op.rule(func, args, kwargs)
        if torch.is_inference_mode_enabled() and is_composite(func):
            return in_parts(self, func, args, kwargs)
        context.locate()
        given = (*args, kwargs["out"]) if "out" in kwargs else args if func is not _LIFT else ()
        live = recorder.live
        for tensor in tensors(given):  # torch.tensor(...) passes it through _LIFT
            if tensor.layout is not torch.strided or storage_pointer(tensor.untyped_storage()) not in live:
                self._follow_unknown(tensor)
        if op.collective:
            recorder.label_sent(tensors(args))
        stream = dispatcher.collective_stream(func, args) if op.collective else recorder.stream
        at = len(recorder.events)
        out, work = dispatcher.call(op, func, args, kwargs)
        if context.phase == "backward" and op.name in IN_PLACE and is_in_place(func, args, recorder.made_by):
            recorder.reuse(args[0], out)
        module = context.module()
        category = "activations" if context.phase == "forward" or context.recomputing else "temporary"
        for tensor in tensors((out,)):
            recorder.follow(tensor, category, op.name, module)
        if op.after is not None:
            op.after(recorder, func, args, kwargs, out)
        if recorder.keeps_ops:
            wire = collective_bytes(func, args) if op.collective else 0
            around = "mode" if from_python_dispatch() else "hooks" if context.recomputing else ""
            recorder.add_op(op.name, work, module, at, stream, wire, around)
            if op.collective:
                recorder.ops[-1].group = group_of(func, args)
        return out

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # torch.compile turns the tracker off while it traces, and on while compiled code runs

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # no compiled code runs here, and the wrapper that guards against it costs as much as an op

    def _follow_unknown(self, tensor: torch.Tensor) -> None:
        """Follow a tensor that was made outside of the record: as resident in the first step, else as allocated now.

        This includes the parameters of a second model, such as the reference model in preference training.
        """
        category = "parameters" if isinstance(tensor, nn.Parameter) else "activations"
        steps = sum(name == "step" for _, name in self.recorder.marks)
        self.recorder.follow(tensor, category, "", resident=steps <= 1)


def swapped_weights(model: nn.Module) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Parameters that the policy `swap` moves, each with its copy in host memory."""
    for inner in model.modules():
        if (swapped := inner.__dict__.get(SWAPPED)) is not None:
            for name, parameter in swapped.swapper.weights(swapped.number):
                yield parameter, swapped.swapper.waiting[name]


def _spare_of_swapped(model: nn.Module) -> int:
    """Bytes of the buffers of swapped weights beyond the weights themselves, which a trace counts one by one."""
    swapped = next((found for inner in model.modules() if (found := inner.__dict__.get(SWAPPED))), None)
    return 0 if swapped is None else swapped.swapper.arena.nbytes - sum(w.nbytes for _, w in swapped_weights(model))
