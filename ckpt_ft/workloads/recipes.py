"""Finds the recipe that trains a model."""

from __future__ import annotations

from ckpt_ft.spec.command import RECIPES
from ckpt_ft.spec.training_spec import TrainingSpec

from .batches import class_for, task_of
from .model_config import read_config


def recipe_for(spec: TrainingSpec, dataset: str = "") -> str:
    """Returns the recipe that trains the spec's model on text, or to classify images; "" for other models.

    dataset: the training data; a vision-language model may find images in it, which recipes/llm.py does not read.
    """
    config = read_config(spec.model.name)
    named = (config.get("architectures") or [""])[0] or class_for(config.get("model_type", ""))
    task = task_of(named)
    pictured = bool(dataset) and "vision_config" in config
    return "" if task is None or pictured else RECIPES.get(task.kind, "")
