"""Flags with which no training is possible are refused in one line, before anything is loaded or written."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.classification import VisionArguments
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, LoopArguments
from ckpt_ft.training.images import ImageArguments
from ckpt_ft.training.models import ModelArguments
from ckpt_ft.training.preferences import DPOArguments
from ckpt_ft.training.run_arguments import RunArguments, parse_args
from ckpt_ft.training.trainer import check_best_metric


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            ["--per_device_train_batch_size", "0"],
            "--per_device_train_batch_size 0: it should be greater than or equal to 1",
        ),
        (
            ["--gradient_accumulation_steps", "0"],
            "--gradient_accumulation_steps 0: it should be greater than or equal to 1",
        ),
        (["--learning_rate", "-1"], "--learning_rate -1.0: it should be greater than or equal to 0"),
        (["--learning_rate", "nan"], "--learning_rate nan: it should be a finite number"),
        (["--lr_scheduler_type", "cosin"], "cosin"),
        (["--optim", "adamw_bnb_8bit"], "needs bitsandbytes, which is not installed"),
        (["--use_liger_kernel"], "--use_liger_kernel needs liger_kernel, which is not installed"),
        (["--report_to", "wandb"], "--report_to wandb: not installed"),
        (["--max_steps", "9" * 5000], "invalid int value"),
        (["--max_steps", "-5"], "--max_steps -5: give at least 1, or leave it out"),
        (["--num_train_epochs", "0"], "--num_train_epochs 0.0: it should be greater than 0"),
        (["--neftune_noise_alpha", "-1"], "--neftune_noise_alpha -1.0: it should be greater than or equal to 0"),
        (["--adam_beta1", "1"], "--adam_beta1 1.0: it should be less than 1"),
        (["--seed", "-1"], "--seed -1: it should be greater than or equal to 0"),
        (["--save_total_limit", "0"], "--save_total_limit 0: it should be greater than or equal to 1"),
        (["--fsdp", "full_shard"], "--fsdp on one process: it shards a model over several"),
        (
            ["--torch_compile_backend", "nosuch"],
            "--torch_compile_backend nosuch: one of no, eager, aot_eager, inductor",
        ),
    ],
)
def test_invalid_trainer_flag_is_refused(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(RunArguments, ["--use_cpu", "--output_dir", "out", *flags], says, monkeypatch)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--train_batch_size", "0"], "--train_batch_size 0: it should be greater than or equal to 1"),
        (["--learning_rate", "-1"], "--learning_rate -1.0: it should be greater than or equal to 0"),
        (["--adam_beta2", "1"], "--adam_beta2 1.0: it should be less than 1"),
        (["--lr_scheduler", "cosin"], "invalid choice: 'cosin'"),
        (["--use_8bit_adam"], "--use_8bit_adam needs bitsandbytes"),
        (["--seed", str(2**32)], f"--seed {2**32}: it should be less than {2**32}"),
        (["--report_to", "nope"], "--report_to nope: not installed; installed trackers: "),
    ],
)
def test_invalid_loop_flag_is_refused(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(LoopArguments, flags, says, monkeypatch)


@pytest.mark.parametrize(
    ("kind", "flags", "says"),
    [
        (
            ModelArguments,
            ["--use_peft", "--lora_r", "100000000000"],
            "--lora_r 100000000000: it should be less than or equal to 65536",
        ),
        (DiffusionModelArguments, ["--rank", "65537"], "--rank 65537: it should be less than or equal to 65536"),
        (DiffusionModelArguments, ["--noise_offset", "nan"], "--noise_offset nan: it should be a finite number"),
        (DiffusionModelArguments, ["--snr_gamma", "0"], "--snr_gamma 0.0: it should be greater than 0"),
        (ImageArguments, ["--resolution", "100000"], "--resolution 100000: it should be less than or equal to 16384"),
        (
            ImageArguments,
            ["--dataloader_num_workers", "-1"],
            "--dataloader_num_workers -1: it should be greater than or equal to 0",
        ),
        (
            DPOArguments,
            ["--use_cpu", "--output_dir", "out", "--beta", "nan"],
            "--beta nan: it should be a finite number",
        ),
        (VisionArguments, ["--resolution", "100000"], "--resolution 100000: it should be less than or equal to 16384"),
    ],
)
def test_nan_or_infinity_is_refused(kind: type, flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(kind, flags, says, monkeypatch)


def test_unknown_metric_of_the_best_model_is_refused() -> None:
    """The run must not wait for an evaluation that never returns this metric."""
    args = SimpleNamespace(metric_for_best_model="foo")
    with pytest.raises(UserError, match="--metric_for_best_model foo: an evaluation gives loss, accuracy"):
        check_best_metric(args, ("loss", "accuracy"))  # type: ignore[arg-type]
    for name in (None, "loss", "eval_accuracy"):
        check_best_metric(SimpleNamespace(metric_for_best_model=name), ("loss", "accuracy"))  # type: ignore[arg-type]


def assert_refused(kind: type, flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find, missing = importlib.util.find_spec, ("bitsandbytes", "liger_kernel", "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in missing else find(name, *more))
    with pytest.raises(UserError) as refused:
        parse_args([kind], flags)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
