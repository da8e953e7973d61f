"""Puts back what a run has set aside: after each of its processes, and after one that was killed before it could."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from advisor.core.errors import AdvisorError
from advisor.userfiles import journal, owners
from advisor.userfiles.journal import DIVERTED, FIXED, JOURNAL, KEPT, RESTORED, Entry

_NAMED = 4  # files that a line names; the others are counted


def restore(run_dir: Path) -> tuple[str, ...]:
    """Undo the journal, last entry first, and close it. Afterwards every path is as it was before the run.

    What the script made lies under `files/diverted/`; processes that it has left running are ended first. Safe to call twice, and
    after a crash of an earlier call. Signals that ask this process to end wait until it is done.

    Returns:
        Paths that could not be put back, each with the reason: what was set aside for them stays in `kept-aside/`, and the next
        call tries them again, and only them.
    """
    with _signals_wait():
        owners.end(run_dir)
        return _restore(journal.root_of(run_dir))


def _restore(root: Path) -> tuple[str, ...]:
    entries, problems = journal.entries(root), []
    if not entries:
        return ()
    done: list[Entry] = []
    left: list[Entry] = []
    while entries:
        entry = entries.pop()
        vanished = entry["action"] == "created" and not os.path.lexists(entry["path"])
        try:
            finished = _undo(root, entry)
        except OSError as error:
            problems.append(f"{entry['path']}: {error.strerror or error}")
            left.append(entry)
            if entry["action"] == "moved":
                # Names below it are those of before the move.
                left += reversed(entries)
                break
            continue
        if not finished and left:
            left.append(entry)
        elif not vanished:  # a temporary file that the script made and removed is nobody's result
            done.append(entry)
    journal.close(root, done[::-1], left[::-1])
    return tuple(problems)


def written(run_dir: Path) -> tuple[tuple[str, ...], int]:
    """Every path outside the run folder that the script wrote, removed or replaced, in the order of first touch.

    Returns:
        The paths, and how many more lay in temporary folders: the work of compilers and libraries, nobody's results.
    """
    root = journal.root_of(run_dir)
    paths = dict.fromkeys(
        entry["path"]
        for entry in journal.entries(root) + journal.entries(root, RESTORED)
        if entry["action"] in ("created", "kept")
    )
    named = tuple(path for path in paths if not _temporary(path))
    return named, len(paths) - len(named)


def pending(run_dir: Path) -> bool:
    """Whether something of the user's is still set aside there."""
    return (journal.root_of(run_dir) / JOURNAL).is_file()


def held_by_another(run_dir: Path) -> str:
    """`/project/log.csv: the run in …, process 12, has set it aside`: what this run's script could not change; "" for nothing."""
    try:
        return (journal.root_of(run_dir) / journal.HELD).read_text().strip()
    except OSError:
        return ""


def told(run_dir: Path, *, moved: bool = True) -> str:
    """One line on what `restore` has done: what was put back, and where what the script wrote is; "" where it wrote nothing.

    Temporary files, the work of compilers and libraries, are not worth a line.

    Args:
        moved: the run folder stays, with what the script wrote in it.
    """
    root = journal.root_of(run_dir)
    undone = [e for e in journal.entries(root, RESTORED) if not _temporary(e["path"])]
    back = dict.fromkeys(e["path"] for e in undone if e["action"] in ("kept", "moved"))
    new = dict.fromkeys(e["path"] for e in undone if e["action"] == "created" and e["path"] not in back)
    folders = {e["path"] for e in undone if e["action"] == "unmade"}
    made = dict.fromkeys(e["path"] for e in undone if e["action"] == "made" and e["path"] not in folders)
    stayed = [path for path in made if os.path.isdir(path)]
    parts = []
    if back:
        parts.append(f"put back as it was: {_names(list(back))}")
    if new:
        parts.append(f"removed again: {_names(list(new))}")
    if parts and moved and (root / DIVERTED).is_dir():
        parts.append(f"what the script wrote is in {_shown(str(root / DIVERTED))}")
    if stayed:
        parts.append(f"left because it is not empty: {_names(stayed)}")
    return "; ".join(parts)


def _names(paths: Sequence[str]) -> str:
    named = ", ".join(_shown(path) for path in paths[:_NAMED])
    return named + (f" and {len(paths) - _NAMED} more" if len(paths) > _NAMED else "")


def _shown(path: str) -> str:
    """Relative where it lies below the working directory."""
    try:
        short = os.path.relpath(path)
    except (OSError, ValueError):
        return path
    return path if short.startswith(os.pardir) else short


def _temporary(path: str) -> bool:
    """Whether `path` is, or lies below, what Python's `tempfile` names: `/tmp/tmpq3x9/header.i`.

    A working directory below such a folder is the user's own all the same.
    """
    for folder in {os.path.realpath(tempfile.gettempdir()), "/tmp", "/var/tmp"}:
        if path.startswith(os.path.join(folder, tempfile.gettempprefix())):
            made = os.path.join(folder, path[len(folder) + 1 :].split(os.sep, 1)[0])
            return not os.path.join(os.path.realpath(os.getcwd()), "").startswith(os.path.join(made, ""))
    return False


@dataclass(frozen=True, slots=True)
class Pending:
    """What `restore_pending` found: run folders put back, folders with a journal that nobody here vouches for, and files
    that could not be put back, each with the reason."""

    restored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def restore_pending(runs: Path) -> Pending:
    """Restore every run under the folder `runs`, and every one elsewhere that this user has started on this machine, that was killed
    before it could.

    A journal says what to move where, so one that came with somebody else's run folder is not obeyed: only runs that
    this user's advisor has noted in the user's own cache folder are restored. One that still goes on is left alone.
    """
    restored: list[str] = []
    foreign: list[str] = []
    problems: list[str] = []
    here = {found.parents[1].resolve(): found.parents[1] for found in runs.glob(f"*/files/{JOURNAL}")}
    elsewhere = {run_dir: run_dir for run_dir in owners.noted() if (run_dir / "files" / JOURNAL).is_file()}
    for _, run_dir in sorted({**elsewhere, **here}.items()):
        if owners.running(run_dir) is not None:
            continue
        if not owners.vouched(run_dir):
            foreign.append(str(run_dir))
        elif failed := restore(run_dir):
            problems += failed
        else:
            restored.append(str(run_dir))
    return Pending(tuple(restored), tuple(foreign), tuple(problems))


def restore_asked(run_dir: Path) -> tuple[str, ...]:
    """As `restore`, for a user who names the run folder.

    Raises:
        AdvisorError: when nothing was set aside there, or its run goes on.
    """
    if not pending(run_dir):
        raise AdvisorError(f"no run was interrupted in {run_dir}", expected=f"a run folder with files/{JOURNAL}")
    process = owners.running(run_dir)
    if process is not None:
        raise AdvisorError(
            f"the run in {run_dir} goes on, in process {process}", fix="It puts the files back when it ends."
        )
    return restore(run_dir)


@contextlib.contextmanager
def _signals_wait() -> Iterator[None]:
    """Ctrl-C and a request to end are obeyed after the block: half of the user's files would be in their places."""
    if threading.current_thread() is not threading.main_thread():
        yield  # Python delivers signals to the main thread only
        return
    waiting: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        waiting.append(number)

    before = {number: signal.signal(number, wait) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not one of Python's
        for asked in waiting:
            signal.raise_signal(asked)


def _undo(root: Path, entry: Entry) -> bool:
    """Undo one entry; False where something else must go first: a folder that is not empty yet.

    Raises:
        OSError: when it cannot be done.
    """
    path, action = entry["path"], entry["action"]
    if action == "created":
        if os.path.isdir(path) and not os.path.islink(path):  # a program made a folder under a name that was free
            _divert_folder(root, path)
        else:
            _divert(root, path)
    elif action == "kept":
        aside = root / KEPT / os.path.basename(entry["aside"])  # a bare name, whatever a journal says
        if not os.path.lexists(aside):
            return True  # put back by an earlier call, or noted just before a crash and never changed
        _put_back(root, aside, path)
    elif action == "made":
        with contextlib.suppress(OSError):
            os.rmdir(path)  # only when empty: somebody else may have put something there
        return not os.path.isdir(path)
    elif action == "unmade":
        os.makedirs(path, exist_ok=True)
    elif action == "set":
        journal.set_back(entry)
    elif action == "moved" and os.path.isdir(entry["to"]) and not os.path.lexists(path):
        os.rename(entry["to"], path)
    return True


def _put_back(root: Path, aside: Path, path: str) -> None:
    if os.path.isfile(path) and not os.path.islink(path) and os.path.samefile(path, aside):
        os.unlink(aside)  # a second name of the untouched file
        return
    try:
        if os.path.lexists(path):
            try:
                _divert(root, path)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                os.unlink(path)  # what the run wrote has no room elsewhere, and the user's own file is to come here
        os.makedirs(os.path.dirname(path), exist_ok=True)
        journal.move(str(aside), path)
    except OSError as error:
        if error.errno not in FIXED or not os.path.isfile(path) or not os.path.isfile(aside):
            raise
        journal.write_back(aside, path)


def _divert(root: Path, path: str) -> None:
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.path.islink(path)):
        return
    if journal.lies_aside(root, path):
        os.unlink(path)  # a name that the script gave to a file of the user's, which comes back under its own
        return
    target = root / DIVERTED / path.lstrip(os.sep).replace(":", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        target.unlink()
    journal.move(path, str(target))


def _divert_folder(root: Path, path: str) -> None:
    target = root / DIVERTED / path.lstrip(os.sep).replace(":", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        target = target.with_name(f"{target.name}-{os.urandom(4).hex()}")
    shutil.move(path, target)
