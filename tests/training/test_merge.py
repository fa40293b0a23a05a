"""Adapters merged into base weights give the adapted model's numbers without peft."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from ckpt_ft.errors import UserError
from ckpt_ft.training.merge import merge


def with_random_lora(model: torch.nn.Module, targets: list[str]) -> torch.nn.Module:
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=targets, init_lora_weights=False))
    return adapted.eval()


def test_merged_language_model_has_the_adapted_logits(sample: tuple[Path, Path], tmp_path: Path) -> None:
    ids = torch.arange(64).view(2, 32)
    base = AutoModelForCausalLM.from_pretrained(sample[0])
    with torch.no_grad():
        plain = base.eval()(ids).logits
        adapted = with_random_lora(base, ["q_proj", "down_proj"])
        wanted = adapted(ids).logits
    adapted.save_pretrained(tmp_path / "adapter")

    merged = AutoModelForCausalLM.from_pretrained(merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))).eval()
    with torch.no_grad():
        found = merged(ids).logits
    assert not hasattr(merged, "peft_config")
    assert torch.allclose(found, wanted, atol=1e-5)
    assert (found - plain).abs().max() > 0.1
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token == "<|pad|>"  # the base's


def test_adapters_tokenizer_stays(sample: tuple[Path, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_random_lora(AutoModelForCausalLM.from_pretrained(sample[0]), ["q_proj"]).save_pretrained(tmp_path / "adapter")
    own = AutoTokenizer.from_pretrained(sample[0])
    own.pad_token = "<|system|>"
    own.save_pretrained(tmp_path / "adapter")
    merge(str(tmp_path / "adapter"), str(tmp_path / "merged"))
    assert AutoTokenizer.from_pretrained(tmp_path / "merged").pad_token == "<|system|>"

    (tmp_path / "adapter" / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="adapter cannot be merged into its base"):
        merge(str(tmp_path / "adapter"), str(tmp_path / "damaged"))

    for file in (tmp_path / "adapter").glob("*token*"):
        file.unlink()
    shutil.copytree(sample[0], tmp_path / "base", ignore=shutil.ignore_patterns("*token*", "*chat*"))
    merge(str(tmp_path / "adapter"), str(tmp_path / "bare"), base=str(tmp_path / "base"))
    assert not list((tmp_path / "bare").glob("*token*"))
    assert "merged without a tokenizer or processor: " in caplog.text


@pytest.mark.parametrize(
    ("file", "content", "says"),
    [
        ("pytorch_lora_weights.safetensors", "", r"pipe.load_lora_weights\(.*pipe.fuse_lora\(\)"),
        ("adapter_config.json", '{"auto_mapping": {"parent_library": "diffusers.models"}}', "merge_and_unload"),
    ],
)
def test_adapter_of_a_pipeline_is_left_to_diffusers(tmp_path: Path, file: str, content: str, says: str) -> None:
    (tmp_path / file).write_text(content)
    with pytest.raises(UserError, match=says):
        merge(str(tmp_path), str(tmp_path / "merged"))


def test_invalid_adapter_or_output_is_one_line(sample: tuple[Path, Path], tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "file").touch()
    (tmp_path / "nameless").mkdir()
    (tmp_path / "nameless" / "adapter_config.json").write_text("{}")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "adapter_config.json").write_text("[")
    for adapter, output, message in (
        (str(sample[0]), "new", "holds no adapter"),
        ("nameless", "taken", "exists already"),
        ("nameless", "new", "names no base model; give it with --base"),
        ("broken", "new", "cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            merge(str(tmp_path / adapter), str(tmp_path / output))
    assert not (tmp_path / "new").exists()


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `base`, and an `adapter` with every kind of tensor: DoRA's magnitudes, and a module saved completely."""
    folder = tmp_path_factory.mktemp("tuned")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "vocab_size": 61}
    LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=1)).save_pretrained(folder / "shallow")
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_hidden_layers=2))
    model.save_pretrained(folder / "base")
    config = LoraConfig(r=2, target_modules=["q_proj"], modules_to_save=["lm_head"], use_dora=True)
    adapted = get_peft_model(model, config)
    adapted.peft_config["default"].base_model_name_or_path = str(folder / "base")
    adapted.save_pretrained(folder / "adapter")
    return folder


def damaged(tuned: Path, out: Path, weights: Any = None, **settings: object) -> str:
    """Returns a copy of the adapter; `weights` are bytes, or a function of its tensors."""
    shutil.copytree(tuned / "adapter", out)
    config, file = out / "adapter_config.json", out / "adapter_model.safetensors"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))
    if isinstance(weights, bytes):
        file.write_bytes(weights)
    elif callable(weights):
        save_file(weights(load_file(file)), file)
    return str(out)


def without_half(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"weights": without_half}, r"lacks 3 tensors of an adapter for base .* \(base_model.model.model.layers.1"),
        ({"base_model_name_or_path": "shallow"}, "has beyond it 3 tensors of an adapter for base .*shallow"),
        ({"weights": b""}, "SafetensorError"),
        ({"weights": lambda tensors: {name: t * float("nan") for name, t in tensors.items()}}, "NaNs detected"),
        ({"lora_alpha": None}, "TypeError"),
        ({"target_modules": "((("}, "unterminated subpattern"),
    ],
)
@pytest.mark.filterwarnings("ignore:Found missing adapter keys")  # peft's only message about it
def test_incomplete_adapter_is_not_merged(
    tuned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, object], says: str
) -> None:
    monkeypatch.chdir(tuned)
    adapter = damaged(tuned, tmp_path / "adapter", **change)
    with pytest.raises(UserError, match=says) as refused:
        merge(adapter, str(tmp_path / "merged"))
    assert "\n" not in str(refused.value)
    assert [path.name for path in tmp_path.iterdir()] == ["adapter"]


def test_complete_adapter_is_merged(tuned: Path, tmp_path: Path) -> None:
    assert merge(str(tuned / "adapter"), str(tmp_path / "merged")).is_dir()
