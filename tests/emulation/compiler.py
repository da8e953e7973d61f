"""CUDA sources of `kernels/` compiled for this machine's CPU, with PTX headers replaced by their emulated twins."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from advisor.ops import sources
from advisor.resources import kernels_dir

HERE = Path(__file__).resolve().parent
INCLUDE = HERE / "include"
BUILTINS = "builtins.cuh"
COMPILER = shutil.which("g++") or shutil.which("clang++")

_FLAGS = ("-std=c++17", "-fPIC", "-shared", "-w", f"-I{INCLUDE}", "-U_FORTIFY_SOURCE")
# A quarter of a small kernel's time would go into looking for libraries to link: what it calls is the runtime's, which brings those along.
_UNLINKED = "-nostdlib"
# The compiler reports each access to the runtime (include/checker.h), which is in the place of the library that looks for races.
_REPORTED = ("-fsanitize=thread", "--param=tsan-instrument-func-entry-exit=0")
# Kernels pun types through pointers, and may not be contracted where nvcc would not. An index past a local or shared
# array and a misaligned vector access trap; a register that nobody set holds a huge number.
_KERNEL_FLAGS = (
    "-O1",
    "-fno-strict-aliasing",
    "-fno-ipa-reference",
    "-ffp-contract=off",
    "-fsanitize=bounds,alignment",
    "-fsanitize-undefined-trap-on-error",
    "-ftrivial-auto-var-init=pattern",
)
_ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(")
_CLUSTERED = re.compile(r"\bCLUSTERED __global__")
_SHARED = re.compile(r"__shared__\s+(?=(__align__)?)((?:unsigned\s+)?[\w:]+)?")
_DYNAMIC = re.compile(
    r"extern\s+__shared__\s+(?:__align__\(\s*\d+\s*\)\s*)?([\w:]+(?:\s+[\w:]+)*?)\s+(\w+)\s*\[\s*\]\s*;"
)


class EmulationError(AssertionError):
    """A kernel did what it must not do."""


@cache
def _folder() -> Path:
    """Where compiled kernels are kept: this user's alone, since what lies there is loaded."""
    folder = Path(tempfile.gettempdir()) / f"advisor-emulation-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    facts = folder.lstat()
    if facts.st_uid != os.getuid() or facts.st_mode & 0o077 or folder.is_symlink():
        return Path(tempfile.mkdtemp(prefix="advisor-emulation-"))
    return folder


@cache
def _supported(flag: str) -> bool:
    check = [str(COMPILER), flag, "-x", "c++", "-E", os.devnull, "-o", os.devnull]
    return subprocess.run(check, capture_output=True, check=False).returncode == 0


def _usable(flags: tuple[str, ...]) -> tuple[str, ...]:
    return (*_FLAGS, *(f for f in flags if f.startswith("-D") or _supported(f)))


def _key(text: str, flags: tuple[str, ...]) -> str:
    parts = [text, " ".join(flags), str(COMPILER), *(p.read_text() for p in sorted(INCLUDE.iterdir()))]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _compiled(made: Path, command: list[str], text: str = "") -> Path:
    """`made`, unless it is there compiled by this command, which reads `text`."""
    if made.is_file():
        return made
    with made.with_name(f"{made.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be at it
        if not made.is_file():
            making = made.with_name(f"{made.name}.{os.getpid()}")
            done = subprocess.run(
                [*command, "-o", str(making)], input=text, capture_output=True, text=True, check=False
            )
            if done.returncode:
                raise EmulationError(f"the emulated source does not compile:\n{done.stderr[:4000]}")
            making.replace(made)
    return made


@cache
def _headers_ahead(kernel: tuple[str, ...] = _KERNEL_FLAGS) -> tuple[str, ...]:
    """Flags by which g++ finds BUILTINS compiled ahead: it is half of what a small kernel takes. Other flags than a kernel's pass it by."""
    if Path(str(COMPILER)).name != "g++":
        return ()
    flags = _usable(kernel)
    folder = _folder() / f"headers-{_key('', flags)}"
    folder.mkdir(mode=0o700, exist_ok=True)
    _compiled(folder / f"{BUILTINS}.gch", [str(COMPILER), *flags, "-x", "c++-header", str(INCLUDE / BUILTINS)])
    return (f"-I{folder}",)


def _build(text: str, flags: tuple[str, ...]) -> Path:
    """The shared library of this C++ text, compiled once for equal text, flags and emulation headers."""
    flags = _usable(flags)
    ahead = _headers_ahead((*_KERNEL_FLAGS, *_REPORTED) if set(_REPORTED) <= set(flags) else _KERNEL_FLAGS)
    command = [str(COMPILER), *ahead, *flags, "-x", "c++", "-"]
    return _compiled(_folder() / f"{_key(text, flags)}.so", command, text)


@cache
def runtime() -> ctypes.PyDLL:
    """The scheduler. Loaded with its names visible, since kernels are linked against it; keeps the GIL while it runs."""
    return ctypes.PyDLL(str(_build((HERE / "runtime.cpp").read_text(), ("-O2",))), mode=ctypes.RTLD_GLOBAL)


_ZONE = "emulated_zone_"  # begins the names of what lies between shared arrays


def _apart(source: str) -> str:
    """The source with 17 bytes of nobody's before each shared array, and each aligned as its declaration says and no better.

    A C++ compiler would align them all for vectors; nvcc does not.
    """
    number = itertools.count()

    def declared(found: re.Match[str]) -> str:
        zone = f'static __attribute__((section("emulated_shared"), used)) char {_ZONE}{next(number)}[17];'
        own = "" if found[1] else f"__attribute__((aligned(alignof({found[2]})))) "
        return f"{zone} __shared__ {own}{found[2] or ''}"

    first, last = (
        f'static __attribute__((section("emulated_shared"), used, aligned(16))) char {_ZONE}{name}[{size}];\n'
        for name, size in (
            ("first", 16),
            ("last", 17),
        )  # so that in either order what follows begins at no multiple of more than it must
    )
    return first + _SHARED.sub(declared, source) + last


class Module:
    """One source with one set of macros, loaded."""

    def __init__(self, source: str, defines: Mapping[str, int], checked: bool = False) -> None:
        runtime()
        self.checked = checked
        self.entries = tuple(dict.fromkeys(_ENTRY.findall(source)))
        self.cluster = int(defines["CLUSTER"]) if _CLUSTERED.search(source) else 1
        body = _apart(_DYNAMIC.sub(r"\1* const \2 = (\1*)emulation::dynamic_shared();", source))
        exports = "".join(f"EMULATED({entry})\n" for entry in self.entries)
        # On lines of their own: line n of `text` is what a fault names.
        self.text = f'#include "{BUILTINS}"\nnamespace {{\n{body}\n}}\n{exports}EMULATED_SHARED()\n'
        reported = _REPORTED if checked else ()
        self._flags = (
            *_KERNEL_FLAGS,
            *reported,
            _UNLINKED,
            *(f"-D{name}={value}" for name, value in sorted(defines.items())),
        )
        self.path = _build(self.text, self._flags)
        self.library = ctypes.PyDLL(str(self.path))
        for edge in (self.library.emulated_shared_begin, self.library.emulated_shared_end):
            edge.restype = ctypes.c_void_p

    def static_shared(self, entry: str) -> int:
        """Bytes of static shared memory that a launch of this entry takes."""
        return sum(size for _, size in self.shared_arrays(entry))

    def shared_arrays(self, entry: str) -> list[tuple[int, int]]:
        """Begin in the static section and bytes of each array there: not what other entries of the source have in theirs."""
        begin, end = (_symbol(self.path, f"__{edge}_emulated_shared") for edge in ("start", "stop"))
        others = tuple(f"_ZZ{len(name)}{name}E" for name in self.entries if name != entry)
        found = (v for v in _variables(self.path) if begin <= v[1] < end and not v[0].startswith(others))
        return [(at - begin, size) for name, at, size in found if _ZONE not in name]

    def parameters(self, entry: str) -> tuple[str, ...]:
        """The entry's parameters, each as kind and size: "p8", "c8" (const pointer), "i4", "f4" …"""
        get = getattr(self.library, f"parameters_of_{entry}")
        get.restype = ctypes.c_char_p
        return tuple(get().decode().rstrip(",").split(","))

    def line_at(self, code: int) -> str:
        """The source line at an address inside the library; empty when it is not known."""
        tool = shutil.which("addr2line")
        function = ctypes.cast(self.library.emulated_shared_begin, ctypes.c_void_p).value or 0
        offset = code - (function - _symbol(self.path, "emulated_shared_begin"))
        if tool is None or offset < 0:
            return ""
        # The same code with its lines written beside, which takes half as long again to compile: made for a fault alone.
        described = _build(self.text, (*self._flags, "-g1"))
        found = subprocess.run([tool, "-e", str(described), hex(offset)], capture_output=True, text=True, check=False)
        name, _, number = found.stdout.strip().partition(":")
        lines = self.text.splitlines()
        if not name.endswith("<stdin>") or not number.split()[0].isdigit() or int(number.split()[0]) > len(lines):
            return ""
        return lines[int(number.split()[0]) - 1].strip()


@cache
def _symbols(library: Path) -> list[tuple[str, int, int]]:
    """Of a shared library's symbols: name, address in the file, bytes (0 where it has none). Read once: each look takes a process."""
    found = subprocess.run(["nm", "-S", str(library)], capture_output=True, text=True, check=False)
    lines = [line.split() for line in found.stdout.splitlines()]
    return [(w[-1], int(w[0], 16), int(w[1], 16) if len(w) == 4 else 0) for w in lines if len(w) in (3, 4)]


def _symbol(library: Path, name: str) -> int:
    """Where it lies in the library; 0 for one that is not there."""
    return next((at for found, at, _ in _symbols(library) if found == name), 0)


def _variables(library: Path) -> list[tuple[str, int, int]]:
    """Variables of functions: mangled name, address in the file, bytes."""
    return [symbol for symbol in _symbols(library) if symbol[2] and symbol[0].startswith("_ZZ")]


@cache
def module(name: str, defines: tuple[tuple[str, int], ...], checked: bool = False) -> Module:
    """`kernels/<name>` with these macros; `checked`: as one whose accesses are all looked at."""
    text = sources.inlined(kernels_dir() / name, (INCLUDE, kernels_dir() / "include"))
    return Module(text, dict(defines), checked)
