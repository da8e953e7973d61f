"""Compiles calls.cpp with the user's C++ compiler, once a torch and a Python, and loads it. Without one everything runs in Python."""

from __future__ import annotations

import hashlib
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from advisor.core import compiled
from advisor.core.errors import first_line
from advisor.ops import tensor_map

_SOURCE = Path(__file__).with_name("calls.cpp")
_LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")


def unavailable() -> str:
    """Why calls are not replayed here; empty where they are. Compiles at first."""
    _, reason = load()
    return reason


def module() -> Any:
    """The compiled calls.cpp, or None."""
    found, _ = load()
    return found


def pending() -> bool:
    """Whether the next use will compile, for half a minute: it is the first, and nothing lies in the cache."""
    return not load.cache_info().currsize and not _hindrance() and not _library().is_file()


def _hindrance() -> str:
    """Why it is not even tried here."""
    if reason := compiled.hindrance():
        return reason
    try:
        _library().is_file()
    except (OSError, RuntimeError) as error:  # another user's, or there is no home
        return f"the cache folder cannot be read: {first_line(error)}"
    return ""


@lru_cache(maxsize=1)
def load() -> tuple[Any, str]:
    if reason := _hindrance():
        return None, reason
    try:
        return _loaded_from(built(find_compiler())), ""
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        errors = [line for line in told.splitlines() if "error" in line]
        return None, f"calls.cpp does not build: {errors[0] if errors else first_line(error)}"


def find_compiler() -> list[str]:
    return compiled.compiler()


def built(compiler: list[str]) -> Path:
    import torch

    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    includes = [f"-I{path}" for path in (root / "include", root / "include/torch/csrc/api/include")]
    links = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{library}" for library in _LIBRARIES)]
    return compiled.built(compiler, _SOURCE, _name(), before=[abi, *includes], behind=links)


def _library() -> Path:
    """Where it is kept."""
    return compiled.library(_name())


@lru_cache(maxsize=1)
def _name() -> str:
    """Of the library, and so of the module: by all that it depends on."""
    import torch

    of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, torch.__file__, sys.version, str(compiled.FLAGS))
    return "calls_" + hashlib.sha256("\0".join(of).encode()).hexdigest()[:16]


def _loaded_from(path: Path) -> Any:
    loaded = compiled.loaded(path, _name())
    loaded.use(tensor_map.encoder())
    return loaded


if __name__ == "__main__":  # beside something else that takes a while: trials/beforehand.py
    import torch

    if torch.version.cuda:
        module()
