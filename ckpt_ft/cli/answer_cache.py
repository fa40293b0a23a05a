"""Caches answers on disk. A file that cannot be read is computed again."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, TypeVar

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import write
from ckpt_ft.memory.gpus import calibrated
from ckpt_ft.planning.results import cache_path
from ckpt_ft.spec.training_spec import TrainingSpec
from ckpt_ft.workloads.model_config import read_config, read_parts, read_processor

logger = logging.getLogger(__name__)
T = TypeVar("T")


def question_of(spec: TrainingSpec) -> dict[str, Any]:
    """What an answer about `spec` depends on: itself, the configurations of its model, and this machine's CPU.

    Raises:
        UserError: the model is not known.
    """
    name = spec.model.name
    processor, config = read_processor(name) if spec.data.images else {}, read_config(name)
    parts = read_parts(name) if config.get("_class_name") else {}
    return {"spec": spec, "config": config, "processor": processor, "parts": parts, "cpu": calibrated("cpu")}


class AnswerCache(Generic[T]):
    """The answer to one question.

    Args:
        kind: of answer: "plan", "estimate".
        question: everything that it depends on, except the libraries' versions and this package's code.
        read: makes the answer from a file's bytes and name; raises UserError if they are no such answer.
    """

    def __init__(self, kind: str, question: Mapping[str, Any], read: Callable[[bytes, str], T]) -> None:
        self.kind, self._read = kind, read
        self.path = cache_path(f"{kind}s", question)

    def get(self) -> T | None:
        """Returns the cached answer; None if there is none, or none that can be read."""
        try:
            return self._read(self.path.read_bytes(), str(self.path)) if self.path.is_file() else None
        except (UserError, OSError) as error:
            logger.warning("the %s is made again: %s", self.kind, one_line(error))
            return None

    def put(self, text: str | Callable[[Path], object]) -> None:
        """Writes the answer to the cache: its text, or by a function that writes a file."""
        try:
            write(self.path, text)
        except OSError as error:
            logger.warning("the %s could not be cached: %s", self.kind, one_line(error))
