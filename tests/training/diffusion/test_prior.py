"""Prior preservation: pairs of rows, and a loss of both halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch.nn.functional import mse_loss

from ckpt_ft.training.diffusion.data import Pairs
from ckpt_ft.training.diffusion.objectives import denoising_loss, preserving_denoising_loss, preserving_flow_loss


class Rows:
    """As many as they are told, each its own key."""

    def __init__(self, count: int) -> None:
        self.count, self.sizes = count, [(32, 32)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return key


def test_pairs() -> None:
    """Three of the subject beside five of the class: an epoch has each pair of places once, the fewer begun anew, and
    what is shown twice in an epoch is framed anew."""
    pairs = Pairs(Rows(8), 3)  # type: ignore[arg-type]
    assert len(pairs) == 5
    rows: Any = pairs.__getitems__([(0, index) for index in range(5)])
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)]
    later: Any = pairs.__getitems__([(1, 0), (1, 3)])
    assert later == [(2, 0), (3, 0), (1, 3), (1, 6)]
    many = Pairs(Rows(8), 6)  # type: ignore[arg-type]
    assert many.__getitems__([(0, 5), (2, 1)]) == [(0, 5), (2, 1), (2, 7), (6, 7)]


@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_the_loss_of_both_halves_by_hand(snr_gamma: float | None) -> None:
    """As diffusers' scripts have it: the halves' means, the class's times its weight; Min-SNR on the subject alone."""
    scheduler = DDPMScheduler()
    prediction, target = torch.randn(2, 6, 4, 8, 8)
    times = torch.tensor([10, 500, 900, 20, 400, 800])
    errors = (prediction - target).square().mean(dim=(1, 2, 3))
    alpha = scheduler.alphas_cumprod[times[:3]]
    weights = torch.ones(3) if snr_gamma is None else (5.0 * (1 - alpha) / alpha).clamp(max=1)
    expected = (errors[:3] * weights).mean() + 0.3 * errors[3:].mean()
    got = preserving_denoising_loss(prediction, target, scheduler, times, snr_gamma, 0.3)
    torch.testing.assert_close(got, expected)
    if snr_gamma is None:
        first = mse_loss(prediction[:3], target[:3])
        assert got == first + 0.3 * mse_loss(prediction[3:], target[3:])
    alone = preserving_denoising_loss(prediction, target, scheduler, times, snr_gamma, 0.0)
    assert alone == denoising_loss(prediction[:3], target[:3], scheduler, times[:3], snr_gamma)


def test_the_flow_loss_of_both_halves_by_hand() -> None:
    batch = {
        "inputs": {"hidden_states": torch.randn(4, 5, 2)},
        "target": torch.randn(4, 5, 2),
        "weight": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }

    def model(hidden_states: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return (hidden_states,)

    errors = (batch["inputs"]["hidden_states"] - batch["target"]).square().mean(dim=(1, 2))  # type: ignore[index]
    expected = (errors[0] + 2 * errors[1]) / 2 + 0.5 * (3 * errors[2] + 4 * errors[3]) / 2
    torch.testing.assert_close(preserving_flow_loss(model, batch, 0.5), expected)
