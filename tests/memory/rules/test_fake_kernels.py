"""Rules that replace a fake kernel return what the real kernel returns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.memory.rules.fake_kernels import RULES

aten = torch.ops.aten


def properties(tensor: Tensor) -> tuple[object, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("loss", ["mse_loss", "smooth_l1_loss", "binary_cross_entropy", "soft_margin_loss"])
def test_reduced_loss_equals_the_real_kernels(loss: str, reduction: int) -> None:
    """The storage is equal too: the real kernel keeps the storage of all summed elements."""
    op = getattr(aten, loss).default
    target, given = (3, 4) if loss == "binary_cross_entropy" else (4,), {"reduction": reduction}
    real = op(torch.zeros(3, 4), torch.zeros(target), **given)
    with FakeTensorMode():
        fake = RULES[op](op, (torch.empty(3, 4), torch.empty(target)), given)
        assert properties(fake) == properties(real)
    assert real.untyped_storage().nbytes() == 4 * 12


@pytest.mark.parametrize("kind", ["batch", "layer"])
@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (0, 3, 1, 2), (3, 2, 1, 0)], ids=str)
def test_strides_of_norms_equal_the_real_kernels(kind: str, order: tuple[int, ...]) -> None:
    """For inputs with permuted axes, the strides of the result and of the gradient decide where later copies are."""
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
        return [properties(out), properties(grad)]

    real = called(fake=False)
    with FakeTensorMode():
        assert called(fake=True) == real


@pytest.mark.parametrize("into", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)], ids=str)
def test_product_added_in_another_dtype_is_traced(batch: tuple[int, ...], into: bool) -> None:
    """PyTorch's fake kernels and its formulas of flops take no `out_dtype` in some versions."""
    made: list[Tensor] = []

    def step(model: nn.Module, optimizer: object) -> None:
        a, b = (torch.zeros(*batch, *shape, dtype=torch.bfloat16) for shape in ((8, 64), (64, 16)))
        total = torch.zeros(*batch, 8, 16)
        add, multiply = (torch.baddbmm, torch.bmm) if batch else (torch.addmm, torch.mm)
        out = {"out": total} if into else {}
        made.extend((add(total, a, b, out_dtype=torch.float32, **out), multiply(a, b, out_dtype=torch.float32)))
        assert (made[0] is total) == into

    trace = trace_step(nn.Linear(4, 4), step, device="a100-80gb", warmup_steps=0)
    assert [(out.shape, out.dtype) for out in made] == [((*batch, 8, 16), torch.float32)] * 2
    assert [op.flops for op in trace.ops if "mm" in op.name] == [2 * 8 * 64 * 16 * (2 if batch else 1)] * 2
