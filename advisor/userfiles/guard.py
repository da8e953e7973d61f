"""Sets files aside in the script's process, before the script changes them."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import stat
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from advisor.core import locks
from advisor.userfiles import events, journal, native_writers, owners
from advisor.userfiles.journal import FIXED, KEPT, SEEN

UNFIT = 75  # exit status of a process that would have changed something ahead of its orders (EX_TEMPFAIL of sysexits.h)
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

_inside = threading.local()  # .yes: this thread is doing advisor's own file work, for whichever guard


class Guard:
    """Sets files aside for one run folder, from construction until `stop`.

    Attributes:
        waits: until `begin` this process waits for another of the run to end, and leaves everything as it is.
        program_bytes: what was set aside so far as other programs may change it.
    """

    def __init__(self, run_dir: Path, *, waits: bool = False) -> None:
        self.root = journal.root_of(run_dir)
        self._run_dir = run_dir
        self._skipped = (str(run_dir.resolve()) + os.sep, *system_folders())
        self._settled: set[str] = set()
        self._set: set[str] = set()  # those whose settings are noted
        self.program_bytes = 0
        # Where other runs may have their folders: beside this one, and where they lie unless told otherwise.
        self._runs = {self.root.parent.parent, Path("advisor-runs").resolve()}
        self.active = True
        self.waits = waits
        if not waits:
            self.begin()
        sys.addaudithook(events.hook_of(self))  # cannot be removed again; `stop` makes it idle

    @classmethod
    def of(cls, run_dir: Path, *, waits: bool = False) -> Guard:
        """This process's guard for the run folder, from now on: before anything of the script has run."""
        folder = run_dir.resolve()
        if folder not in _guards:
            _guards[folder] = here = cls(folder, waits=waits)
            os.open = here._told_of_folders(os.open)
            os.supports_dir_fd.add(os.open)
            native_writers.announce(here.announced)
            if hasattr(os, "register_at_fork"):
                os.register_at_fork(after_in_child=here._forked)
        return _guards[folder]

    def begin(self) -> None:
        """From now on the script may change files; what the process before this one has set aside is put back."""
        with self.own_work():
            for name in (KEPT, SEEN):
                (self.root / name).mkdir(parents=True, exist_ok=True)
            owners.join(self._run_dir)
        self.waits = False

    def stop(self) -> None:
        """Later writes are the script's own business."""
        self.active = False

    def _forked(self) -> None:
        """A worker is among those who work here: whoever puts the files back waits for its end."""
        if self.active and not self.waits:
            with self.own_work(), contextlib.suppress(OSError):
                owners.add(self._run_dir)

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
        if stat.S_ISREG(found.st_mode) and (not truncates or found.st_nlink > 1):
            # The user's file lies aside and the script gets a copy: put back it is the same file, with its other names, for whoever
            # has it open (`tail -f`, another training that logs to it). On another file system than the run folder the copy lies aside.
            if (aside := self._keep_name(target)) is not None or found.st_nlink > 1:
                self._part_from(target, aside, truncates)
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
        if os.path.isdir(
            target
        ):  # an error, or a file without a name in this folder (O_TMPFILE): nothing that is there changes
            return
        self.touch(os.path.realpath(target) if os.path.islink(target) else target, truncates=truncates)

    def announced(self, path: str | bytes | os.PathLike[str], truncates: bool) -> None:
        """As `written_at`, from code that writes natively (native_writers.py)."""
        if self.active:
            if self.waits and self.absolute(path) is not None:
                os._exit(UNFIT)
            with self.own_work():
                self.written_at(path, truncates=truncates)

    def keep_settings(self, path: str, *, folder: bool = False) -> None:
        """Mode, owner or times of what is at `path` are about to be set, or what is in the `folder` is about to change, which sets its
        time. What the script has made is its own business.
        """
        target = self.absolute(path)
        if (
            target is None
            or target in self._set
            or (target in self._settled and not journal.lies_aside(self.root, target))
        ):
            return
        self._set.add(target)
        with contextlib.suppress(FileNotFoundError):
            found = os.stat(target)
            if not folder or found.st_uid == os.geteuid():  # nobody else could set it back
                journal.note(self.root, action="set", path=target, **journal.settings(found))

    def _keep_name(self, target: str) -> Path | None:
        """Where what is at `target` lies under a second name; None where nothing does, or a copy."""
        if not os.path.lexists(target):
            journal.note(self.root, action="created", path=target)
            return None
        if os.path.isdir(target) and not os.path.islink(target):
            return None
        aside = journal.aside(self.root, target)
        journal.note(self.root, action="kept", path=target, aside=aside.name)
        try:
            os.link(target, aside, follow_symlinks=False)
        except OSError:  # another file system, or one without links
            journal.copy(target, aside)
            return None
        return aside

    def _part_from(self, target: str, aside: Path | None, truncates: bool) -> None:
        try:
            self._part(target, truncates)
        except OSError as error:
            if aside is None or error.errno not in FIXED:
                raise
            journal.copy(target, aside)  # in place of its second name

    def _unshare(self, path: object, truncates: bool) -> None:
        """What was removed, renamed or linked lies aside as a second name of the same file. Where the script goes on to change it under
        a name that it still has, it gets a file of its own.
        """
        target = self.absolute(path)
        if target is None or not journal.lies_aside(self.root, target):
            return
        with self._alone():
            if not journal.lies_aside(self.root, target):
                return  # another process was first
            self._part(target, truncates)

    def _part(self, target: str, truncates: bool) -> None:
        """The path no longer shares its file with other names: it has a copy, or nothing where the caller writes it anew."""
        if truncates:
            os.unlink(target)
            return
        made = f"{journal.aside(self.root, target)}.part"  # not beside the target: a kill would leave half a copy there
        journal.copy(target, made)
        try:
            os.replace(made, target)
        except OSError as error:
            os.unlink(made)
            if error.errno != errno.EXDEV:
                raise
            journal.note(self.root, action="created", path=target + journal.PART)
            journal.copy(target, target)

    def about_to(self, event: str, args: tuple[Any, ...]) -> None:
        """An audit event of this process: what it is about to change is set aside.

        Raises:
            OSError: when it cannot be.
        """
        if not self.active or getattr(_inside, "yes", False):
            return
        _inside.yes = True
        try:
            if not self.waits:
                events.EVENTS[event](self, *args)
            elif "torch" not in sys.modules and self._changes(event, *args):
                os._exit(UNFIT)
            # Else reading; or a temporary file of torch's, which is imported, and of which another process's run knows nothing.
        except Exception as error:
            # Without a copy the script must not go on to destroy the file: its own open or remove fails instead. By the number, which makes it
            # the error that the script would have had of the system (PermissionError), and may be ready for.
            told = f"advisor could not set a file aside before the script changes it ({event}: {error})"
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
            self.about_to("open", (events.below(path, dir_fd), None, flags))
            with self.own_work():  # the name alone would be taken for one in the working folder
                return plain(path, flags, mode, dir_fd=dir_fd)

        return opened

    def _changes(self, event: str, *args: Any) -> bool:
        """Whether this is more than reading, outside of caches."""
        if event in events.STARTS:
            return True
        if event == "open" and not (isinstance(args[-1], int) and args[-1] & events.WRITE):
            return False
        return self.absolute(args[0]) is not None

    @contextlib.contextmanager
    def own_work(self) -> Iterator[None]:
        """File operations of this thread inside the block are advisor's own."""
        before = getattr(_inside, "yes", False)
        _inside.yes = True
        try:
            yield
        finally:
            _inside.yes = before

    def absolute(self, path: object) -> str | None:
        """The path in full; None for what needs no guard: an open file, advisor's own, the system's, caches."""
        text = _real(path)
        if text is None or text.startswith(self._skipped):
            return None
        return None if in_cache(text) or locks.is_of_user(text) else text

    def holds(self, path: object) -> bool:
        """Whether what was set aside lies at or below `path`, or `path` is in there."""
        text, root = _real(path), str(self.root)
        return text is not None and (f"{root}/".startswith(f"{text}/") or text.startswith(f"{root}/"))

    @contextlib.contextmanager
    def _first(self, path: object) -> Iterator[str | None]:
        """The path in full, for the first process that touches it in this run; others wait until it is set aside."""
        target = self.absolute(path)
        if target is None or target in self._settled:
            yield None
            return
        marker = journal.mark(self.root, target)
        with self._alone():
            if marker.exists():
                yield None
            else:
                # First the mark, then the look: of two runs that come at once both see the other's, and neither goes on.
                marker.touch()
                try:
                    self._not_held_by_another(marker.name, target)
                    self.keep_settings(os.path.dirname(target), folder=True)
                    yield target
                except BaseException:
                    marker.unlink(missing_ok=True)
                    raise
            self._settled.add(target)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of the run is inside such a block."""
        with locks.exclusive(self.root / "lock"):
            yield

    def _not_held_by_another(self, marker: str, target: str) -> None:
        """Two runs that put the same file back would put back each other's.

        Raises:
            OSError: when another run that goes on now has set this file aside.
        """
        beside = {found.parents[2] for runs in self._runs for found in runs.glob(f"*/files/{SEEN}/{marker}")}
        elsewhere = {folder for folder in owners.noted() if (folder / "files" / SEEN / marker).exists()}
        for other in (beside | elsewhere) - {self.root.parent}:
            if (process := owners.running(other)) is not None:
                told = f"the run in {other}, process {process}, has set it aside"
                (self.root / journal.HELD).write_text(f"{target}: {told}")
                raise OSError(f"{told}; try again when that has ended")


_guards: dict[Path, Guard] = {}


def _real(path: object) -> str | None:
    """The path in full, of the link itself where it is one; None for what is no path."""
    if isinstance(path, int) or path is None:
        return None
    try:
        text = os.fsdecode(path)  # type: ignore[arg-type]  # a TypeError is the answer
    except TypeError:
        return None
    return os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(text))), os.path.basename(text.rstrip("/")))


def in_cache(text: str) -> bool:
    """Whether this path, in full, is in a folder that is a cache by its name."""
    parts = Path(text).parts
    return not _CACHE_PARTS.isdisjoint(parts) or any(p.startswith(_CACHE_PREFIXES) for p in parts)


def system_folders() -> tuple[str, ...]:
    """Where nothing is the user's, each with a separator behind it: the system's, and caches that variables name."""
    named = [os.environ[v] for v in _CACHE_VARIABLES if os.environ.get(v)]
    return (*_SYSTEM_ROOTS, *(os.path.realpath(folder) + os.sep for folder in named))
