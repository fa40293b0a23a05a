"""Files are written completely or not at all; and the directories for caches."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ckpt_ft.errors import UserError, one_line
from ckpt_ft.files import cache_root, check_writable, make_directory, write


def half(path: Path) -> None:
    path.write_text("half of")
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"CKPT_FT_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"CKPT_FT_CACHE": "", "XDG_CACHE_HOME": "/b"}, "/b/ckpt_ft"),
        ({"XDG_CACHE_HOME": "", "HOME": "/c"}, "/c/.cache/ckpt_ft"),
        ({"HOME": "/c"}, "/c/.cache/ckpt_ft"),
    ],
)
def test_root_follows_environment(environment: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CKPT_FT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert cache_root() == Path(expected)


def test_samples_and_plans_are_below_the_cache_root(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from ckpt_ft.planning.results import cache_path
    from ckpt_ft.training.samples import language

    monkeypatch.setattr(language, "_write_reference", lambda directory: (directory / "model").mkdir())
    model, _ = language.make_reference()
    assert Path(model).parents[1] == own_cache
    assert cache_path("plans", {"budget": 1}).parents[1] == own_cache


def test_write_creates_directories_and_takes_text_or_a_function(tmp_path: Path) -> None:
    assert write(tmp_path / "a" / "b.json", "{}\n").read_text() == "{}\n"
    seen: list[str] = []

    def writer(path: Path) -> None:
        seen.append(path.suffix)
        path.write_bytes(b"\x00\xff")

    assert write(tmp_path / "a" / "b.png", writer).read_bytes() == b"\x00\xff"
    assert seen == [".png"]  # a writer may choose its format by it
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["b.json", "b.png"]


def test_write_keeps_devices_and_links(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "real" / "x.json"
    os.mkfifo(pipe)
    with pytest.raises(OSError, match="it is a device or a pipe"):
        write(pipe, "x")
    with pytest.raises(UserError, match=r"--html .*pipe: cannot be written \(it is a device or a pipe\)"):
        check_writable(pipe, "--html")
    assert pipe.is_fifo()
    link.symlink_to(target)
    check_writable(link, "--html")
    assert write(link, "through it") == target
    assert link.is_symlink()
    assert link.read_text() == target.read_text() == "through it"
    link.unlink()
    link.symlink_to(link)
    with pytest.raises(OSError, match="File exists|Too many levels"):
        write(link / "x", "")


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = write(tmp_path / "x.md", "before")
    with pytest.raises(OSError, match=r"No space left on device: '.*/x\.md'"):
        write(path, half)
    assert path.read_text() == "before"
    assert os.listdir(tmp_path) == ["x.md"]


def test_directory_is_filled_once_and_completely(tmp_path: Path) -> None:
    filled: list[Path] = []

    def fill(directory: Path) -> None:
        filled.append(directory)
        (directory / "file").write_text("whole")

    target = tmp_path / "cache" / "sample-v1.2"
    assert make_directory(target, fill) == make_directory(target, fill) == target
    assert len(filled) == 1
    assert filled[0] != target
    assert os.listdir(target.parent) == ["sample-v1.2"]
    with pytest.raises(OSError, match="No space left"):
        make_directory(tmp_path / "cache" / "other", lambda directory: half(directory / "file"))
    assert os.listdir(target.parent) == ["sample-v1.2"]


def test_directory_of_another_process_is_used(tmp_path: Path) -> None:
    target = tmp_path / "sample"

    def fill(directory: Path) -> None:
        make_directory(target, lambda other: (other / "file").write_text("theirs"))
        (directory / "file").write_text("ours")

    assert (make_directory(target, fill) / "file").read_text() == "theirs"
    assert os.listdir(tmp_path) == ["sample"]


def test_error_as_one_line() -> None:
    error = ValueError("first line\n   and the  second")
    assert one_line(error) == "first line and the second"
    assert one_line(error, 10) == "first line"
    assert one_line(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert one_line("a message\nof two lines") == "a message of two lines"


def test_cache_is_readable_by_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CKPT_FT_CACHE", str(tmp_path / "a" / "cache"))
    before = os.umask(0o022)
    try:
        write(cache_root() / "plans" / "p.json", "{}")
        make_directory(tmp_path / "other" / "d", lambda path: None)
    finally:
        os.umask(before)
    modes = [oct(path.stat().st_mode & 0o777) for path in (cache_root(), tmp_path / "a", tmp_path / "other")]
    assert modes == ["0o700", "0o755", "0o755"]
