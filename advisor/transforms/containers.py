"""Lists and dictionaries of a function's own that may hold numbers to come: those of which it gives no value away."""

from __future__ import annotations

import ast
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set
from typing import Any

from advisor.transforms.source import Resolve
from advisor.transforms.uses import only_looks

_SUMS = frozenset({"mean", "sum", "median", "std", "var", "array", "asarray", "nanmean"})


class Containers:
    """Those of one scope.

    Args:
        own: its nodes; `parents` has what stands around each.
        foreign: names that live elsewhere too.
        resolve: what names stand for.
    """

    def __init__(
        self, own: Sequence[ast.AST], parents: Mapping[ast.AST, ast.AST], foreign: Set[str], resolve: Resolve
    ) -> None:
        self._own, self._parents, self._foreign, self._resolve = own, parents, foreign, resolve

    def kept(self, node: ast.AST) -> bool:
        """Whether `node` is put into a list of the function's own of which it only makes means, sums and counts."""
        call = self._parents.get(node)
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "append"
            and call.args == [node]
            and isinstance(self._parents.get(call), ast.Expr)
            and isinstance(call.func.value, ast.Name)
        ):
            return False
        name = call.func.value.id
        if name in self._foreign or type(self._resolve(call.func.value)) is not list:
            return False
        loads = [n for n in self._own if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return all(map(self._sums_up, loads))

    def added_up(self, top: ast.AST) -> bool:
        """Whether `top` is added to an entry of a dictionary of the function's own, whose entries are then only computed with or shown."""
        parent = self._parents.get(top)
        if not (
            isinstance(parent, ast.AugAssign)
            and parent.value is top
            and isinstance(parent.target, ast.Subscript)
            and isinstance(parent.target.value, ast.Name)
        ):
            return False
        name = parent.target.value.id
        if name in self._foreign or type(self._resolve(parent.target.value)) not in (dict, defaultdict):
            return False
        loads = [n for n in self._own if isinstance(n, ast.Name) and n.id == name and isinstance(n.ctx, ast.Load)]
        return all(map(self._shows_entries, loads))

    def _shows_entries(self, name: ast.AST) -> bool:
        """Whether a dictionary is used there without one of its values being given away."""
        entry = self._parents[name]
        if isinstance(entry, ast.Compare):
            return name in entry.comparators and all(isinstance(op, (ast.In, ast.NotIn)) for op in entry.ops)
        if isinstance(entry, ast.For) and entry.iter is name:
            return True
        if not (isinstance(entry, ast.Subscript) and entry.value is name):
            return False
        if not isinstance(entry.ctx, ast.Load):
            return True
        above = self._parents[entry]
        looks = isinstance(above, ast.Call) and entry in above.args and only_looks(above.func)
        return looks or isinstance(above, (ast.BinOp, ast.UnaryOp, ast.FormattedValue))

    def _sums_up(self, name: ast.AST) -> bool:
        """Whether a list is used there without one of its values being given away."""
        node = name
        above = self._parents[node]
        if isinstance(above, ast.Attribute) and above.attr in ("append", "clear"):
            return True
        if isinstance(above, ast.Subscript) and isinstance(above.slice, ast.Slice):
            node, above = above, self._parents[above]
        if isinstance(above, (ast.If, ast.While)) and above.test is node:
            return True
        if not (isinstance(above, ast.Call) and above.args[:1] == [node]):
            return False
        if isinstance(above.func, ast.Name):
            return above.func.id in ("sum", "len") and self._resolve(above.func) is None
        numpy: Any = sys.modules.get("numpy")
        found = isinstance(above.func, ast.Attribute) and above.func.attr in _SUMS
        return found and numpy is not None and self._resolve(above.func.value) is numpy  # type: ignore[attr-defined]  # `found` says that it is an attribute
