"""Where Python keeps compiled modules; and where the processes of a search do, if it keeps none.

A search starts the script ten times and more. Where torch was installed without compiled modules, and they cannot be written
beside their sources (an image made by root, or with PYTHONDONTWRITEBYTECODE), each start compiles some two thousand of them anew:
about 5 of a ResNet-50's 17 s on an H200. The first process of a search then leaves them in the user's cache for the others.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from advisor.core.cache import cache_dir

PREFIX, FORBIDDEN = "PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"


def hindrance() -> str:
    """Why torch's modules are compiled anew at each start; "" where they are kept, will be once imported, or there is no torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return ""
    compiled = Path(importlib.util.cache_from_source(spec.origin))
    if compiled.exists():
        return ""
    if os.environ.get(FORBIDDEN):
        return f"{FORBIDDEN} is set"
    beside = compiled.parent if compiled.parent.exists() else compiled.parent.parent
    return "" if os.access(beside, os.W_OK) else f"{beside} cannot be written"


def variables() -> dict[str, str]:
    """What to set for the processes of a search; nothing where Python keeps compiled modules, or the user says where."""
    folder = cache_dir() / "python"
    if os.environ.get(PREFIX) or not hindrance() or not _private(folder):
        return {}
    return {PREFIX: str(folder), FORBIDDEN: ""}


def _private(folder: Path) -> bool:
    """Whether the folder is there, or can be made, and nobody else may put code into it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = [folder.lstat(), folder.parent.lstat()]
    except OSError:
        return False
    return all(f.st_uid == os.getuid() and not f.st_mode & 0o022 for f in found)
