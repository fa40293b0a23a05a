"""Flags that nothing can be trained with: one line, before anything is loaded or written."""

from __future__ import annotations

import importlib.util

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import LoopArguments
from ckpt_ft.training.run.arguments import RunArguments
from ckpt_ft.training.run.parser import parse_args


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--per_device_train_batch_size", "0"], "--per_device_train_batch_size 0: give at least 1"),
        (["--gradient_accumulation_steps", "0"], "--gradient_accumulation_steps 0: give at least 1"),
        (["--learning_rate", "-1"], "--learning_rate -1.0: give a number from 0 on"),
        (["--learning_rate", "nan"], "--learning_rate nan: give a number from 0 on"),
        (["--lr_scheduler_type", "cosin"], "cosin"),
        (["--optim", "adamw_bnb_8bit"], "needs bitsandbytes, which is not installed"),
        (["--use_liger_kernel"], "--use_liger_kernel needs liger_kernel, which is not installed"),
        (["--report_to", "wandb"], "--report_to wandb: not installed"),
        (["--max_steps", "9" * 5000], "invalid int value"),
    ],
)
def test_a_trainer(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(RunArguments, ["--use_cpu", "--output_dir", "out", *flags], says, monkeypatch)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--train_batch_size", "0"], "--train_batch_size 0: give at least 1"),
        (["--learning_rate", "-1"], "--learning_rate -1.0: give a number from 0 on"),
        (["--adam_beta2", "1"], "--adam_beta2 1.0: give a number from 0 up to"),
        (["--lr_scheduler", "cosin"], "invalid choice: 'cosin'"),
        (["--use_8bit_adam"], "--use_8bit_adam needs bitsandbytes"),
    ],
)
def test_the_loop(flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_refused(LoopArguments, flags, says, monkeypatch)


def assert_refused(kind: type, flags: list[str], says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find, missing = importlib.util.find_spec, ("bitsandbytes", "liger_kernel", "wandb")
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *more: None if name in missing else find(name, *more))
    with pytest.raises(UserError) as refused:
        parse_args([kind], flags)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 1000
