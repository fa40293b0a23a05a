"""What a transformers model is trained to make small: its own loss, or that of its library."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from .workload import Batch, Forward

POSITIVES = "positives"  # ids of what each row's text belongs to
_SCALE = 20.0  # of sentence-transformers' MultipleNegativesRankingLoss


def own_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def of_pairs_by_itself(model: Forward, batch: Batch) -> torch.Tensor:
    """The loss of CLIP and its kind, which it computes where it is asked to."""
    return own_loss(model, {**batch, "return_loss": True})


def of_pairs(model: Forward, batch: Batch) -> torch.Tensor:
    """Each row's text must be nearest to its own positive: sentence-transformers' MultipleNegativesRankingLoss."""
    rows = {name: value for name, value in batch.items() if name != POSITIVES}
    anchors, positives = (
        _embedded(model, {**rows, "input_ids": ids}) for ids in (batch["input_ids"], batch[POSITIVES])
    )
    scores = _SCALE * F.normalize(anchors, dim=1) @ F.normalize(positives, dim=1).T
    return F.cross_entropy(scores, torch.arange(len(scores), device=scores.device))


def _embedded(model: Forward, inputs: Batch) -> torch.Tensor:
    """(rows, width): the mean over each row's tokens, as sentence-transformers' Pooling takes it."""
    tokens = model(**inputs).last_hidden_state
    mask = inputs.get("attention_mask", torch.ones_like(inputs["input_ids"]))
    weights = mask.unsqueeze(-1).expand(tokens.shape).to(tokens.dtype)
    mean: torch.Tensor = (tokens * weights).sum(1) / weights.sum(1).clamp(min=1e-9)
    return mean
