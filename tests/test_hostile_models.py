"""Models that are damaged or contain code: errors are one line, and code runs only on request."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import ViTImageProcessor

from ckpt_ft.errors import UserError
from ckpt_ft.planning.check import check_model
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.training.classification import load_classifier, load_processor
from ckpt_ft.training.models import LanguageModelArguments, load_model, load_tokenizer
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import read_config

WEIGHTS = "model.safetensors"
SHORT = TrainingSpec.of(seq_length=8, optimizer="none")


@pytest.fixture
def model(sample: tuple[Path, Path], tmp_path: Path) -> Path:
    """The built-in model, for damaging."""
    return Path(shutil.copytree(sample[0], tmp_path / "model"))


def arguments(path: Path, **more: Any) -> LanguageModelArguments:
    return LanguageModelArguments(model_name_or_path=str(path), **more)


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(UserError) as error:
        read()
    said = str(error.value)
    assert "\n" not in said
    return said


def with_header(content: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """Returns a safetensors file with a changed header."""
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    change(header)
    written = json.dumps(header).encode()
    return struct.pack("<Q", len(written)) + written + content[8 + length :]


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:50],
        lambda content: content[: len(content) // 2],
        lambda content: content[:-1],
        lambda content: content + b"x",
        lambda content: struct.pack("<Q", 2**62) + content[8:],
        lambda content: b"version https://git-lfs.github.com/spec/v1\nsize 4006352\n",
        lambda content: with_header(content, lambda header: header["model.norm.weight"].update(dtype="F99")),
        lambda content: with_header(content, lambda header: header["model.norm.weight"].update(shape=[1, 128])),
    ],
    ids=["empty", "header", "half", "last byte", "longer", "huge header", "pointer", "dtype", "shape"],
)
def test_damaged_weights(model: Path, damage: Callable[[bytes], bytes]) -> None:
    (model / WEIGHTS).write_bytes(damage((model / WEIGHTS).read_bytes()))
    assert refused(lambda: load_model(arguments(model))).startswith(f"model {model} cannot be loaded: ")
    assert f"{model}: its saved weights cannot be read: " in refused(
        lambda: check_model(SHORT.edit(model=str(model), policy="full", batch_size=1), 0)
    )


@pytest.mark.parametrize("content", [b"", b"null", b"[]", b'"x"', b"[" * 100_000, b"9" * 5000, b"\xff\xfe"])
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "config.json"])
def test_damaged_config_and_tokenizer_files(model: Path, name: str, content: bytes) -> None:
    (model / name).write_bytes(content)
    refused(lambda: load_tokenizer(arguments(model)))
    if name == "config.json":
        refused(lambda: load_model(arguments(model)))


def test_model_of_excessive_depth_is_refused(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 10**9}))
    assert "num_hidden_layers 1000000000 is no size of a model" in refused(lambda: load_model(arguments(model)))


def test_infinite_time_limit_of_mamba2_is_accepted(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}')
    assert read_config(str(tmp_path))["time_step_limit"] == [0.0, float("inf")]


CODE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, ViTImageProcessor
Path({mark!r}).touch()
class Config(LlamaConfig):
    model_type = "of_its_own"
class Model(LlamaForCausalLM):
    config_class = Config
class Tokenizer(PreTrainedTokenizerFast):
    pass
class Processor(ViTImageProcessor):
    pass
"""


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


@pytest.fixture
def mark(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file that the code beside `model` creates when it runs."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    (model / "code.py").write_text(CODE.format(mark=str(tmp_path / "was run")))
    named = {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"}
    images = {"AutoConfig": "code.Config", "AutoModelForImageClassification": "code.Model"}
    edit(model / "config.json", model_type="of_its_own", architectures=["Model"], auto_map={**named, **images})
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": [None, "code.Tokenizer"]}, tokenizer_class="T")
    ViTImageProcessor().save_pretrained(model)
    edit(
        model / "preprocessor_config.json",
        auto_map={"AutoImageProcessor": "code.Processor"},
        image_processor_type="Processor",
    )
    return tmp_path / "was run"


def test_code_of_a_model_is_not_run(model: Path, mark: Path) -> None:
    reads: list[Callable[[LanguageModelArguments], object]] = [load_tokenizer, load_model, load_processor]
    reads.append(lambda args: load_classifier(args, ["a", "b"]))
    for read in reads:
        said = refused(lambda read=read: read(arguments(model)))  # type: ignore[misc]
        assert "contains custom code" in said
    assert not mark.exists()


def test_code_of_a_model_is_not_run_by_the_commands(model: Path, mark: Path) -> None:
    assert "has no class Model" in refused(
        lambda: load(SHORT.edit(model=str(model)), "cpu")
    )  # of estimate, plan, explain and max-batch
    assert "has no class Model" in refused(
        lambda: check_model(SHORT.edit(model=str(model), policy="full", batch_size=1), 0)
    )
    edit(model / "config.json", model_type="llama", architectures=["LlamaForCausalLM"])
    assert type(load(SHORT.edit(model=str(model)), "cpu").model).__name__ == "LlamaForCausalLM"
    assert check_model(SHORT.edit(model=str(model), policy="full", batch_size=1), 0).ok
    assert not mark.exists()


def test_code_of_a_model_runs_on_request(model: Path, mark: Path) -> None:
    assert type(load_model(arguments(model, trust_remote_code=True))).__name__ == "Model"
    assert mark.exists()


class Malice:
    """Creates the directory when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.mkdir, (self.mark,)


def test_pickled_weights_run_no_code(model: Path, tmp_path: Path) -> None:
    (model / WEIGHTS).unlink()
    torch.save({"model.norm.weight": Malice(tmp_path / "was run")}, model / "pytorch_model.bin")
    assert "Weights only load failed" in refused(lambda: load_model(arguments(model)))
    assert "Weights only load failed" in refused(
        lambda: check_model(SHORT.edit(model=str(model), policy="full", batch_size=1), 0)
    )
    assert not (tmp_path / "was run").exists()


def test_parameter_names_are_checked_before_weights_are_read(model: Path) -> None:
    (model / WEIGHTS).unlink()
    asked = arguments(model, use_peft=True, lora_target_parameters=["mlp.experts.up"])
    assert "LoRA target parameter 'mlp.experts.up': no parameter has that name" in refused(lambda: load_model(asked))
    with pytest.raises(UserError, match=r"--lora_dropout 0.1: adapted parameters have no dropout; give 0"):
        arguments(model, use_peft=True, lora_target_parameters=["mlp.gate.weight"], lora_dropout=0.1)
