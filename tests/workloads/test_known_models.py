"""Models known without the Hub: every name has a configuration, which builds a model of the published size."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.load import load
from ckpt_ft.workloads.model_config import CONFIGS, KnownModel, find_model, hub_id, known_models, names, read_config
from ckpt_ft.workloads.transformers_models import _build

RECIPES = Path(__file__).parents[2] / "recipes"
UNITS = {"M": 10**6, "B": 10**9}


def built(model: KnownModel) -> Any:
    if "_class_name" in model.config:
        diffusers = pytest.importorskip("diffusers")
        with torch.device("meta"):
            return getattr(diffusers, model.kind).from_config(dict(model.config))
    import transformers

    return _build(model.name, getattr(transformers, model.kind), model.config, TrainingSpec.of())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")  # diffusers warns about itself
@pytest.mark.parametrize("family", [path.stem for path in sorted(CONFIGS.glob("*.json"))])
def test_number_of_parameters_equals_the_published_one(family: str) -> None:
    """Exact for a published 7,615,616,512; within the last digit for a model card's 32B."""
    for model in known_models().values():
        if model.family == family:
            counted, said = sum(p.numel() for p in built(model).parameters()), model.parameters
            if isinstance(said, int):
                assert counted == said, model.name
            else:
                digits = len(said[:-1].partition(".")[2])
                assert abs(counted / UNITS[said[-1]] - float(said[:-1])) <= 10**-digits, model.name


def test_known_models_are_found_by_any_name() -> None:
    assert len(known_models()) >= 120
    assert len(names()) >= 220
    for name, model in names().items():
        assert read_config(name) == model.config
        assert find_model(name.rpartition("/")[2]) is not None
        assert re.match(r"config\.json|the (Hub|class|published)", model.source.replace("the Hub's", "the Hub"))


@pytest.mark.parametrize(
    ("typed", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B"),
        ("llama-3.1-8b-instruct", "meta-llama/Llama-3.1-8B"),
        ("unsloth/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-1B"),
        ("NousResearch/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-8B"),
        ("runwayml/stable-diffusion-v1-5", "stable-diffusion-v1-5/stable-diffusion-v1-5"),
        ("gpt2", "openai-community/gpt2"),
        ("flux.1-dev", "black-forest-labs/FLUX.1-dev"),
    ],
)
def test_model_is_found_by_the_names_that_users_type(typed: str, name: str) -> None:
    found = find_model(typed)
    assert found is not None
    assert found.name == name


def test_model_of_another_owner_is_not_a_known_model() -> None:
    assert find_model("someone/Llama-3.1-8B") is None
    assert hub_id("someone/Llama-3.1-8B") == "someone/Llama-3.1-8B"
    assert hub_id("llama-3.1-8b-instruct") == "meta-llama/Llama-3.1-8B-Instruct"  # `check` loads its weights


def test_recipe_files_name_known_models() -> None:
    keys = ("model_name_or_path", "pretrained_model_name_or_path")
    named = [yaml.safe_load(path.read_text()) for path in sorted(RECIPES.rglob("*.yaml"))]
    models = [config[key] for config in named for key in keys if key in config]
    assert len(models) >= 8
    assert [name for name in models if find_model(name) is None] == []


def test_untied_head_of_a_checkpoint_is_not_tied() -> None:
    """Flan-T5's configuration says untied, although its class ties by default."""
    model = load(TrainingSpec.of("google/flan-t5-small", seq_length=8), "t4").model
    assert model.lm_head.weight is not model.shared.weight
    assert load(TrainingSpec.of("google-t5/t5-small", seq_length=8), "t4").model.lm_head.weight.shape == (32128, 512)


def test_linear_attention_without_its_kernels_is_said() -> None:
    (note,) = load(TrainingSpec.of("Qwen/Qwen3-Next-80B-A3B-Instruct")).notes
    assert note.startswith("linear attention runs as without flash-linear-attention")
