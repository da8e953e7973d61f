"""One process at a time inside of a lock."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from pathlib import Path

import pytest

from advisor.core import locks


def counts(path: str, turns: int) -> None:
    """Adds to a number in a file, slowly."""
    for _ in range(turns):
        with locks.exclusive(Path(path + ".lock")):
            number = int(Path(path).read_text())
            time.sleep(0.002)
            Path(path).write_text(str(number + 1))


def test_processes_take_turns(tmp_path: Path) -> None:
    number = tmp_path / "number"
    number.write_text("0")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=counts, args=(str(number), 20)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert number.read_text() == "60"


def test_a_lock_is_free_behind_an_error_and_its_descriptor_too(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        try:
            with locks.exclusive(file):
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            pass
    with locks.exclusive(file):
        pass
    assert len(os.listdir("/proc/self/fd")) == before


def test_windows_has_neither_locks_nor_users_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    monkeypatch.delattr(os, "getuid")
    with locks.exclusive(locks.of_user("test")):
        pass
    assert not locks.of_user("test").exists()
