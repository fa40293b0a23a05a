"""Takes back what a script writes while it is only looked at."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

_WRITES = os.O_WRONLY | os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC
_CACHES = (
    "HF_HOME",
    "HF_DATASETS_CACHE",
    "HF_HUB_CACHE",
    "TORCH_HOME",
    "XDG_CACHE_HOME",
    "TRITON_CACHE_DIR",
    "MPLCONFIGDIR",
)


class KeptFiles:
    """Notes each file and folder that Python code of this process creates or opens for writing; `restore` undoes it.

    The caches of Hugging Face, torch, Triton and matplotlib stay. Writes of libraries in other languages are not seen
    (datasets' Arrow files lie in its cache).
    """

    def __init__(self) -> None:
        named = [os.environ[name] for name in _CACHES if os.environ.get(name)]
        free = ["/dev", "/proc", "/sys", str(Path.home() / ".cache"), *named]
        self._free = tuple(os.path.realpath(path) for path in free)
        self.begin()
        sys.addaudithook(self._hear)

    def begin(self) -> None:
        """Note from here on what this process writes; a child process that was forked begins anew."""
        self._active, self._process = False, os.getpid()
        self._saved = Path(tempfile.mkdtemp(prefix="ckpt_ft-"))
        self._made: list[str] = []  # in order
        self._before: dict[str, str] = {}  # file that existed -> its copy
        self._active = True

    def _hear(self, event: str, args: tuple[object, ...]) -> None:
        if event not in ("open", "os.mkdir") or not self._active or os.getpid() != self._process:
            return
        path = args[0]
        if not isinstance(path, (str, bytes)) or (event == "open" and not self._writes(args)):
            return
        self._active = False
        try:
            self._note(os.path.realpath(os.fsdecode(path)))
        finally:
            self._active = True

    @staticmethod
    def _writes(args: tuple[object, ...]) -> bool:
        mode, flags = args[1], args[2]
        if isinstance(mode, str):
            return any(letter in mode for letter in "wax+")
        return isinstance(flags, int) and bool(flags & _WRITES)

    def _note(self, path: str) -> None:
        if path.startswith(self._free) or "__pycache__" in path or path in self._before or path in self._made:
            return
        if not os.path.lexists(path):
            self._made.append(path)
        elif os.path.isfile(path):
            copy = str(self._saved / str(len(self._before)))
            shutil.copy2(path, copy)
            self._before[path] = copy

    def restore(self) -> None:
        """Remove what was made and put back what was there."""
        self._active = False
        for path in reversed(self._made):
            if os.path.isdir(path) and not os.path.islink(path):
                shutil.rmtree(path, ignore_errors=True)
            elif os.path.lexists(path):
                os.unlink(path)
        for path, copy in self._before.items():
            shutil.copy2(copy, path)
        shutil.rmtree(self._saved, ignore_errors=True)
