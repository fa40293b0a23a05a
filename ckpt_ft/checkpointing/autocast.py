"""Restores forward's autocast state for recomputation; backward usually runs without autocast."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
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
        """Return a context that sets autocast to this state."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


@contextmanager
def autocast_as(state: AutocastState | None) -> Iterator[None]:
    """Set autocast to `state`; if it is None, turn autocast off on every device."""
    if state is not None:
        with state.context():
            yield
        return
    kinds = [kind for kind in ("cpu", torch._C._get_accelerator().type) if torch.is_autocast_enabled(kind)]
    with torch.autocast(kinds[0] if kinds else "cpu", enabled=False):
        yield
