"""What was at each path before the script changed it: notes and originals in `files/` of a run folder."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path

from advisor.core import storage

JOURNAL, RESTORED = "journal.jsonl", "restored-journal.jsonl"
KEPT, DIVERTED, SEEN = "kept-aside", "diverted", "seen"

Entry = dict[str, str]  # action: created, kept, made, unmade, moved; path; aside or to


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


def move(source: str, target: str) -> None:
    """Rename, or copy and remove where `target` is on another file system."""
    try:
        os.replace(source, target)
    except OSError:
        copy(source, target)
        os.unlink(source)


def copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy with times and mode; `target` is whole or absent at every moment, so that a crash leaves no half copy."""
    temporary = os.fspath(target) + ".advisor-part"
    try:
        shutil.copy2(source, temporary, follow_symlinks=False)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


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
