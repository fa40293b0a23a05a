"""The package as it is installed: what it imports, the one command it brings, and the types it ships."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_importing_it_leaves_the_heavy_and_the_optional_alone() -> None:
    code = "import ckpt_ft, sys; print([m for m in ('diffusers', 'datasets', 'matplotlib') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_installed_package_is_the_described_one() -> None:
    distribution = importlib.metadata.distribution("ckpt_ft")
    (script,) = [entry for entry in distribution.entry_points if entry.group == "console_scripts"]
    assert (script.name, script.value) == ("ckpt-ft", "ckpt_ft.cli.app:main")
    assert callable(script.load())
    extras = {"diffusion", "vision", "plot", "test", "dev", "docs"}
    assert set(distribution.metadata.get_all("Provides-Extra") or []) == extras
    assert (ROOT / "ckpt_ft" / "py.typed").is_file()


def test_every_tested_version_is_one_that_is_installed() -> None:
    lines = [line.partition(";")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    for name, _, version in (line.partition("==") for line in lines if line and not line.startswith("#")):
        assert importlib.metadata.version(name).split("+")[0] == version, name
