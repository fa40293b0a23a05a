"""ckpt_ft/compat: its private names exist in the installed libraries, and no other room uses one."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from operator import attrgetter
from pathlib import Path
from pkgutil import iter_modules, resolve_name
from typing import Any

import pytest
from private_names import private_names, private_parts
from versions import is_older

import ckpt_ft
from ckpt_ft import compat
from ckpt_ft.compat import Table
from ckpt_ft.errors import UserError

PACKAGE = Path(ckpt_ft.__file__).parent
ROOMS = [f"{compat.__name__}.{module.name}" for module in iter_modules(compat.__path__)]
TABLES: list[Table] = [vars(import_module(room))["__getattr__"] for room in ROOMS]


def sources(kind: Any) -> Iterator[str]:
    for one in getattr(kind, "__mro__", (kind,)):
        with suppress(OSError, TypeError):  # written in C
            yield inspect.getsource(one)


def look_up(table: Table, short: str) -> None:
    """Raises an error unless the installed library has this name and the parts of it that we use."""
    name = table.names[short]
    owner, _, attribute = name.path.rpartition(".")
    if not owner.endswith("()"):
        found = table(short)
        if found is None:
            raise AttributeError(short)
        for part in name.parts:
            attrgetter(part)(found)
        return
    kind = resolve_name(owner[:-2])  # whose methods may set the attribute
    if not hasattr(kind, attribute) and not any(re.search(rf"\b{attribute}\b", text) for text in sources(kind)):
        raise AttributeError(attribute)


def changed(tables: list[Table]) -> Iterator[str]:
    """The lines about names that the installed libraries do not have."""
    for table in tables:
        for short, name in table.names.items():
            library = name.path.partition(".")[0]
            if find_spec(library) is not None and not (name.since and is_older(library, name.since)):
                try:
                    look_up(table, short)
                except (ImportError, AttributeError, UserError):
                    yield table.changed(short)


@pytest.mark.filterwarnings("ignore")  # at imports of Inductor
def test_every_private_name_is_in_the_installed_libraries() -> None:
    assert sum(len(table.names) for table in TABLES) >= 15
    gone = "\n".join(changed(TABLES))
    assert not gone, gone


def test_name_that_moved_is_named_with_its_library_and_where_to_look() -> None:
    lost = """
lost: torch._C._nowhere
part: torch._subclasses.fake_tensor FakeTensor.nothing
field: torch.Tensor()._nowhere
    a test
there: torch.nn.Module()._parameters
    another
"""
    table = Table("ckpt_ft.compat.tensors", "torch 1.0", lost)
    see = "see ckpt_ft/compat/tensors.py (a test; read in torch 1.0)"
    line = f"torch._C._nowhere changed in torch {version('torch')}: {see}"
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        table("lost")
    assert sorted(text.split()[0] for text in changed([table])) == [
        "torch.Tensor()._nowhere", "torch._C._nowhere", "torch._subclasses.fake_tensor",
    ]  # fmt: skip


def test_library_that_is_not_installed_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="no_such_library"):
        Table("ckpt_ft.compat.libraries", "1.0", "name: no_such_library._inner\n  why")("name")


def test_names_are_looked_up_when_they_are_asked_for() -> None:
    code = f"import sys, {', '.join(ROOMS)}; print('torch' in sys.modules)"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "False"


def test_every_name_is_used() -> None:
    texts = [path.read_text(encoding="utf-8") for path in PACKAGE.rglob("*.py") if path.parent.name != "compat"]
    words = {word for text in texts for word in re.findall(r"\w+", text)}
    assert [short for table in TABLES for short in table.names if short not in words] == []


def test_no_other_room_uses_a_private_name_and_there_are_no_more_of_them() -> None:
    known = {part for table in TABLES for name in table.names.values() for part in private_parts(name.path)}
    used = private_names(PACKAGE, known)
    outside = {name: [place for place in places if not place.startswith("compat/")] for name, places in used.items()}
    assert {name: places for name, places in outside.items() if places} == {}
    assert len(known | used.keys()) <= 119  # use what is public; lower this with each name that is gone
