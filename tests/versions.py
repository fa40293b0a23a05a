"""What the libraries that the tests run with lack."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import transformers
from packaging.version import Version


def is_older(library: str, than: str) -> bool:
    """Whether the library that is installed is older than a version; its pre-releases and builds count as it."""
    return Version(Version(version(library)).base_version) < Version(than)


def needs_processor(family: str) -> None:
    """Skips a test where the processor of this family's images, Pillow's, is there with torchvision alone."""
    kind = {"idefics2": "Idefics2", "idefics3": "Idefics3", "smolvlm": "SmolVLM"}.get(family)
    if kind:
        needs(f"{kind}ImageProcessorPil")


def needs(name: str) -> None:
    """Skips a test where this class of transformers is there with torchvision alone."""
    if getattr(getattr(transformers, name), "is_dummy", False):
        pytest.skip(f"{name} of this transformers needs torchvision")
