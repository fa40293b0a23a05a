"""The command `ckpt-ft check`: which weights it uses, and its tolerance for policies that sum in another order."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.planning import check
from ckpt_ft.planning.check import check_model
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads import model_config

TINY = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 61,
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SETTINGS = TrainingSpec.of(seq_length=8, optimizer="none", dtype="float32")


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Returns a directory with a saved bf16 model whose weights no seed of the check produces."""
    torch.manual_seed(1234)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).to(torch.bfloat16)
    model.save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def test_saved_weights_of_a_hub_model_are_loaded(saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights come from a local copy of the Hub's cache, in huggingface_hub's layout."""
    from huggingface_hub import constants

    repository = tmp_path / "hub" / "models--me--tiny"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("0" * 40)
    shutil.copytree(saved, repository / "snapshots" / ("0" * 40))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    for module in (check, model_config):
        monkeypatch.setattr(module, "hub_answers", lambda: False)
    expected = check_model(SETTINGS.edit(model=str(saved), policy="full", batch_size=2), seed=0)
    parity = check_model(SETTINGS.edit(model="me/tiny", policy="full", batch_size=2), seed=0)
    assert parity.ok
    assert parity.rows[0].plain == expected.rows[0].plain
    assert parity.notes[-1] == "note: me/tiny with the saved weights"


def test_config_without_weights_gets_random_weights(saved: Path) -> None:
    parity = check_model(SETTINGS.edit(model=str(saved / "config.json"), policy="full", batch_size=2), seed=0)
    assert "with random weights" in parity.notes[-1]
    assert (
        parity.rows[0].plain
        != check_model(SETTINGS.edit(model=str(saved), policy="full", batch_size=2), seed=0).rows[0].plain
    )


@pytest.mark.parametrize("mixed_precision", ["no", "bf16"])
def test_head_and_pointwise_are_within_their_tolerance(saved: Path, mixed_precision: str) -> None:
    settings = TrainingSpec.of(seq_length=8, optimizer="none", dtype="float32", mixed_precision=mixed_precision)
    assert check_model(settings.edit(model=str(saved), policy="pointwise,head", batch_size=2), seed=0).ok


def test_compile_budget_with_dropout_is_refused(tmp_path: Path) -> None:
    LlamaConfig(**TINY, attention_dropout=0.1).save_pretrained(tmp_path)
    with pytest.raises(UserError, match="has dropout.*silently wrong.*pytorch#190717|pytorch/pytorch#190717"):
        check_model(SETTINGS.edit(model=str(tmp_path), policy="budget:0.5", batch_size=2), seed=0)
    assert check_model(SETTINGS.edit(model=str(tmp_path), policy="budget:1", batch_size=2), seed=0).ok


def test_noise_of_a_diffusion_model_is_drawn_from_the_seed(tmp_path: Path) -> None:
    """The loss is the same in each check, so the noise is not uninitialized memory."""
    pytest.importorskip("diffusers")
    from tiny_unets import make_tiny_pipeline

    make_tiny_pipeline("sd1", 0, (16,)).unet.save_pretrained(tmp_path)
    losses = [
        check_model(TrainingSpec.of(str(tmp_path), policy="full", batch_size=1, optimizer="none"), seed=3)
        .rows[0]
        .plain
        for _ in (1, 2)
    ]
    assert losses[0] == losses[1]
    assert 0.5 < float(losses[0]) < 10  # noise has variance 1 and the U-Net is untrained
