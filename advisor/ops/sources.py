"""Kernel sources as one string each, with a hash that covers every included file. Needs neither torch nor CuPy."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path

from advisor.core import architectures
from advisor.core.errors import AdvisorError
from advisor.resources import kernels_dir

# A kernel and its parameters. Those between `#if MACRO` and `#endif` are there where the macro is set, and not to 0.
_ENTRY = re.compile(r"__global__\s+void\s+(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?(\w+)\s*\(([^)]*)\)")
_CONDITION = re.compile(r"#if (\w+)\n(.*?)#endif", re.DOTALL)
_COMMENT = re.compile(r"//.*")
# Letters of the module `struct` for the types of numbers.
_LETTERS = {"int": "i", "i64": "q", "unsigned int": "I", "float": "f", "double": "d"}
ADDRESS = "P"
_INCLUDE = re.compile(r'^\s*#include "([\w./]+)"\s*$', re.MULTILINE)


@cache
def source(name: str) -> str:
    """The text of `kernels/<name>` with every `#include "x.cuh"` replaced, once, by `kernels/include/x.cuh`.

    CuPy's cache key covers the source string but not the files it includes; inlining closes that hole.

    Raises:
        AdvisorError: when the file or an include is missing.
    """
    return inlined(kernels_dir() / name, (kernels_dir() / "include",))


def inlined(file: Path, folders: tuple[Path, ...]) -> str:
    """The text of `file` with every `#include "x"` replaced, once, by the first `x` that one of `folders` has.

    Raises:
        AdvisorError: when the file or an include is missing.
    """
    seen: set[str] = set()

    def read(path: Path) -> str:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError:
            raise AdvisorError(
                f"kernel source {path} is missing", expected="a complete installation", fix="Reinstall cnn-advisor."
            ) from None

        def insert(match: re.Match[str]) -> str:
            include = match.group(1)
            if include in seen:
                return ""
            seen.add(include)
            return read(next((f / include for f in folders if (f / include).is_file()), folders[-1] / include))

        return _INCLUDE.sub(insert, text)

    return read(file)


@cache
def included(name: str) -> frozenset[str]:
    """The headers that `kernels/<name>` includes, and those that they do."""
    found: set[str] = set()
    ahead = [kernels_dir() / name]
    while ahead:
        for header in _INCLUDE.findall(ahead.pop().read_text(encoding="utf-8")):
            if header not in found:
                found.add(header)
                ahead.append(kernels_dir() / "include" / header)
    return frozenset(found)


@cache
def entries(name: str) -> dict[str, str]:
    """The kernels of a source, each with its parameters as they are written."""
    return dict(_ENTRY.findall(source(name)))


@cache
def parameters(name: str, entry: str, defines: tuple[tuple[str, int], ...]) -> str:
    """What an entry of a source takes, as `types`."""
    return types(entries(name)[entry], dict(defines))


def types(written: str, defines: Mapping[str, int]) -> str:
    """Parameters as they are written, a letter each as the module `struct` has them: ADDRESS for a pointer, and for a struct too."""
    text = _CONDITION.sub(lambda found: found[2] if defines.get(found[1]) else "", _COMMENT.sub("", written))
    found = [one.rsplit(None, 1)[0].strip() for one in text.split(",") if one.strip()]
    return "".join(_LETTERS.get(type_, ADDRESS) for type_ in found)


def target(name: str) -> tuple[str, ...]:
    """Compiler options for a source with instructions that one architecture alone has; none for another."""
    alone = [row.sm for row in architectures.ROWS if row.warpgroups] if "warpgroups" in needs(name) else []
    return tuple(f"-arch=sm_{sm}a" for sm in alone)


# Headers whose functions not every architecture has, and what they need (core/architectures.py).
NEEDED_BY = {
    "cluster.cuh": "clusters",
    "mbarrier.cuh": "bulk_copies",
    "tensor_map.cuh": "bulk_copies",
    "wgmma.cuh": "warpgroups",
}
OVERLAP = "overlap.cuh"


@cache
def needs(name: str) -> frozenset[str]:
    """What an architecture must have to run this source: features of core/architectures.py."""
    return frozenset(NEEDED_BY[header] for header in included(name) & NEEDED_BY.keys())


def lacks(name: str, arch: int) -> str:
    """Why this architecture (90 for sm_90) cannot run this source; empty where it can."""
    row = architectures.of(arch)
    return next((reason for feature in sorted(needs(name), reverse=True) if (reason := row.lacks(feature))), "")


def overlaps(name: str) -> bool:
    """Whether every kernel of the source waits for the one ahead of it itself (include/overlap.cuh), so that it may be launched early."""
    return OVERLAP in included(name)


def sha256(*names: str) -> str:
    """Hash of these sources, one after the other: what benchmark results and plans are tied to."""
    return hashlib.sha256("".join(map(source, names)).encode()).hexdigest()


def all_names() -> tuple[str, ...]:
    """Every kernel source, as `<family>/<file>.cu`, sorted."""
    root = kernels_dir()
    return tuple(sorted(path.relative_to(root).as_posix() for path in root.glob("*/*.cu")))
