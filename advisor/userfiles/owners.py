"""Who searches in a run folder: so that nobody restores under their feet, or obeys a journal that came from elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from pathlib import Path

from advisor.core.cache import cache_dir
from advisor.userfiles import journal

OWNERS, TOKEN = "owners", "token"
_FORGOTTEN_S = 90 * 24 * 3600.0  # a search that nobody has asked about for a quarter of a year


def hold(run_dir: Path) -> None:
    """Note that this process searches in this run folder, so that another advisor does not restore under its feet.

    A token goes into the run folder and into the user's cache folder: `restore_pending` obeys the journal while they agree.
    """
    root = journal.root_of(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNERS).unlink(missing_ok=True)
    _join(root)
    token = os.urandom(16).hex()
    with contextlib.suppress(OSError):  # without a cache folder nothing is restored unasked
        noted = _noted(run_dir)
        noted.parent.mkdir(mode=0o700, exist_ok=True)
        for old in noted.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another advisor forgets it at this moment
                if time.time() - old.stat().st_mtime > _FORGOTTEN_S:
                    old.unlink()
        noted.write_text(token, encoding="ascii")
        (root / TOKEN).write_text(token, encoding="ascii")


def _noted(run_dir: Path) -> Path:
    """Where the user's own cache folder notes this search."""
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]
    return cache_dir() / "searches" / name


def vouched(run_dir: Path) -> bool:
    """Whether the search in this run folder was one of this user's, here."""
    try:
        noted = _noted(run_dir).read_bytes()
        return len(noted) == 32 and noted == (journal.root_of(run_dir) / TOKEN).read_bytes()
    except OSError:
        return False


def join(run_dir: Path) -> None:
    """This process searches here too: a script goes on when the advisor that started it is killed."""
    if running(run_dir) is None:
        hold(run_dir)
    else:
        _join(journal.root_of(run_dir))


def _join(root: Path) -> None:
    with open(root / OWNERS, "a", encoding="ascii") as owners:
        owners.write(f"{os.getpid()} {started(os.getpid())}\n")


def running(run_dir: Path) -> int | None:
    """Another process than this one that searches in this run folder; None when all have ended."""
    try:
        lines = (journal.root_of(run_dir) / OWNERS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            pid, since = map(int, line.split())
            os.kill(pid, 0)
            if pid != os.getpid() and started(pid) == since:
                return pid
    return None


def started(pid: int) -> int:
    """When a process began, in clock ticks since boot: a later process can have its number. 0 where there is no /proc.

    Raises:
        ProcessLookupError: when it has ended, though nobody may have asked for its exit code.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return 0
    state, *rest = text[text.rindex(")") + 1 :].split()
    if state in "ZX":
        raise ProcessLookupError(pid)
    return int(rest[18])
