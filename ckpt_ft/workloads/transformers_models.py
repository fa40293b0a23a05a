"""Language models and image classifiers of transformers as workloads: the model on meta, its batches, its own loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ckpt_ft.errors import UserError, one_line

from .adapters import adapt
from .settings import DTYPES, Settings
from .workload import Batch, Forward, Workload


def language_model(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    """A causal or masked language model on rows of `seq_length` tokens.

    Raises:
        UserError: its type is neither, it has fewer positions, or its config makes no model.
    """
    from transformers import AutoModelForCausalLM, AutoModelForMaskedLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    )

    kind = config["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and kind not in MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        raise UserError(
            f"{name}: model type '{kind}' is neither a causal or masked language model nor an image classifier"
        )
    masked = kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES or "MaskedLM" in _architecture(config)
    built = _build(name, AutoModelForMaskedLM if masked else AutoModelForCausalLM, config, settings)
    text = built.config.get_text_config()
    limit = getattr(text, "max_position_embeddings", None)
    if limit and settings.seq_length > limit:
        raise UserError(f"--seq-length {settings.seq_length}: {name} has {limit} positions")

    def make_batch(samples: int, length: int | None) -> Batch:
        ids = torch.zeros(samples, length or settings.seq_length, dtype=torch.long)
        batch = {"input_ids": ids, "labels": ids.clone()}
        if length is not None:  # of one row; the others are padded
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][1:, -1:] = 0
        return batch

    shape = {"seq_length": settings.seq_length}
    return Workload(adapt(built, settings), make_batch, own_loss, kind="language model", shape=shape)


def image_classifier(name: str, config: Mapping[str, Any], settings: Settings) -> Workload:
    """An image classifier on square images.

    Raises:
        UserError: its config makes no model.
    """
    from transformers import AutoModelForImageClassification

    side = settings.resolution or _image_size(config)
    sized = {**config, **({"image_size": side} if "image_size" in config else {})}
    built = _build(name, AutoModelForImageClassification, sized, settings)
    channels = int(getattr(built.config, "num_channels", 3))
    dtype = torch.float32 if settings.mixed_precision != "no" else DTYPES[settings.dtype]

    def make_batch(samples: int, length: int | None) -> Batch:
        pixels = torch.zeros(samples, channels, side, side, dtype=dtype)
        return {"pixel_values": pixels, "labels": torch.zeros(samples, dtype=torch.long)}

    shape = {"resolution": side}
    return Workload(adapt(built, settings), make_batch, own_loss, kind="image classifier", shape=shape)


def is_image_classifier(config: Mapping[str, Any]) -> bool:
    """Whether a transformers config is an image classifier's."""
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES,
    )

    kind = config["model_type"]
    named = _architecture(config).endswith("ForImageClassification")
    return named or (
        kind in MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES and kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    )


def own_loss(model: Forward, batch: Batch) -> torch.Tensor:
    """The loss that a transformers model computes itself."""
    loss: torch.Tensor = model(**batch).loss
    return loss


def _build(name: str, auto: Any, config: Mapping[str, Any], settings: Settings) -> Any:
    """The model on meta, in the settings' dtype, from its config alone."""
    from transformers import AutoConfig

    values = {key: value for key, value in config.items() if key not in ("model_type", "quantization_config")}
    try:
        parsed = AutoConfig.for_model(config["model_type"], **values)
        with torch.device("meta"):
            model = auto.from_config(
                parsed, dtype=DTYPES[settings.dtype], attn_implementation=settings.attn_implementation or None
            )
    except Exception as error:
        raise UserError(f"{name}: its config does not make a model: {one_line(error, 200)}") from error
    return model.train()


def _architecture(config: Mapping[str, Any]) -> str:
    return (config.get("architectures") or [""])[0]


def _image_size(config: Mapping[str, Any]) -> int:
    size = config.get("image_size", 224)
    return int(size[0] if isinstance(size, (list, tuple)) else size)
