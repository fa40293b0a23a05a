"""Wheels for a machine without network: what gpu.py needs beside torch, transformers, accelerate, peft and timm.

`build` downloads them on a machine with network. `use` unpacks those that the GPU's machine lacks and appends them to
`sys.path`, so that installed packages come first. Only the standard library is imported here.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "out" / "gpu_wheels"
_WITH_DEPENDENCIES = ("pydantic", "typer", "rich", "filelock", "psutil", "pytest", "hypothesis", "requests")
_ALONE = ("diffusers", "importlib_metadata", "zipp")  # their dependencies are transformers' too
_MACHINE = ("--python-version", "3.12", "--implementation", "cp", "--platform", "manylinux_2_28_x86_64",
            "--platform", "manylinux2014_x86_64", "--only-binary", ":all:")  # fmt: skip
MOST = 60 * 2**20  # bytes


def build(folder: Path = FOLDER) -> int:
    """Downloads the wheels into `folder`; returns their bytes.

    Raises:
        ValueError: they are more than `MOST` bytes.
        subprocess.CalledProcessError: pip has failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.whl"):
        old.unlink()
    for more in (_WITH_DEPENDENCIES, ("--no-deps", *_ALONE)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", str(folder), *_MACHINE, *more]
        subprocess.run(command, check=True)
    nbytes = sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))
    if nbytes > MOST:
        raise ValueError(f"{nbytes / 2**20:.0f} MiB of wheels, more than {MOST / 2**20:.0f}")
    return nbytes


def use(folder: Path = FOLDER) -> list[str]:
    """Makes the packages of `folder` that are not installed importable here and in child processes.

    Returns their names.
    """
    names = {}
    for wheel in sorted(folder.glob("*.whl")):
        name = wheel.name.partition("-")[0]
        if _version(name) is None:
            names[name] = wheel
    if not names:
        return []
    into = Path(tempfile.gettempdir()) / f"gpu_wheels-{os.getuid()}"
    for wheel in names.values():
        done = into / f".{wheel.stem}"
        if not done.exists():
            with zipfile.ZipFile(wheel) as packed:
                packed.extractall(into)
            done.touch()
    sys.path.append(str(into))
    # children get it last, too: a path in PYTHONPATH comes before installed packages, and none of these is installed
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(into))))
    return list(names)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(re.sub(r"[-_.]+", "-", name))
    except importlib.metadata.PackageNotFoundError:
        return None
