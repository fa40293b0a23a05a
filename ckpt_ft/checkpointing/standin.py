"""Objects that replace a module's forward, and the `Installed` result that engines return to `apply_policy`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any

import torch
from torch import nn

from .verify import NEVER, Verification

_FORWARDS = "_ckpt_ft_forwards"  # module attribute: the stand-ins that its `ForwardOfModule`s call


class StandIn:
    """Replaces `module.forward` as an instance attribute. No wrapper module exists, so state-dict keys stay the same.

    The module and its bound forward are attributes, so a deep copy or pickle of a model has its own stand-ins.
    Subclasses define `__call__`.
    """

    acts = True
    name = ""  # qualified name of the module in the model, set by `apply_policy`
    verification: Verification = NEVER  # the policy's, set by `apply_policy`

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._put_on()

    def _put_on(self) -> None:
        self.forward = self.module.forward
        self.previous = self.module.__dict__.get("forward")
        self.module.forward = self  # type: ignore[assignment]

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # used by inspect.signature
        return self.forward

    @property
    def __func__(self) -> ForwardOfModule:  # accelerate wraps and restores this function
        return ForwardOfModule(self._index(), inspect.signature(self.forward))

    def _index(self) -> int:
        """The place of this stand-in in its module's list."""
        table: list[StandIn] = self.module.__dict__.setdefault(_FORWARDS, [])
        if not any(self is other for other in table):
            table.append(self)
        return next(i for i, other in enumerate(table) if other is self)

    @property
    def __self__(self) -> nn.Module:  # accelerate's compile_regions binds `__func__` of its module's forward again
        return self.module

    @property
    def __code__(self) -> CodeType:  # torch.export reads file and line from it
        code: CodeType = inspect.unwrap(self.forward).__code__
        return code

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for pickle, with the module's methods as plain functions.

        Pickle stores a bound method as `getattr(module, "forward")`, which would return this stand-in on loading.
        """
        return {name: _unbound(value, self.module) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state["module"]
        for name, value in state.items():
            self.__dict__[name] = MethodType(value.function, module) if type(value) is _Unbound else value

    def on_copy(self, module: nn.Module) -> StandIn:
        """Return this stand-in, and those beneath it, for a shallow copy of its module."""
        state, copied = self.__getstate__(), object.__new__(type(self))
        if isinstance(self.forward, StandIn):
            state["forward"] = self.forward.on_copy(module)
        copied.__setstate__({**state, "module": module})
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__})"

    def remove(self) -> None:
        """Restore the module's previous forward.

        If another library has wrapped this stand-in since (accelerate's autocast), it cannot be removed from inside
        the wrapper; it stays there and only forwards calls.
        """
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, MethodType) and isinstance(forward.__func__, ForwardOfModule):
            forward = forward.__func__.stand_in(self.module)
        if forward is not self:
            self.buried: type[StandIn] = type(self)
            self.__class__ = _PassingOn
            return
        if self.previous is None:
            del self.module.forward
        else:
            self.module.forward = self.previous
        if self.module.__dict__.get(_FORWARDS) == [self]:
            del self.module.__dict__[_FORWARDS]

    def put_back(self) -> None:
        """Undo `remove`; the module must be unchanged since then."""
        self._put_on()

    def idle(self, term: str) -> bool:
        """Whether this term of a policy does nothing in a call: without gradients, or compiled, with a warning."""
        if torch.compiler.is_compiling():
            say_compiled(term)
            return True
        return not torch.is_grad_enabled()


class ForwardOfModule:
    """A stand-in as a function that takes the module as its first argument, like `__func__` of a bound method.

    accelerate's `prepare` wraps this function, and `unwrap_model(keep_fp32_wrapper=False)` binds it to the module
    again. It looks up the stand-in through the module, so a deep copy of the module uses its own stand-in.
    """

    __slots__ = ("__signature__", "index")
    __name__ = "forward"  # pickle looks up a method by this name

    def __init__(self, index: int, signature: inspect.Signature) -> None:
        self.index = index
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])

    def stand_in(self, module: nn.Module) -> Any:
        """Return the module's stand-in that this function calls."""
        table: list[StandIn] = module.__dict__[_FORWARDS]
        if table[self.index].module is not module:  # accelerate's compile_regions copies a model with its attributes
            module.__dict__[_FORWARDS] = table = [one.on_copy(module) for one in table]
        return table[self.index]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.stand_in(module)(*args, **kwargs)


@dataclass
class _Unbound:
    """A bound method of the stand-in's module, as stored in a pickle."""

    function: Callable[..., Any]


def _unbound(value: Any, module: nn.Module) -> Any:
    return _Unbound(value.__func__) if isinstance(value, MethodType) and value.__self__ is module else value


class _PassingOn(StandIn):
    """A stand-in that was removed inside another library's wrapper; `buried` is its original class."""

    acts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def put_back(self) -> None:
        """Make the stand-in active again, inside the wrapper."""
        self.__class__ = self.buried  # type: ignore[assignment]


@dataclass(frozen=True)
class Treated:
    """How an engine treats one class of modules: their count, what is dropped, and what is kept instead."""

    module: str
    count: int
    dropped: str
    kept: str


class Installed:
    """An engine that is installed in a model: its policy term, its stand-ins, and its rows for `explain()`."""

    def __init__(self, term: str, stand_ins: Sequence[StandIn], rows: list[Treated]) -> None:
        self.term, self.stand_ins, self.rows = term, list(stand_ins), rows

    def remove(self) -> None:
        """Restore the previous forward of every module until `put_back`."""
        for stand_in in reversed(self.stand_ins):
            stand_in.remove()

    def put_back(self) -> None:
        for stand_in in self.stand_ins:
            stand_in.put_back()


def warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


_warned: set[str] = set()
_INSTEAD = {
    "pointwise": "its partitioner decides what is recomputed",
    "head": "the logits are computed whole",
    "tile": "MLPs run whole",
    "offload": "what is saved stays on the device",
}


def say_compiled(term: str) -> None:
    """Warn, while torch.compile traces the caller, that this term of a policy does nothing there."""
    from ckpt_ft.compat.compiler import comptime

    comptime(_warn_compiled)  # runs at trace time and accepts no closure


def _warn_compiled(context: Any) -> None:
    term = context.get_local("term").as_python_constant()
    warn_once(f"policy '{term}' does nothing under torch.compile: {_INSTEAD[term]}")
