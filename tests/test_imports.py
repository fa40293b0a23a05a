"""Imports of the package: no cycles, one direction, matplotlib in one file only, and no missing names.

Imports inside functions count. Imports for type checkers do not, because no code runs through them.
"""

from __future__ import annotations

import ast
import logging
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest
from importlinter.cli import lint_imports

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """Returns each module of ckpt_ft with the modules of ckpt_ft that it imports anywhere."""
    graph = grimp.build_graph("ckpt_ft", cache_dir=None, exclude_type_checking_imports=True)
    return {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}


def cycle(imports: dict[str, set[str]]) -> list[str]:
    """Returns the modules of an import cycle, if there is one."""
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def imports_between(imports: dict[str, set[str]], package: str) -> dict[str, set[str]]:
    """Returns, for each file or folder directly in `package`, which others of them it imports."""

    def child(module: str) -> str | None:
        inside = module.removeprefix(f"{package}.")
        return None if inside == module else inside.partition(".")[0]

    pairs = {(child(importer), child(imported)) for importer, found in imports.items() for imported in found}
    between: dict[str, set[str]] = {}
    for one, other in pairs:
        if one is not None and other is not None and one != other:
            between.setdefault(one, set()).add(other)
    return between


def test_no_import_cycle(imports: dict[str, set[str]]) -> None:
    assert len(imports) > 100
    assert cycle(imports) == []


def test_import_cycle_would_be_found() -> None:
    assert set(cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}})) == {"a", "b", "c"}


def test_no_import_cycle_between_folders(imports: dict[str, set[str]]) -> None:
    """Of two folders or files side by side, at most one imports the other."""
    folders = {module.rpartition(".")[0] for module in imports} - {""}
    assert len(folders) > 15
    assert {folder: found for folder in sorted(folders) if (found := cycle(imports_between(imports, folder)))} == {}


def test_import_cycle_between_folders_would_be_found() -> None:
    imports = {"p.a.x": {"p.b.y"}, "p.b.z": {"p.a.w"}, "p.b.y": set(), "p.a.w": set()}
    assert cycle(imports) == []
    assert set(cycle(imports_between(imports, "p"))) == {"a", "b"}


def test_imports_in_functions_count_and_annotations_do_not(imports: dict[str, set[str]]) -> None:
    assert "ckpt_ft.memory.record.trace" not in imports["ckpt_ft.export.perfetto"]  # if TYPE_CHECKING
    assert "ckpt_ft.export.perfetto" in imports["ckpt_ft.memory.record.trace"]  # in a method
    assert "ckpt_ft.workloads.load" in imports["ckpt_ft.cli.planning"]  # in a command


def test_imports_follow_the_contract() -> None:
    loggers = [logger for logger in logging.root.manager.loggerDict.values() if isinstance(logger, logging.Logger)]
    disabled = [logger.disabled for logger in loggers]
    code = lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True)
    for logger, was in zip(loggers, disabled, strict=True):
        logger.disabled = was  # import-linter disables all loggers, whose messages later tests read
    assert code == 0


def test_every_folder_is_in_the_import_contract() -> None:
    """A folder or file that the contract does not name could import anything."""
    contract = (ROOT / "pyproject.toml").read_text(encoding="utf-8").partition("[[tool.importlinter.contracts]]")[2]
    paths = list((ROOT / "ckpt_ft").iterdir())
    names = [path.stem for path in paths if path.suffix == ".py" or any(path.glob("*.py"))]
    assert [name for name in names if f"ckpt_ft.{name}" not in contract and not name.startswith("__")] == []


def test_one_file_imports_matplotlib() -> None:
    importers = set()
    for path in (ROOT / "ckpt_ft").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            named = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            named += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if any(name.partition(".")[0] == "matplotlib" for name in named):
                importers.add(path.relative_to(ROOT).as_posix())
    assert importers == {"ckpt_ft/export/plots.py"}


# A type checker may find a deleted module in another installed copy of the package, and an import inside a function
# fails only when it runs.


def file_of(module: str) -> Path | None:
    """Returns the file of a module of the package, or None if this tree has none."""
    path = ROOT.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None)


IMPORT = re.compile(r"^[ \t]*from[ \t]+(\.*)([\w.]*)[ \t]+import[ \t]+(\([^)]*\)|[^\n]*)", re.MULTILINE)


def missing_imports(file: Path) -> list[str]:
    """Returns the imports in `file` of names that this tree does not have, as "file: module name"."""
    package, missing = file.relative_to(ROOT).parent.parts, []
    for dots, named, text in IMPORT.findall(file.read_text(encoding="utf-8")):
        base = package[: len(package) - len(dots) + 1] if dots else ()
        module = ".".join((*base, *filter(None, [named])))
        if module.partition(".")[0] != "ckpt_ft":
            continue
        home = file_of(module)
        words = set(re.findall(r"\w+", home.read_text(encoding="utf-8"))) if home else set()
        names = [
            part.split()[0] for part in re.sub(r"#.*|[()]", "", text).replace("\n", " ").split(",") if part.strip()
        ]
        missing += [f"{file.relative_to(ROOT)}: {module} {name}" for name in names
                    if name not in words and file_of(f"{module}.{name}") is None]  # fmt: skip
    return missing


def test_every_imported_name_exists() -> None:
    files = [file for folder in ("ckpt_ft", "recipes", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 200
    assert [line for file in files for line in missing_imports(file)] == []


def test_deleted_module_and_name_are_found(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    (tmp_path / "ckpt_ft" / "part").mkdir(parents=True)
    (tmp_path / "ckpt_ft" / "kept.py").write_text("A = 1\n\n\ndef b(): ...\n")
    file = tmp_path / "ckpt_ft" / "part" / "user.py"
    lines = ["import json", "from ckpt_ft.kept import A, c", "from ..kept import b", "", "", "def f():"]
    lines += [
        f"    from {home} import {name}" for home, name in (("ckpt_ft.gone", "x"), ("ckpt_ft", "kept"), (".", "y"))
    ]
    file.write_text("\n".join(lines))
    assert missing_imports(file) == [
        "ckpt_ft/part/user.py: ckpt_ft.kept c",
        "ckpt_ft/part/user.py: ckpt_ft.gone x",
        "ckpt_ft/part/user.py: ckpt_ft.part y",
    ]
