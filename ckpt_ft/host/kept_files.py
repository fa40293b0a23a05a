"""Takes back what a script writes, moves and removes while it is only looked at."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

# Audit events that change files -> where their arguments have the folder that a path is relative to, -1 for none.
_EVENTS = {
    "open": None, "os.truncate": None, "os.mkdir": 2, "os.remove": 1, "os.rmdir": 1, "os.rename": 3, "os.link": 3,
    "os.symlink": 2, "shutil.rmtree": None,
}  # fmt: skip
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = (
    "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR",
)  # fmt: skip
KEPT = "kept-"  # the beginning of the names of such folders
_JOURNAL = "journal"  # in a folder of kept files: a line for each change


class KeptFiles:
    """Notes what Python code of this process makes, writes, moves and removes; `restore` undoes it.

    A file that is to be written is copied first; one that is removed or replaced gets a second name instead. The
    caches of Hugging Face, torch, Triton and matplotlib stay. Writes of libraries in other languages are not seen
    (datasets' Arrow files lie in its cache).

    Args:
        folder: where copies are kept. If this process is killed, `put_back` of what is there undoes its writes.
    """

    def __init__(self, folder: Path) -> None:
        named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        free = ["/dev", "/proc", "/sys", str(Path.home() / ".cache"), str(folder), *named]
        self.folder = folder
        self._free = tuple(os.path.join(os.path.realpath(path), "") for path in free)
        self.begin()
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        """Note from here on what this process writes; a child process that was forked begins anew."""
        self._saved = Path(tempfile.mkdtemp(prefix=KEPT, dir=self.folder))
        self._known, self._numbers = set[str](), count()
        self._process = os.getpid()

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in _EVENTS or os.getpid() != self._process or not isinstance(args[0], (str, bytes, Path)):
            return None
        if (event == "open" and not args[2] & _WRITES) or ((within := _EVENTS[event]) and args[within] != -1):
            return None  # it only reads, or is one of the removals of rmtree
        if event in ("open", "os.truncate"):
            return self._note(os.path.realpath(os.fsdecode(args[0])))
        paths = [_absolute(path) for path in args[:2] if isinstance(path, (str, bytes, Path))]
        if event == "shutil.rmtree":
            for folder, folders, files in os.walk(paths[0], topdown=False):
                for name in (*files, *folders):
                    self._note(os.path.join(folder, name), goes=True)
        self._note(paths[-1], goes=event != "os.mkdir")
        if event in ("os.rename", "os.link"):
            self._known.discard(paths[1])  # what will be there has not been kept
        if event == "os.rename" and not self._stays(paths[1]):
            self._write("moved", *paths)

    def _stays(self, path: str) -> bool:
        return path.startswith(self._free) or "__pycache__" in path

    def _note(self, path: str, goes: bool = False) -> None:
        """Note a path before it is made, written or replaced, or before it `goes`."""
        if path in self._known or self._stays(path):
            return
        if os.path.isdir(path) and not os.path.islink(path):
            return self._write("folder", path) if goes else None
        if os.path.lexists(path) and not os.path.isfile(path) and not os.path.islink(path):
            return None  # a device, a pipe
        self._known.add(path)
        copy = str(self._saved / str(next(self._numbers)))
        if not os.path.lexists(path):
            return self._write("made", path)
        with suppress(OSError):  # another file system
            if goes:
                os.link(path, copy, follow_symlinks=False)
                return self._write("gone", path, copy)
        shutil.copy2(path, copy, follow_symlinks=False)
        return self._write("written", path, copy)

    def _write(self, kind: str, path: str, other: str = "") -> None:
        with (self._saved / _JOURNAL).open("a") as journal:
            journal.write(json.dumps([kind, path, other]) + "\n")

    def restore(self) -> None:
        """Remove what was made and put back what was there."""
        self._process = 0
        put_back(self._saved)


def _absolute(path: Any) -> str:
    """A path whose last part may be a link that is itself meant."""
    folder, name = os.path.split(os.path.abspath(os.fsdecode(path)))
    return os.path.join(os.path.realpath(folder), name)


def put_back(saved: Path) -> None:
    """Undo what a process has changed, by its journal and the files that it kept in `saved`."""
    journal = saved / _JOURNAL
    lines = journal.read_text().splitlines() if journal.exists() else []
    for kind, path, other in map(json.loads, reversed(lines)):
        with suppress(OSError):  # the others are put back
            if kind == "folder":
                os.makedirs(path, exist_ok=True)
            elif kind in ("moved", "gone"):
                if os.path.lexists(other):  # else the script has moved another file there
                    os.replace(other, path)
            elif kind == "written":
                shutil.copy2(other, path, follow_symlinks=False)
            elif os.path.lexists(path):
                (shutil.rmtree if os.path.isdir(path) and not os.path.islink(path) else os.unlink)(path)
    shutil.rmtree(saved, ignore_errors=True)
