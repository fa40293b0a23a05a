"""The installed package: its imports, its command, and its type information."""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import ckpt_ft

ROOT = Path(__file__).parents[1]


PUBLIC = {
    "ACArguments", "ACCallback", "AppliedPolicy", "Estimate", "MemoryProfiler", "Policy", "TrainingSpec", "Workload",
    "__version__",
    "apply_policy", "check_parity", "estimate", "find_max_batch_size", "find_max_length", "plan", "trace_step",
}  # fmt: skip


def loaded_after(code: str) -> set[str]:
    """Returns the top-level packages that a new interpreter has loaded after `code`."""
    code = f"{code}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_public_names() -> None:
    assert set(ckpt_ft.__all__) == PUBLIC
    assert set(dir(ckpt_ft)) >= PUBLIC
    for name in PUBLIC - {"__version__"}:
        found = getattr(ckpt_ft, name)
        assert found.__name__ == name
        assert found.__doc__
    assert ckpt_ft.__version__ == importlib.metadata.version("ckpt_ft")
    with pytest.raises(AttributeError, match="module 'ckpt_ft' has no attribute 'Plan'"):
        _ = ckpt_ft.Plan  # type: ignore[attr-defined]


def test_lazy_names_equal_the_names_for_type_checkers() -> None:
    """The `TYPE_CHECKING` block and the table of `__getattr__` must agree."""
    tree = ast.parse((ROOT / "ckpt_ft" / "__init__.py").read_text(encoding="utf-8"))
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    froms = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in froms for alias in node.names} == {
        name: f"ckpt_ft.{home}" for name, home in ckpt_ft._HOMES.items()
    }


def test_import_loads_no_other_module() -> None:
    """Neither modules of others nor submodules of the package."""
    code = "import sys, __future__, importlib, typing; n = {*sys.modules}; import ckpt_ft; print({*sys.modules} - n)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "{'ckpt_ft'}"


def test_public_names_load_no_optional_package() -> None:
    names = ", ".join(sorted(PUBLIC - {"ACCallback"}))
    assert {"diffusers", "datasets", "matplotlib", "typer", "peft"} & loaded_after(
        f"from ckpt_ft import {names}"
    ) == set()


def test_installed_package_has_its_command_and_extras() -> None:
    distribution = importlib.metadata.distribution("ckpt_ft")
    (script,) = [entry for entry in distribution.entry_points if entry.group == "console_scripts"]
    assert (script.name, script.value) == ("ckpt-ft", "ckpt_ft.cli.main:main")
    assert callable(script.load())
    extras = {"diffusion", "vision", "plot", "trl", "deepspeed", "offload", "lomo", "app", "test", "dev", "docs"}
    assert set(distribution.metadata.get_all("Provides-Extra") or []) == extras
    assert (ROOT / "ckpt_ft" / "py.typed").is_file()


def test_installed_versions_equal_the_constraints() -> None:
    """The constraints are those of this environment or the pinned ones. Compares only versions for this Python."""
    made_with = Path(sys.prefix, "constraints.txt")
    file = made_with if made_with.exists() else ROOT / "constraints.txt"
    lines = file.read_text(encoding="utf-8").splitlines()
    tested = [Requirement(line) for line in lines if line and not line.startswith("#")]
    for_this_python = [one for one in tested if one.marker is None or one.marker.evaluate()]
    assert len(for_this_python) > 5
    wrong = {one.name: found for one in for_this_python if (found := installed(one.name)) not in one.specifier}
    assert wrong == {}


def installed(name: str) -> str:
    return importlib.metadata.version(name).partition("+")[0]
