"""Scratch that a GPU's Fourier transforms and transposed convolutions take, and a CPU's do not."""

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
    """Bytes that the peak of one call is above its input, which is resident."""
    model = Applied(function)
    model.x = nn.Parameter(x, requires_grad=False)
    return trace_step(model, lambda model, _: model(model.x), device="l40s").peak_allocated - x.numel() * x.itemsize


@pytest.mark.parametrize(
    ("function", "dtype", "parts"),
    [
        (torch.fft.fft2, torch.complex64, 8 * MIB * 2),  # result, work area
        (torch.fft.rfft, torch.float32, 4 * MIB * 2),
        (torch.fft.irfft, torch.complex64, 8 * MIB * 3),  # and a copy of what is transformed
    ],
)
def test_a_fourier_transform_takes_a_work_area_of_the_complex_data(function, dtype, parts):
    assert peak_over_input(function, torch.zeros(1024, 1024, dtype=dtype)) == pytest.approx(parts, rel=0.01)


def test_a_transposed_convolution_is_no_grouped_one():
    x, weight = torch.zeros(1, 4, 512, 512), torch.zeros(4, 1, 2, 2)
    copies = peak_over_input(lambda x: nn.functional.conv_transpose2d(x, weight, stride=2), x)
    assert copies == pytest.approx(4 * MIB + (4 + 4) * MIB, rel=0.02)  # its result, and both channels last
