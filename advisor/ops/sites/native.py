"""Compiles calls.cpp with the user's C++ compiler, once a torch and a Python, and loads it. Without one everything runs in Python."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from functools import lru_cache
from importlib.machinery import ExtensionFileLoader
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

from advisor.core import locks
from advisor.core.cache import cache_dir
from advisor.core.errors import first_line
from advisor.ops import tensor_map

SWITCH = "ADVISOR_NATIVE"  # 0 keeps everything in Python
_SOURCE = Path(__file__).with_name("calls.cpp")
_COMPILERS = ("c++", "g++", "clang++")
_FLAGS = ("-O2", "-std=c++20", "-fPIC", "-shared", "-w")
_LIBRARIES = ("torch_python", "torch", "torch_cpu", "c10")
_SECONDS = 300


def unavailable() -> str:
    """Why calls are not replayed here; empty where they are. Compiles at first."""
    _, reason = _loaded()
    return reason


def module() -> Any:
    """The compiled calls.cpp, or None."""
    found, _ = _loaded()
    return found


def pending() -> bool:
    """Whether the next use will compile, for half a minute: it is the first, and nothing lies in the cache."""
    return not _loaded.cache_info().currsize and not _hindrance() and not _library().is_file()


def _hindrance() -> str:
    """Why it is not even tried here."""
    if os.environ.get(SWITCH) == "0":
        return f"{SWITCH}=0"
    if os.name == "nt":
        return "on Windows it is not built"
    if not _compiler():
        return f"no C++ compiler: neither CXX names one nor is there {', '.join(_COMPILERS)}"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").is_file():
        return "Python's headers are not installed"
    try:
        _library().is_file()
    except (OSError, RuntimeError) as error:  # another user's, or there is no home
        return f"the cache folder cannot be read: {first_line(error)}"
    return ""


@lru_cache(maxsize=1)
def _loaded() -> tuple[Any, str]:
    if reason := _hindrance():
        return None, reason
    try:
        return _load(_built(_compiler())), ""
    except (OSError, ImportError, subprocess.SubprocessError) as error:
        told = getattr(error, "stderr", "") or str(error)
        errors = [line for line in told.splitlines() if "error" in line]
        return None, f"calls.cpp does not build: {errors[0] if errors else first_line(error)}"


def _compiler() -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    if named and shutil.which(named[0]):
        return named
    return [found for name in _COMPILERS if (found := shutil.which(name))][:1]


def _built(compiler: list[str]) -> Path:
    """The shared library: from the cache folder, or made there, by one process while others wait for it."""
    made = _library()
    if not made.is_file():
        with locks.exclusive(locks.of_user("native")):
            if not made.is_file():
                _make(compiler, made)
    return made


def _make(compiler: list[str], made: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    includes = (root / "include", root / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    name = _name()
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    command = [*compiler, *_FLAGS, abi, f"-DADVISOR_NATIVE={name}", *(f"-I{path}" for path in includes)]
    if sys.platform == "darwin":
        command += ["-undefined", "dynamic_lookup"]
    links = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", *(f"-l{library}" for library in _LIBRARIES)]
    made.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(suffix=".so", dir=made.parent)
    os.close(handle)
    try:
        subprocess.run(
            [*command, str(_SOURCE), *links, "-o", temporary],
            check=True,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
        Path(temporary).replace(made)
    finally:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()


def _library() -> Path:
    """Where it is kept."""
    return cache_dir() / "native" / f"{_name()}{sysconfig.get_config_var('EXT_SUFFIX')}"


@lru_cache(maxsize=1)
def _name() -> str:
    """Of the library, and so of the module: by all that it depends on."""
    import torch

    of = (_SOURCE.read_text(encoding="utf-8"), torch.__version__, torch.__file__, sys.version, str(_FLAGS))
    return "calls_" + hashlib.sha256("\0".join(of).encode()).hexdigest()[:16]


def _load(path: Path) -> Any:
    name = _name()
    spec = spec_from_file_location(name, path, loader=ExtensionFileLoader(name, str(path)))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no extension module")
    loaded = module_from_spec(spec)
    spec.loader.exec_module(loaded)
    loaded.use(tensor_map.encoder())
    return loaded


if __name__ == "__main__":  # beside something else that takes a while: trials/beforehand.py
    module()
