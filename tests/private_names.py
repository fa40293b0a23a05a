"""Finds private names of other packages: `python tests/private_names.py ckpt_ft` prints them with the places of use.

A name is private if it begins with one underscore. It counts once, wherever it is used. What the tree defines itself
does not count, nor do operators (`torch.ops.aten._softmax`), whose schemas PyTorch keeps compatible.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Collection, Iterator
from pathlib import Path

_BY_STRING = {"getattr", "hasattr", "setattr", "delattr", "object"}  # the last one is patch.object
_DOCUMENTED = {"_exit", "_getframe", "_make"}  # by Python
_OPERATORS = re.compile(r"\b(aten|torch\.ops)\.")


def private_parts(path: str) -> list[str]:
    """The private names in a dotted path."""
    return re.findall(r"(?<!\w)_[A-Za-z0-9]\w*", path)


def private_names(root: Path, known: Collection[str] = ()) -> dict[str, list[str]]:
    """The private names of other packages that the files below `root` use, each with "file:line" of its uses.

    known: names that are another package's wherever an object has them, though the tree defines one of that name, too.
    """
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(root.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)}.difference(known) | _DOCUMENTED
    found: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees.items():
        here = set(_defined(tree))
        for line, name, expression in _used(tree):
            if name not in own and not (name in here and expression.startswith(("self.", "cls.", "super()."))):
                found[name].append(f"{path.relative_to(root)}:{line}")
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    """The functions, classes, variables, attributes of `self` and slots of a file."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                yield name
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                yield name
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=slots)):
                yield from (ast.literal_eval(slot) for slot in slots)


def _used(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """(line, private name, expression) for each import, attribute or attribute's name in a call."""
    for node in ast.walk(tree):
        paths: list[str] = []
        match node:
            case ast.Import(names=names):
                paths = [name.name for name in names]
            case ast.ImportFrom(module=module, names=names, level=0):
                paths = [f"{module}.{name.name}" for name in names]
            case ast.Call(
                func=ast.Name(id=call) | ast.Attribute(attr=call), args=[_, ast.Constant(value=str(name)), *_]
            ):
                paths = [name] if call in _BY_STRING else []
            case ast.Attribute(attr=name):
                expression = ast.unparse(node)
                if private_parts(name) and (name == "_schema" or not _OPERATORS.search(expression)):
                    yield node.lineno, name, expression
        for path in paths:
            if not path.startswith(("ckpt_ft.", "_ckpt_ft")):
                yield from ((node.lineno, name, path) for name in private_parts(path))


if __name__ == "__main__":
    uses = private_names(Path(sys.argv[1]), sys.argv[2:])
    for name, places in sorted(uses.items()):
        print(name, *places)
    print(len(uses), "private names of other packages")
