"""Scratch of cuDNN's convolutions, derived from its algorithms; nothing here is fitted to a model.

cuDNN's choice of algorithm is not documented. These are the two algorithms that need memory, each used where it is the
fast one. Depthwise, grouped and channels-last convolutions are assumed to need none.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from ckpt_ft.memory.record.dispatch import After
from ckpt_ft.memory.record.recorder import Recorder

aten = torch.ops.aten
_ARGUMENTS = {
    aten.convolution.default: (0, 1, 3, 8),
    aten.convolution_backward.default: (1, 2, 4, 9),
}  # input, weight, stride, groups


def nhwc_copies(operands: list[Tensor]) -> int:
    """Bytes of transposed copies: tensor cores need channels-last operands, so contiguous ones are copied to scratch.

    [docs.nvidia.com/deeplearning/performance/dl-performance-convolutional: tensor layouts]
    """
    return sum(t.numel() * t.itemsize for t in operands)


def winograd(batch: int, channels_in: int, channels_out: int, size: torch.Size) -> int:
    """Bytes of non-fused Winograd F(4x4, 3x3): 36 values for each 16 of input and output, and each 9 of weight.

    [Lavin and Gray 2016, arXiv:1509.09308]
    """
    tiles = batch * prod(-(-n // 4) for n in size)
    return 36 * 4 * (channels_in * channels_out + tiles * (channels_in + channels_out))


def workspace(arch: int) -> After:
    """Records the scratch of a convolution, or of its backward, whose two halves run one after the other."""

    def record(recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> None:
        input, weight, stride, groups = (args[at] for at in _ARGUMENTS[func])
        output = out if isinstance(out, Tensor) else args[0]
        if weight.dim() != 4 or groups != 1 or not input.is_contiguous():
            return
        tf32 = arch >= 80 and torch.backends.cudnn.allow_tf32
        if (arch >= 70 and input.dtype == torch.float16) or (arch >= 80 and input.dtype == torch.bfloat16) or tf32:
            recorder.scratch(nhwc_copies([input, weight, output]), str(func))
        elif weight.shape[2:] == (3, 3) and list(stride) == [1, 1]:
            recorder.scratch(winograd(input.size(0), weight.size(1), weight.size(0), output.shape[2:]), str(func))

    return record
