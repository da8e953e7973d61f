"""The syntax tree of running code, and what names in it stand for."""

from __future__ import annotations

import ast
import functools
import inspect
import sysconfig
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from types import CodeType, FrameType, FunctionType, ModuleType
from typing import Any

from advisor.transforms.patch import is_script

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
Resolve = Callable[[ast.expr], Any]
"""What a name, an attribute or an entry of a dictionary stands for in a scope; None where that cannot be told without running code."""

NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_DEEPEST = 3  # functions that functions call
_STDLIB = sysconfig.get_path("stdlib")


@functools.lru_cache(maxsize=256)
def scope_of(code: CodeType) -> Scope | None:
    """The syntax tree that `code` was compiled from; None when its file is gone, edited since, or it is no plain function."""
    try:
        with open(code.co_filename, "rb") as stream:
            source = stream.read()
        tree = ast.parse(source)
        if not any(
            _same(code, candidate) for candidate in _codes(compile(source, code.co_filename, "exec", dont_inherit=True))
        ):
            return None
    except (OSError, SyntaxError, ValueError):
        return None
    if code.co_name == "<module>":
        return tree
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == code.co_name:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            if first == code.co_firstlineno:
                return node
    return None


def lines_of(node: ast.stmt) -> set[int]:
    """All lines of a statement."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


def own_nodes(scope: Scope) -> Iterator[ast.AST]:
    """All nodes of a scope, those of nested functions and classes left out."""
    waiting: list[ast.AST] = [scope]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, NESTED)]


def own_attribute(node: ast.AST, owner: str) -> bool:
    """Whether this is an attribute of what is called `owner`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner


def resolving(*spaces: Mapping[str, Any]) -> Resolve:
    """Names are looked up in these, one after the other. No code of the script's runs: no property, no `__getattr__`."""

    def resolve(node: ast.expr) -> Any:
        if isinstance(node, ast.Name):
            return next((space[node.id] for space in spaces if node.id in space), None)
        if isinstance(node, ast.Attribute):
            owner = resolve(node.value)
            found = getattr(owner, "__dict__", {}).get(node.attr) if owner is not None else None
            if found is None and owner is not None and not isinstance(owner, ModuleType):
                found = inspect.getattr_static(type(owner), node.attr, None)
            return None if isinstance(found, property) else found
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            owner = resolve(node.value)
            return dict.get(owner, node.slice.value) if isinstance(owner, dict) else None
        return None

    return resolve


def of_frame(frame: FrameType) -> Resolve:
    """As the names of a running function."""
    return resolving(frame.f_locals, frame.f_globals)


def called(scope: Scope, resolve: Resolve, deepest: int = _DEEPEST) -> Iterator[tuple[FunctionType, Resolve]]:
    """The script's own functions that a scope calls, and those that these call, as far as names tell; each once."""
    seen: set[CodeType] = set()
    waiting = [(scope, resolve, deepest)]
    while waiting:
        within, known, depth = waiting.pop()
        for node in own_nodes(within):
            if not isinstance(node, ast.Call):
                continue
            found = known(node.func)
            function = found.__func__ if isinstance(found, (staticmethod, classmethod)) else found
            if not isinstance(function, FunctionType) or function.__code__ in seen or not own(function.__code__):
                continue
            seen.add(function.__code__)
            owner = known(node.func.value) if isinstance(node.func, ast.Attribute) else None
            bound = {} if owner is None or isinstance(found, staticmethod) else _bound(function, owner)
            below = resolving(bound, function.__globals__)
            yield function, below
            body = scope_of(function.__code__)
            if body is not None and depth > 1:
                waiting.append((body, below, depth - 1))


def _bound(function: FunctionType, owner: Any) -> dict[str, Any]:
    """The first argument of a method."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    return {names[0]: owner} if names and not isinstance(owner, ModuleType) else {}


def own(code: CodeType) -> bool:
    """Whether this is the script's own code, and no installed library's."""
    parts = PurePath(code.co_filename).parts
    installed = code.co_filename.startswith(_STDLIB) or "site-packages" in parts or "dist-packages" in parts
    return is_script(code.co_filename) and not installed


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same(left: CodeType, right: CodeType) -> bool:
    return (left.co_name, left.co_firstlineno, left.co_code) == (right.co_name, right.co_firstlineno, right.co_code)
