"""Which version of a library the tests run with."""

from __future__ import annotations

from importlib.metadata import version

from packaging.version import Version


def is_older(library: str, than: str) -> bool:
    """Whether the library that is installed is older than a version; its pre-releases and builds count as it."""
    return Version(Version(version(library)).base_version) < Version(than)
