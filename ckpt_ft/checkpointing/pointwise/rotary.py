"""Rotary embedding as a cheap call of `pointwise`, where it gains something: behind a norm of queries and keys.

Attention keeps rotated queries and keys, and the rotation's backward needs nothing but cosines and sines; so dropping
the rotated ones gains only if the unrotated ones are rebuilt anyway, from the projections that a query and key norm
keeps (Qwen3, Gemma 3, OLMo 2). transformers calls the rotation as a function of the modeling file,
`apply_rotary_pos_emb`. Here the attention's forward runs with globals in which that name means the cheap call; the
file's own stay untouched.
"""

from __future__ import annotations

from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ckpt_ft.checkpointing.standin import StandIn

from .cheap_calls import OperatorCall, local, running_pass
from .discard import Pass
from .structure import is_norm

_NAME = "apply_rotary_pos_emb"
_treated: dict[FunctionType, FunctionType] = {}


class RotaryAttention(StandIn):
    """An attention module with query and key norms."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if running_pass() is None:
            return self.forward(*args, **kwargs)
        function = self.forward.__func__  # type: ignore[attr-defined]
        if function not in _treated:
            _treated[function] = _with_cheap_call(function)
        return MethodType(_treated[function], self.module)(*args, **kwargs)


class _Rotation:
    """`apply_rotary_pos_emb` as a cheap call where queries and keys are rebuilt anyway."""

    def __init__(self, function: Any) -> None:
        self.function = function
        self.call = OperatorCall(function)

    def __call__(self, query: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        running: Pass | None = local.running
        if running is None or not (running.is_free(query) and running.is_free(key)):
            return self.function(query, key, *args, **kwargs)
        return running.run(self.call, (query, key, *args), kwargs)


def is_rotary_attention(module: nn.Module) -> bool:
    """Whether the module has norms of its own and its forward, plain Python, calls `apply_rotary_pos_emb`."""
    function = getattr(module.forward, "__func__", None)
    return (
        type(function) is FunctionType
        and _NAME in function.__code__.co_names
        and callable(function.__globals__.get(_NAME))
        and any(is_norm(child) for child in module.children())
    )


def _with_cheap_call(function: FunctionType) -> FunctionType:
    names = {**function.__globals__, _NAME: _Rotation(function.__globals__[_NAME])}
    treated = FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)
    treated.__kwdefaults__ = function.__kwdefaults__
    return treated
