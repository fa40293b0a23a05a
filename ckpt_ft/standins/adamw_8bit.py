"""AdamW with 8-bit moments in the memory layout of bitsandbytes (Dettmers et al. 2022, arXiv:2110.02861).

A trace uses this stand-in in place of bitsandbytes' optimizer, so it needs neither CUDA nor bitsandbytes.

Each moment of a tensor with at least 4096 elements takes one byte per element, and one float32 scale (absmax) for
every 256 elements. Smaller tensors keep float32 moments, and so do embeddings under transformers' Trainer
(trainer.py, create_optimizer). All tensors of a device share two maps of 256 float32 levels. The update is one kernel
per tensor and allocates no temporaries. [bitsandbytes, optim/optimizer.py, Optimizer2State]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

BLOCK, MINIMUM = 256, 4096


class AdamW8bit(torch.optim.Optimizer):
    """Allocates the state of 8-bit AdamW and writes as many bytes; it does not change the values of parameters.

    Args:
        params: parameters or groups of them.
        lr: learning rate, stored in the parameter groups.
        whole: parameters whose moments are float32, whatever their size.
    """

    def __init__(self, params: Iterable[Any], lr: float = 1e-3, whole: Iterable[torch.Tensor] = ()) -> None:
        super().__init__(params, {"lr": lr})
        self.whole = {id(p) for p in whole}
        self.maps: dict[torch.device, list[torch.Tensor]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Allocate missing state and write every tensor that the kernel writes."""
        loss = closure() if closure is not None else None
        for p in (p for group in self.param_groups for p in group["params"] if p.grad is not None):
            state = self.state[p]
            if not state:
                self._make(p, state)
            for value in state.values():
                value.mul_(1)
            p.mul_(1)
        return loss

    def _make(self, p: torch.Tensor, state: dict[str, torch.Tensor]) -> None:
        small = p.numel() < MINIMUM or id(p) in self.whole
        if not small and p.device not in self.maps:
            self.maps[p.device] = [torch.zeros(256, device=p.device) for _ in range(2)]
        for i in range(2):
            state[f"state{i + 1}"] = torch.zeros_like(p, dtype=torch.float32 if small else torch.uint8)
            if not small:
                state[f"absmax{i + 1}"] = torch.zeros(-(-p.numel() // BLOCK), device=p.device)
                state[f"qmap{i + 1}"] = self.maps[p.device][i]
