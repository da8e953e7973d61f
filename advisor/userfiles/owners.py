"""Who works in a run folder: so that nobody restores under their feet, or obeys a journal that came from elsewhere."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from advisor.core.cache import cache_dir
from advisor.userfiles import journal

OWNERS, TOKEN = "owners", "token"
_FORGOTTEN_S = 90 * 24 * 3600.0  # a run that nobody has asked about for a quarter of a year
# What the script has left running, once its own process has ended: time to end by itself, then when asked to.
LEAVES_S, ASKED_S = 2.0, 5.0

last_seen: tuple[tuple[Path, int], list[Path]] | None = (
    None  # the folder of notes as it was, and the run folders noted there
)


def hold(run_dir: Path) -> None:
    """Note that this process works in this run folder, so that another advisor does not restore under its feet.

    A token goes into the run folder and into the user's cache folder: `restore_pending` obeys the journal while they agree.
    """
    root = journal.root_of(run_dir)
    root.mkdir(parents=True, exist_ok=True)
    (root / OWNERS).unlink(missing_ok=True)
    add(run_dir)
    token = os.urandom(16).hex()
    with contextlib.suppress(OSError):  # without a cache folder nothing is restored unasked
        note = _note(run_dir)
        note.parent.mkdir(mode=0o700, exist_ok=True)
        for old in note.parent.iterdir():
            with contextlib.suppress(FileNotFoundError):  # another advisor forgets it at this moment
                if time.time() - old.stat().st_mtime > _FORGOTTEN_S:
                    old.unlink()
        note.write_bytes(f"{token}\n{platform.node()}\n".encode() + os.fsencode(run_dir.resolve()))
        (root / TOKEN).write_text(token, encoding="ascii")


def _note(run_dir: Path) -> Path:
    """Where the user's own cache folder notes this run: its token, the machine, the folder."""
    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]
    return cache_dir() / "searches" / name


def _read(note: Path) -> tuple[bytes, str, Path | None]:
    token, _, rest = note.read_bytes().partition(b"\n")
    machine, _, folder = rest.partition(b"\n")
    return token, machine.decode(errors="replace"), Path(os.fsdecode(folder)) if folder else None


def vouched(run_dir: Path) -> bool:
    """Whether the run in this folder was one of this user's, on this machine: no other can say whether it has ended."""
    try:
        token, machine, _ = _read(_note(run_dir))
        return (
            len(token) == 32 and machine == platform.node() and token == (journal.root_of(run_dir) / TOKEN).read_bytes()
        )
    except OSError:
        return False


def noted() -> Sequence[Path]:
    """Run folders of this user's on this machine, wherever they are; some may be gone."""
    global last_seen
    try:
        folder = cache_dir() / "searches"
        state = folder, folder.stat().st_mtime_ns
        if last_seen is None or last_seen[0] != state:
            last_seen = (
                state,
                [run_dir for note in sorted(folder.iterdir()) if (run_dir := _folder_here(note)) is not None],
            )
        return last_seen[1]
    except OSError:
        return []


def _folder_here(note: Path) -> Path | None:
    """The run folder that a note is about, if it is on this machine and the note can be read."""
    with contextlib.suppress(OSError):
        _, machine, run_dir = _read(note)
        return run_dir if machine == platform.node() else None
    return None


def join(run_dir: Path) -> None:
    """This process works here too: a script goes on when the advisor that started it is killed."""
    if running(run_dir) is None:
        hold(run_dir)
    else:
        add(run_dir)


def add(run_dir: Path) -> None:
    """This process is one of those who work here."""
    with open(journal.root_of(run_dir) / OWNERS, "a", encoding="ascii") as owners:
        owners.write(f"{os.getpid()} {started(os.getpid())}\n")


def running(run_dir: Path) -> int | None:
    """Another process than this one that works in this run folder; None when all have ended."""
    return next(iter(_others(run_dir)), None)


def end(run_dir: Path) -> None:
    """Wait for all other processes that work here to end: what the script has left running would change files that are back in
    their places. Those that do not end by themselves are asked to (SIGTERM), then killed.
    """
    if not started(os.getpid()):
        return  # without /proc a number may be another process's by now
    for number, patience_s in ((None, LEAVES_S), (signal.SIGTERM, ASKED_S), (signal.SIGKILL, ASKED_S)):
        if number is not None:
            for pid in _others(run_dir):
                with contextlib.suppress(OSError):
                    os.kill(pid, number)
        until = time.monotonic() + patience_s
        while _others(run_dir):
            if time.monotonic() > until:
                break
            time.sleep(0.02)
        else:
            return


def _others(run_dir: Path) -> list[int]:
    try:
        lines = (journal.root_of(run_dir) / OWNERS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in dict.fromkeys(lines):
        with contextlib.suppress(OSError, ValueError, OverflowError):
            pid, since = map(int, line.split())
            os.kill(pid, 0)
            if pid != os.getpid() and started(pid) == since:
                found.append(pid)
    return found


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
