"""Restores forward's autocast state for recomputation; backward usually runs without autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """The autocast settings of one device type."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> AutocastState:
        """Return the current state, or that of the CPU for a device type without autocast."""
        kind = device_type if torch.amp.is_autocast_available(device_type) else "cpu"
        return cls(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        )

    def context(self) -> torch.autocast:
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


_ACCELERATOR = torch.accelerator.current_accelerator() or torch.device("cpu")
_KINDS = dict.fromkeys(("cpu", "cuda", _ACCELERATOR.type))  # a dry run shows a script a GPU that torch does not have


def any_autocast() -> bool:
    # `any` takes twice as long, and this runs for every layer
    return (
        torch.is_autocast_enabled("cpu")
        or torch.is_autocast_enabled("cuda")
        or torch.is_autocast_enabled(_ACCELERATOR.type)
    )


def autocast_now(device_type: str) -> tuple[AutocastState, ...]:
    """Return the states of a device and of the CPU; nothing if autocast is off everywhere."""
    if not any_autocast():
        return ()
    return tuple(AutocastState.now(kind) for kind in dict.fromkeys((device_type, "cpu")))


@contextmanager
def autocast_as(states: tuple[AutocastState, ...]) -> Iterator[None]:
    """Set autocast to `states`, which `autocast_now` returned; without any, turn autocast off on every device."""
    with ExitStack() as contexts:
        for state in states:
            contexts.enter_context(state.context())
        if not states and any_autocast():
            for kind in _KINDS:
                if torch.is_autocast_enabled(kind):
                    contexts.enter_context(torch.autocast(kind, enabled=False))
        yield
