"""Loads Trainer checkpoints whose weight names differ from the names in the model.

transformers saves many models (Qwen-VL, LLaVA, mixtures of experts) under the names of their published checkpoints,
and converts these in `from_pretrained` only. A Trainer that resumes, or loads the best checkpoint at the end, does not
convert them: it logs a warning and keeps its current weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from safetensors import safe_open

if TYPE_CHECKING:
    from transformers import Trainer


@contextmanager
def under_any_name(trainer: Trainer) -> Iterator[None]:
    """Context manager: if names differ, `trainer` loads its checkpoints as `from_pretrained` does."""
    own, own_best = trainer._load_from_checkpoint, trainer._load_best_model

    def load(checkpoint: str, model: Any = None) -> None:
        if _are_converted(trainer, checkpoint):
            _load(trainer.model, checkpoint)
        else:
            own(checkpoint, model)

    def load_best() -> None:
        best = trainer.state.best_model_checkpoint
        if best is not None and _are_converted(trainer, best):
            _load(trainer.model, best)
        else:
            own_best()

    with patch.object(trainer, "_load_from_checkpoint", load), patch.object(trainer, "_load_best_model", load_best):
        yield


def _are_converted(trainer: Trainer, checkpoint: str) -> bool:
    """Whether the checkpoint holds full weights under names that the model does not have."""
    from transformers import PreTrainedModel

    model: Any = trainer.model
    if not isinstance(model, PreTrainedModel) or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
        return False
    names: set[str] = set()
    for file in Path(checkpoint).glob("model*.safetensors"):
        with safe_open(file, "pt") as weights:
            names |= set(weights.keys())
    return not names <= model.state_dict().keys()


def _load(model: Any, checkpoint: str) -> None:
    read, info = type(model).from_pretrained(checkpoint, dtype=model.dtype, output_loading_info=True)
    if info["missing_keys"]:
        raise ValueError(f"it has no {', '.join(sorted(info['missing_keys'])[:3])}")
    model.load_state_dict(read.state_dict())
