"""Commands in README.md and docs/: cheap ones are run, and the flags of the others are parsed.

A bash fence below `<!-- needs a GPU -->`, `<!-- needs a download -->` or `<!-- long -->` is not run. The fences of a
page run in order in one empty directory, so that a page reads as a session.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import typer

from ckpt_ft.cli import main as cli
from ckpt_ft.memory.gpus import find_gpu
from ckpt_ft.policy import Policy
from ckpt_ft.units import parse_bytes

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKS = {"needs a GPU", "needs a download", "long"}
NOT_OURS = {"pip", "git", "cd"}  # commands that are neither run nor parsed
_FENCE = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*?) -->\s*)?^```(?P<language>\w*)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE
)
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)(?:#[^)]*)?\)")


@dataclass(frozen=True)
class Fence:
    """A fenced block of a page, and the comment directly above it."""

    page: Path
    line: int
    language: str
    mark: str
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[list[str]]:
        """Returns each command line as words, without leading variables."""
        words = [shlex.split(line, comments=True) for line in self.text.replace("\\\n", " ").splitlines()]
        without = [list(line[next((i for i, w in enumerate(line) if "=" not in w), 0) :]) for line in words]
        return [line for line in without if line]


def fences(page: Path, *languages: str) -> list[Fence]:
    text = page.read_text(encoding="utf-8")
    found = [
        Fence(page, text.count("\n", 0, m.start("language")) + 1, m["language"], m["mark"] or "", m["text"])
        for m in _FENCE.finditer(text)
    ]
    return [fence for fence in found if fence.language in languages]


BASH = [fence for page in PAGES for fence in fences(page, "bash", "sh", "shell", "console")]
SHOWING = [
    *sorted((ROOT / "recipes").glob("*.py")),
    *sorted((ROOT / "recipes").glob("*/*.yaml")),
    *sorted((ROOT / "accelerate_configs").glob("*.yaml")),
]
PYTHON = [fence for page in PAGES for fence in fences(page, "python", "py")]


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, id=page.name, marks=() if page.name == "README.md" else pytest.mark.slow) for page in PAGES],
)
def test_commands_of_the_docs_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for fence in (fence for fence in BASH if fence.page == page and not fence.mark):
        for command in fence.commands:
            if command[0] == "ckpt-ft":
                run_cli(command[1:], monkeypatch)
            elif command[:2] == ["python", "-c"]:
                exec(compile(command[2], fence.where, "exec"), {})
            elif command[0] == "python":
                subprocess.run([sys.executable, *command[1:]], check=True, timeout=300)


def run_cli(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs a command in this process, because imports take most of a command's time."""
    monkeypatch.setattr(sys, "argv", ["ckpt-ft", *arguments])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert cli._main() == 0


@pytest.mark.parametrize("fence", [pytest.param(fence, id=fence.where) for fence in BASH])
def test_commands_of_the_docs_parse(fence: Fence, monkeypatch: pytest.MonkeyPatch) -> None:
    assert fence.mark in {"", *MARKS}
    monkeypatch.chdir(ROOT)
    for program, *arguments in fence.commands:
        if program == "ckpt-ft":
            parse_cli(arguments)
        elif program in ("accelerate", "torchrun"):
            assert program == "torchrun" or arguments[:2] == ["launch", "-q"], "its own traceback hides our one line"
            parse_launch(arguments)
        elif program == "make":
            targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
            assert set(arguments) <= set(targets)
        elif program == "python":
            assert arguments[0] == "-c" or (ROOT / arguments[0]).is_file()
        else:
            assert program in NOT_OURS or fence.mark


@pytest.mark.parametrize("path", [pytest.param(path, id=str(path.relative_to(ROOT))) for path in SHOWING])
def test_commands_in_scripts_and_yaml_files_parse(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In docstrings of recipes and headers of YAML files, including the launcher and the script's flags."""
    monkeypatch.chdir(ROOT)
    importlib.import_module("trl.trainer.grpo_trainer")  # it must import before bitsandbytes is hidden
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "bitsandbytes" or found(name))
    text = re.sub(r"\\+\n[# ]*", "", path.read_text(encoding="utf-8"))
    shown = re.findall(r"(?:^[# ]*|: )accelerate (launch .*?recipes/\S+\.py.*)$", text, re.MULTILINE)
    assert shown
    for command in shown:
        words = command.split()
        assert words[:2] == ["launch", "-q"]
        parse_launch([word for word in words if word != "HOST"])


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_indented_commands_of_the_docs_parse(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """These are commands shown above a page, which would take minutes or a GPU."""
    monkeypatch.chdir(ROOT)
    for line in re.findall(r"^    (?:ckpt-ft|accelerate) .*$", page.read_text(encoding="utf-8"), re.MULTILINE):
        program, *arguments = shlex.split(line, comments=True)
        if program == "ckpt-ft":
            parse_cli(arguments)
        else:
            assert arguments[:2] == ["launch", "-q"]
            if not any(word.startswith("plan.json") for word in arguments):  # a file that an earlier command writes
                parse_launch(arguments)


def parse_cli(arguments: Sequence[str]) -> None:
    """Parses with the command's own parser and the parsers of text values."""
    group: Any = typer.main.get_command(cli.app)
    name, *rest = arguments
    given = group.commands[name].make_context(name, list(rest)).params
    policies = given.get("policy") or "none"
    for policy in [policies] if isinstance(policies, str) else policies:
        Policy.parse(policy)
    device = given.get("device") or ""
    for card in device.split(",") if name == "where" else [device]:
        if card not in ("", "cpu"):
            find_gpu(card)
    for amount in ("capacity", "budget"):
        if given.get(amount):
            parse_bytes(given[amount])


def parse_launch(arguments: Sequence[str]) -> None:
    if "ckpt_ft.run" in arguments:
        parse_cli(["run", *arguments[arguments.index("ckpt_ft.run") + 1 :]])
        return
    at = next(i for i, word in enumerate(arguments) if word.endswith(".py"))
    if "--config_file" in arguments[:at]:
        assert (ROOT / arguments[arguments.index("--config_file") + 1]).is_file()
    parse_recipe(arguments[at], list(arguments[at + 1 :]))


def parse_recipe(script: str, flags: list[str]) -> None:
    recipe = load(script)
    loops = {
        "recipes/diffusion_unet.py": ("DiffusionModelArguments", "LoopArguments"),
        "recipes/diffusion_transformer.py": ("TransformerArguments", "LoopArguments"),
    }
    if script in loops:
        from ckpt_ft.training.run_arguments import parse_args

        names = (*loops[script], "ImageArguments", "ACArguments")
        parse_args([getattr(recipe, name) for name in names], flags)
    else:
        recipe.parse([*flags, "--use_cpu"])  # half precision is refused without a GPU and without this flag


def load(script: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{Path(script).stem}", ROOT / script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("fence", [pytest.param(fence, id=fence.where) for fence in PYTHON])
def test_python_of_the_docs_compiles_and_its_imports_exist(fence: Fence) -> None:
    for node in ast.walk(ast.parse(fence.text, fence.where)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ckpt_ft"):
            module = importlib.import_module(node.module or "")
            assert [name.name for name in node.names if not hasattr(module, name.name)] == []


@pytest.mark.parametrize("page", [pytest.param(page, id=page.name) for page in PAGES])
def test_relative_links_exist(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_policy_of_the_docs_parses() -> None:
    text = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    table = text.partition("| term |")[2].partition("\n\n")[0]
    terms = [term for row in table.splitlines()[2:] for term in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(terms) == 21
    assert [str(Policy.parse(term)) for term in terms] == terms
