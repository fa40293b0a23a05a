"""How a script ends: exit codes, one line per error, and output streams that fail."""

from __future__ import annotations

import errno
import importlib
import io
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from ckpt_ft.errors import Interrupted, UserError, WorkFailed, run


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("wrong"), 2, "error: wrong\n"),
        (WorkFailed("failed"), 1, "error: failed\n"),
        (KeyboardInterrupt(), 130, "error: interrupted\n"),
        (Interrupted("stopped", signal.SIGTERM), 143, "error: stopped\n"),
        (MemoryError("Unable to allocate 3 TiB"), 1, "error: Unable to allocate 3 TiB\n"),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory"),
            1,
            "error: DefaultCPUAllocator: can't allocate memory\n",
        ),
        (OSError(errno.ENOSPC, "No space left on device", "x"), 1, "error: [Errno 28] No space left on device: 'x'\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        raise error

    with pytest.raises(SystemExit) as stopped:
        run(main)
    assert stopped.value.code == code
    assert capsys.readouterr().err == said


def test_progress_bar_ends_its_line_before_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def main() -> int:
        bar = tqdm(total=3)
        bar.update()
        raise UserError("wrong")

    with pytest.raises(SystemExit):
        run(main)
    *_, shown, last = capsys.readouterr().err.splitlines()
    assert "1/3" in shown
    assert last == "error: wrong"


def test_warnings_of_libraries_are_hidden() -> None:
    """Unless Python's -W asks for them."""
    lines = "import warnings; from ckpt_ft.errors import run; run(lambda: warnings.warn('old name', FutureWarning))"
    said = [
        subprocess.run([sys.executable, *asked, "-c", lines], capture_output=True, text=True, check=True).stderr
        for asked in ([], ["-W", "default"])
    ]
    assert said[0] == ""
    assert "FutureWarning: old name" in said[1]


def test_libraries_of_different_versions_are_one_line(tmp_path: Path) -> None:
    """A torchvision of another torch fails in transformers' imports, which name neither."""
    (tmp_path / "torchvision-0.1.dist-info").mkdir()
    (tmp_path / "torchvision-0.1.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 0.1\n")
    (tmp_path / "torchvision").mkdir()
    (tmp_path / "torchvision" / "__init__.py").write_text("raise RuntimeError('operator torchvision::nms is missing')")
    lines = "from ckpt_ft.errors import run; import transformers; run(lambda: transformers.modeling_utils)"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{Path(__file__).parents[1]}"}
    done = subprocess.run([sys.executable, "-c", lines], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    line = done.stderr.splitlines()[-1]  # torchao prints lines of its own before
    assert line.startswith(
        "error: the installed libraries do not fit each other: operator torchvision::nms is missing;"
    )


def test_a_missing_package_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="1"):
        run(lambda: importlib.import_module("no_such_package.part"))
    assert "error: the package no_such_package is not installed (" in capsys.readouterr().err


@pytest.mark.parametrize("error", [FileNotFoundError(errno.ENOENT, "No such file", "x"), RuntimeError(7)])
def test_unexpected_error_keeps_its_traceback(error: Exception) -> None:
    def main() -> int:
        raise error

    with pytest.raises(type(error)):
        run(main)


def test_ascii_stream_replaces_other_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    with pytest.raises(SystemExit) as stopped:
        run(lambda: print("policy full \u00b7 cpu", flush=True))
    assert stopped.value.code == 0
    assert raw.getvalue() == b"policy full ? cpu\n"


def test_long_input_is_shortened_in_an_error() -> None:
    said = str(UserError(f"--seed {'9' * 5000}: give a smaller number"))
    assert len(said) < 600
    assert said.startswith("--seed 999")
    assert said.endswith("9: give a smaller number")


def test_closed_output_pipe_has_no_traceback(tmp_path: Path) -> None:
    """As with `| head -1`; flushing at exit prints no traceback either."""
    script = tmp_path / "script.py"
    script.write_text("from ckpt_ft.errors import run\nrun(lambda: [print(n) for n in range(100_000)] and 0)\n")
    read, written = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, str(script)], stdout=written, stderr=subprocess.PIPE, check=False)
    os.close(written)
    assert (done.returncode, done.stderr) == (141, b"")
