"""The state of the random generators that a region can draw from: the CPU's and its accelerator's."""

from __future__ import annotations

import ctypes

import torch
from torch import nn

_RATES = ("p", "dropout", "dropout_p", "attention_dropout", "activation_dropout", "drop_prob")


class Snapshot:
    """Generator states at one moment; equal when nothing was drawn in between."""

    __slots__ = ("device", "states")

    def __init__(self, device: torch.device, states: list[torch.Tensor]) -> None:
        self.device, self.states = device, states

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Snapshot) and all(
            _bytes(a) == _bytes(b) for a, b in zip(self.states, other.states, strict=True)
        )

    def restore(self) -> None:
        """Set the generators to these states."""
        torch.set_rng_state(self.states[0])
        for state in self.states[1:]:
            torch.get_device_module(self.device).set_rng_state(state, self.device)


def snapshot(device: torch.device) -> Snapshot:
    """The CPU generator's state (5 KiB) and, for an accelerator, its own (16 B, on the host: no synchronisation)."""
    states = [torch.get_rng_state()]
    if device.type not in ("cpu", "meta"):
        states.append(torch.get_device_module(device).get_rng_state(device))
    return Snapshot(device, states)


def has_dropout(model: nn.Module) -> bool:
    """Whether `model` drops anything out when it trains."""
    rates = (getattr(module, name, 0.0) for module in model.modules() for name in _RATES)
    return any(isinstance(rate, float) and 0 < rate <= 1 for rate in rates)


def _bytes(state: torch.Tensor) -> bytes:
    # not torch.equal: an operator would be seen by dispatch modes and turned into a fake one under FakeTensorMode
    return ctypes.string_at(state.data_ptr(), state.numel())
