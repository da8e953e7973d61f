"""What a process writes goes to a folder of its own, and what it has written there it reads back from there. No torch here.

For ranks other than the first of a script that believes itself alone: all of them save the same checkpoint under the same name, and
one file of it is wanted. A path that is written is at `<folder>/<its absolute path>` from then on, for this process and those below it;
all others are read where they are. So a rank saves, rotates, renames and loads its checkpoints as the first one does.

Seen is what Python code does (`open`, `os`, `shutil`, and the native writers of native_writers.py). Caches, the system's folders and
temporary files keep their places. A program that is started writes where it is told to.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from advisor.userfiles import native_writers
from advisor.userfiles.guard import in_cache, system_folders

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_TEMPORARY = re.compile(r"tmp[a-z0-9_]{8}|pymp-|torch_")  # tempfile's names, torch's shared memory


class Scratch:
    """Redirects this process's writes to `folder`, once installed, for good."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        self._gone: set[str] = set()  # removed by this process alone: the first rank's is there
        self._kept = (*system_folders(), str(folder.resolve().parents[2]) + os.sep)
        self._temporary = os.path.join(tempfile.gettempdir(), "")
        self._lstat, self._mkdir = os.lstat, os.mkdir

    # -- paths ------------------------------------------------------------------------------------------------------

    def absolute(self, path: object) -> str | None:
        """The path in full; None for what is let be."""
        if not isinstance(path, (str, bytes, os.PathLike)):
            return None  # an open file
        try:
            text = os.path.abspath(os.fsdecode(path))
        except (OSError, ValueError):
            return None
        if text.startswith(self._kept) or in_cache(text):
            return None
        if text.startswith(self._temporary) and _TEMPORARY.match(text, len(self._temporary)):
            return None
        return text

    def own(self, text: str) -> str:
        """Where this process's own version of a path lies."""
        return self.folder + text

    def has(self, text: str) -> bool:
        """Whether there is one."""
        try:
            self._lstat(self.own(text))
        except OSError:
            return False
        return True

    def reads(self, path: Any) -> Any:
        """What to read in place of `path`."""
        text = self.absolute(path)
        if text is not None and (text in self._gone or self.has(text)):
            return self.own(text)
        return path

    def writes(self, path: Any, *, anew: bool = True) -> Any:
        """What to write in place of `path`; it has the content of the other, unless it is written `anew`."""
        text = self.absolute(path)
        if text is None:
            return path
        mine = self.own(text)
        self._make(os.path.dirname(mine))
        if not anew and not self.has(text) and text not in self._gone and os.path.isfile(text):
            with io.FileIO(text) as source, io.FileIO(mine, "w") as copy:
                shutil.copyfileobj(source, copy)
        self._gone.discard(text)
        return mine

    def _make(self, folder: str) -> None:
        """This folder of the scratch, with those above it."""
        try:
            self._mkdir(folder)
        except FileExistsError:
            return
        except FileNotFoundError:
            self._make(os.path.dirname(folder))
            self._make(folder)

    def loses(self, path: Any) -> str:
        """`path` is removed for this process; its own version's place, "" where it has none."""
        text = self.absolute(path)
        if text is None:
            return os.fsdecode(path)
        mine = self.own(text) if self.has(text) else ""
        self._gone.add(text)
        return mine

    # -- in the place of Python's -----------------------------------------------------------------------------------

    def install(self) -> None:
        """From now on."""
        plain_open = builtins.open

        @functools.wraps(plain_open)
        def opened(file: Any, mode: Any = "r", *args: Any, **kwargs: Any) -> Any:
            changes = isinstance(mode, str) and set(mode) & set("wax+")
            file = self.writes(file, anew="w" in mode or "x" in mode) if changes else self.reads(file)
            return plain_open(file, mode, *args, **kwargs)

        builtins.open = io.open = opened
        self._around("open", self._opens)
        for name in ("stat", "lstat", "access", "readlink"):
            self._around(name, lambda plain, path, *a, **k: plain(self.reads(path), *a, **k))
        for name in ("chmod", "utime", "truncate", "chown"):
            self._around(name, self._sets)
        self._around("mkdir", self._makes)
        for name in ("remove", "unlink", "rmdir"):
            self._around(name, self._removes)
        for name in ("rename", "replace"):
            self._around(name, self._moves)
        for name in ("link", "symlink"):
            self._around(name, self._links)
        self._around("listdir", self._lists)
        os.scandir = self._scans(os.scandir)
        shutil.rmtree = self._clears(shutil.rmtree)
        native_writers.announce(lambda path, anew: self.writes(path, anew=anew))

    def _around(self, name: str, instead: Callable[..., Any]) -> None:
        plain = getattr(os, name)

        @functools.wraps(plain)
        def replaced(path: Any, *args: Any, **kwargs: Any) -> Any:
            if kwargs.get("dir_fd") is not None or kwargs.get("src_dir_fd") is not None:
                return plain(path, *args, **kwargs)
            return instead(plain, path, *args, **kwargs)

        for known in (os.supports_dir_fd, os.supports_effective_ids, os.supports_fd, os.supports_follow_symlinks):
            if plain in known:
                known.add(replaced)
        if name == "listdir":

            @functools.wraps(plain)
            def listdir(path: Any = ".") -> Any:
                return instead(plain, path)

            replaced = listdir
        setattr(os, name, replaced)

    def _opens(self, plain: Any, path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
        if flags & _CHANGES and not os.path.isdir(path):
            return plain(self.writes(path, anew=bool(flags & os.O_TRUNC)), flags & ~os.O_EXCL, *args, **kwargs)
        return plain(self.reads(path), flags, *args, **kwargs)

    def _sets(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        where = self.reads(path)
        if where != path or self.absolute(path) is None:
            plain(where, *args, **kwargs)

    def _makes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        text = self.absolute(path)
        if text is None:
            plain(path, *args, **kwargs)
        elif self.has(text):
            raise FileExistsError(17, "File exists", path)
        else:  # the first rank's folder may be there already: this one did not see it when it asked
            self._make(self.own(text))
            self._gone.discard(text)

    def _removes(self, plain: Any, path: Any, *args: Any, **kwargs: Any) -> None:
        if mine := self.loses(path):
            plain(mine, *args, **kwargs)

    def _moves(self, plain: Any, source: Any, target: Any, **kwargs: Any) -> None:
        if self.absolute(source) is None and self.absolute(target) is None:
            plain(source, target, **kwargs)
            return
        found, place = self.reads(source), self.writes(target)
        if found == source:  # not this process's to take away
            (shutil.copytree if os.path.isdir(source) else shutil.copyfile)(source, place)
        else:
            plain(found, place, **kwargs)
        self.loses(source)

    def _links(self, plain: Any, source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        place = self.writes(target)
        with contextlib.suppress(FileExistsError):
            plain(os.path.abspath(self.reads(source)), place, *args, **kwargs)

    def _lists(self, plain: Any, path: Any) -> Any:
        text = self.absolute(path)
        if text is None:
            return plain(path)
        if not self.has(text):
            return [name for name in plain(self.reads(path)) if self._seen(text, name)]
        theirs: list[Any] = []
        if text not in self._gone:
            with contextlib.suppress(OSError):
                theirs = [name for name in plain(path) if self._seen(text, name)]
        return list(dict.fromkeys([*theirs, *plain(self.own(text))]))

    def _seen(self, text: str, name: Any) -> bool:
        return os.path.join(text, os.fsdecode(name)) not in self._gone

    def _scans(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def scandir(path: Any = ".") -> Any:
            text = self.absolute(path)
            if text is None or not self.has(text):
                return plain(path)
            with plain(self.own(text)) as found:
                entries = {entry.name: entry for entry in found}
            if text not in self._gone:
                with contextlib.suppress(OSError), plain(text) as found:
                    for entry in found:
                        if self._seen(text, entry.name):
                            entries.setdefault(entry.name, entry)
            return _Entries(iter(entries.values()))

        return scandir

    def _clears(self, plain: Any) -> Any:
        @functools.wraps(plain)
        def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
            if mine := self.loses(path):
                plain(mine, *args, **kwargs)

        rmtree.avoids_symlink_attacks = plain.avoids_symlink_attacks  # type: ignore[attr-defined]  # a function that has an attribute
        return rmtree


class _Entries:
    """As `os.scandir` returns it."""

    def __init__(self, entries: Iterator[os.DirEntry[str]]) -> None:
        self._entries = entries

    def __iter__(self) -> _Entries:
        return self

    def __next__(self) -> os.DirEntry[str]:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Nothing is open."""
