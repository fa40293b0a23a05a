"""Fixtures of recipe tests: the built-in samples."""

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
    """recipes/llm.py, with its built-in sample in the cache."""
    return load_recipe("llm")
