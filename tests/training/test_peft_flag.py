"""The flag `--peft_config`: checks before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig

from ckpt_ft.errors import UserError
from ckpt_ft.training.diffusion.arguments import DiffusionModelArguments, TransformerArguments
from ckpt_ft.training.models import ModelArguments, adapter_config, adapter_of, sort_names


def file(folder: Path, **content: Any) -> str:
    path = folder / "adapter_config.json"
    path.write_text(json.dumps(content))
    return str(path)


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({}, "no configuration of PEFT: it names no peft_type"),
        ({"peft_type": "LORAX"}, r"PEFT has no kind LORAX \(ADALORA, "),
        ({"peft_type": "LOKR", "rank": 4}, "unexpected keyword argument 'rank'"),
        ({"peft_type": "ADALORA", "total_step": 9}, "ADALORA sets its ranks between steps"),
        ({"peft_type": "LORA", "init_lora_weights": "eva"}, "'eva' is computed before training, from data"),
    ],
)
@pytest.mark.parametrize("kind", [ModelArguments, DiffusionModelArguments, TransformerArguments])
def test_invalid_peft_config_is_refused(tmp_path: Path, content: dict[str, Any], says: str, kind: Any) -> None:
    with pytest.raises(UserError, match=says) as refused:
        kind(peft_config=file(tmp_path, **content))
    assert "--peft_config" in str(refused.value)
    with pytest.raises(UserError, match="--peft_config /nowhere: No such file"):
        kind(peft_config="/nowhere")


@pytest.mark.parametrize(
    ("kind", "flags", "named"),
    [
        (ModelArguments, {"lora_r": 16}, "--lora_r"),
        (ModelArguments, {"lora_target_modules": ["q"], "use_dora": True}, "--lora_target_modules and --use_dora"),
        (ModelArguments, {"lora_dropout": 0.0}, "--lora_dropout"),
        (ModelArguments, {"lora_modules_to_save": ["lm_head"]}, "--lora_modules_to_save"),
        (DiffusionModelArguments, {"rank": 4}, "--rank"),
        (TransformerArguments, {"lora_target_modules": ["to_q"]}, "--lora_target_modules"),
    ],
)
def test_peft_config_with_lora_flags_is_refused(tmp_path: Path, kind: Any, flags: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=f"{named} describe two different adapters: give one or the other"):
        kind(peft_config=file(tmp_path, peft_type="LOKR"), **flags)


def test_recipe_completes_a_peft_config(tmp_path: Path) -> None:
    """A saved adapter's directory is accepted; entries about its saved weights are ignored."""
    file(tmp_path, peft_type="LOHA", modules_to_save=["a"], inference_mode=True, base_model_name_or_path="gone")
    config: Any = adapter_of(str(tmp_path), lambda asked: asked or ["q"], ["head"], task_type="CAUSAL_LM")
    assert config.target_modules == {"q"}
    assert set(config.modules_to_save) == {"a", "head"}
    assert (config.task_type, config.inference_mode, config.base_model_name_or_path) == ("CAUSAL_LM", False, None)
    assert ModelArguments(peft_config=str(tmp_path)).adapts
    assert ModelArguments(use_peft=True).lora == {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}


def test_modules_to_save_are_those_of_the_flag_and_of_the_recipe() -> None:
    arguments = ModelArguments(use_peft=True, lora_modules_to_save=["lm_head"])
    assert set(adapter_config(arguments, modules_to_save=["norm"]).modules_to_save) == {"lm_head", "norm"}


def test_flags_of_lora_need_use_peft() -> None:
    with pytest.raises(UserError, match="^--lora_r without --use_peft would train all weights: add --use_peft, or"):
        ModelArguments(lora_r=4, lora_dropout=0.1)
    assert not ModelArguments(use_dora=False).adapts


def test_adapters_are_saved_with_sorted_names(tmp_path: Path) -> None:
    """The order of a set differs from process to process."""
    names = [f"layer_{number}" for number in range(30)]
    config = LoraConfig(target_modules=names[::-1])
    sort_names(config)
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == sorted(names)
