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


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("loss", [aten.mse_loss.default, aten.smooth_l1_loss.default], ids=str)
def test_a_reduced_loss_as_the_real_kernel(loss: torch._ops.OpOverload, reduction: int) -> None:
    """Its storage too: that of all the elements that were summed up."""
    real = loss(torch.zeros(3, 4), torch.zeros(4), reduction)
    with FakeTensorMode():
        fake = RULES[loss](loss, (torch.empty(3, 4), torch.empty(4), reduction), {})
        assert described(fake) == described(real)
    assert real.untyped_storage().nbytes() == 4 * 12


@pytest.mark.parametrize("kind", ["batch", "layer"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (3, 2, 1, 0)], ids=str)
def test_a_norm_lays_out_as_the_real_kernel(kind: str, order: tuple[int, ...]) -> None:
    """Its result and its input's gradient, of an input whose axes were moved: what comes next may have to copy."""
    forward = {"batch": aten.native_batch_norm.default, "layer": aten.native_layer_norm.default}[kind]
    backward = {"batch": aten.native_batch_norm_backward.default, "layer": aten.native_layer_norm_backward.default}[
        kind
    ]

    def called(fake: bool) -> list[tuple[object, ...]]:
        x = torch.empty(6, 6, 6, 6).permute(order)
        weight = torch.empty(6)
        given = (x, weight, weight, None, None, True, 0.1, 1e-5) if kind == "batch" else (x, [6], weight, weight, 1e-5)
        out, mean, rstd = RULES[forward](forward, given, {}) if fake else forward(*given)
        back: tuple[object, ...] = (x, x, [6], mean, rstd, weight, weight, [True] * 3)
        if kind == "batch":
            back = (x, x, weight, None, None, mean, rstd, True, 1e-5, [True] * 3)
        grad = (RULES[backward](backward, back, {}) if fake else backward(*back))[0]
        return [described(out), described(grad)]

    real = called(fake=False)
    with FakeTensorMode():
        assert called(fake=True) == real
