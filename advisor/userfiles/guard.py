"""Sets files aside in the child, before the script changes them."""

from __future__ import annotations

import contextlib
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from advisor.core import locks
from advisor.core.stderr import say
from advisor.userfiles import journal, owners, programs
from advisor.userfiles.journal import KEPT, SEEN

UNFIT = 75  # exit status of a process that would have changed something ahead of its orders (EX_TEMPFAIL of sysexits.h)
# What programs name is set aside up to this much in all: beyond it they may be reading a data set.
_PROGRAM_BYTES = 1 << 30
# An open with one of these changes what is there, or makes it: without O_WRONLY too.
_WRITE = os.O_WRONLY | os.O_RDWR | os.O_TRUNC | os.O_CREAT
_ANEW = os.O_TRUNC | os.O_CREAT
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

# What starts a program, which may change anything.
_PROGRAMS = frozenset({"subprocess.Popen", "os.system", "os.posix_spawn", "os.exec"})

_inside = threading.local()  # .yes: this thread is doing advisor's own file work, for whichever guard


class Guard:
    """Sets files aside for one run folder, from construction until `stop`.

    Attributes:
        waits: until `begin` this process waits for another of the search to end, and leaves everything as it is.
    """

    def __init__(self, run_dir: Path) -> None:
        self.root = journal.root_of(run_dir)
        self.begin()
        self._skipped = (str(run_dir.resolve()) + os.sep, *_SYSTEM_ROOTS, *_cache_folders())
        self._settled: set[str] = set()
        self._program_bytes = 0
        # Where other searches may have their run folders: beside this one, and where they lie unless told otherwise.
        self._runs = {self.root.parent.parent, Path("advisor-runs").resolve()}
        self.active = True
        owners.join(run_dir)
        sys.addaudithook(_hook_of(self))  # cannot be removed again; `stop` makes it idle

    @classmethod
    def of(cls, run_dir: Path) -> Guard:
        """This process's guard for the run folder, from now on: its audit hook, before anything of the script has run."""
        folder = run_dir.resolve()
        if folder not in _guards:
            _guards[folder] = here = cls(folder)
            os.open = here._told_of_folders(os.open)
            os.supports_dir_fd.add(os.open)
        return _guards[folder]

    def begin(self) -> None:
        """From now on the script may change files; what the process before this one has set aside is put back."""
        self.waits = False
        for name in (KEPT, SEEN):
            (self.root / name).mkdir(parents=True, exist_ok=True)

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
        self._unshare(path, truncates)

    def losing(self, path: object) -> None:
        """`path` is about to be removed, or replaced by another file: keep its content under a second name."""
        with self._first(path) as target:
            if target is not None:
                self._keep_name(target)

    def _keep_content(self, target: str, truncates: bool) -> None:
        try:
            found = os.lstat(target)
        except FileNotFoundError:
            journal.note(self.root, action="created", path=target)
            return
        if stat.S_ISREG(found.st_mode) and found.st_nlink > 1:
            # Under the file's other names, which it had before the search, stays what it is. Put back it is one file with them
            # again, but not where it lay on another file system than the run folder: there it is a copy.
            self._keep_name(target)
            _part(target, truncates)
            return
        if not (stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode)):
            return
        aside = journal.aside(self.root, target)
        # The note comes first: a crash in between leaves a note without a copy, which restore skips, never the reverse.
        journal.note(self.root, action="kept", path=target, aside=aside.name)
        if truncates:
            with contextlib.suppress(OSError):
                os.rename(target, aside)
                return
        journal.copy(target, aside)

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
            journal.note(self.root, action="created", path=target)
            return
        if os.path.isdir(target) and not os.path.islink(target):
            return
        aside = journal.aside(self.root, target)
        journal.note(self.root, action="kept", path=target, aside=aside.name)
        try:
            os.link(target, aside, follow_symlinks=False)
        except OSError:  # another file system, or one without links
            journal.copy(target, aside)

    def _unshare(self, path: object, truncates: bool) -> None:
        """What was removed, renamed or linked lies aside as a second name of the same file. Where the script goes on to change it under
        a name that it still has, it gets a file of its own.
        """
        target = self._absolute(path)
        if target is None or not self._lies_aside(target):
            return
        with self._alone():
            if not self._lies_aside(target):
                return  # another process was first
            _part(target, truncates)

    def _lies_aside(self, target: str) -> bool:
        try:
            found = os.lstat(target)
        except OSError:
            return False
        if found.st_nlink < 2 or not stat.S_ISREG(found.st_mode):
            return False
        with os.scandir(self.root / KEPT) as kept:
            return any(
                entry.inode() == found.st_ino and os.path.samestat(entry.stat(follow_symlinks=False), found)
                for entry in kept
            )

    def _about_to(self, event: str, args: tuple[Any, ...]) -> None:
        if not self.active or getattr(_inside, "yes", False):
            return
        _inside.yes = True
        try:
            if not self.waits:
                _EVENTS[event](self, *args)
            elif "torch" not in sys.modules and self._changes(event, *args):
                os._exit(UNFIT)
            # Else reading; or a temporary file of torch's, which is imported, and of which another process's search knows nothing.
        except Exception as error:
            # Without a copy the script must not go on to destroy the file: its own open or remove fails instead. By the number, which makes it
            # the error that the script would have had of the system (PermissionError), and may be ready for.
            told = f"advisor could not set a file aside before a write in a search ({event}: {error})"
            number = error.errno if isinstance(error, OSError) else None
            raise (OSError(told) if number is None else OSError(number, told)) from error
        finally:
            _inside.yes = False

    def _told_of_folders(self, plain: Callable[..., int]) -> Callable[..., int]:
        """`os.open`, whose audit event has the name alone where that is relative to an open folder (`dir_fd`)."""

        @functools.wraps(plain)
        def opened(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
            if dir_fd is None or not self.active:
                return plain(path, flags, mode, dir_fd=dir_fd)
            self._about_to("open", (_below(path, dir_fd), None, flags))
            with self.own_work():  # the name alone would be taken for one in the working folder
                return plain(path, flags, mode, dir_fd=dir_fd)

        return opened

    def _changes(self, event: str, *args: Any) -> bool:
        """Whether this is more than reading, outside of caches."""
        if event in _PROGRAMS:
            return True
        if event == "open" and not (isinstance(args[-1], int) and args[-1] & _WRITE):
            return False
        return self._absolute(args[0]) is not None

    def _program(self, executable: object, arguments: object, cwd: object = None, environment: object = None) -> None:
        for path in programs.named(executable, arguments, cwd, environment):
            if not os.path.isdir(path) or os.path.islink(path):
                self._named(path)
                continue
            for folder, folders, names in os.walk(path, topdown=False):
                for name in (*names, *(f for f in folders if os.path.islink(os.path.join(folder, f)))):
                    self._named(os.path.join(folder, name))
                if (target := self._absolute(folder)) is not None:
                    journal.note(self.root, action="unmade", path=target)

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
        marker = journal.mark(self.root, target)
        with self._alone():
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

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of the search is inside such a block."""
        with locks.exclusive(self.root / "lock"):
            yield

    def _not_held_by_another(self, marker: str) -> None:
        """Two searches that put the same file back would put back each other's.

        Raises:
            OSError: when another search that runs now has set this file aside.
        """
        own = self.root.parent
        for other in {found.parents[2] for runs in self._runs for found in runs.glob(f"*/files/{SEEN}/{marker}")} - {
            own
        }:
            if (process := owners.running(other)) is not None:
                raise OSError(
                    f"the search in {other}, process {process}, has set it aside; try again when that has ended"
                )

    # Audit events (docs.python.org/3/library/audit_events.html), with their arguments.

    def _open(self, path: object, mode: object, flags: object = 0) -> None:
        if not isinstance(flags, int) or not flags & _WRITE:
            return
        if isinstance(path, (str, bytes, os.PathLike)):
            self.written_at(path, truncates=flags & _ANEW == _ANEW)

    def _remove(self, path: object, dir_fd: int = -1) -> None:
        self.losing(_below(path, dir_fd))

    def _rename(self, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
        source, target = _below(source, source_fd), _below(target, target_fd)
        here = self._absolute(source)
        if here is not None and os.path.isdir(here) and not os.path.islink(here):
            there = self._absolute(target)
            if there is not None:
                if os.path.isdir(there):  # an empty one, which goes
                    journal.note(self.root, action="unmade", path=there)
                journal.note(self.root, action="moved", path=here, to=there)
            return
        self.losing(source)
        self.losing(target)

    def _made(self, path: object, _mode: object = None, dir_fd: int = -1) -> None:
        target = self._absolute(_below(path, dir_fd))
        if target is not None and not os.path.lexists(target):
            journal.note(self.root, action="made", path=target)

    def _unmade(self, path: object, dir_fd: int = -1) -> None:
        target = self._absolute(_below(path, dir_fd))
        if target is not None and os.path.isdir(target):
            journal.note(self.root, action="unmade", path=target)

    def _linked(self, source: object, target: object, source_fd: int = -1, target_fd: int = -1) -> None:
        source = _below(source, source_fd)
        if isinstance(source, (str, bytes, os.PathLike)):  # what is written under the new name is in this file too
            for place in dict.fromkeys((source, os.path.realpath(source))):
                self.losing(place)
        self.losing(_below(target, target_fd))

    def _symlinked(self, _source: object, target: object, dir_fd: int = -1) -> None:
        self.losing(_below(target, dir_fd))

    def _truncated(self, path: object, *_rest: object) -> None:
        if isinstance(path, (str, bytes, os.PathLike)):
            self.written_at(path, truncates=False)

    def _database(self, database: object) -> None:
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
                self.touch(os.path.realpath(name) + ending)

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
            journal.note(self.root, action="unmade", path=folder)


_EVENTS: dict[str, Callable[..., None]] = {
    "open": Guard._open,
    "os.remove": Guard._remove,
    "os.rename": Guard._rename,
    "os.mkdir": Guard._made,
    "os.rmdir": Guard._unmade,
    "os.link": Guard._linked,
    "os.symlink": Guard._symlinked,
    "os.truncate": Guard._truncated,
    "shutil.rmtree": Guard._rmtree,
    "sqlite3.connect": Guard._database,
    "subprocess.Popen": Guard._program,
    "os.system": lambda guard, line: guard._program("sh", line),
    "os.posix_spawn": lambda guard, path, words, environment: guard._program(path, words, None, environment),
    "os.exec": lambda guard, path, words, environment: guard._program(path, words, None, environment),
}

_guards: dict[Path, Guard] = {}


def _hook_of(guard: Guard) -> Callable[[str, tuple[Any, ...]], None]:
    """What is called at every audit event of the process. A function: every `id()` is an event, an optimizer's step has two a
    parameter, and Python looks for an attribute that a bound method takes 1.2 µs to say it lacks.
    """

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            guard._about_to(event, args)

    return hook


def _part(target: str, truncates: bool) -> None:
    """The path no longer shares its file with other names: it has a copy, or nothing where the caller writes it anew."""
    if truncates:
        os.unlink(target)
    else:
        journal.copy(target, target)


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
