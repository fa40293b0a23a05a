"""Marks and conditions of tests, most of them for older versions of libraries."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.version import Version


def is_older(library: str, than: str) -> bool:
    """Whether the installed library is older than a version; its pre-releases and builds count as that version."""
    return Version(Version(version(library)).base_version) < Version(than)


def is_pinned(*libraries: str) -> bool:
    """Whether the installed versions are those of constraints.txt, with which stored figures were made."""
    lines = Path(__file__).parents[1].joinpath("constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {one.name: one.specifier for line in lines if line[:1] not in ("", "#") for one in [Requirement(line)]}
    return all(Version(version(name)).public in pins[name] for name in libraries)


def slow_except(every: Iterable[str], *quick: str) -> list[Any]:
    """Returns all names as parameters of a test; those not in `quick` are slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in every]
