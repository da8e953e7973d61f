"""A captured graph as plain values, and back: names of torch's functions, numbers, and which node takes which. Nothing is unpickled.

Functions are told by the path that leads to them from torch, operator or math; a graph with others (a script's own operation, a part that
is a graph itself) is none of these.
"""

from __future__ import annotations

import builtins
import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

# `builtins` for the few that Dynamo leaves in graphs: a node's name must say which.
_ROOTS: dict[str, Any] = {"torch": torch, "operator": operator, "_operator": operator, "math": math}
_BUILTINS = ("getattr", "len", "max", "min", "sum", "abs", "round", "int", "float")
_NAMED = (torch.dtype, torch.layout, torch.memory_format)


def written(graph: fx.Graph) -> list[dict[str, Any]]:
    """The nodes in order, JSON-ready.

    Raises:
        TypeError: naming what cannot be written.
    """
    return [
        {
            "op": node.op,
            "name": node.name,
            "target": _path(node.target) if node.op == "call_function" else _text(node),
            "args": plain(node.args),
            "kwargs": plain(dict(node.kwargs)),
        }
        for node in graph.nodes
    ]


def read(nodes: list[dict[str, Any]]) -> fx.GraphModule:
    """The graph of `written`'s nodes.

    Raises:
        TypeError: for what `written` does not write.
    """
    graph, known = fx.Graph(), dict[str, fx.Node]()
    for node in nodes:
        target = _found(node["target"]) if node["op"] == "call_function" else node["target"]
        known[node["name"]] = graph.create_node(
            node["op"], target, value(node["args"], known), value(node["kwargs"], known), name=node["name"]
        )
    return fx.GraphModule(torch.nn.Module(), graph)


def plain(given: Any) -> Any:
    """An argument, JSON-ready.

    Raises:
        TypeError: naming what cannot be written.
    """
    if given is None or isinstance(given, (bool, int, str)) or (isinstance(given, float) and math.isfinite(given)):
        return given
    if isinstance(given, fx.Node):
        return {"node": given.name}
    if isinstance(given, float):
        return {"float": repr(given)}
    if isinstance(given, _NAMED):
        return {"torch": str(given).removeprefix("torch.")}
    if isinstance(given, torch.device):
        return {"device": str(given)}
    if isinstance(given, slice):
        return {"slice": [plain(part) for part in (given.start, given.stop, given.step)]}
    if isinstance(given, dict) and all(isinstance(key, str) for key in given):
        return {"dict": {key: plain(entry) for key, entry in given.items()}}
    if isinstance(given, tuple):
        return {"tuple": [plain(part) for part in given]}
    if isinstance(given, list):
        return [plain(part) for part in given]
    if given is Ellipsis:
        return {"ellipsis": True}
    raise TypeError(f"an argument of a kind that is not written: {type(given).__name__}")


def value(told: Any, known: dict[str, fx.Node]) -> Any:
    """What `plain` has told.

    Raises:
        TypeError: for what it does not tell.
    """
    if isinstance(told, list):
        return [value(part, known) for part in told]
    if not isinstance(told, dict):
        return told
    ((kind, inner),) = told.items()
    if kind == "dict":
        return {key: value(entry, known) for key, entry in inner.items()}
    if kind in ("tuple", "slice"):
        return (tuple if kind == "tuple" else _slice)(value(part, known) for part in inner)
    simple: dict[str, Callable[[Any], Any]] = {
        "node": known.get,
        "float": float,
        "device": torch.device,
        "ellipsis": lambda _: Ellipsis,
    }
    if kind == "torch" and isinstance(found := getattr(torch, inner, None), _NAMED):
        return found
    if kind in simple:
        return simple[kind](inner)
    raise TypeError(f"a value of a kind that is not known: {kind}")


def _slice(parts: Any) -> slice:
    return slice(*parts)


def _text(node: fx.Node) -> str:
    if node.op not in ("placeholder", "call_method", "output"):
        raise TypeError(f"a node of the kind {node.op}: {node.target}")
    return str(node.target)


def _path(function: Any) -> str:
    """The path of a function, by which it is found again."""
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        path = f"torch.ops.{function!s}" if not str(function).startswith("torch.ops.") else str(function)
    else:
        path = torch.fx.node._get_qualified_name(function)
    if path.startswith("builtins."):
        path = path.removeprefix("builtins.")
    try:
        same = _follow(path) is function
    except (TypeError, AttributeError):
        same = False
    if not same:
        raise TypeError(f"a function that is not torch's: {path}")
    return path


def _found(path: str) -> Any:
    """The function that `_path` tells so.

    Raises:
        TypeError: for a path that it tells of none.
    """
    function = _follow(path)
    if _path(function) != path:  # a module that torch has imported
        raise TypeError(f"a path to something else: {path}")
    return function


def _follow(path: str) -> Any:
    """What is at a path.

    Raises:
        TypeError: for a path that does not lead from torch, operator or math.
    """
    root, _, rest = path.partition(".")
    if not rest and root in _BUILTINS:
        return getattr(builtins, root)
    if root not in _ROOTS or not rest or "__" in rest:
        raise TypeError(f"a path from elsewhere: {path}")
    return functools.reduce(getattr, rest.split("."), _ROOTS[root])
