"""Hooks around a module's forward and backward, as DeepSpeed has them (deepspeed/runtime/zero/parameter_offload.py).

An identity on each tensor of its input and output has a backward of its own: of an output's, the module's begins, and
with the last of its inputs' it ends. A module that is given no tensor that needs a gradient has no end to be seen.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor, nn


class Watcher(Protocol):
    """Who is told what a module does."""

    def before_forward(self) -> None: ...
    def after_forward(self) -> None: ...
    def before_backward(self) -> None: ...
    def after_backward(self) -> None: ...


def _deepspeeds(hook: Any) -> Any:
    """Mark a hook as one of DeepSpeed's, for code that asks whose hooks a module has."""
    hook.stands_for = "deepspeed"
    return hook


class Around:
    """The hooks of one module."""

    def __init__(self, module: nn.Module, watcher: Watcher) -> None:
        self.watcher = watcher
        self.to_begin = 0  # tensors of its outputs whose gradient has not come yet
        self.to_end = 0  # tensors of its last input whose gradient is not made yet
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward)

    @_deepspeeds
    def _before_forward(self, module: nn.Module, args: Any) -> Any:
        self.watcher.before_forward()
        self.to_end = 0
        return _on_tensors(lambda x: _Input.apply(x, self), args)

    @_deepspeeds
    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.watcher.after_forward()
        return _on_tensors(lambda x: _Output.apply(x, self), output)


class _Output(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, around: Around) -> Tensor:
        ctx.around = around
        around.to_begin += 1
        return output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.around.to_begin:
            ctx.around.watcher.before_backward()
            ctx.around.to_begin -= 1
        return gradient, None


class _Input(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, around: Around) -> Tensor:
        ctx.around = around
        around.to_end += ctx.needs_input_grad[0]
        return given.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        ctx.around.to_end -= 1
        if not ctx.around.to_end:
            ctx.around.watcher.after_backward()
        return gradient, None


class Watched(dict[str, Any]):
    """A module's own parameters, and who is told when one is looked at by name."""

    def __init__(self, parameters: dict[str, Any], look: Callable[[Any], None]) -> None:
        super().__init__(parameters)
        self.look = look

    def __getitem__(self, name: str) -> Any:
        parameter = super().__getitem__(name)
        self.look(parameter)
        return parameter


def _on_tensors(function: Any, value: Any) -> Any:
    """`value` with `function` of each tensor in it (apply_to_tensors_only)."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_on_tensors(function, item) for item in value)
    if isinstance(value, dict):
        for key in value:
            value[key] = _on_tensors(function, value[key])
    return value
