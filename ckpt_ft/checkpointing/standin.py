"""What stands in place of a module's forward, and what engines give back to `apply_policy`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ckpt_ft.errors import UserError

from .verify import NEVER, Verification


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

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.module).__name__})"

    def remove(self) -> None:
        """Give the module the forward it had.

        Where another library has wrapped this one since (accelerate's autocast), it cannot be drawn out from below: it
        stays there and passes every call on.
        """
        if self.module.__dict__.get("forward") is not self:
            self.buried: type[StandIn] = type(self)
            self.__class__ = _PassingOn
        elif self.previous is None:
            del self.module.forward
        else:
            self.module.forward = self.previous

    def put_back(self) -> None:
        """Undo `remove`, the module being as that left it."""
        self._put_on()


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
