"""One process at a time."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def of_user(name: str) -> Path:
    """A file to be `exclusive` of, the same one in all of this user's processes on this machine that name it so."""
    user = os.getuid() if hasattr(os, "getuid") else ""  # Windows has none
    return Path(tempfile.gettempdir()) / f"advisor-{user}-{name}.lock"


def is_of_user(path: str) -> bool:
    """Whether this path's name is one of `of_user`, in whatever folder. Asked while the script opens a file, so it must not ask `tempfile`
    for its folder: the script may be in there, with its lock held.
    """
    user = os.getuid() if hasattr(os, "getuid") else ""
    name = os.path.basename(path)
    return name.startswith(f"advisor-{user}-") and name.endswith(".lock")


@contextlib.contextmanager
def exclusive(file: Path) -> Iterator[None]:
    """Inside, no other process is inside of `exclusive` of this file; waits for its turn. The file is made, and stays. Not on Windows."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    lock = os.open(file, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        # Not by closing it alone: a process that another thread forks meanwhile has it open for as long as it lives.
        fcntl.flock(lock, fcntl.LOCK_UN)
        os.close(lock)
