"""Tensors that share a storage and count versions separately: parts made by `unsafe_chunk` and written in place.

Torch's fused cells do this: an LSTMCell applies its gates' activations in place to parts of one matmul's output.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ckpt_ft.checkpointing import offload
from ckpt_ft.checkpointing.apply import apply_policy
from ckpt_ft.checkpointing.tensor_identity import counter_of, counts_with

WIDTH = 8
POLICIES = ("full", "segments:2", "save:matmul", "save:matmul,offload", "pointwise", "offload", "pointwise,offload")


@pytest.fixture(autouse=True)
def _park_small_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(offload.install.__kwdefaults__, "min_bytes", 1)


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.proj = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, c = self.cell(x)
        h, c = self.cell(self.proj(x), (h, c))
        return x + h * c


class GRUCell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.proj = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(self.proj(x), self.cell(x))


class GRU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.gru(x[None])[0][0]


class Chunked(nn.Module):
    """Parts of a matmul's output, written in place one after another."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = torch.unsafe_chunk(self.up(x), 3, -1)
        a.sigmoid_()
        b.tanh_()
        return x + a * b * c.cos_()


class ChunkedAfterWrite(nn.Module):
    """The whole was written before, so that its version number equals that of a written part."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x).mul_(2)
        before = y.sin()  # saves y at version 1
        a, b, _ = torch.unsafe_split(y.clone().mul_(3), WIDTH, -1)
        z = nn.functional.silu(self.up(x)).mul_(1.5)
        d, e, _ = torch.unsafe_split(z, WIDTH, -1)
        d.mul_(2)
        return x + a.tanh_() * b.sigmoid_() + before[:, :WIDTH] * d.sin() * e


class Stack(nn.Module):
    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)


def _gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    (model(x).pow(2) * torch.arange(1.0, WIDTH + 1)).sum().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:policy")
@pytest.mark.parametrize("block", [LSTM, GRUCell, GRU, Chunked, ChunkedAfterWrite], ids=lambda block: block.__name__)
@pytest.mark.parametrize("policy", POLICIES)
def test_parts_written_in_place_have_the_plain_gradients(block: type[nn.Module], policy: str) -> None:
    torch.manual_seed(0)
    model, x = Stack(block), torch.randn(4, WIDTH)
    plain = _gradients(model, x)
    apply_policy(model, policy)
    for ours, wanted in zip(_gradients(model, x), plain, strict=True):
        assert torch.equal(ours, wanted)


def test_version_counters_with_equal_numbers_are_distinguished() -> None:
    whole = torch.zeros(4)
    first, second = torch.unsafe_chunk(whole, 2)
    first.add_(1)
    whole.add_(1)
    assert first._version == whole._version == 1
    assert not counts_with(first, whole)
    assert not counts_with(first, second)
    assert counts_with(whole, counter_of(whole))
    assert counts_with(first[:1], first)
    assert (first._version, whole._version, second._version) == (1, 1, 0)
    with torch.inference_mode():
        assert not counts_with(torch.zeros(1), torch.zeros(1))
