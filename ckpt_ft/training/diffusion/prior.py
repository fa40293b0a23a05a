"""Prior preservation: beside each of the subject's images one of its class, in the same batch, with a loss of its own.

A micro-batch of N samples has 2 N rows: first the subject's, then the class's.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor
from torch.utils.data import Dataset

from ckpt_ft.workloads.workload import Batch, Forward

from .flow import flow_errors
from .noise import denoising_loss

if TYPE_CHECKING:
    from diffusers import DDPMScheduler

    from .latents import CachedLatents, FramedImages, Key, Row


class Pairs(Dataset["Row"]):
    """Pairs of rows: sample i of an epoch is image i of the subject beside image i of the class, each begun anew where
    it has fewer.

    Args:
        rows: the `instances` rows of the subject, behind them those of the class.
    """

    def __init__(self, rows: FramedImages | CachedLatents, instances: int) -> None:
        self.rows, self.instances, self.classes = rows, instances, len(rows) - instances
        self.sizes, self.buckets = rows.sizes, [list(range(len(self)))]  # one size: see DreamBoothArguments

    def __len__(self) -> int:
        return max(self.instances, self.classes)

    def __getitems__(self, keys: list[Key]) -> list[Row]:
        """Of a whole micro-batch, in place of one `__getitem__` after another."""
        first = [_key(epoch, index, self.instances, len(self)) for epoch, index in keys]
        second = [_key(epoch, index, self.classes, len(self)) for epoch, index in keys]
        return [self.rows[key] for key in [*first, *((epoch, self.instances + index) for epoch, index in second)]]


def _key(epoch: int, index: int, rows: int, length: int) -> Key:
    """Which of `rows` is sample `index` of so many, and for the how-manieth time, so that each is framed anew."""
    turn, place = divmod(index, rows)
    return epoch * -(-length // rows) + turn, place


def preserving_denoising_loss(
    prediction: Tensor, target: Tensor, scheduler: DDPMScheduler, times: Tensor, snr_gamma: float | None, weight: float
) -> Tensor:
    """`denoising_loss` of the subject's half, plus `weight` times the class's, which Min-SNR leaves alone."""
    (ours, prior), (wanted, kept) = prediction.chunk(2), target.chunk(2)
    loss = denoising_loss(ours, wanted, scheduler, times.chunk(2)[0], snr_gamma)
    return loss + weight * denoising_loss(prior, kept, scheduler, times)


def preserving_flow_loss(model: Forward, batch: Batch, weight: float) -> Tensor:
    """`flow_loss` of the subject's half, plus `weight` times the class's."""
    ours, prior = flow_errors(model, batch).chunk(2)
    return ours.mean() + weight * prior.mean()
