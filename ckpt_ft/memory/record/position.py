"""Position: where a training step is, as the process shows it: its phase and the module that runs.

Nothing is hooked onto tensors: the phase is read from autograd's graph task, and a backward op belongs to the module
whose forward made its node, found by the node's sequence number (torch/csrc/autograd/function.h).
"""

from __future__ import annotations

from bisect import bisect_right
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch._C._autograd import _get_sequence_nr
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook, register_optimizer_step_pre_hook


class Position:
    """Base of what records a step: the phase, the zone and the module that it is in, brought up to date by `_locate`.

    What is recorded where the step moves on is the subclass's: `_begin`, `_before_optimizer`, `_after_optimizer`.
    """

    def __init__(self) -> None:
        super().__init__()
        self._names: dict[int, str] = {}  # of modules, by id
        self._stack: list[str] = []  # modules whose forward is running
        self._node_starts: list[int] = []  # from this sequence number on, nodes belong to ...
        self._node_modules: list[str] = []  # ... this module
        self._kept_nodes = 0
        self._phase, self._recompute, self._stepping = "forward", False, False
        self._zone = 0  # counts changes of phase: what dies in the zone it was made in was only temporary

    @property
    def phase(self) -> str:
        """Where the step is: "forward", "backward" or "optimizer"."""
        return self._phase

    def _begin(self, phase: str) -> None:
        """`phase` begins, and `_phase` ends."""

    def _before_optimizer(self, optimizer: Optimizer) -> None:
        """`optimizer` is about to step."""

    def _after_optimizer(self, optimizer: Optimizer) -> None:
        """`optimizer` has stepped; the phase is still its own."""

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
            if phase != self._phase:
                self._begin(phase)
            self._phase, self._recompute = phase, recompute
            self._zone += 1

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

    def _add_hooks(self) -> None:
        self._thread = get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._enter_module),
            register_module_forward_hook(self._leave_module, always_call=True),
            register_optimizer_step_pre_hook(self._enter_optimizer),
            register_optimizer_step_post_hook(self._leave_optimizer),
        ]

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()

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

    def _enter_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._locate()
        self._before_optimizer(optimizer)
        self._stepping = True
        self._locate()

    def _leave_optimizer(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if get_ident() != self._thread:
            return
        self._after_optimizer(optimizer)
        self._stepping = False
        # Nodes from before the last optimizer step are dead: forget whose they were.
        del self._node_starts[: self._kept_nodes], self._node_modules[: self._kept_nodes]
        self._kept_nodes = len(self._node_starts)
