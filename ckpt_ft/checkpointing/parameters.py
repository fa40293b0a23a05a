"""A region's second run computes with the parameters, and in the mode, of its first.

Between forward and backward others may act on a model. What can be put back for the second run is put back: a
parameter that another took the place of (`torch.func.functional_call`), train and eval mode. What cannot is an error
that names it: a value written in place or put behind `p.data`, a switched `requires_grad` (which is how adapters are
switched). Plain autograd raises for some of these and gives wrong gradients for others.

Parameters that a sharding engine manages are left to it: FSDP2 has sharded and gathered ones take turns, ZeRO-3 swaps
`p.data`, accelerate's hooks bring weights in from the host. A write through `p.data` counts no version and is not
seen.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from ckpt_ft.errors import UserError

from .tensor_identity import version_of


def modules_in(module: nn.Module) -> dict[nn.Module, None]:
    """`module` and all below it, each once (`module.modules()` takes four times as long)."""
    found, rest = {module: None}, [module]
    while rest:
        for child in rest.pop()._modules.values():
            if child is not None and child not in found:
                found[child] = None
                rest.append(child)
    return found


def has(module: nn.Module, name: str) -> bool:
    """Whether `module` or its class has an attribute `name` that is no part of it; a miss of `hasattr` is slow."""
    return name in module.__dict__ or hasattr(type(module), name)


class Found:
    """The parameters and modes of a region's modules when its first run ended.

    Flat lists: an object for each parameter would cost more in garbage collection than in being made.
    """

    __slots__ = ("modes", "modules", "requires_grad", "storages", "values", "versions")

    def __init__(self, modules: dict[nn.Module, None]) -> None:
        self.modules = modules
        self.modes = [module.training for module in modules]
        self.values = [value for module in modules for value in module._parameters.values()]
        self.versions, self.requires_grad, self.storages = _state(self.values)

    def swap_in(self) -> list[tuple[nn.Module, str, Any]]:
        """Before the second run: put them in place; returns what was there instead.

        Raises:
            UserError: a parameter's value or `requires_grad` is another than in the first run.
        """
        if _state(self.values) != (self.versions, self.requires_grad, self.storages):
            self.check()
        swapped: list[tuple[nn.Module, str, Any]] = []
        if self.modes != [module.training for module in self.modules]:
            for module, training in zip(self.modules, self.modes, strict=True):
                swapped.append((module, "", module.training))
                module.training = training
        there = [value for module in self.modules for value in module._parameters.values()]
        if not (len(there) == len(self.values) and all(map(operator.is_, there, self.values))):
            for (owner, name), value in zip(self.names(), self.values, strict=True):
                now = owner._parameters[name]
                if now is not value and not (_managed(now) and _managed(value)):
                    swapped.append((owner, name, now))
                    owner._parameters[name] = value
        return swapped

    def names(self) -> list[tuple[nn.Module, str]]:
        """Whose parameters they are, and what they are called there."""
        return [(module, name) for module in self.modules for name in module._parameters]

    def check(self) -> None:
        """Raise for the first parameter that cannot be put back."""
        versions, requires_grad, storages = _state(self.values)
        for i, ((owner, name), value) in enumerate(zip(self.names(), self.values, strict=True)):
            if versions[i] != self.versions[i]:
                change = "written in place (an optimizer's step?)"
            elif requires_grad[i] != self.requires_grad[i]:
                change = f"switched to requires_grad={requires_grad[i]} (another adapter?)"
            elif storages[i] != self.storages[i] and not hasattr(value, "ds_id"):  # ZeRO-3 gathers into `p.data`
                change = "given other data (p.data = ...)"
            else:
                continue
            region = next(iter(self.modules))
            paths = {module: path for path, module in region.named_modules()}
            raise UserError(
                f"{type(region).__name__}: its parameter '{f'{paths.get(owner)}.{name}'.lstrip('.')}' was {change} "
                "between forward and backward, so its second run cannot repeat the first; do that after backward"
            )


def swap_out(swapped: list[tuple[nn.Module, str, Any]]) -> None:
    """After the second run: put back what `Found.swap_in` returned."""
    for owner, name, before in swapped:
        if name:
            owner._parameters[name] = before
        else:
            owner.training = before


def _state(values: list[nn.Parameter | None]) -> tuple[list[int], list[bool], list[int]]:
    """Of each: its version, whether it is trained, and the identity of its memory.

    The memory is the storage, not its address: FSDP frees and gathers it in place. 0 of other kinds of tensors.
    """
    return (
        _versions(values),
        [False if value is None else value.requires_grad for value in values],
        [value.untyped_storage()._cdata if type(value) is nn.Parameter else 0 for value in values],
    )


def _versions(values: list[nn.Parameter | None]) -> list[int]:
    try:
        return [0 if value is None else value._version for value in values]
    except RuntimeError:  # one was made under torch.inference_mode
        return [0 if value is None else version_of(value) for value in values]


def _managed(value: Any) -> bool:
    return value is None or isinstance(value, DTensor) or value.is_meta
