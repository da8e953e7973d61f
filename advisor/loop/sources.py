"""Which source line a call into torch or CuPy is told under: the user's own, where there is one, and the library's that it went through.

Frames of torch, CuPy, advisor and the standard library are passed over. Of what remains, installed packages are libraries and all else is
the user's. A model library's line says most inside a module's forward (torchvision's `resnet.py:95` rather than the one line
that calls the model); a training framework's says little without the user's that led there (`self.log(…)` in a callback).
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

from advisor.core.cache import NOTEBOOKS, SESSION

# Scripts may change it (hydra gives each run a folder of its own): paths are shown from where the process was started.
_STARTED_IN = os.path.join(os.getcwd(), "")
_ADVISOR = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
_STDLIB = os.path.join(os.path.abspath(sysconfig.get_path("stdlib")), "")
_PACKAGES = tuple({os.path.join(os.path.abspath(sysconfig.get_path(key)), "") for key in ("purelib", "platlib")})
# Of other prefixes: a virtual environment that sees the system's packages, the user's own packages, Debian's.
_PACKAGES_FOLDER = re.compile(r"^.*[\\/](?:site|dist)-packages[\\/]")
# Packages whose own lines tell nothing: what is told is who called them.
_ARRAYS = ("torch", "cupy", "cupyx", "cupy_backends")

CELL = "# cell "  # what `profiling.beside.notebooks` writes above each cell of a notebook
_NOTEBOOK = re.compile(rf"^.*[\\/]{NOTEBOOKS}[\\/][0-9a-f]{{16}}[\\/](?P<name>[^\\/]+)\.py$")

PASSED_OVER, LIBRARY, USER = "", "library", "user"


def _folders() -> tuple[str, ...]:
    """Of the array packages that this process has imported."""
    files = (getattr(sys.modules.get(name), "__file__", None) for name in _ARRAYS)
    packages = (os.path.abspath(file) for file in files if file and os.path.basename(file).startswith("__init__"))
    return tuple(os.path.join(os.path.dirname(file), "") for file in packages)


def _forward() -> CodeType | None:
    """What runs a module's forward; None without torch."""
    torch: Any = sys.modules.get("torch")
    return torch.nn.Module._call_impl.__code__ if torch is not None else None


def kind(path: str) -> str:
    """Whose code a file holds, by its absolute path: USER, LIBRARY, or PASSED_OVER for torch, CuPy, advisor and Python itself."""
    if path.startswith(("<", _ADVISOR, *_folders())):
        return PASSED_OVER
    if path.startswith(_PACKAGES) or _PACKAGES_FOLDER.match(path):
        return LIBRARY
    return PASSED_OVER if path.startswith(_STDLIB) else USER


def shown(path: str) -> str:
    """A path as it is told: a library's from its package on, others relative to where the process was started, if below."""
    for folder in _PACKAGES:
        if path.startswith(folder):
            return path[len(folder) :]
    return _PACKAGES_FOLDER.sub("", path).removeprefix(_STARTED_IN)


def place(path: str, line: int) -> str:
    """A line as it is told: "train.py:42"; in a notebook by its cell among those of code, and the line there: "train.ipynb cell 3:2"."""
    notebook = _NOTEBOOK.match(path)
    above = [n for n in _cells(path) if n < line] if notebook else []
    if notebook is None or not above:
        return f"{shown(path)}:{line}"
    name = f"{notebook['name']}.ipynb " if notebook["name"] != SESSION else ""
    return f"{name}cell {len(above)}:{line - above[-1]}"


@lru_cache(maxsize=64)
def _cells(path: str) -> tuple[int, ...]:
    """The lines of a notebook's script above which a cell begins."""
    try:
        with open(path, encoding="utf-8") as script:
            return tuple(n for n, text in enumerate(script, 1) if text.startswith(CELL))
    except OSError:
        return ()


class Lines:
    """Finds source lines; remembers each file's kind, so that a look costs a dictionary's read a frame."""

    def __init__(self) -> None:
        self._files: dict[str, tuple[str, str]] = {}  # co_filename → kind, path to show
        self._notebooks: set[str] = set()  # co_filename of notebooks' scripts
        self._forward = _forward()

    def of(self, frame: FrameType | None) -> str:
        """ "train.py:42" for a call that `frame` makes; "" where all is torch's.

        The innermost line inside the innermost running module, else the user's innermost line and, where it went through a
        library, that one's: "train.py:42 via lightning/pytorch/trainer/call.py:48".
        """
        library = ""
        while frame is not None:
            code = frame.f_code
            if library and code is self._forward:
                return library
            whose, path = self.whose(code.co_filename)
            if whose == USER:
                line = self._line(code.co_filename, path, frame.f_lineno)
                return f"{line} via {library}" if library else line
            if whose == LIBRARY and not library:
                library = f"{path}:{frame.f_lineno}"
            frame = frame.f_back
        return library

    def _line(self, filename: str, path: str, line: int) -> str:
        return place(os.path.abspath(filename), line) if filename in self._notebooks else f"{path}:{line}"

    def users(self, frame: FrameType | None) -> str:
        """The user's innermost line; a library's where no code of the user's is running."""
        return self.of(frame).partition(" via ")[0]

    def call(self, frame: FrameType | None) -> str:
        """The user's innermost line, and which call of it: two of one line are told apart."""
        own = frame
        while own is not None and self.whose(own.f_code.co_filename)[0] != USER:
            own = own.f_back
        return f"{self.users(frame)}+{own.f_lasti if own is not None else 0}"

    def whose(self, filename: str) -> tuple[str, str]:
        """A code's file: its kind, and its path as it is shown."""
        known = self._files.get(filename)
        if known is None:
            path = filename if filename.startswith("<") else os.path.abspath(filename)
            known = self._files[filename] = (kind(path), shown(path))
            if _NOTEBOOK.match(path):
                self._notebooks.add(filename)
        return known


_lines = Lines()


def user_line() -> str:
    """The caller's line, as `Lines.users` tells it."""
    return _lines.users(sys._getframe(1))
