"""The one room for private names of torch and other libraries, and for what the package replaces in them.

Each file here has a table of short names, the private names that they stand for, and below them what these are for.

    from ckpt_ft.compat.tensors import swap_contents

looks the name up in the installed library. A library that has moved it is named in one line, which says where to look.
`tests/test_compat.py` looks up all of them, and fails for a private name that is used anywhere else in the package.
"""

from __future__ import annotations

from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NamedTuple

from ckpt_ft.errors import UserError


class Name(NamedTuple):
    """A private name.

    Attributes:
        path: "torch.Tensor()._version" is an attribute of the objects of a class.
        parts: public attributes that we use, if it is a module or an object.
        why: what it is for.
    """

    path: str
    parts: list[str]
    why: str


class Table:
    """The names of one file, of which this is the `__getattr__`.

    Args:
        room: the module's `__name__`.
        read_in: the versions in which we have read the names.
        text: lines "short: path parts", followed by an indented line that says what those names are for.
    """

    def __init__(self, room: str, read_in: str, text: str) -> None:
        self.room, self.read_in = room, read_in
        self.names: dict[str, Name] = {}
        for line in reversed(text.strip().split("\n")):
            if line.startswith(" "):
                why = line.strip()
            else:
                short, path, *parts = line.replace(":", "", 1).split()
                self.names[short] = Name(path, parts, why)

    def __call__(self, short: str) -> Any:
        """Return what the installed library has by this name: for an attribute of objects, a function that reads it.

        Raises:
            ImportError: the library is not installed.
            UserError: this version of it has no such name.
        """
        if short not in self.names:  # the import system asks for `__path__`
            raise AttributeError(f"{self.room} has no name '{short}'")
        owner, _, name = self.names[short].path.rpartition(".")
        if owner.endswith("()"):
            return attrgetter(name)
        try:
            return resolve_name(f"{owner}.{name}")
        except (ImportError, AttributeError) as error:
            resolve_name(owner.partition(".")[0])  # the ImportError of a library that is not installed
            raise UserError(self.changed(short)) from error

    def changed(self, short: str) -> str:
        """The line about a name that the installed version does not have."""
        from importlib.metadata import version

        name = self.names[short]
        library, file = name.path.partition(".")[0], self.room.replace(".", "/")
        return (
            f"{name.path} changed in {library} {version(library)}: see {file}.py ({name.why}; read in {self.read_in})"
        )
