"""What stands in place of a module's forward, and what engines give back to `apply_policy`."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import CodeType, MethodType
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError

from .verify import NEVER, Verification

_FORWARDS = "_ckpt_ft_forwards"  # the attribute of a module that lists the stand-ins of its `ForwardOfModule`s


class StandIn:
    """Stands in for `module.forward` as an instance attribute: no wrapper, so state-dict keys stay as they are.

    It holds the module and its bound forward as attributes, so a deep copy or a pickle of a model gets stand-ins of
    its own. Subclasses define `__call__`.
    """

    acts = True
    name = ""  # qualified name of the module in the model, set by `apply_policy`
    verification: Verification = NEVER  # of the policy that this is part of, set by `apply_policy`

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._put_on()

    def _put_on(self) -> None:
        self.forward = self.module.forward
        self.previous = self.module.__dict__.get("forward")
        self.module.forward = self  # type: ignore[assignment]

    @property
    def __wrapped__(self) -> Callable[..., Any]:  # what inspect.signature reads
        return self.forward

    @property
    def __func__(self) -> ForwardOfModule:  # what accelerate wraps in place of a bound method, and puts back
        table: list[StandIn] = self.module.__dict__.setdefault(_FORWARDS, [])
        if not any(self is other for other in table):
            table.append(self)
        return ForwardOfModule(
            next(i for i, other in enumerate(table) if other is self), inspect.signature(self.forward)
        )

    @property
    def __code__(self) -> CodeType:  # from which torch.export reads file and line
        code: CodeType = inspect.unwrap(self.forward).__code__
        return code

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: the module's own methods as functions.

        Pickle stores a bound method as `getattr(module, "forward")`, which is this stand-in when it is looked up.
        """
        return {name: _unbound(value, self.module) for name, value in self.__dict__.items()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state["module"]
        for name, value in state.items():
            self.__dict__[name] = MethodType(value.function, module) if type(value) is _Unbound else value

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__})"

    def remove(self) -> None:
        """Give the module the forward it had.

        Where another library has wrapped this one since (accelerate's autocast), it cannot be drawn out from below: it
        stays there and passes every call on.
        """
        forward = self.module.__dict__.get("forward")
        if isinstance(forward, MethodType) and isinstance(forward.__func__, ForwardOfModule):
            forward = forward.__func__.stand_in(self.module)
        if forward is not self:
            self.buried: type[StandIn] = type(self)
            self.__class__ = _PassingOn
        elif self.previous is None:
            del self.module.forward
        else:
            self.module.forward = self.previous

    def put_back(self) -> None:
        """Undo `remove`, the module being as that left it."""
        self._put_on()


class ForwardOfModule:
    """A stand-in as a function whose first argument is the module, as `__func__` of a bound method is.

    accelerate's `prepare` wraps this function, and its `unwrap_model(keep_fp32_wrapper=False)` binds it to the module
    again. It finds the stand-in through the module, so that in a deep copy it is the copy's.
    """

    __slots__ = ("__signature__", "index")
    __name__ = "forward"  # by which pickle finds a method of it

    def __init__(self, index: int, signature: inspect.Signature) -> None:
        self.index = index
        first = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        self.__signature__ = signature.replace(parameters=[first, *signature.parameters.values()])

    def stand_in(self, module: nn.Module) -> Any:
        """The module's stand-in that this function calls."""
        return module.__dict__[_FORWARDS][self.index]

    def __call__(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return self.stand_in(module)(*args, **kwargs)


@dataclass
class _Unbound:
    """A method of a stand-in's module, in a pickle."""

    function: Callable[..., Any]


def _unbound(value: Any, module: nn.Module) -> Any:
    return _Unbound(value.__func__) if isinstance(value, MethodType) and value.__self__ is module else value


class _PassingOn(StandIn):
    """A stand-in that was removed below a wrapper of someone else's; `buried` is the class that it had."""

    acts = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    def put_back(self) -> None:
        """Act again, where it is."""
        self.__class__ = self.buried  # type: ignore[assignment]


class OneDevice:
    """Refuses nn.DataParallel's replicas: they share the stand-ins, and so would run on the original's parameters.

    It stands in place of the method by which replicas are made, as an instance attribute.
    """

    def __init__(self, model: nn.Module, policy: str) -> None:
        self.model, self.policy = model, policy
        self.put_back()

    def put_back(self) -> None:
        """Refuse replicas."""
        self.model._replicate_for_data_parallel = self  # type: ignore[method-assign]

    def __call__(self) -> nn.Module:
        raise UserError(
            f"policy '{self.policy}' on {type(self.model).__name__}: nn.DataParallel's replicas would run on the "
            "parameters of the first device; start one process for each GPU (torchrun, accelerate launch), or show "
            "one GPU (CUDA_VISIBLE_DEVICES=0)"
        )

    def remove(self) -> None:
        """Allow replicas again."""
        del self.model._replicate_for_data_parallel


@dataclass(frozen=True)
class Treated:
    """What an engine did to a class of modules: how many, what is dropped of them, what is kept instead."""

    module: str
    count: int
    dropped: str
    kept: str


class Installed:
    """What an engine did to a model; `term` is the engine's in a policy, `rows` what `explain()` says of it."""

    def __init__(self, term: str, stand_ins: Sequence[StandIn], rows: list[Treated]) -> None:
        self.term, self.stand_ins, self.rows = term, list(stand_ins), rows

    def pause(self) -> None:
        """Give every module the forward it had, until `resume`."""
        for stand_in in reversed(self.stand_ins):
            stand_in.remove()

    def resume(self) -> None:
        """Undo `pause`."""
        for stand_in in self.stand_ins:
            stand_in.put_back()


def warn_once(message: str) -> None:
    """Warn, the first time that this is said in the process."""
    if message not in _said:
        _said.add(message)
        warnings.warn(message, stacklevel=2)


_said: set[str] = set()
