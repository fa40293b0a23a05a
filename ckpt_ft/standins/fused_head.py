"""TRL's fused LM head as it runs on a GPU, for traces.

TRL computes log-probabilities from tiles of the logits (trl/kernels/chunked_logprob.py, ChunkedLogProbFunction). On a
GPU a Triton kernel folds each tile into running statistics, another one overwrites it with its gradient in backward,
and cuBLAS adds to the gradients of hidden states and head in fp32. Elsewhere torch operators with fp32 temporaries do
the same. Fake tensors are on the CPU, so a trace for a GPU would follow those operators. The autograd function and its
chunk size stay TRL's; only its kernels are replaced, by operators that read and write the same memory and allocate
nothing. The policy `head` leaves a model with TRL's loss as it is (checkpointing/head.py, `fused_loss`).
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.compat.libraries import TRL_KERNEL
from ckpt_ft.compat.patches import patched


@contextmanager
def on_gpu() -> Iterator[None]:
    """Makes TRL's fused head run as on a GPU, where TRL is imported and has one."""
    kernels, users = sys.modules.get("trl.kernels.chunked_logprob"), sys.modules.get("trl.trainer.utils")
    with ExitStack() as stack:
        if kernels is not None and hasattr(kernels, TRL_KERNEL):
            own: dict[str, Any] = {
                "trl_forward": defaultdict(lambda: _fold),  # `kernel[grid](...)` launches a Triton kernel
                "trl_backward": defaultdict(lambda: _turn_into_gradient),
                "trl_addmm": _addmm_fp32,
                "trl_triton": SimpleNamespace(cdiv=lambda size, block: -(-size // block)),
                "trl_kernels_run": lambda device: True,
            }
            stack.enter_context(patched(**own))
            if users is not None:
                stack.enter_context(patched(trl_uses_kernels=own["trl_kernels_run"]))
        yield


def _fold(tile: Tensor, stride: int, targets: Tensor, statistic: Tensor, *args: Any, **kwargs: Any) -> None:
    """Reads the tile once and writes a few numbers for each token."""
    torch.sum(tile, -1, dtype=torch.float32, out=statistic)


def _turn_into_gradient(tile: Tensor, *args: Any, **kwargs: Any) -> None:
    tile.mul_(1)


def _addmm_fp32(acc: Tensor, a: Tensor, b: Tensor) -> None:
    """cuBLAS adds a product of half-precision matrices to fp32 (addmm with `out_dtype`)."""
    if a.dtype is torch.float32:
        acc.addmm_(a, b)
    else:
        torch.addmm(acc, a, b, out_dtype=torch.float32, out=acc)
