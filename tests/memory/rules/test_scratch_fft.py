"""Temporary memory of Fourier transforms and transposed convolutions on GPUs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ckpt_ft.memory.fake.step import trace_step
from ckpt_ft.units import MIB


class Applied(nn.Module):
    def __init__(self, function) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


def peak_over_input(function, x: Tensor) -> int:
    """Returns the peak bytes of one call above its input, which is resident."""
    model = Applied(function)
    model.x = nn.Parameter(x, requires_grad=False)
    return trace_step(model, lambda model, _: model(model.x), device="l40s").peak_allocated - x.numel() * x.itemsize


@pytest.mark.parametrize(
    ("function", "dtype", "parts"),
    [
        (torch.fft.fft2, torch.complex64, 8 * MIB * 2),  # result and work area
        (torch.fft.rfft, torch.float32, 4 * MIB * 2),
        (torch.fft.irfft, torch.complex64, 8 * MIB * 3),  # and a copy of the input
    ],
)
def test_fourier_transform_allocates_a_complex_work_area(function, dtype, parts):
    assert peak_over_input(function, torch.zeros(1024, 1024, dtype=dtype)) == pytest.approx(parts, rel=0.01)


def test_transposed_convolution_has_no_grouped_copies():
    x, weight = torch.zeros(1, 4, 512, 512), torch.zeros(4, 1, 2, 2)
    copies = peak_over_input(lambda x: nn.functional.conv_transpose2d(x, weight, stride=2), x)
    assert copies == pytest.approx(4 * MIB + (4 + 4) * MIB, rel=0.02)  # its result, and both operands in channels last
