"""Other libraries that compute on CuPy's arrays: whose functions a script has taken from them, nobody sees called."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

UNSEEN = ("cupyx.", "cuml", "cudf", "cuquantum", "numba.cuda")
# Who may import these for themselves: CuPy loads parts of cupyx when they are first needed.
_OWN = ("cupy", "cupyx", "advisor", *(name.split(".")[0] for name in UNSEEN))


def loaded_beside() -> set[str]:
    """Those modules that are imported by now."""
    return {name for name in sys.modules if name.startswith(UNSEEN)}


def around(name: str) -> set[str]:
    """A module, those that it is in, and those in it that are imported by now."""
    parts = name.split(".")
    above = {".".join(parts[:n]) for n in range(1, len(parts) + 1)}
    return above | {found for found in loaded_beside() if found.startswith(name + ".")}


def used_by_script(names: Iterable[str]) -> list[str]:
    """Of these modules those that other code than the libraries' own holds, takes something from, or names in a function."""
    wanted = sorted(names)
    if not wanted:
        return []
    held, words = _held(), _words()
    return [
        name
        for name in wanted
        if name in held
        or any(name.startswith(f"{other}.") for other in held)
        or any(set(name.split(".")) <= said for said in words)
    ]


def _others() -> Iterator[ModuleType]:
    for name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and name.split(".")[0] not in _OWN:
            yield module


def _held() -> set[str]:
    """Modules of these that stand in a script's names, and modules that what stands there is from."""
    found = set()
    for module in _others():
        for value in list(vars(module).values()):
            name = value.__name__ if issubclass(type(value), ModuleType) else _source(value)
            if name.startswith(UNSEEN):
                found.add(name)
    return found


def _words() -> list[frozenset[str]]:
    """By function of a script, those that speak of one of these: all names in it."""
    roots = {name.split(".")[0] for name in UNSEEN}
    codes = (code for module in _others() for code in _codes(module))
    found = {frozenset(word for name in code.co_names for word in name.split(".")) for code in codes}
    return [words for words in found if words & roots]


def _codes(module: ModuleType) -> Iterator[CodeType]:
    waiting: list[Any] = []
    for value in list(vars(module).values()):
        if _source(value) != module.__name__:
            continue
        inside = list(vars(value).values()) if issubclass(type(value), type) else [value]
        waiting += [part.__code__ for part in inside if type(part) is FunctionType]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]


def _source(value: Any) -> str:
    """The name of the module that it is from; "" where it tells none."""
    try:
        found = getattr(value, "__module__", "")
    except Exception:  # a lazy object of somebody's
        return ""
    return found if isinstance(found, str) else ""
