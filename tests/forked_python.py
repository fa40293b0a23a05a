"""Processes like those of `python ...` that do not import torch and transformers again, which takes six CPU seconds.

They are forked from multiprocessing's server, which has imported the libraries and nothing of the tests.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import IO, Any

_SERVER = multiprocessing.get_context("forkserver")
_IMPORTED = (
    "torch", "transformers.models.llama.modeling_llama", "transformers.trainer", "peft", "accelerate",
    "ckpt_ft.host.dry", "ckpt_ft.host.live", "ckpt_ft.cli.main", "torch._dynamo", "forked_python",
)  # fmt: skip


class Popen:
    """What the tests use of `subprocess.Popen`, for `[sys.executable, *words]`; the output goes into files."""

    def __init__(
        self, words: Sequence[str], *, stdout: IO[Any], stderr: IO[Any], env: Any = None, stdin: Any = None
    ) -> None:
        assert words[0] == sys.executable
        _SERVER.set_forkserver_preload(list(_IMPORTED))
        outputs = [Connection(os.dup(file.fileno()), readable=False) for file in (stdout, stderr)]
        self.process = _SERVER.Process(target=_python, args=(list(words[1:]), outputs, dict(env or os.environ)))
        self.process.start()
        for output in outputs:
            output.close()
        assert self.process.pid is not None
        self.pid = self.process.pid

    def wait(self, timeout: float | None = None) -> int:
        self.process.join(timeout)
        assert self.process.exitcode is not None, f"runs for more than {timeout} s"
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


def run(words: Sequence[str], env: Any = None) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run(..., capture_output=True, text=True)`."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        code = Popen(words, stdout=out, stderr=err, env=env).wait(600)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read())
    return subprocess.CompletedProcess(list(words), code, *printed)


def _python(words: list[str], outputs: list[Connection], environment: dict[str, str]) -> None:
    """Does in this new process what `python *words` does."""
    gc.freeze()
    os.environ.clear()
    os.environ.update(environment)
    for number, output in enumerate(outputs, 1):
        os.dup2(output.fileno(), number)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    first, sys.argv = words[0], words
    try:
        if first == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        elif first == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            sys.path.insert(0, str(Path(first).resolve().parent))
            runpy.run_path(first, run_name="__main__")
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
