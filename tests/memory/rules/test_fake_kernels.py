"""Rules that stand for a fake kernel give what it gives."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt_ft.memory.rules.fake_kernels import RULES

aten = torch.ops.aten


def described(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_nll_loss_as_the_fake_kernel(dtype: torch.dtype, reduction: int) -> None:
    forward, backward = aten.nll_loss_forward.default, aten.nll_loss_backward.default
    with FakeTensorMode():
        for shape in ((7, 5), (1, 1)):
            scores, labels = torch.empty(shape, dtype=dtype), torch.zeros(shape[0], dtype=torch.long)
            given = scores, labels, None, reduction, -100
            losses, weight = forward(*given)
            assert list(map(described, RULES[forward](forward, given, {}))) == [described(losses), described(weight)]
            given = losses, *given, weight
            assert described(RULES[backward](backward, given, {})) == described(backward(*given))
