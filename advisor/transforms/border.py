"""Where a script hands arrays from CuPy to PyTorch, or back, by way of the host, and nothing else can see what is on the host meanwhile.

Read from the script's source: `torch.from_numpy(cupy.asnumpy(x)).to(device)` in one expression, or by local names that are read once.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch

from advisor.transforms.patch import script_frames
from advisor.transforms.source import Resolve, called, of_frame, own_nodes, scope_of

# Methods of a tensor on the host that may as well be the device's: they round alike.
CASTS = frozenset({"float", "half", "bfloat16", "double", "long", "int", "bool", "contiguous", "pin_memory"})
SENDS = frozenset({"to", "cuda"})
_TAKES_ARRAYS = ("from_numpy", "as_tensor")
_TAKES_HOST = ("asarray", "array")
Sites = dict[tuple[CodeType, int], str]  # a call's code and line → which way it goes
TO_TORCH, TO_CUPY = "CuPy to PyTorch", "PyTorch to CuPy"


def sites(frame: FrameType | None) -> Sites:
    """Lines of calls that begin such a way, in the functions that run the step and in the script's own that these call."""
    found: Sites = {}
    for code, resolve in _functions(frame):
        scope = scope_of(code)
        if scope is None:
            continue
        parents = {child: node for node in ast.walk(scope) for child in ast.iter_child_nodes(node)}
        begins: dict[int, list[str]] = {}  # by line, the ways that begin there; "" for a call that may be looked at
        for node in own_nodes(scope):
            if isinstance(node, ast.Call) and (way := _begins(node, resolve)):
                ends = _ends(node, way, scope, parents, resolve)
                for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                    begins.setdefault(line, []).append(way if ends else "")
        found |= {(code, line): ways[0] for line, ways in begins.items() if len(ways) == 1 and ways[0]}
    return found


def _functions(frame: FrameType | None) -> Iterator[tuple[CodeType, Resolve]]:
    for script in script_frames(frame):
        resolve = of_frame(script)
        yield script.f_code, resolve
        scope = scope_of(script.f_code)
        if scope is not None:
            for function, below in called(scope, resolve):
                yield function.__code__, below


def _begins(call: ast.Call, resolve: Resolve) -> str:
    """Which way a call may begin."""
    if not isinstance(call.func, ast.Attribute):
        return ""
    if call.func.attr == "asnumpy" and len(call.args) == 1 and not call.keywords and _of_cupy(call.func, resolve):
        return TO_TORCH
    if call.args or call.keywords:
        return ""
    return {"get": TO_TORCH, "cpu": TO_CUPY}.get(call.func.attr, "")


def _ends(call: ast.Call, way: str, scope: Any, parents: dict[Any, Any], resolve: Resolve) -> bool:
    """Whether all that uses the call's value is what this module knows."""
    user, value = _user(call, scope, parents)
    if way == TO_CUPY:
        method = _method(user, value, parents)
        if method is None or user.attr != "numpy" or method.args or method.keywords:
            return False
        user, value = _user(method, scope, parents)
        return _is_call(user, value, _TAKES_HOST) and _of_cupy(user.func, resolve)
    if not _is_call(user, value, _TAKES_ARRAYS) or resolve(user.func.value) is not torch:
        return False
    if user.func.attr == "as_tensor":
        return True
    if user.keywords:
        return False
    while True:
        user, value = _user(user, scope, parents)
        method = _method(user, value, parents)
        if method is None or user.attr not in CASTS | SENDS:
            return False
        if user.attr in SENDS:
            return True
        if method.args or method.keywords:
            return False
        user = method


def _user(node: ast.AST, scope: Any, parents: dict[Any, Any]) -> tuple[Any, ast.AST]:
    """What takes the node's value, and the node that stands for it there: a name that it is given to, if that is read once."""
    parent = parents.get(node)
    if not (isinstance(parent, ast.Assign) and parent.value is node and len(parent.targets) == 1):
        return parent, node
    target = parent.targets[0]
    if not isinstance(target, ast.Name) or isinstance(scope, ast.Module):
        return None, node
    uses = [n for n in ast.walk(scope) if isinstance(n, ast.Name) and n.id == target.id]
    reads = [n for n in uses if isinstance(n.ctx, ast.Load)]
    said_elsewhere = any(isinstance(n, (ast.Global, ast.Nonlocal)) and target.id in n.names for n in ast.walk(scope))
    if len(uses) != 2 or len(reads) != 1 or said_elsewhere:
        return None, node
    return parents.get(reads[0]), reads[0]


def _method(user: Any, value: ast.AST, parents: dict[Any, Any]) -> ast.Call | None:
    """The call of a method of the value."""
    call = parents.get(user)
    if isinstance(user, ast.Attribute) and user.value is value and isinstance(call, ast.Call) and call.func is user:
        return call
    return None


def _is_call(user: Any, value: ast.AST, names: tuple[str, ...]) -> bool:
    """Whether the value alone is what a function of one of these names is given, keywords aside."""
    if not isinstance(user, ast.Call) or not isinstance(user.func, ast.Attribute):
        return False
    return len(user.args) == 1 and user.args[0] is value and user.func.attr in names


def _of_cupy(function: ast.Attribute, resolve: Resolve) -> bool:
    module = sys.modules.get("cupy")
    return module is not None and resolve(function.value) is module
