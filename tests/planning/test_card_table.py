"""`ckpt-ft where --device CARD`, without a model: the stored table says what an estimate says, for every card."""

from __future__ import annotations

import json
import sys

import pytest
from versions import is_pinned

from ckpt_ft.cli import main as cli
from ckpt_ft.memory.gpus import GPUS, find_gpu
from ckpt_ft.planning.card_table import LENGTHS, PAGE, fits, kernels_of, spec_of, stored
from ckpt_ft.planning.estimate import estimate
from ckpt_ft.planning.methods import METHODS

SMALLEST = "Qwen/Qwen3-0.6B"


def test_every_card_has_its_rows() -> None:
    for card in GPUS.values():
        found = fits(card)
        assert [one.model for one in found[:3]] == [SMALLEST] * 3
        assert len(found) == len(METHODS) * len(stored())
        assert all(one.speed > 0 or card.sized if one.length else one.needed > card.memory for one in found)


def test_row_is_the_answer_of_an_estimate() -> None:
    """To the byte on the versions that made the table. Elsewhere the same bytes may be allocated in another order.

    In transformers 5.16, the first matrix product is that of the rotary embeddings: the workspace of cuBLAS lies
    elsewhere, so that 12 MiB more are reserved, while as much is allocated.
    """
    card = find_gpu("rtx-3060")
    row = stored()[SMALLEST]["QLoRA"][kernels_of(card)]
    found = estimate(spec_of(SMALLEST, "QLoRA", 2048, card))
    room = 0 if is_pinned("torch", "transformers") else 0.015
    assert found.peak_reserved == pytest.approx(PAGE * row["pages"][LENGTHS.index(2048)], rel=room, abs=0)
    assert found.seconds == pytest.approx(2048 / row["speed"][card.name], rel=1e-3)


def test_card_is_asked_about_without_a_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "where", "--device", "NVIDIA GeForce RTX 3060 12GB", "--json"])
    assert cli._main() == 0
    rows = {(row["model"], row["method"]): row for row in json.loads(capsys.readouterr().out)["rtx-3060"]}
    assert rows["Qwen/Qwen3-8B", "QLoRA"]["length"] == 4096
    assert rows["Qwen/Qwen3-14B", "QLoRA"]["swap"] == 40
    assert rows["Qwen/Qwen3-8B", "full"]["needed"] > 60 << 30
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", "where", "--device", "rtx-3060", "--seq-length", "512"])
    assert cli._main() == 0
    assert "without a model only --device and --method count" in capsys.readouterr().err
