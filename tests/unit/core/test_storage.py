"""Who may read what advisor writes: the user's umask says it, for every file of a run folder alike."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.core import storage
from advisor.loop.session import Session, tell


@pytest.fixture(params=[0o022, 0o027, 0o077], ids=oct)
def readable(request: pytest.FixtureRequest) -> Iterator[int]:
    """The mode of a new file under this umask."""
    before = os.umask(request.param)
    yield 0o666 & ~request.param
    os.umask(before)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_that_are_replaced_and_files_that_grow_have_one_mode(tmp_path: Path, readable: int) -> None:
    session = Session(mode="profile", run_dir=str(tmp_path), script="train.py")
    storage.save(tmp_path / "session.json", session)
    storage.write_text(tmp_path / "report.html", "x")
    tell(session, "phase")
    assert {path.name: mode(path) for path in tmp_path.iterdir()} == dict.fromkeys(
        ("session.json", "report.html", "progress.jsonl"), readable
    )


def test_a_file_that_is_written_again_keeps_its_mode(tmp_path: Path, readable: int) -> None:
    path = tmp_path / "plan.yaml"
    storage.write_text(path, "old")
    path.chmod(0o640)
    storage.write_text(path, "new")
    assert (path.read_text(), mode(path), list(tmp_path.iterdir())) == ("new", 0o640, [path])


def test_a_long_name_is_written_too(tmp_path: Path) -> None:
    path = tmp_path / ("n" * 250)
    storage.write_text(path, "x")
    assert path.read_text() == "x"
