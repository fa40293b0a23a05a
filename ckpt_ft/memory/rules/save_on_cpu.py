"""Models `torch.autograd.graph.save_on_cpu` in a GPU trace, whose tensors are already on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks


def _to_host(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.size(), dtype=tensor.dtype, layout=tensor.layout, pin_memory=True).copy_(tensor)


def _to_device(host: Tensor) -> Tensor:
    return torch.empty_like(host).copy_(host)


def _init(self: Any, pin_memory: bool = False, device_type: str = "cuda") -> None:
    saved_tensors_hooks.__init__(self, _to_host, _to_device)


@contextmanager
def leaves_the_device() -> Iterator[None]:
    """Saved tensors go to pinned host memory, which a trace excludes; unpinned copies are timed like pinned ones."""
    with patch.object(save_on_cpu, "__init__", _init):
        yield
