"""Precedence of flags and YAML files, and one line for every invalid value."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.arguments import ACArguments
from ckpt_ft.training.run_arguments import parse_args


@dataclass
class Flags:
    steps: int = 3
    rate: float = 0.5
    names: list[str] = field(default_factory=list)
    fast: bool = False
    slow: bool = True
    options: dict | str | None = None  # type: ignore[type-arg]
    model_name: str | None = None


def parse(*argv: str, **kwargs: object) -> Flags:
    (flags,) = parse_args([Flags], argv, **kwargs)  # type: ignore[arg-type]
    return flags


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(
        "steps: 7\nrate: 2e-5\nnames: [a, b]\nfast: true\nslow: false\noptions: {x: 1}\nmodel_name: null\n"
    )
    return path


def test_command_line_beats_yaml_beats_builtin_beats_default(config: Path) -> None:
    assert parse().steps == 3
    assert parse(builtin={"steps": 5}).steps == 5
    assert parse("--config", str(config), builtin={"steps": 5}).steps == 7
    assert parse("--config", str(config), "--steps", "9", builtin={"steps": 5}).steps == 9
    assert parse("--steps", "9", f"--config={config}").steps == 9


def test_yaml_values_are_converted_to_the_flags_types(config: Path) -> None:
    flags = parse("--config", str(config))
    assert (flags.rate, flags.fast, flags.slow, flags.model_name) == (2e-5, True, False, None)
    assert flags.names == ["a", "b"]
    assert flags.options == '{"x": 1}'


def test_builtin_values_are_dropped_if_the_given_flag_is_set(config: Path) -> None:
    assert parse("--model-name=m", builtin={"steps": 5}, unless="model_name").steps == 3
    assert parse("--rate", "1", builtin={"steps": 5}, unless="model_name").steps == 5


@dataclass
class Trained:
    max_length: int = 8
    per_device_train_batch_size: int = 1
    lora_r: int = 16
    ac_policy: str | None = None
    label_smoothing_factor: float = 0.0


@pytest.mark.parametrize("flag", ["--beta=0.1", "--loss_type=0.1", "--padding_free=1"])
def test_a_flag_of_another_trainer_is_not_read_as_a_flag_beside_it(flag: str) -> None:
    with pytest.raises(UserError, match=f"^no flag '{flag.partition('=')[0]}'"):
        parse_args([Trained], [flag])


def test_flag_has_the_names_of_other_tools(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("sequence_len: 32\nmicro_batch_size: 4\n")
    flags = ["--config", str(file), "--batch-size=2", "--policy", "full", "--rank", "4"]
    (found,) = parse_args([Trained], flags)
    assert found == Trained(max_length=32, per_device_train_batch_size=2, lora_r=4, ac_policy="full")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--step", "1"], "no flag '--step'; did you mean '--steps'? (see --help)"),
        (["--zzzzzz=1"], "no flag '--zzzzzz' (see --help)"),
        (["loose"], "'loose' belongs to no flag (see --help)"),
        (["--steps", "x"], "argument --steps: invalid int value: 'x'"),
        (["--steps"], "argument --steps: expected one argument"),
        (["--config"], "argument --config: expected one argument"),
        (["--config", "/nowhere.yaml"], "--config /nowhere.yaml: No such file or directory"),
    ],
)
def test_invalid_flag_is_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(*argv)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("stepz: 1", "no flag 'stepz'; did you mean 'steps'?"),
        ("steps: 1.5", "invalid int value: '1.5'"),
        ("- steps", "expected 'flag: value' lines, found list"),
        ("a: [", "is not valid YAML"),
        ("steps: 2024-13-45", "is not valid YAML"),
        ("steps: " + "9" * 5000, "is not valid YAML"),
        ("steps: " + "[" * 5000, "is not valid YAML"),
        ("options: {x: 2024-01-02}", "options: Object of type date is not JSON serializable"),
        ("options: &a {x: *a}", "options: Circular reference detected"),
        ("config: other.yaml", "no flag 'config'"),
    ],
)
def test_invalid_yaml_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(text)
    with pytest.raises(UserError) as caught:
        parse("--config", str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_policies_are_canonical_after_parsing() -> None:
    (flags,) = parse_args([ACArguments], ["--ac_policy", "save:matmul+attention"])
    assert flags.ac_policy == "save:attention+matmul"
    assert flags.reports == ("json", "md", "html", "png")
    (plain,) = parse_args([ACArguments], ["--ac_report", "none"])
    assert (plain.policy, plain.reports) == (None, ())


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--ac_policy", "save:atention"], "did you mean 'attention'?"),
        (["--ac_policy", "full,every:2"], "contradict"),
        (["--ac_budget", "3GiB"], "the budget is for --ac_policy auto"),
        (["--ac_policy", "auto", "--ac_budget", "lots"], "'lots' is not an amount of memory"),
        (["--ac_report", "jsn"], "did you mean 'json'?"),
        (["--ac_check"], "give one, as in --ac_policy full"),
    ],
)
def test_invalid_ac_flags_are_one_line(argv: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        parse_args([ACArguments], argv)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
