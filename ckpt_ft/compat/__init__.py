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
        path: "torch.Tensor()._version" is an attribute of the objects of a class, or of a module that assigns to it.
        parts: public attributes that we use, if it is a module or an object.
        since: the first version that has it, if the package runs with older ones, too.
        why: what it is for.
    """

    path: str
    parts: list[str]
    since: str
    why: str


class Table:
    """The names of one file, of which this is the `__getattr__`.

    Args:
        room: the module's `__name__`.
        read_in: the versions in which we have read the names.
        text: lines "short: path parts" or "short: path >=version"; an indented line below says what the names are for.
    """

    def __init__(self, room: str, read_in: str, text: str) -> None:
        self.room, self.read_in = room, read_in
        self.names: dict[str, Name] = {}
        for line in reversed(text.strip().split("\n")):
            if line.startswith(" "):
                why = line.strip()
            else:
                words, _, since = line.replace(":", "", 1).partition(" >=")
                short, path, *parts = words.split()
                self.names[short] = Name(path, parts, since, why)

    def __call__(self, short: str) -> Any:
        """Return what the installed library has; for an attribute of objects, a function that reads it.

        If the short name of such an attribute is in capitals, return its name, for `setattr` and `vars`. Return None
        for a name that this older version does not have yet.

        Raises:
            ImportError: the library is not installed.
            UserError: this version of it has no such name.
        """
        if short not in self.names:  # the import system asks for `__path__`
            raise AttributeError(f"{self.room} has no name '{short}'")
        owner, _, name = self.names[short].path.rpartition(".")
        if owner.endswith("()"):
            return name if short.isupper() else attrgetter(name)
        try:
            return resolve_name(f"{owner}.{name}")
        except (ImportError, AttributeError) as error:
            resolve_name(owner.partition(".")[0])  # the ImportError of a library that is not installed
            if self.names[short].since:
                return None
            raise UserError(self.changed(short)) from error

    def changed(self, short: str) -> str:
        """The line about a name that the installed version does not have."""
        from importlib.metadata import version

        name = self.names[short]
        library, file = name.path.partition(".")[0], self.room.replace(".", "/")
        return (
            f"{name.path} changed in {library} {version(library)}: see {file}.py ({name.why}; read in {self.read_in})"
        )
