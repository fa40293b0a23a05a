"""MemoryCallback in a run of Lightning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.training.arguments import ACArguments


class Module(pl.LightningModule):
    """Four residual blocks on random rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        x = batch[0]
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def fit(folder: Path, callbacks: list[Any]) -> Module:
    module = Module()
    rows = torch.randn(16, 32, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        max_epochs=1, accumulate_grad_batches=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, default_root_dir=folder,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.utils.data.TensorDataset(rows), batch_size=2))
    return module


@pytest.mark.filterwarnings("ignore")
def test_policy_keeps_the_weights_and_a_report_is_written(tmp_path: Path) -> None:
    from ckpt_ft.integrations.lightning import MemoryCallback

    callback = MemoryCallback("full")
    with_policy, plain = fit(tmp_path, [callback]), fit(tmp_path / "plain", [])
    assert all(map(torch.equal, with_policy.parameters(), plain.parameters()))
    report = json.loads((tmp_path / "memory_report.json").read_text())
    assert (report["provenance"]["policy"], report["ranks"][0]["steps"]) == ("full", 4)
    assert callback.session.applied is None
    with pytest.raises(UserError, match="ac_check: a Lightning module"):
        MemoryCallback(ACArguments(ac_policy="full", ac_check=True))
    assert "forward" not in vars(with_policy.blocks[0])
