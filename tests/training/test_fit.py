"""Plans of recipes: the flags that they decide, lines of the report, and continuing after out-of-memory errors."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from ckpt_ft.errors import UserError
from ckpt_ft.memory.record.tracker import Tracker
from ckpt_ft.policy import Policy
from ckpt_ft.spec.launch import Launch, ZeroOptions
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.callback import ACCallback
from ckpt_ft.training.fit import Fitted
from ckpt_ft.training.flags import check_offloaded
from ckpt_ft.training.text import PadCollator
from ckpt_ft.units import MIB
from ckpt_ft.workloads.optimizers import OffloadedAdamW
from ckpt_ft.workloads.workload import Workload

ROWS = [{"input_ids": [1] * length, "labels": [1] * length} for length in (8, 32, 16)]


def model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=256, hidden_size=32, intermediate_size=80, num_hidden_layers=4, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64,
    )  # fmt: skip
    return LlamaForCausalLM(config).train()


def arguments(tmp_path: Path, **more: Any) -> TrainingArguments:
    return TrainingArguments(output_dir=str(tmp_path / "out"), use_cpu=True, **more)


def trainer(tmp_path: Path, **more: Any) -> Trainer:
    return Trainer(
        model(), arguments(tmp_path, **more), train_dataset=Dataset.from_list(ROWS), data_collator=PadCollator(0)
    )


def fit(tmp_path: Path, settings: ACArguments, **more: Any) -> Fitted:
    """Returns what a callback with `settings` plans for a trainer."""
    fitted = ACCallback(settings).attach(trainer(tmp_path, **more)).fitted
    assert fitted is not None
    return fitted


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Fitted:
    """A model with a plan for 3 MiB, shared by several tests because a plan takes seconds."""
    settings = ACArguments(ac_policy="auto", ac_budget="3MiB")
    return fit(tmp_path_factory.mktemp("fitted"), settings, per_device_train_batch_size=8)


def test_auto_becomes_a_policy_that_fits(fitted: Fitted) -> None:
    assert fitted.plan is not None
    assert str(fitted.policy) == fitted.plan.best.policy
    assert fitted.settings == ACArguments(ac_policy="auto", ac_budget="3MiB")
    assert fitted.plan.best.batch == 8
    trained = fitted.workload.model
    assert fitted.workload.make_optimizer is not None
    step, optimizer = fitted.workload.step(8), fitted.workload.make_optimizer(trained)
    from ckpt_ft.checkpointing.apply import apply_policy

    applied = apply_policy(trained, fitted.policy)
    for _ in range(2):
        with Tracker(trained, optimizer, limit=3 * MIB, ops=False) as tracker:
            step(trained, optimizer)
    applied.remove()
    assert tracker.recorder.peak <= 3 * MIB


@pytest.mark.slow
def test_found_batch_keeps_the_effective_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    settings = ACArguments(ac_policy="full", ac_budget="3MiB", find_max_batch_size=True)
    given = trainer(tmp_path, per_device_train_batch_size=64)
    before = given.args
    fitted = ACCallback(settings).attach(given).fitted
    assert fitted is not None
    assert fitted.largest is not None
    assert given.args is fitted.args
    assert given._train_batch_size == fitted.args.per_device_train_batch_size
    assert 1 < fitted.args.per_device_train_batch_size <= fitted.largest.batch < 64
    assert fitted.args.per_device_train_batch_size * fitted.args.gradient_accumulation_steps == 64
    assert fitted.workload.accumulation == fitted.args.gradient_accumulation_steps
    assert (before.per_device_train_batch_size, before.gradient_accumulation_steps) == (64, 1)
    assert "the effective batch stays 64 per device" in capsys.readouterr().out


@pytest.mark.slow
def test_found_batch_fits_as_a_micro_batch(tmp_path: Path) -> None:
    """Gradients live across micro-batches, so a budget that just fits four samples alone fits fewer then."""
    alone = Workload.from_trainer(trainer(tmp_path))
    limit = alone.trace(4).peak_allocated
    settings = ACArguments(ac_policy="none", ac_budget=f"{limit / 0.95 + 1:.0f}B", find_max_batch_size=True)
    fitted = fit(tmp_path, settings, per_device_train_batch_size=12)
    assert (fitted.args.per_device_train_batch_size, fitted.args.gradient_accumulation_steps) == (3, 4)
    assert alone.trace(5).peak_allocated > limit
    assert replace(alone, accumulation=3).trace(4).peak_allocated > limit
    assert fitted.workload.trace(3).peak_allocated <= limit


def test_plan_file_is_a_policy(fitted: Fitted, tmp_path: Path) -> None:
    assert fitted.plan is not None
    path = tmp_path / "plan.json"
    path.write_text(fitted.plan.to_json())
    settings = ACArguments(ac_policy=str(path))
    path.unlink()  # it was read once, with the flags
    assert settings.policy == Policy.parse(fitted.plan.best.policy)
    attached = ACCallback(settings).attach(trainer(tmp_path))
    assert attached.policy == settings.policy
    with pytest.raises(UserError, match="no such file"):
        ACArguments(ac_policy="missing.json")
    other = Trainer(torch.nn.Linear(2, 2), arguments(tmp_path), train_dataset=Dataset.from_list(ROWS))
    with pytest.raises(UserError, match="made for LlamaForCausalLM, .* and this is a Linear"):
        ACCallback(settings).attach(other)


def test_model_partitioned_by_zero3_is_planned_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the launch is not predicted, this is refused: a plan for one process would need the whole model."""
    given, whole = trainer(tmp_path), trainer(tmp_path)
    for parameter in given.model.parameters():  # as deepspeed.zero.Init leaves them
        parameter.ds_id, parameter.data = 0, torch.empty(0)
    settings = ACArguments(ac_policy="full", ac_budget="3MiB", find_max_batch_size=True)
    zero3 = Launch("zero3", 2, zero=ZeroOptions(reduce_bucket_size=1000, prefetch_bucket_size=1000))
    monkeypatch.setattr("ckpt_ft.training.callback.launch_of", lambda *_, **__: zero3)
    ours, expected = (ACCallback(settings).attach(each).fitted for each in (given, whole))
    assert ours is not None
    assert expected is not None
    assert ours.largest == expected.largest
    assert ours.largest is not None
    assert ours.largest.batch > 1
    monkeypatch.setattr("ckpt_ft.training.callback.launch_of", launch_of_deepspeed)
    with pytest.raises(UserError, match="--find_max_batch_size: what DeepSpeed's engine has made"):
        ACCallback(settings).attach(given)


def launch_of_deepspeed(*_: Any, **__: Any) -> None:
    raise UserError("what DeepSpeed's engine has made of model and optimizer is not traced")


def test_invalid_planning_flags_are_refused() -> None:
    with pytest.raises(UserError, match="for --ac_policy auto or --find_max_batch_size"):
        ACArguments(ac_budget="1GiB")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("both", "", 0, False, 1), "--offload_optimizer both: choose states, or gradients"),
        (("states", "--optim lion_8bit", 0, False, 1), "states with --optim lion_8bit: it is for PyTorch's AdamW"),
        (("states", "", 1.0, False, 1), "with --max_grad_norm: gradients are copied in backward, before that; add"),
        (("states", "", 0, True, 1), "with fp16: gradients are copied in backward, before that unscales them"),
        (
            ("gradients", "", 0, False, 4),
            "with accumulation: gradients are copied in backward, before that is",
        ),
    ],
)
def test_settings_that_optimizer_offload_excludes(
    given: tuple[Any, ...], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchao copies a gradient to the host when it is computed, so later changes of it have no effect."""
    monkeypatch.setattr("ckpt_ft.training.flags.require_package", lambda *args: None)
    with pytest.raises(UserError, match=re.escape(message)):
        check_offloaded(*given)
    check_offloaded("states", "", 0, False, 4)


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [False, True])
def test_offloaded_adamw_trains_like_adamw(gradients: bool) -> None:
    pytest.importorskip("torchao")
    ours, plain = (torch.nn.Linear(256, 256, device="cuda") for _ in range(2))
    plain.load_state_dict(ours.state_dict())
    optimizers = (
        OffloadedAdamW([{"params": [*ours.parameters()]}], offload_gradients=gradients, lr=1e-2),
        torch.optim.AdamW(plain.parameters(), lr=1e-2),
    )
    for model, optimizer in zip((ours, plain), optimizers, strict=True):
        for _ in range(3):
            model(torch.ones(4, 256, device="cuda")).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.allclose(ours.weight, plain.weight, atol=1e-5)


def test_offloaded_adamw_without_a_gpu_is_adamw() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    layer = torch.nn.Linear(64, 64)
    made = OffloadedAdamW([{"params": [*layer.parameters()], "weight_decay": 0.1}], offload_gradients=True, lr=2e-3)
    assert type(made) is torch.optim.AdamW
    assert [made.param_groups[0][name] for name in ("lr", "weight_decay", "fused")] == [2e-3, 0.1, True]
