"""Processors of images and videos where torchvision is missing, which their part for videos alone needs.

That part is its settings here, and they are saved as they were read: rows have images.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from transformers import ProcessorMixin
from transformers.utils import is_torchvision_available
from transformers.video_processing_utils import BaseVideoProcessor


class VideoSettings(BaseVideoProcessor):
    """What a model's own processor of videos is made from; where none is named, its kind follows from the model's."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.settings = settings

    def to_dict(self) -> dict[str, Any]:
        """As they were read."""
        return dict(self.settings)


@contextmanager
def without_videos() -> Iterator[None]:
    """Within it, where torchvision is missing, `AutoProcessor` makes no processor of videos."""
    from transformers.models.auto.video_processing_auto import AutoVideoProcessor

    if is_torchvision_available():
        yield
        return
    with (
        patch.object(AutoVideoProcessor, "from_pretrained", VideoSettings.from_pretrained),
        patch.object(ProcessorMixin, "check_argument_for_proper_class", _checked),
    ):
        yield


_check = ProcessorMixin.check_argument_for_proper_class


def _checked(processor: ProcessorMixin, name: str, part: Any) -> Any:
    """As transformers checks a processor's parts; it would look for the class of these among torchvision's."""
    return VideoSettings if isinstance(part, VideoSettings) else _check(processor, name, part)
