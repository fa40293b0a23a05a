"""What a class of transformers is called with in training: its task, by transformers' own tables, and a batch of it.

A batch is described by the `Field`s of one row. A class that no table below names has no known training step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ckpt_ft.errors import UserError

from .settings import DTYPES, Settings
from .workload import Batch

_OTHER_SENSES = {"pixel_values", "input_features", "input_values"}  # what a model of text and more takes as well


@dataclass(frozen=True)
class Field:
    """One input. `shape`: of one sample's. `top`: one more than the largest whole number; 0 for floats."""

    shape: tuple[int, ...]
    top: int = 0


Fields = dict[str, Field]


@dataclass(frozen=True)
class Task:
    """What a table of transformers' auto classes is trained on.

    kind: for people. table: X of MODEL_FOR_X_MAPPING_NAMES. fields: (model, settings) -> its inputs.
    """

    kind: str
    table: str
    fields: Callable[[Any, Settings], Fields]

    @property
    def classes(self) -> dict[str, tuple[str, ...]]:
        """model type -> names of its classes."""
        from transformers.models.auto import modeling_auto

        table = getattr(modeling_auto, f"MODEL_FOR_{self.table}_MAPPING_NAMES")
        return {kind: (names,) if isinstance(names, str) else tuple(names) for kind, names in table.items()}


def _text(model: Any, settings: Settings) -> Fields:
    ids = Field((settings.seq_length,), model.config.get_text_config().vocab_size)
    return {"input_ids": ids, "labels": ids}


def _speech(model: Any, settings: Settings) -> Fields:
    config = model.config
    if not (hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions")):
        raise UserError(f"no batch is known for {type(model).__name__}: of speech, Whisper's log-mel windows are")
    frames = 2 * config.max_source_positions
    return {
        "input_features": Field((config.num_mel_bins, frames)),
        "labels": Field((settings.seq_length,), config.vocab_size),
    }


def _image(model: Any, settings: Settings) -> Fields:
    side = settings.resolution
    return {
        "pixel_values": Field((getattr(model.config, "num_channels", 3), side, side)),
        "labels": Field((), model.config.num_labels),
    }


def _whole_text(model: Any, settings: Settings) -> Fields:
    classes = model.config.num_labels
    several = model.config.problem_type == "multi_label_classification"
    labels = Field((classes,) if several else (), 0 if several or classes == 1 else classes)
    return {"input_ids": _text(model, settings)["input_ids"], "labels": labels}


def _each_token(model: Any, settings: Settings) -> Fields:
    labels = Field((settings.seq_length,), model.config.num_labels)
    return {"input_ids": _text(model, settings)["input_ids"], "labels": labels}


def _span(model: Any, settings: Settings) -> Fields:
    position = Field((), settings.seq_length)
    ids = _text(model, settings)["input_ids"]
    return {"input_ids": ids, "start_positions": position, "end_positions": position}


# In this order: where a configuration names no class, the first that has its model type stands.
TASKS = (
    Task("speech recogniser", "SPEECH_SEQ_2_SEQ", _speech),
    Task("sequence-to-sequence model", "SEQ_TO_SEQ_CAUSAL_LM", _text),
    Task("language model", "CAUSAL_LM", _text),
    Task("language model", "MASKED_LM", _text),
    Task("image classifier", "IMAGE_CLASSIFICATION", _image),
    Task("language model", "IMAGE_TEXT_TO_TEXT", _text),
    Task("text classifier", "SEQUENCE_CLASSIFICATION", _whole_text),
    Task("token classifier", "TOKEN_CLASSIFICATION", _each_token),
    Task("question answerer", "QUESTION_ANSWERING", _span),
)


def task_of(class_name: str) -> Task | None:
    """The task of the transformers class of that name, if there is one with a known batch."""
    return next((task for task in TASKS if any(class_name in names for names in task.classes.values())), None)


def class_for(model_type: str) -> str:
    """The class that stands for a model type where its configuration names none; "" where there is none."""
    return next((task.classes[model_type][0] for task in TASKS if model_type in task.classes), "")


def check_fields(model: Any, fields: Fields) -> None:
    """Raises UserError where the forward of `model` does not take `fields`, or needs more than them."""
    parameters = inspect.signature(model.forward).parameters.values()
    missing = {p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD} - set(fields)
    foreign = set(fields) - {p.name for p in parameters}
    if missing or foreign:
        wants = ", ".join(sorted(missing)) or f"no {', '.join(sorted(foreign))}"
        raise UserError(f"no batch is known for {type(model).__name__}, which takes {wants}")


def notes_on(model: Any, task: Task) -> tuple[str, ...]:
    """What a batch of the task leaves out or takes for granted, one sentence each."""
    senses = _OTHER_SENSES & set(inspect.signature(model.forward).parameters)
    if task.fields is not _text:
        return ()
    if senses:
        return (f"rows are text alone: what takes {', '.join(sorted(senses))} is resident and does not run",)
    return ("sources and targets are of the same length",) if model.config.is_encoder_decoder else ()


def zeros(fields: Fields, samples: int, settings: Settings) -> Batch:
    """A micro-batch of zeros; floats in float32 under autocast, else in the weights' dtype."""
    floats = torch.float32 if settings.mixed_precision != "no" else DTYPES[settings.dtype]
    return {
        name: torch.zeros(samples, *field.shape, dtype=torch.long if field.top else floats)
        for name, field in fields.items()
    }
