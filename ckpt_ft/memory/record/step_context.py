"""StepContext: the phase that a training step is in, and the module whose forward or backward runs.

No hook is put on tensors. The phase is read from autograd's graph task. An op in backward belongs to the module whose
forward created its autograd node, found by the node's sequence number (torch/csrc/autograd/function.h).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ckpt_ft.compat.autograd import current_node, graph_task, next_node_number, node_number


class StepContext:
    """Follows a training step by global module and optimizer hooks, while entered as a context manager.

    Attributes:
        hook: in a compiled step, makes global hooks of `enter_module` and `leave_module`: torch.compile traces into
            them, and may call the second alone if it raises.
        phase: "forward", "backward" or "optimizer", which goes on until a module runs.
        recomputing: a checkpoint re-runs a forward inside backward.
        stack: names of the modules whose forward is running.
        inner: the module within a compiled region that the running kernel is of, if it is known.
        zone: counts changes of phase. What is freed in the zone that it was allocated in was temporary.
        phase_listeners: called with the new phase before `phase` changes.
        before_optimizer, after_optimizer: called around `optimizer.step()`, if set; `stepping` in between.
    """

    def __init__(self) -> None:
        self.hook: Callable[[Callable[..., None]], Callable[..., None]] | None = None
        self.phase, self.recomputing, self.zone = "forward", False, 0
        self.inner = ""
        self.phase_listeners: list[Callable[[str], None]] = []
        self.before_optimizer: Callable[[Optimizer], None] | None = None
        self.after_optimizer: Callable[[Optimizer], None] | None = None
        self._names: dict[int, str] = {}  # of modules, by id
        self.stack: list[str] = []
        self._node_starts: list[int] = []  # from this sequence number on, nodes belong to ...
        self._node_modules: list[str] = []  # ... this module
        self._kept_nodes = 0
        self.stepping = False
        self._hooks: list[Any] = []

    def name_modules(self, model: nn.Module) -> None:
        """Report the modules of `model` by their qualified names; a module outside it counts as its caller."""
        self._names = {id(module): name for name, module in model.named_modules()}

    @property
    def calls_seen(self) -> int:
        """A number that grows with every module call; if two values are equal, no module was called in between."""
        return len(self._node_starts)

    def locate(self, dispatching: bool = True) -> None:
        """Update phase and zone.

        dispatching: an op is being dispatched. A free alone never begins a forward: backward's tensors die after it.
        """
        recomputing = False
        if self.stepping:
            phase = "optimizer"
        elif graph_task() >= 0:
            phase = "backward"
            recomputing = bool(self.stack) or torch.is_grad_enabled()  # a checkpoint's forward, inside backward
        elif not self.stack and (
            self.phase == "optimizer" or (self.phase == "backward" and not torch.is_grad_enabled())
        ):
            phase = "optimizer"  # unscaling, clipping, zero_grad: around the optimizer, until a module runs
        elif dispatching:
            phase = "forward"
        else:
            return
        if phase != self.phase or recomputing != self.recomputing:
            if phase != self.phase:
                for listener in self.phase_listeners:
                    listener(phase)
            self.phase, self.recomputing = phase, recomputing
            self.zone += 1

    def module(self) -> str:
        """Qualified name of the module whose forward or backward runs; "" outside of all."""
        if self.inner:
            return self.inner
        if self.stack:
            return self.stack[-1]
        if self.phase != "backward":
            return ""
        node = current_node()
        if node is None:
            return ""
        number = node_number(node)()
        if not self._node_starts or number >= 2**63:  # AccumulateGrad has no place in the order
            return ""
        return self._node_modules[max(bisect_right(self._node_starts, number) - 1, 0)]

    def __enter__(self) -> StepContext:
        enter, leave = _of_this_thread(self.enter_module), _of_this_thread(self.leave_module)
        if self.hook is not None:
            enter, leave = self.hook(enter), self.hook(leave)
        self._hooks = [
            register_optimizer_step_pre_hook(_of_this_thread(self._enter_optimizer)),
            register_optimizer_step_post_hook(_of_this_thread(self._leave_optimizer)),
            register_module_forward_pre_hook(enter),
            register_module_forward_hook(leave, always_call=self.hook is None),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def enter_module(self, module: nn.Module, args: Any) -> None:
        name = self._names.get(id(module))
        self.stack.append(self.module() if name is None else name)
        self._note_node()

    def leave_module(self, module: nn.Module, args: Any, output: Any) -> None:
        """A forward hook, called whether the forward raised or not."""
        if self.stack:  # else the record began inside of this call
            self.stack.pop()
        self._note_node()

    def call_module(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """`forward` as a call of `module`, whose hooks do not run."""
        self.enter_module(module, args)
        try:
            return forward(*args, **kwargs)
        finally:
            self.leave_module(module, args, None)

    def _note_node(self) -> None:
        self._node_starts.append(next_node_number())
        self._node_modules.append(self.stack[-1] if self.stack else "")

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self.locate()
        if self.before_optimizer is not None:
            self.before_optimizer(optimizer)
        self.stepping = True
        self.locate()

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self.after_optimizer is not None:
            self.after_optimizer(optimizer)
        self.stepping = False
        # Nodes from before the last optimizer step are dead: forget their modules.
        del self._node_starts[: self._kept_nodes], self._node_modules[: self._kept_nodes]
        self._kept_nodes = len(self._node_starts)


def _of_this_thread(hook: Callable[..., None]) -> Callable[..., None]:
    """`hook`, which is global to the process: calls from other threads are not part of this step."""
    thread = get_ident()

    def run(*args: Any) -> None:
        if get_ident() == thread:
            hook(*args)

    return run
