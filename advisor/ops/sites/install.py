"""Puts sites in the place of the bundled operations' functions that a rewritten graph calls."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from advisor.ops import nvrtc
from advisor.ops.sites import native
from advisor.ops.sites.recording import recording, state

MOST_KNOWN = 8  # recordings a site
MOST_REFUSED = 4
OPERATION = "operation"  # in a node's `meta`
_numbers = itertools.count()
# How many calls were recorded to be replayed, and why others were not, by function: read by tests and for debugging.
recorded: Counter[str] = Counter()
refused: Counter[tuple[str, str]] = Counter()


def install(graph: fx.Graph) -> None:
    """Put sites in, where they can be compiled at all. Each of our nodes remembers the operation, and names of the last arguments."""
    ours = [node for node in graph.nodes if node.op == "call_function" and _is_ours(node.target)]
    for node in ours:
        node.meta[OPERATION] = node.target, ()
    nodes = [node for node in ours if _is_flat(node)]
    if not nodes or native.module() is None:
        return
    for node in nodes:
        names = tuple(node.kwargs)
        node.meta[OPERATION] = node.target, names
        node.target = site(node.target, names)
        node.args, node.kwargs = (*node.args, *node.kwargs.values()), {}


def site(function: Callable[..., Any], names: tuple[str, ...] = ()) -> Callable[..., Any]:
    """`function`, called with positional arguments, of which the last have these names."""
    made = native.module().Site(f"{function.__name__}_{next(_numbers)}", _Miss(function, names), state)
    found: Callable[..., Any] = made.function()
    return found


def _is_ours(target: Any) -> bool:
    module = getattr(target, "__module__", None) or ""
    return module.startswith("advisor.ops.") and module.endswith(".api")


def _is_flat(node: fx.Node) -> bool:
    """Whether its arguments are values, lists or tuples of values, and constants."""
    found: set[fx.Node] = set()
    for argument in (*node.args, *node.kwargs.values()):
        listed = argument if isinstance(argument, (list, tuple)) else (argument,)
        values = [one for one in listed if isinstance(one, fx.Node)]
        if values and len(values) < len(listed):
            return False
        found.update(values)
    return found == set(node.all_input_nodes)


class _Miss:
    """What a site calls where no recording fits: the operation itself, recorded while that may be of use."""

    def __init__(self, function: Callable[..., Any], names: tuple[str, ...]) -> None:
        self._function, self._names = function, names
        self._known = self._refused = 0

    def __call__(self, site: Any, *arguments: Any) -> Any:
        done = self._known >= MOST_KNOWN or self._refused >= MOST_REFUSED
        if done or torch._C._len_torch_dispatch_stack() or nvrtc.transformed():  # in which nothing is replayed
            return self._run(arguments)
        with recording(arguments) as made:
            result = self._run(arguments)
        if made.finished(result):
            site.add(made.recorded)
            self._known += 1
            recorded[self._function.__name__] += 1
        else:
            self._refused += 1
            refused[self._function.__name__, made.refused] += 1
        return result

    def _run(self, arguments: tuple[Any, ...]) -> Any:
        if not self._names:
            return self._function(*arguments)
        count = len(arguments) - len(self._names)
        return self._function(*arguments[:count], **dict(zip(self._names, arguments[count:], strict=True)))
