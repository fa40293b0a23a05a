"""Optimizers chosen by name in the diffusion loop: predicted states are exact; resumed runs have the same losses."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from recipe_scripts import copy_checkpoint, forget_process, load_recipe
from tiny_unets import make_tiny_pipeline
from torch import nn

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import LoopArguments
from ckpt_ft.training.diffusion.loop import make_optimizer, read_losses
from ckpt_ft.workloads.optimizers import optimizer_maker
from ckpt_ft.workloads.workload import Workload

pytestmark = pytest.mark.usefixtures("one_process")

NAMES = ("adamw", "adafactor", "prodigy")


def loop_arguments(name: str) -> LoopArguments:
    return LoopArguments(optimizer=name, learning_rate=1.0 if name == "prodigy" else 1e-3)


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", NAMES)
def test_optimizer_states_are_predicted_exactly(name: str, lora: bool) -> None:
    """LoRA's B matrices start as zeros, for which Prodigy keeps no state."""
    args = loop_arguments(name)
    model: nn.Module = nn.Sequential(nn.Linear(48, 96), nn.ReLU(), nn.Linear(96, 48))
    if lora:
        model = inject_adapter_in_model(LoraConfig(r=4, target_modules=["0", "2"]), model)

    def compute_loss(run: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss: torch.Tensor = run(batch["x"]).square().mean()
        return loss

    workload = Workload(
        model, lambda samples, length: {"x": torch.ones(samples, 48)}, compute_loss,
        make_optimizer=optimizer_maker(args.traced_optimizer, model=model), device="cpu", max_grad_norm=1.0,
    )  # fmt: skip
    predicted = workload.trace(2).at_peak["optimizer"]
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = make_optimizer([{"params": trained}], args, args.learning_rate)
    for _ in range(2):
        workload.step(2)(model, optimizer)
    held = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    assert predicted == sum(v.untyped_storage().nbytes() for v in held)


@pytest.mark.parametrize("name", ["adafactor", pytest.param("prodigy", marks=pytest.mark.slow)])
def test_resumed_run_with_a_named_optimizer_has_the_same_losses(name: str, tmp_path: Path) -> None:
    args = loop_arguments(name)
    make_tiny_pipeline("sd2", 0, (16, 32)).save_pretrained(tmp_path / "base")
    recipe = load_recipe("diffusion_unet")

    def run(out: Path, *flags: str) -> list[float]:
        forget_process()
        small = [
            "--max_train_samples", "8", "--train_batch_size", "2", "--max_train_steps", "4", "--ac_report", "none",
        ]  # fmt: skip
        small += [
            "--pretrained_model_name_or_path",
            str(tmp_path / "base"),
            "--checkpointing_steps",
            "2",
            "--rank",
            "2",
        ]
        small += ["--optimizer", name, "--learning_rate", str(args.learning_rate), "--output_dir", str(out)]
        recipe.main([*small, *flags])
        return [line["loss"] for line in read_losses(str(out))]

    whole = run(tmp_path / "whole")
    part = copy_checkpoint(tmp_path / "whole", 2, tmp_path / "part")
    assert run(part, "--resume_from_checkpoint", "latest") == whole
    with pytest.raises(UserError, match=f"was written with optimizer {name}, this run has None"):
        run(part, "--optimizer", "adamw", "--resume_from_checkpoint", str(part / "checkpoint-2"))


def test_invalid_optimizer_flags_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match="--optimizer prodigy needs prodigyopt, .*: pip install prodigyopt"):
        LoopArguments(optimizer="prodigy")
    with pytest.raises(UserError, match="the optimizer prodigy needs prodigyopt"):
        optimizer_maker("prodigy")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object())
    with pytest.raises(UserError, match="--use_8bit_adam is AdamW, --optimizer adafactor is not: give one of them"):
        LoopArguments(optimizer="adafactor", use_8bit_adam=True)
