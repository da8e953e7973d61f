"""What Python tells of before it happens, and what that means for a file: audit events, and what a guard does at each.

The events with their arguments: docs.python.org/3/library/audit_events.html.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from advisor.core.stderr import say
from advisor.userfiles import journal, programs

# An open with one of these changes what is there, or makes it: without O_WRONLY too.
WRITE = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_ANEW = os.O_TRUNC | os.O_CREAT
# What programs name is set aside up to this much in all: beyond it they may be reading a data set.
_PROGRAM_BYTES = 1 << 30
# What starts a program, which may change anything.
STARTS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"})


class Keeper(Protocol):
    """What is told of events, and keeps what is about to be lost: guard.py's Guard."""

    root: Path
    program_bytes: int

    def about_to(self, event: str, args: tuple[Any, ...]) -> None:
        """The script is about to do this."""

    def touch(self, path: object, *, truncates: bool = False) -> None:
        """A file is about to be changed in place."""

    def losing(self, path: object) -> None:
        """A name is about to be gone, or to be another file's."""

    def written_at(self, path: str | bytes | os.PathLike[str], *, truncates: bool) -> None:
        """A file is about to be opened for writing."""

    def keep_settings(self, path: str, *, folder: bool = False) -> None:
        """Permissions and times are about to change."""

    def absolute(self, path: object) -> str | None:
        """The path in full; None for what is none of the user's."""

    def holds(self, path: object) -> bool:
        """Whether it is a folder with files in it that are set aside."""


def hook_of(guard: Keeper) -> Callable[[str, tuple[Any, ...]], None]:
    """What is called at every audit event of the process. A function: every `id()` is an event, an optimizer's step has two a
    parameter, and Python looks for an attribute that a bound method takes 1.2 µs to say it lacks.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in EVENTS:
            guard.about_to(event, args)

    return hook


def below(path: object, dir_fd: object) -> object:
    """A name relative to an open folder, made whole; None where the platform cannot say which folder that is."""
    if not isinstance(dir_fd, int) or dir_fd < 0:
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))  # type: ignore[arg-type]  # a TypeError is the answer
    except (OSError, TypeError):
        return None


def _named(path: object) -> str | None:
    """The path itself, or of the open file that a number stands for; None where neither is to be had."""
    if isinstance(path, (str, bytes, os.PathLike)):
        return os.fsdecode(path)
    try:
        return os.readlink(f"/proc/self/fd/{path}")
    except OSError:
        return None


def _stays(guard: Keeper, path: object) -> None:
    """The script wipes or moves a folder of its own, and the run folder lies in it.

    Raises:
        OSError: when what was set aside would go with `path`.
    """
    if guard.holds(path):
        raise OSError(errno.EBUSY, "the files that were set aside lie in there until they are put back")


def _open(guard: Keeper, path: object, mode: object, flags: object = 0) -> None:
    if not isinstance(flags, int) or not flags & WRITE:
        return
    if isinstance(path, (str, bytes, os.PathLike)):
        guard.written_at(path, truncates=flags & _ANEW == _ANEW)


def _remove(guard: Keeper, path: object, dir_fd: int = -1) -> None:
    target = below(path, dir_fd)
    _stays(guard, target)
    guard.losing(target)


def _rename(guard: Keeper, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
    source, target = below(source, source_fd), below(target, target_fd)
    _stays(guard, source)
    here = guard.absolute(source)
    if here is not None and os.path.isdir(here) and not os.path.islink(here):
        there = guard.absolute(target)
        if there is not None:
            for folder in (os.path.dirname(here), here, os.path.dirname(there)):
                guard.keep_settings(folder, folder=True)
            if os.path.isdir(there):  # an empty one, which goes
                _gone(guard, there)
            journal.note(guard.root, action="moved", path=here, to=there)
        return
    guard.losing(source)
    guard.losing(target)


def _made(guard: Keeper, path: object, _mode: object = None, dir_fd: int = -1) -> None:
    target = guard.absolute(below(path, dir_fd))
    if target is not None and not os.path.lexists(target):
        guard.keep_settings(os.path.dirname(target), folder=True)
        journal.note(guard.root, action="made", path=target)


def _unmade(guard: Keeper, path: object, dir_fd: int = -1) -> None:
    where = below(path, dir_fd)
    _stays(guard, where)
    target = guard.absolute(where)
    if target is not None and os.path.isdir(target):
        _gone(guard, target)


def _gone(guard: Keeper, folder: str) -> None:
    guard.keep_settings(os.path.dirname(folder), folder=True)
    guard.keep_settings(folder, folder=True)
    journal.note(guard.root, action="unmade", path=folder)


def _linked(guard: Keeper, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
    source = below(source, source_fd)
    if isinstance(source, (str, bytes, os.PathLike)):  # what is written under the new name is in this file too
        for place in dict.fromkeys((source, os.path.realpath(source))):
            guard.losing(place)
    guard.losing(below(target, target_fd))


def _symlinked(guard: Keeper, _source: object, target: object, dir_fd: int = -1) -> None:
    guard.losing(below(target, dir_fd))


def _truncated(guard: Keeper, path: object, *_rest: object) -> None:
    if isinstance(path, (str, bytes, os.PathLike)):
        guard.written_at(path, truncates=False)


def _set(guard: Keeper, path: object, *rest: object) -> None:
    """Mode, owner or times of a file or folder: the last argument is the folder that a relative name is of."""
    named = _named(below(path, rest[-1] if rest and not isinstance(path, int) else -1))
    if named is not None:
        guard.keep_settings(os.path.realpath(named))


def _database(guard: Keeper, database: object) -> None:
    # SQLite writes natively, and beside the file that a link or a URI names: part of the database is in its logs.
    if not isinstance(database, (str, bytes, os.PathLike)):
        return
    name = os.fsdecode(database)
    if name.startswith("file:"):
        address = urlsplit(name)
        name = unquote(address.path)
        if {"mode=ro", "mode=memory", "immutable=1"} & set(address.query.split("&")):
            return
    if name and name != ":memory:":
        for ending in ("", "-journal", "-wal", "-shm"):
            guard.touch(os.path.realpath(name) + ending)


def _rmtree(guard: Keeper, path: object, dir_fd: object = None) -> None:
    # Its own removals carry names relative to open folders; walking first works on every platform.
    top = guard.absolute(below(path, dir_fd))
    if top is None or os.path.islink(top):
        return
    for folder, folders, names in os.walk(top, topdown=False):
        for name in names:
            guard.losing(os.path.join(folder, name))
        for name in folders:
            if os.path.islink(os.path.join(folder, name)):
                guard.losing(os.path.join(folder, name))
        if guard.absolute(folder) is not None:
            _gone(guard, folder)


def _program(
    guard: Keeper, executable: object, arguments: object, cwd: object = None, environment: object = None
) -> None:
    for path in programs.named(executable, arguments, cwd, environment):
        if programs.takes_away(executable, arguments):
            _stays(guard, path)
        if not os.path.isdir(path) or os.path.islink(path):
            _named_to_program(guard, path)
            continue
        for folder, folders, names in os.walk(path, topdown=False):
            for name in (*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))):
                _named_to_program(guard, os.path.join(folder, name))
            if (target := guard.absolute(folder)) is not None:
                _gone(guard, target)


def _named_to_program(guard: Keeper, path: str) -> None:
    """As `Guard.touch`, of a link and of what it points to, while there is room."""
    for place in dict.fromkeys((path, os.path.realpath(path))):
        with contextlib.suppress(OSError):
            guard.program_bytes += os.path.getsize(place)
        if guard.program_bytes > _PROGRAM_BYTES:
            say(f"not enough room to set this file aside before a program may change it: {place}")
        else:
            guard.touch(place)


EVENTS: dict[str, Callable[..., None]] = {
    "open": _open,
    "os.remove": _remove,
    "os.rename": _rename,
    "os.mkdir": _made,
    "os.rmdir": _unmade,
    "os.link": _linked,
    "os.symlink": _symlinked,
    "os.truncate": _truncated,
    "os.chmod": _set,
    "os.chown": _set,
    "os.utime": _set,
    "shutil.rmtree": _rmtree,
    "sqlite3.connect": _database,
    "subprocess.Popen": _program,
    "os.system": lambda guard, line: _program(guard, "sh", line),
    "os.posix_spawn": lambda guard, path, words, environment: _program(guard, path, words, None, environment),
    "os.exec": lambda guard, path, words, environment: _program(guard, path, words, None, environment),
}
