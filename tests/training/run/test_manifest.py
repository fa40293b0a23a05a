"""A made directory is whole, or made again."""

from __future__ import annotations

from pathlib import Path

import pytest

from ckpt_ft.errors import UserError
from ckpt_ft.training.run.checkpoints import make_whole, what_is_wrong


def test_a_damaged_directory_is_made_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fill(directory: Path) -> None:
        calls.append(directory)
        (directory / "sub").mkdir()
        (directory / "sub" / "weights").write_bytes(bytes(100))

    path = tmp_path / "cache" / "made"
    for _ in range(2):
        assert make_whole(path, fill) == path
    assert len(calls) == 1
    assert what_is_wrong(path) is None
    for damage in (lambda file: file.write_bytes(bytes(99)), lambda file: file.unlink()):
        damage(path / "sub" / "weights")
        make_whole(path, fill)
        assert what_is_wrong(path) is None
    assert len(calls) == 3
    assert [record.message.partition(": ")[2] for record in caplog.records] == [
        "sub/weights has 99 bytes and not 100",
        "sub/weights is missing",
    ]
    assert sorted(entry.name for entry in path.parent.iterdir()) == ["made"]


def test_a_place_that_can_be_no_directory(tmp_path: Path) -> None:
    """A cache that is a file, or in a directory that takes none."""
    (tmp_path / "file").touch()
    for place in (tmp_path / "file" / "cache" / "made", tmp_path / "file" / "made", Path("/proc/nowhere/made")):
        with pytest.raises(UserError, match=r"made cannot be made \(.*\); CKPT_FT_CACHE names another directory"):
            make_whole(place, lambda directory: (directory / "x").touch())
