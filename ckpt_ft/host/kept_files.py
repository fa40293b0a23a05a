"""Takes back what a script writes while it is only looked at."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = (
    "HF_HOME", "HF_DATASETS_CACHE", "HF_HUB_CACHE", "TORCH_HOME", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "MPLCONFIGDIR",
)  # fmt: skip
KEPT = "kept-"  # the beginning of the names of such folders
_JOURNAL = "journal"  # of a folder of copies: a line for each path, with the name of its copy if it existed


class KeptFiles:
    """Notes each file and folder that Python code of this process creates or opens for writing; `restore` undoes it.

    The caches of Hugging Face, torch, Triton and matplotlib stay. Writes of libraries in other languages are not seen
    (datasets' Arrow files lie in its cache).

    Args:
        folder: where copies are kept. If this process is killed, `put_back` of what is there undoes its writes.
    """

    def __init__(self, folder: Path) -> None:
        named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        free = ["/dev", "/proc", "/sys", str(Path.home() / ".cache"), str(folder), *named]
        self.folder = folder
        self._free = tuple(os.path.realpath(path) for path in free)
        self.begin()
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        """Note from here on what this process writes; a child process that was forked begins anew."""
        self._saved = Path(tempfile.mkdtemp(prefix=KEPT, dir=self.folder))
        self._known: set[str] = set()
        self._process = os.getpid()

    def _hear(self, event: str, args: tuple[Any, ...]) -> None:
        if event not in ("open", "os.mkdir") or not isinstance(args[0], (str, bytes)):
            return
        if os.getpid() != self._process or (event == "open" and not args[2] & _WRITES):
            return
        path = os.path.realpath(os.fsdecode(args[0]))
        exists = os.path.lexists(path)
        if path.startswith(self._free) or "__pycache__" in path or path in self._known:
            return
        if exists and not os.path.isfile(path):
            return
        self._known.add(path)
        copy = str(len(self._known)) if exists else ""
        if copy:
            shutil.copy2(path, self._saved / copy)
        with (self._saved / _JOURNAL).open("a") as journal:
            journal.write(json.dumps([path, copy]) + "\n")

    def restore(self) -> None:
        """Remove what was made and put back what was there."""
        self._process = 0
        put_back(self._saved)


def put_back(saved: Path) -> None:
    """Undo what a process has written, by the copies that it kept in `saved`."""
    journal = saved / _JOURNAL
    lines = journal.read_text().splitlines() if journal.exists() else []
    for path, copy in map(json.loads, reversed(lines)):
        if copy:
            shutil.copy2(saved / copy, path)
        elif os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path, ignore_errors=True)
        elif os.path.lexists(path):
            os.unlink(path)
    shutil.rmtree(saved, ignore_errors=True)
