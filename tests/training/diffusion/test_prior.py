"""Prior preservation: pairs of subject and class images, and the loss of both halves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler
from torch.nn.functional import mse_loss

from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments
from ckpt_ft.training.diffusion.data import Pairs
from ckpt_ft.training.diffusion.families import UNET
from ckpt_ft.training.diffusion.workload import Denoising, weighted_loss


class Rows:
    """A dataset of `count` rows; each row is its own key."""

    def __init__(self, count: int) -> None:
        self.count, self.sizes = count, [(32, 32)]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, key: tuple[int, int]) -> Any:
        return key


def test_pairs_repeat_the_shorter_half() -> None:
    """With three subject and five class images, an epoch has five pairs. The three start again, and an image that
    appears twice in an epoch is cropped again.
    """
    pairs = Pairs(Rows(8), 3)  # type: ignore[arg-type]
    assert len(pairs) == 5
    rows: Any = pairs.__getitems__([(0, index) for index in range(5)])
    assert rows == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 7)]
    later: Any = pairs.__getitems__([(1, 0), (1, 3)])
    assert later == [(2, 0), (3, 0), (1, 3), (1, 6)]
    many = Pairs(Rows(8), 6)  # type: ignore[arg-type]
    assert many.__getitems__([(0, 5), (2, 1)]) == [(0, 5), (2, 1), (2, 7), (6, 7)]


@pytest.mark.parametrize("snr_gamma", [None, 5.0])
def test_denoising_loss_of_both_halves(snr_gamma: float | None) -> None:
    """As in diffusers' scripts: the mean of each half, the class's times its weight; Min-SNR for the subject only."""
    scheduler, args = DDPMScheduler(), DiffusionModelArguments(snr_gamma=snr_gamma)
    prediction, latents, noise = torch.randn(3, 6, 4, 8, 8)
    times = torch.tensor([10, 500, 900, 20, 400, 800])
    made = Denoising(UNET, None, None, scheduler, args, prior=True)  # type: ignore[arg-type]
    batch = made.batch(latents, noise, times, {"prompt_embeds": torch.zeros(1)})
    errors = (prediction - noise).square().mean(dim=(1, 2, 3))
    alpha = scheduler.alphas_cumprod[times[:3]]
    weights = torch.ones(3) if snr_gamma is None else (5.0 * (1 - alpha) / alpha).clamp(max=1)
    expected = (errors[:3] * weights).mean() + 0.3 * errors[3:].mean()
    got = weighted_loss(lambda **inputs: (prediction,), batch, 0.3)
    torch.testing.assert_close(got, expected)
    if snr_gamma is None:
        halves = mse_loss(prediction[:3], noise[:3]) + 0.3 * mse_loss(prediction[3:], noise[3:])
        torch.testing.assert_close(got, halves)
    alone = weighted_loss(lambda **inputs: (prediction,), batch, 0.0)
    torch.testing.assert_close(alone, (errors[:3] * weights).mean())


def test_flow_matching_loss_of_both_halves() -> None:
    batch = {
        "inputs": {"hidden_states": torch.randn(4, 5, 2)},
        "target": torch.randn(4, 5, 2),
        "weight": torch.tensor([1.0, 2.0, 3.0, 4.0]),
    }

    def model(hidden_states: torch.Tensor, return_dict: bool) -> tuple[torch.Tensor]:
        return (hidden_states,)

    errors = (batch["inputs"]["hidden_states"] - batch["target"]).square().mean(dim=(1, 2))  # type: ignore[index]
    expected = (errors[0] + 2 * errors[1]) / 2 + 0.5 * (3 * errors[2] + 4 * errors[3]) / 2
    torch.testing.assert_close(weighted_loss(model, batch, 0.5), expected)
