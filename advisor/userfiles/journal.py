"""What was at each path before the script changed it: notes and originals in `files/` of a run folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Collection, Iterable
from pathlib import Path

from advisor.core import storage
from advisor.core.stderr import say
from advisor.core.units import bytes_text

JOURNAL, RESTORED = "journal.jsonl", "restored-journal.jsonl"
KEPT, DIVERTED, SEEN = "kept-aside", "diverted", "seen"
HELD = "held-by-another"  # has a line where a file could not be set aside because another run has it

Entry = dict[str, str]  # action: created, kept, made, unmade, moved, set; path; aside, to, or settings

# Of a folder in which no file can be made, or a file that is a mount: it cannot change places with a copy of it.
FIXED = frozenset({errno.EACCES, errno.EPERM, errno.EBUSY})
PART = ".advisor-part"  # what a copy is called until it is whole
_CLONE = 0x40049409  # FICLONE of linux/fs.h: a second file of the same blocks, which costs nothing
_CLONED_FROM = 1 << 20  # bytes: smaller files are copied as fast
_TOLD_FROM = 4 << 30  # bytes: copying these takes seconds or minutes


def root_of(run_dir: Path) -> Path:
    """The folder of a run folder that all of this is in."""
    return run_dir.resolve() / "files"


def note(root: Path, **entry: str) -> None:
    """Add an entry, in one write in append mode: whole lines, also from several processes.

    Raises:
        OSError: when it is not there whole, as on a disk that fills: what it is about must not be touched.
    """
    _append(root / JOURNAL, [entry])


def entries(root: Path, name: str = JOURNAL) -> list[Entry]:
    """The entries in order; empty where there is no such file."""
    try:
        lines = (root / name).read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        # A line cut off, by a crash or a full disk, names nothing that was touched.
        with contextlib.suppress(ValueError):
            entry = json.loads(line)
            if isinstance(entry, dict) and "path" in entry and "action" in entry:
                found.append(entry)
    return found


def close(root: Path, done: Iterable[Entry], left: Collection[Entry]) -> None:
    """`done` is history, and what it names may be touched and noted anew; `left` stays to be undone."""
    # On a full disk fewer files are listed; undone again they would be the user's own.
    with contextlib.suppress(OSError):
        _append(root / RESTORED, done)
    if left:
        storage.write_text(root / JOURNAL, "".join(map(_line, left)))
        marks = {mark(root, entry["path"]) for entry in left}
        for seen in (root / SEEN).glob("*"):
            if seen not in marks:
                seen.unlink(missing_ok=True)
    else:
        (root / JOURNAL).unlink(missing_ok=True)
        shutil.rmtree(root / SEEN, ignore_errors=True)


def mark(root: Path, target: str) -> Path:
    """Exists from the first touch of `target` in a run."""
    return root / SEEN / _digest(target)


def aside(root: Path, target: str) -> Path:
    """Where the original of `target` lies."""
    return root / KEPT / f"{_digest(target)}-{os.path.basename(target)[-80:]}"


def lies_aside(root: Path, target: str) -> bool:
    """Whether what is at `target` is a file that lies aside, under another name: one of the user's."""
    try:
        found = os.lstat(target)
    except OSError:
        return False
    if found.st_nlink < 2 or not stat.S_ISREG(found.st_mode):
        return False
    with os.scandir(root / KEPT) as kept:
        return any(
            entry.inode() == found.st_ino and os.path.samestat(entry.stat(follow_symlinks=False), found)
            for entry in kept
        )


def move(source: str, target: str) -> None:
    """Rename, or copy and remove where `target` is on another file system."""
    try:
        os.replace(source, target)
    except OSError:
        copy(source, target)
        os.unlink(source)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy with owner, times and mode; `target` is whole or absent at every moment, so that a crash leaves no half copy.

    Raises:
        OSError: also before anything is copied, where the disk has no room for it: others need what there is.
    """
    temporary = os.fspath(target) + PART
    found = os.lstat(source)
    try:
        if not (stat.S_ISREG(found.st_mode) and found.st_size >= _CLONED_FROM and cloned(source, temporary)):
            _check_room(source, temporary, found)
            shutil.copy2(source, temporary, follow_symlinks=False)
        with contextlib.suppress(OSError, AttributeError):  # of another user's file, or not on Windows
            os.lchown(temporary, found.st_uid, found.st_gid)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def write_back(aside: Path, path: str) -> None:
    """The content, mode and times of `aside` into the file that is at `path`, which cannot change places with it."""
    shutil.copyfile(aside, path)
    shutil.copystat(aside, path)
    os.unlink(aside)


def cloned(source: str | os.PathLike[str], target: str) -> bool:
    try:
        from fcntl import ioctl

        with open(source, "rb") as original, open(target, "wb") as clone:
            ioctl(clone.fileno(), _CLONE, original.fileno())
        shutil.copystat(source, target)
    except (OSError, ImportError):  # most file systems cannot
        return False
    return True


def _check_room(source: str | os.PathLike[str], target: str, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode) or found.st_size < _CLONED_FROM:
        return
    with contextlib.suppress(AttributeError):  # Windows has none
        disk = os.statvfs(os.path.dirname(target))
        free = disk.f_bavail * disk.f_frsize
        if free < found.st_size:
            told = f"a copy needs {bytes_text(found.st_size)}, and {bytes_text(free)} are free"
            raise OSError(errno.ENOSPC, f"{os.strerror(errno.ENOSPC)}: {told}", os.fspath(source))
    if found.st_size >= _TOLD_FROM:
        say(f"copying {os.fspath(source)} ({bytes_text(found.st_size)}), so that it stays as it is")


def settings(found: os.stat_result) -> Entry:
    """Mode, owner and times, as an entry of action `set` has them."""
    return {
        "mode": str(stat.S_IMODE(found.st_mode)),
        "owner": f"{found.st_uid} {found.st_gid}",
        "times": f"{found.st_atime_ns} {found.st_mtime_ns}",
    }


def set_back(entry: Entry) -> None:
    """What is at the entry's path has its settings again; nothing where it is gone.

    Raises:
        OSError: when this user may not.
    """
    path = entry["path"]
    try:
        found = os.stat(path)
    except FileNotFoundError:
        return
    before = settings(found)
    with contextlib.suppress(KeyError, ValueError):  # a line of another version
        if entry["owner"] != before["owner"]:
            user, group = map(int, entry["owner"].split())
            os.chown(path, user, group)
        if entry["mode"] != before["mode"]:
            os.chmod(path, int(entry["mode"]))
        accessed, modified = map(int, entry["times"].split())
        if found.st_mtime_ns != modified:
            os.utime(path, ns=(accessed, modified))


def _digest(target: str) -> str:
    return hashlib.sha256(os.fsencode(target)).hexdigest()[:32]


def _line(entry: Entry) -> str:
    return "\n" + json.dumps(entry) + "\n"  # apart from one that was cut off before it


def _append(path: Path, found: Iterable[Entry]) -> None:
    data = "".join(map(_line, found)).encode()
    if not data:
        return
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        if os.write(handle, data) < len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(handle)
