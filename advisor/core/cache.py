"""The user's cache folder."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

# Where a notebook's cells are kept as a script, in the cache folder; and the script's name where they are those of a running
# session, which has no file.
NOTEBOOKS, SESSION = "notebooks", "cell"
_CELL = re.compile(rf"[\\/]{NOTEBOOKS}[\\/][0-9a-f]{{16}}[\\/]{SESSION}\.py$")


def is_cell(script: str) -> bool:
    """Whether it is the script that was made of a cell of a running notebook: nobody starts it by its path."""
    return bool(_CELL.search(script))


def told_as(script: str) -> str:
    """The script as people know it: the path of a cell's script says nothing to them."""
    return "a cell of a notebook" if is_cell(script) else script


def cache_dir() -> Path:
    """The user's cache folder for advisor, there and private (0700) where the disk allows it."""
    root = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    folder = Path(root) / "advisor"
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
    return folder
