"""TrainingSpec: values are checked, edits are typed, and the words of a spec parse back into it."""

from __future__ import annotations

import pickle
import subprocess
import sys
from typing import Any

import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_ft.cli import params
from ckpt_ft.errors import UserError
from ckpt_ft.spec.fields import text_of_bytes
from ckpt_ft.spec.flags import Edit, fields_of, flags, words_of
from ckpt_ft.spec.training_spec import PARTS, TrainingSpec, declared
from ckpt_ft.units import parse_budget


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"dtype": "fp16"}, "dtype 'fp16' (float32, bfloat16, float16)"),
        ({"optimizer": "adam"}, "optimizer 'adam'; did you mean 'adamw'? (adamw, adamw_fused, adamw_8bit, "),
        ({"seq_length": 1}, "sequence length 1: a sequence has at least 2 tokens"),
        ({"seq_length": 2**30}, "sequence length 1073741824: at most 16777216"),
        ({"seq_length": "many"}, "sequence length many: a sequence has at least 2 tokens"),
        ({"batch_size": 0}, "batch size 0: a batch has at least 1 sample, and no more than memory has bytes"),
        ({"max_grad_norm": float("nan")}, "gradients clipped to nan: a norm, or 0 for no clipping"),
        ({"lora_r": 4, "lora_dropout": 1}, "LoRA dropout 1: a share from 0 up to, but not including, 1"),
        ({"image_size": (0, 4)}, "image size 0x4: each side has 1 to 8192 pixels"),
        ({"lora_r": 4, "load_in_4bit": True, "load_in_8bit": True}, "weights in 4 bits and in 8 bits: choose one"),
        ({"load_in_8bit": True}, "8-bit weights cannot be trained themselves: give a LoRA rank too"),
        ({"dtpye": "float16"}, "no setting 'dtpye'; did you mean 'dtype'?"),
    ],
)
def test_invalid_value_is_one_line(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(UserError) as refused:
        TrainingSpec.of("gpt2", **fields)
    assert says in str(refused.value)
    assert "\n" not in str(refused.value)


def test_values_are_converted_to_their_types() -> None:
    spec = TrainingSpec.of("gpt2", seq_length="32", max_grad_norm=1, frozen=["embed"], image_size=[64, 48])
    assert (spec.data.seq_length, spec.optimizer.max_grad_norm, spec.model.frozen) == (32, 1.0, ("embed",))
    assert (spec.data.image_size, spec.data.tokens, TrainingSpec().data.tokens) == ((64, 48), 32, 1024)
    assert pickle.loads(pickle.dumps(spec)) == spec
    with pytest.raises(AttributeError):
        spec.data.seq_length = 5  # type: ignore[misc]


def test_edit_is_checked_and_does_not_change_the_original() -> None:
    spec = TrainingSpec.of("gpt2", lora_r=8, load_in_8bit=True, policy="full")
    edited = spec.edit(seq_length=64, policy="none")
    assert (edited.data.seq_length, edited.policy, edited.adapter.lora_r) == (64, "none", 8)
    assert (spec.data.seq_length, spec.policy) == (None, "full")
    assert str(spec) == str(TrainingSpec.of("gpt2", lora_r=8, load_in_8bit=True, policy="full"))  # keys of a cache
    assert len({str(spec), str(edited), str(edited.edit(policy="full"))}) == 3
    with pytest.raises(UserError, match="weights in 4 bits and in 8 bits"):
        spec.edit(load_in_4bit=True)
    with pytest.raises(UserError, match="8-bit weights cannot be trained themselves"):
        spec.edit(lora_r=0)


def test_edit_prints_flags_to_add_and_to_leave_out() -> None:
    spec = TrainingSpec.of("gpt2", lora_r=8, load_in_8bit=True)
    four = Edit({"load_in_8bit": False, "load_in_4bit": True, "dtype": "bfloat16"})
    assert four.text(spec) == "--load-in-4bit --dtype bfloat16 without --load-in-8bit"
    assert words_of(four.of(spec)) == ["gpt2", "--dtype", "bfloat16", "--lora", "8", "--load-in-4bit"]
    assert Edit({"policy": "full", "batch_size": 2}).words(spec) == ["--policy", "full", "--batch-size", "2"]
    with pytest.raises(UserError, match="weights in 4 bits and in 8 bits"):
        Edit({"load_in_4bit": True}).text(spec)


@pytest.mark.parametrize("nbytes", [24 * 2**30, 150 * 2**20, 30 * 2**10, 12345, 10**10])
def test_byte_text_parses_back(nbytes: int) -> None:
    assert parse_budget(text_of_bytes(nbytes)) == nbytes


VALUES: dict[str, Any] = {
    "policy": st.sampled_from(["none", "full", "save:attention+matmul"]),
    "frozen": st.sampled_from([(), ("embed",), ("a", "b.c")]),
    "batch_size": st.integers(1, 64),
    "seq_length": st.none() | st.integers(2, 4096),
    "accumulation": st.integers(1, 8),
    "rows": st.sampled_from(["alike", "padded", "packed"]),
    "images": st.integers(1, 3),
    "image_size": st.tuples(st.integers(1, 999), st.integers(1, 999)),
    "dtype": st.sampled_from(["float32", "bfloat16"]),
    "mixed_precision": st.sampled_from(["no", "bf16", "fp16"]),
    "lora_r": st.integers(1, 64),
    "lora_targets": st.sampled_from([(), ("q_proj", "v_proj")]),
    "lora_dropout": st.none() | st.sampled_from([0.0, 0.05, 0.1]),
    "use_dora": st.booleans(),
    "load_in_4bit": st.booleans(),
    "optimizer": st.sampled_from(["adamw", "adamw_fused", "adamw_8bit", "sgd"]),
    "max_grad_norm": st.sampled_from([0.0, 0.5, 1.0]),
    "ema": st.booleans(),
    "budget": st.none() | st.integers(10**5, 2**40),
    "device": st.sampled_from(["", "t4", "cpu"]),
}


@settings(max_examples=60, deadline=None)
@given(st.fixed_dictionaries(VALUES))
def test_words_of_a_spec_parse_back_into_it(fields: dict[str, Any]) -> None:
    spec = TrainingSpec.of("gpt2", **fields)
    model, *words = words_of(spec)
    assert TrainingSpec.of(model, **fields_of(parsed(words))) == spec


def parsed(words: list[str]) -> dict[str, Any]:
    """Returns the flag values that the command line parses from `words`."""
    found: list[dict[str, Any]] = []
    app = typer.Typer()
    app.command()(_command_of(found))
    typer.main.get_command(app)(words, standalone_mode=False)
    return found[0]


def _command_of(found: list[dict[str, Any]]) -> Any:
    import inspect

    def command(**given: Any) -> None:
        found.append(given)

    parameters = [params._parameter(name, params._option(flag), None) for name, flag in flags().items()]
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return command


def test_every_field_has_a_unique_name_and_help() -> None:
    assert len(declared()) == sum(len(part.__dataclass_fields__) for part in PARTS.values())
    for own in declared().values():
        assert own.setting.help
        assert own.flag is None or own.flag in flags()


def test_flags_are_declared_without_importing_pydantic() -> None:
    code = (
        "import sys; from ckpt_ft.spec.flags import flags; flags(); "
        "print({'pydantic', 'torch', 'typer'} & set(sys.modules))"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "set()\n"
