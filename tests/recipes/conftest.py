"""What tests of recipes share: the built-in samples, and the flags that keep a run small."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
from recipe_scripts import ROOT, load_recipe


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def llm(sample: tuple[Path, Path]) -> ModuleType:
    """recipes/llm.py, with its built-in sample made."""
    return load_recipe("llm")
