"""Which folders living processes use, so that nobody clears them away meanwhile. Told by locks, which end with their process."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_held: dict[str, int] = {}  # real path → open descriptor of a folder that this process uses, for as long as it lives


def hold(folder: Path) -> None:
    """This process uses the folder until it ends. A file system without locks (some network ones), or Windows, keeps nothing."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        _forget()
        name = os.path.realpath(folder)
        if name not in _held:
            descriptor = os.open(name, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BaseException:
                os.close(descriptor)
                raise
            _held[name] = descriptor


def _forget() -> None:
    """Let go of folders that have been removed."""
    for name, descriptor in list(_held.items()):
        if not os.fstat(descriptor).st_nlink:
            os.close(_held.pop(name))


@contextlib.contextmanager
def unused(folder: Path) -> Iterator[bool]:
    """Whether no other process uses the folder; if none does, none will while the block runs."""
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except (ImportError, OSError):
        yield True  # nothing can be told; the caller looks at other signs too
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        except OSError:
            pass  # no locks here
        yield True
    finally:
        os.close(descriptor)
