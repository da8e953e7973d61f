"""A search leaves the user's files as they were: what the script is about to change is set aside first, and put back.

In the child an audit hook sees every open, remove, rename, mkdir and rmdir that Python code makes, before it happens, in
DataLoader workers too (fork inherits it). At the first touch of a path the journal says what was there: the original goes
to `kept-aside/` (a hard link or a rename where the file system allows, so a large checkpoint costs nothing), or the path
is noted as new. The script then works on real paths, so reading back, copying and rotating its own checkpoints just works.

`restore` reads the journal: what the script made is moved to `diverted/`, what was there before is put back. The
supervisor calls it after every search process; after a `kill -9` of everything, `restore_pending` does at the next start.

Python processes that the script starts are guarded as it is itself; before another program starts (a shell, `cp`, `rm`),
what its words name is set aside (programs.py). Functions that write natively, where Python sees nothing, are wrapped in
those packages that people write checkpoints and images with (native_writers.py). What is not covered: files written by
other native libraries, and by programs under names that they were not given.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.core.errors import AdvisorError
from advisor.profiling.launcher import SUPERVISOR_VARIABLE
from advisor.profiling.patches import say
from advisor.trials import native_writers, programs

JOURNAL, OWNERS = "journal.jsonl", "owners"
KEPT, DIVERTED, SEEN = "kept-aside", "diverted", "seen"
# What programs name is set aside up to this much in all: beyond it they may be reading a data set.
_PROGRAM_BYTES = 1 << 30
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_WRITE = os.O_WRONLY | os.O_RDWR
# Folders whose content is a cache: made again by whoever needs it, and worthless to put back.
_CACHE_PARTS = frozenset({"__pycache__", ".cache", ".triton", ".nv", ".cupy", ".pytest_cache", ".git"})
_CACHE_PREFIXES = ("torchinductor_", "triton_", "pymp-")
_SYSTEM_ROOTS = ("/dev/", "/proc/", "/sys/", "/run/")
_CACHE_VARIABLES = (
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "CUPY_CACHE_DIR",
    "CUDA_CACHE_PATH",
    "XDG_CACHE_HOME",
)

_FORGOTTEN_S = 90 * 24 * 3600.0  # a search that nobody has asked about for a quarter of a year

_inside = threading.local()  # .yes: this thread is doing advisor's own file work, for whichever guard


class Guard:
    """Sets files aside for one run folder, from construction until `stop`."""

    def __init__(self, run_dir: Path) -> None:
        self.root = run_dir.resolve() / "files"
        for name in (KEPT, SEEN):
            (self.root / name).mkdir(parents=True, exist_ok=True)
        self._skipped = (str(run_dir.resolve()) + os.sep, *_SYSTEM_ROOTS, *_cache_folders())
        self._settled: set[str] = set()
        self._program_bytes = 0
        # Where other searches may have their run folders: beside this one, and where they lie unless told otherwise.
        self._runs = {self.root.parent.parent, Path("advisor-runs").resolve()}
        self.active = True
        if _running(run_dir) is None:
            hold(run_dir)
        else:
            _own(self.root)
        sys.addaudithook(self._hook)  # cannot be removed again; `stop` makes it idle

    def stop(self) -> None:
        """Later writes are the script's own business."""
        self.active = False

    def touch(self, path: object, *, truncates: bool = False) -> None:
        """Set aside what is at `path`, if this is the first time in this run that anyone is about to change it.

        truncates: the caller is about to write the file anew, so the original may be renamed away instead of copied.
        """
        with self._first(path) as target:
            if target is not None:
                self._keep_content(target, truncates)

    def losing(self, path: object) -> None:
        """`path` is about to be removed, or replaced by another file: keep its content under a second name."""
        with self._first(path) as target:
            if target is not None:
                self._keep_name(target)

    def _keep_content(self, target: str, truncates: bool) -> None:
        try:
            mode = os.lstat(target).st_mode
        except FileNotFoundError:
            self._note(action="created", path=target)
            return
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            return
        aside = self._aside(target)
        # The note comes first: a crash in between leaves a note without a copy, which restore skips, never the reverse.
        self._note(action="kept", path=target, aside=aside.name)
        if truncates:
            with contextlib.suppress(OSError):
                os.rename(target, aside)
                return
        _copy(target, aside)

    def written_at(self, path: str | bytes | os.PathLike[str], *, truncates: bool) -> None:
        """`path` is about to be opened for writing; a symbolic link stays, and what it points to is set aside."""
        target = os.fsdecode(path)
        self.touch(os.path.realpath(target) if os.path.islink(target) else target, truncates=truncates)

    def announced(self, path: str | bytes | os.PathLike[str], truncates: bool) -> None:
        """As `written_at`, from code that writes natively (native_writers.py)."""
        if self.active:
            with self.own_work():
                self.written_at(path, truncates=truncates)

    def _keep_name(self, target: str) -> None:
        if not os.path.lexists(target):
            self._note(action="created", path=target)
            return
        if os.path.isdir(target) and not os.path.islink(target):
            return
        aside = self._aside(target)
        self._note(action="kept", path=target, aside=aside.name)
        try:
            os.link(target, aside, follow_symlinks=False)
        except OSError:  # another file system, or one without links
            _copy(target, aside)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        handler = _EVENTS.get(event)
        if handler is None or not self.active or getattr(_inside, "yes", False):
            return
        _inside.yes = True
        try:
            handler(self, *args)
        except Exception as error:
            # Without a copy the script must not go on to destroy the file: its own open or remove fails instead.
            raise OSError(
                f"advisor could not set a file aside before a write in a search ({event}: {error})"
            ) from error
        finally:
            _inside.yes = False

    def _program(self, executable: object, arguments: object, cwd: object = None, environment: object = None) -> None:
        for path in programs.named(executable, arguments, cwd, environment):
            if not os.path.isdir(path) or os.path.islink(path):
                self._named(path)
                continue
            for folder, folders, names in os.walk(path, topdown=False):
                for name in (*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))):
                    self._named(os.path.join(folder, name))
                if (target := self._absolute(folder)) is not None:
                    self._note(action="unmade", path=target)

    def _named(self, path: str) -> None:
        """As `touch`, of a link and of what it points to, while there is room."""
        for place in dict.fromkeys((path, os.path.realpath(path))):
            with contextlib.suppress(OSError):
                self._program_bytes += os.path.getsize(place)
            if self._program_bytes > _PROGRAM_BYTES:
                say(f"not set aside before a program may change it, for want of room: {place}")
            else:
                self.touch(place)

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """File operations of this thread inside the block are advisor's own."""
        before = getattr(_inside, "yes", False)
        _inside.yes = True
        try:
            yield
        finally:
            _inside.yes = before

    def _absolute(self, path: object) -> str | None:
        if isinstance(path, int) or path is None:
            return None
        try:
            text = os.fsdecode(path)  # type: ignore[arg-type]
        except TypeError:
            return None
        text = os.path.join(
            os.path.realpath(os.path.dirname(os.path.abspath(text))), os.path.basename(text.rstrip("/"))
        )
        if text.startswith(self._skipped):
            return None
        parts = Path(text).parts
        if not _CACHE_PARTS.isdisjoint(parts) or any(p.startswith(_CACHE_PREFIXES) for p in parts):
            return None
        return text

    @contextlib.contextmanager
    def _first(self, path: object) -> Iterator[str | None]:
        """The path in full, for the first process that touches it in this run; others wait until it is set aside."""
        target = self._absolute(path)
        if target is None or target in self._settled:
            yield None
            return
        marker = self.root / SEEN / hashlib.sha256(os.fsencode(target)).hexdigest()[:32]
        lock = os.open(self.root / "lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if marker.exists():
                yield None
            else:
                # First the mark, then the look: of two searches that come at once both see the other's, and neither goes on.
                marker.touch()
                try:
                    self._not_held_by_another(marker.name)
                    yield target
                except BaseException:
                    marker.unlink(missing_ok=True)
                    raise
            self._settled.add(target)
        finally:
            os.close(lock)

    def _not_held_by_another(self, marker: str) -> None:
        """Two searches that put the same file back would put back each other's.

        Raises:
            OSError: when another search that runs now has set this file aside.
        """
        own = self.root.parent
        for other in {found.parents[2] for runs in self._runs for found in runs.glob(f"*/files/{SEEN}/{marker}")} - {
            own
        }:
            if (process := _running(other)) is not None:
                raise OSError(
                    f"the search in {other}, process {process}, has set it aside; try again when that has ended"
                )

    def _aside(self, target: str) -> Path:
        return (
            self.root
            / KEPT
            / f"{hashlib.sha256(os.fsencode(target)).hexdigest()[:32]}-{os.path.basename(target)[-80:]}"
        )

    def _note(self, **entry: str) -> None:
        line = (json.dumps(entry) + "\n").encode()
        handle = os.open(self.root / JOURNAL, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, line)  # one write in append mode: whole lines, also from several processes
        finally:
            os.close(handle)

    # Audit events (docs.python.org/3/library/audit_events.html), with their arguments.

    def _open(self, path: object, mode: object, flags: object = 0) -> None:
        if not isinstance(flags, int) or not flags & _WRITE:
            return
        if isinstance(path, (str, bytes, os.PathLike)):
            self.written_at(path, truncates=bool(flags & os.O_TRUNC))

    def _remove(self, path: object, dir_fd: int = -1) -> None:
        self.losing(_below(path, dir_fd))

    def _rename(self, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
        source, target = _below(source, source_fd), _below(target, target_fd)
        here = self._absolute(source)
        if here is not None and os.path.isdir(here) and not os.path.islink(here):
            there = self._absolute(target)
            if there is not None:
                self._note(action="moved", path=here, to=there)
            return
        self.losing(source)
        self.losing(target)

    def _made(self, path: object, *_rest: object) -> None:
        target = self._absolute(path)
        if target is not None and not os.path.lexists(target):
            self._note(action="made", path=target)

    def _unmade(self, path: object, dir_fd: int = -1) -> None:
        target = self._absolute(_below(path, dir_fd))
        if target is not None and os.path.isdir(target):
            self._note(action="unmade", path=target)

    def _linked(self, _source: object, target: object, *_rest: object) -> None:
        self.losing(target)

    def _rmtree(self, path: object, dir_fd: object = None) -> None:
        # Its own removals carry names relative to open folders; walking first works on every platform.
        top = self._absolute(_below(path, dir_fd if isinstance(dir_fd, int) else -1))
        if top is None or os.path.islink(top):
            return
        for folder, _folders, names in os.walk(top, topdown=False):
            for name in names:
                self.losing(os.path.join(folder, name))
            for name in _folders:
                if os.path.islink(os.path.join(folder, name)):
                    self.losing(os.path.join(folder, name))
            self._note(action="unmade", path=folder)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": Guard._open,
    "os.remove": Guard._remove,
    "os.rename": Guard._rename,
    "os.mkdir": Guard._made,
    "os.rmdir": Guard._unmade,
    "os.link": Guard._linked,
    "os.symlink": Guard._linked,
    "os.truncate": lambda guard, path, *_: guard.touch(path),
    "shutil.rmtree": Guard._rmtree,
    "sqlite3.connect": lambda guard, path, *_: guard.touch(path),
    "subprocess.Popen": Guard._program,
    "os.system": lambda guard, line: guard._program("sh", line),
    "os.posix_spawn": lambda guard, path, words, environment: guard._program(path, words, None, environment),
    "os.exec": lambda guard, path, words, environment: guard._program(path, words, None, environment),
}

_guards: dict[Path, Guard] = {}


def guard(run_dir: Path) -> Guard:
    """This process's guard for the run folder, from now on: its audit hook, before anything of the script has run."""
    folder = run_dir.resolve()
    if folder not in _guards:
        _guards[folder] = Guard(folder)
    return _guards[folder]


def protect(run_dir: Path) -> Guard:
    """Guard this process: the audit hook, native writers, and trackers that stay offline or in the run folder.

    Call once a process, after torch's import.
    """
    _end_with_supervisor()
    for name, value in tracker_environment(run_dir).items():
        os.environ[name] = value
    here = guard(run_dir)
    native_writers.announce(here.announced)
    return here


def tracker_environment(run_dir: Path) -> dict[str, str]:
    """Variables that keep experiment trackers from the network and from the user's own tracking folders."""
    folder = run_dir.resolve() / "trackers"
    folder.mkdir(parents=True, exist_ok=True)
    return {
        "WANDB_MODE": "offline",
        "WANDB_DIR": str(folder),
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": folder.joinpath("mlruns").as_uri(),
        "COMET_MODE": "offline",
        "COMET_OFFLINE_DIRECTORY": str(folder),
        "NEPTUNE_MODE": "offline",
        "CLEARML_OFFLINE_MODE": "1",
    }


def written(run_dir: Path) -> tuple[tuple[str, ...], int]:
    """Every path outside the run folder that the script wrote, removed or replaced, in the order of first touch.

    Returns:
        The paths, and how many more lay in temporary folders: the work of compilers and libraries, nobody's results.
    """
    paths = dict.fromkeys(
        entry["path"]
        for entry in _journal(run_dir) + _journal(run_dir, done=True)
        if entry["action"] in ("created", "kept")
    )
    named = tuple(path for path in paths if not _temporary(path))
    return named, len(paths) - len(named)


def _temporary(path: str) -> bool:
    """Whether `path` is, or lies below, what Python's `tempfile` names: `/tmp/tmpq3x9/header.i`.

    A working directory below such a folder is the user's own all the same.
    """
    for folder in {os.path.realpath(tempfile.gettempdir()), "/tmp", "/var/tmp"}:
        if path.startswith(os.path.join(folder, tempfile.gettempprefix())):
            made = os.path.join(folder, path[len(folder) + 1 :].split(os.sep, 1)[0])
            return not os.path.join(os.path.realpath(os.getcwd()), "").startswith(os.path.join(made, ""))
    return False


def restore(run_dir: Path) -> tuple[str, ...]:
    """Undo the journal, last entry first, and close it. Afterwards every path is as it was before the search.

    What the script made lies under `files/diverted/`. Safe to call twice, and after a crash of an earlier call.

    Returns:
        Paths that could not be put back, each with the reason; what was set aside for them stays in `kept-aside/`.
    """
    root = run_dir.resolve() / "files"
    entries, problems = _journal(run_dir), []
    vanished: set[int] = set()
    for index in range(len(entries) - 1, -1, -1):
        entry = entries[index]
        if entry["action"] == "created" and not os.path.lexists(entry["path"]):
            vanished.add(index)  # a temporary file that the script made and removed: nobody's result
        try:
            _undo(root, entry)
        except OSError as error:
            problems.append(f"{entry['path']}: {error.strerror or error}")
    if entries and not problems:
        with open(root / ("restored-" + JOURNAL), "a", encoding="utf-8") as done:
            done.writelines(json.dumps(entry) + "\n" for i, entry in enumerate(entries) if i not in vanished)
        (root / JOURNAL).unlink()
        shutil.rmtree(root / SEEN, ignore_errors=True)
    return tuple(problems)


@dataclass(frozen=True, slots=True)
class Pending:
    """What `restore_pending` found: run folders put back, folders with a journal that nobody here vouches for, and files
    that could not be put back, each with the reason."""

    restored: tuple[str, ...] = ()
    foreign: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()


def restore_pending(runs: Path) -> Pending:
    """Restore every run under the folder `runs` whose search was killed before it could.

    A journal says what to move where, so one that came with somebody else's run folder is not obeyed: only searches that
    this user's advisor has noted in the user's own cache folder are restored. One that still runs is left alone.
    """
    restored: list[str] = []
    foreign: list[str] = []
    problems: list[str] = []
    for journal in sorted(runs.glob(f"*/files/{JOURNAL}")):
        run_dir = journal.parent.parent
        if _running(run_dir) is not None:
            continue
        if not _vouched(run_dir):
            foreign.append(str(run_dir))
        elif failed := restore(run_dir):
            problems += failed
        else:
            restored.append(str(run_dir))
    return Pending(tuple(restored), tuple(foreign), tuple(problems))


def restore_asked(run_dir: Path) -> tuple[str, ...]:
    """As `restore`, for a user who names the run folder.

    Raises:
        AdvisorError: when nothing was set aside there, or its search still runs.
    """
    if not (run_dir / "files" / JOURNAL).is_file():
        raise AdvisorError(f"no search was interrupted in {run_dir}", expected=f"a run folder with files/{JOURNAL}")
    process = _running(run_dir)
    if process is not None:
        raise AdvisorError(
            f"the search in {run_dir} still runs, in process {process}", fix="It puts the files back when it ends."
        )
    return restore(run_dir)


def hold(run_dir: Path) -> None:
    """Note that this process searches in this run folder, so that another advisor does not restore under its feet.

    A token goes into the run folder and into the user's cache folder: `restore_pending` obeys the journal while they agree.
    """
    folder = run_dir.resolve() / "files"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OWNERS).unlink(missing_ok=True)
    _own(folder)
    token = os.urandom(16).hex()
    with contextlib.suppress(OSError):  # without a cache folder nothing is restored unasked
        noted = _noted(run_dir)
        noted.parent.mkdir(mode=0o700, exist_ok=True)
        for old in noted.parent.iterdir():
            if time.time() - old.stat().st_mtime > _FORGOTTEN_S:
                old.unlink()
        noted.write_text(token, encoding="ascii")
        (folder / "token").write_text(token, encoding="ascii")


def _noted(run_dir: Path) -> Path:
    """Where the user's own cache folder notes this search."""
    from advisor.profiling import environment  # not in every process that is guarded: `guard` comes before the script

    name = hashlib.sha256(os.fsencode(run_dir.resolve())).hexdigest()[:32]
    return environment.cache_dir() / "searches" / name


def _vouched(run_dir: Path) -> bool:
    try:
        noted = _noted(run_dir).read_bytes()
        return len(noted) == 32 and noted == (run_dir / "files" / "token").read_bytes()
    except OSError:
        return False


def _own(folder: Path) -> None:
    """Add this process to those that search here: a script goes on when the advisor that started it is killed."""
    with open(folder / OWNERS, "a", encoding="ascii") as owners:
        owners.write(f"{os.getpid()} {_started(os.getpid())}\n")


def _running(run_dir: Path) -> int | None:
    """Another process than this one that searches in this run folder; None when all have ended."""
    try:
        lines = (run_dir / "files" / OWNERS).read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return None
    for line in lines:
        with contextlib.suppress(OSError, ValueError, OverflowError):
            pid, started = map(int, line.split())
            os.kill(pid, 0)
            if pid != os.getpid() and _started(pid) == started:
                return pid
    return None


def _started(pid: int) -> int:
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


def _end_with_supervisor() -> None:
    """On Linux this process gets SIGTERM when the advisor that started it dies: nobody else would end its search."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    if supervisor != str(os.getppid()):
        return
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if supervisor != str(os.getppid()):  # it died just before
        os.kill(os.getpid(), signal.SIGTERM)


def _undo(root: Path, entry: dict[str, str]) -> None:
    path, action = entry["path"], entry["action"]
    if action == "created":
        if os.path.isdir(path) and not os.path.islink(path):  # a program made a folder under a name that was free
            _divert_folder(root, path)
        else:
            _divert(root, path)
    elif action == "kept":
        aside = root / KEPT / os.path.basename(entry["aside"])  # a bare name, whatever a journal says
        if not os.path.lexists(aside):
            return  # put back by an earlier call, or noted just before a crash and never changed
        if os.path.lexists(path):
            if os.path.isfile(path) and not os.path.islink(path) and os.path.samefile(path, aside):
                os.unlink(aside)  # a second name of the untouched file
                return
            _divert(root, path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        _move(str(aside), path)
    elif action == "made":
        with contextlib.suppress(FileNotFoundError, OSError):
            os.rmdir(path)  # only when empty: somebody else may have put something there
    elif action == "unmade":
        os.makedirs(path, exist_ok=True)
    elif action == "moved" and os.path.isdir(entry["to"]) and not os.path.lexists(path):
        os.rename(entry["to"], path)


def _divert(root: Path, path: str) -> None:
    if not os.path.lexists(path) or (os.path.isdir(path) and not os.path.islink(path)):
        return
    target = root / DIVERTED / path.lstrip(os.sep).replace(":", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        target.unlink()
    _move(path, str(target))


def _divert_folder(root: Path, path: str) -> None:
    target = root / DIVERTED / path.lstrip(os.sep).replace(":", "")
    target.parent.mkdir(parents=True, exist_ok=True)
    if os.path.lexists(target):
        target = target.with_name(f"{target.name}-{os.urandom(4).hex()}")
    shutil.move(path, target)


def _move(source: str, target: str) -> None:
    try:
        os.replace(source, target)
    except OSError:  # another file system
        _copy(source, target)
        os.unlink(source)


def _copy(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Copy with times and mode; `target` is whole or absent at every moment, so that a crash leaves no half copy."""
    temporary = os.fspath(target) + ".advisor-part"
    try:
        shutil.copy2(source, temporary, follow_symlinks=False)
        os.replace(temporary, target)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def _journal(run_dir: Path, *, done: bool = False) -> list[dict[str, str]]:
    path = run_dir.resolve() / "files" / (("restored-" if done else "") + JOURNAL)
    try:
        lines = path.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except FileNotFoundError:
        return []
    entries = []
    for line in lines:
        with contextlib.suppress(ValueError):  # a line cut off by a crash names nothing that was touched
            entry = json.loads(line)
            if isinstance(entry, dict) and "path" in entry and "action" in entry:
                entries.append(entry)
    return entries


def _below(path: object, dir_fd: int) -> object:
    """A name relative to an open folder, made whole; None where the platform cannot say which folder that is."""
    if not isinstance(dir_fd, int) or dir_fd < 0:
        return path
    try:
        return os.path.join(os.readlink(f"/proc/self/fd/{dir_fd}"), os.fsdecode(path))  # type: ignore[arg-type]
    except (OSError, TypeError):
        return None


def _cache_folders() -> tuple[str, ...]:
    named = [os.environ[v] for v in _CACHE_VARIABLES if os.environ.get(v)]
    return tuple(os.path.realpath(folder) + os.sep for folder in named)
