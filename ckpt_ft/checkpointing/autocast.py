"""Autocast as it is in forward, for what runs again in backward, which usually runs without."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AutocastState:
    """The state of autocast for one type of device."""

    device_type: str
    dtype: torch.dtype
    enabled: bool
    cache_enabled: bool

    @classmethod
    def now(cls, device_type: str) -> AutocastState:
        """The present state; that of the CPU for a type of device that has no autocast."""
        kind = device_type if torch.amp.is_autocast_available(device_type) else "cpu"
        return cls(
            kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind), torch.is_autocast_cache_enabled()
        )

    def context(self) -> torch.autocast:
        """Sets autocast to this state."""
        return torch.autocast(self.device_type, self.dtype, self.enabled, self.cache_enabled)


@contextmanager
def autocast_as(state: AutocastState | None) -> Iterator[None]:
    """Autocast in `state`; off on every device for None."""
    if state is not None:
        with state.context():
            yield
        return
    kinds = [kind for kind in ("cpu", torch._C._get_accelerator().type) if torch.is_autocast_enabled(kind)]
    with torch.autocast(kinds[0] if kinds else "cpu", enabled=False):
        yield
