"""Extension modules of ours that are compiled with the user's C++ compiler, once, and kept in the cache folder."""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from advisor.core import locks
from advisor.core.cache import cache_dir

SWITCH = "ADVISOR_NATIVE"  # 0 keeps everything in Python
FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-w")
_COMPILERS = ("c++", "g++", "clang++")
_SECONDS = 300


def hindrance() -> str:
    """Why it is not even tried here."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if os.name == "nt":
        return "on Windows it is not built"
    if not compiler():
        return f"no C++ compiler: neither CXX names one nor is there {', '.join(_COMPILERS)}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers are not installed"
    return ""


def compiler() -> list[str]:
    """The command that compiles; empty for none."""
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return named
    return [found for name in _COMPILERS if (found := shutil.which(name))][:1]


def library(name: str) -> Path:
    """Where the module of this name is kept."""
    return cache_dir() / "native" / f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"


def built(
    command: Sequence[str], source: Path, name: str, *, before: Sequence[str] = (), behind: Sequence[str] = ()
) -> Path:
    """The library of this module: from the cache folder, or made there, by one process while others wait for it.

    Args:
        command: the compiler's. before, behind: its arguments before the source and behind it.

    Raises:
        OSError, subprocess.SubprocessError: it cannot be made.
    """
    made = library(name)
    if not made.is_file():
        with locks.exclusive(locks.of_user("native")):
            if not made.is_file():
                words = [*command, *FLAGS, f"-DADVISOR_NATIVE={name}", *before]
                words += [f"-I{sysconfig.get_paths()['include']}"]
                words += ["-undefined", "dynamic_lookup"] if sys.platform == "darwin" else []
                _make([*words, str(source), *behind], made)
    return made


def _make(words: list[str], made: Path) -> None:
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=made.parent)
    os.close(handle)
    try:
        subprocess.run([*words, "-o", temporary], check=True, capture_output=True, text=True, timeout=_SECONDS)
        Path(temporary).replace(made)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def loaded(path: Path, name: str) -> Any:
    """The module.

    Raises:
        ImportError: it is none.
    """
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    made = module_from_spec(spec)
    spec.loader.exec_module(made)
    return made
