"""In a verified step, engines compare restored tensors with those dropped, offloaded or computed in forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_models import build
from torch import nn

from ckpt_ft import apply_policy
from ckpt_ft.checkpointing import deferred_logits, head, offload
from ckpt_ft.checkpointing.verify import Schedule, Verification, VerificationError
from ckpt_ft.errors import WorkFailed

WIDTH = 8
factor = 1.0


class OutsideLayerNorm(nn.LayerNorm):
    """Reads a value from outside the module, so that its code and attributes do not show it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * factor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.act, self.down = (
            OutsideLayerNorm(WIDTH),
            nn.Linear(WIDTH, 16),
            nn.GELU(),
            nn.Linear(16, WIDTH),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_pointwise_names_the_norm_that_is_recomputed_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    apply_policy(model, "pointwise", verify="always")
    model(torch.randn(4, WIDTH)).sum().backward()
    loss = model(torch.randn(4, WIDTH)).sum()
    monkeypatch.setitem(globals(), "factor", 2.0)
    with pytest.raises(VerificationError, match=r"where: blocks\.0\.norm \(OutsideLayerNorm\)"):
        loss.backward()


def test_pointwise_compares_nothing_in_unverified_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Stack()
    apply_policy(model, "pointwise", verify="never")
    loss = model(torch.randn(4, WIDTH)).sum()
    monkeypatch.setitem(globals(), "factor", 2.0)
    loss.backward()


def test_offload_compares_fetched_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)
    model = Stack()
    apply_policy(model, "offload", verify="always")
    model(torch.randn(4, WIDTH)).sum().backward()
    loss = model(torch.randn(4, WIDTH)).sum()
    fetch = offload.Parked.fetch

    def damaged(self: Any) -> None:
        fetch(self)
        self.device.view(torch.int32)[0] ^= 1  # one bit

    monkeypatch.setattr(offload.Parked, "fetch", damaged)
    with pytest.raises(VerificationError, match="what differs: values"):
        loss.backward()


def test_head_compares_the_second_run_of_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", 5 * 99 * 4)
    model, inputs = build("llama")
    apply_policy(model, "head", verify="always")
    model(**inputs).loss.backward()
    loss = model(**inputs).loss
    with torch.no_grad():
        model.lm_head.weight.data.mul_(1.5)
    with pytest.raises(VerificationError, match=r"where: lm_head \(Linear\)"):
        loss.backward()


class MeanOfPositions(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x - x.mean(-2, keepdim=True))


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * self.calls


@pytest.mark.parametrize("kind", [MeanOfPositions, Counting])
@pytest.mark.parametrize("rows", [5, 1000])
def test_head_refuses_mixed_positions(kind: type[nn.Linear], rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deferred_logits, "CHUNK_BYTES", rows * 99 * 4)
    model, inputs = build("llama")
    model.lm_head = kind(32, 99, bias=False)
    apply_policy(model, "head")
    with pytest.raises(WorkFailed, match=f"{kind.__name__}, the output layer, computes a position's logits from"):
        model(**inputs)


@pytest.mark.parametrize(
    "written",
    [lambda hidden, bias: hidden.data.mul_(2), lambda hidden, bias: bias.mul_(2), lambda hidden, bias: torch.rand(1)],
)
def test_head_compares_what_changes_before_the_loss(written: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer's input, tensors added to the logits, and the random state must not change before the loss."""
    verification = Verification(Schedule.parse("always"), "head")
    verification.begin_step()
    layer = head.OutputLayer(nn.Sequential(nn.Linear(4, 7), nn.Dropout(0.3)))
    layer.module.out_features = 7  # type: ignore[assignment]
    layer.verification = verification
    hidden, bias = torch.randn(5, 4, requires_grad=True), torch.randn(7)
    logits = layer.defer(hidden) + bias
    written(hidden, bias)
    with pytest.raises(WorkFailed, match=r"its input: \(5, 4\)|given to \(add\) was written|draws between"):
        F.cross_entropy(logits, torch.arange(5))


def test_statistics_of_batch_norm_are_not_compared() -> None:
    """BatchNorm saves them, but in training they change and backward does not read them."""
    model = Stack()
    for block in model.blocks:
        block.norm = nn.BatchNorm1d(WIDTH)
    apply_policy(model, "pointwise", verify="always")
    for _ in range(3):
        model(torch.randn(4, WIDTH)).sum().backward()
    assert int(model.blocks[0].norm.num_batches_tracked) == 3
