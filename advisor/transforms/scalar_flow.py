"""Where a scalar that `.item()` reads can go in the script's own source: decided on the syntax tree, before anything is changed.

A site is safe to defer when its value only meets arithmetic, comparison, formatting and printing, through local names, or goes into
the `update` method of a meter that does no more than that. Returned, stored, passed on or captured bare: not safe. Operators on
lines that are not listed as lazy make plain numbers, so what leaves through them is a plain number.
"""

from __future__ import annotations

import ast
import math
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from advisor.transforms.containers import Containers
from advisor.transforms.meters import Meter, meter_of
from advisor.transforms.source import NESTED, Resolve, Scope, lines_of
from advisor.transforms.uses import (
    COMPREHENSIONS,
    asks_identity,
    ends,
    is_item,
    is_text,
    only_formats,
    only_looks,
    reads,
)

_SPIES = frozenset({"locals", "vars", "exec", "eval", "globals", "dir"})
_TESTS = frozenset({"isfinite", "isnan", "isinf"})
_COPIES = frozenset({"cpu", "numpy", "tolist"})
COPIES = "copies a tensor to the host, which waits; what is done with it there needs it"


@dataclass(slots=True)
class Flow:
    """Lines of one scope: where to defer, where arithmetic stays deferred, and why other sites are left alone.

    Attributes:
        guards: by line, `if`s that only end the program where a number is not finite. They may be decided later, before the next update.
        returns: whether a deferred value is returned as it is: the callers have to take it as one.
    """

    calls: set[int] = field(default_factory=set)  # first lines of the calls to defer
    sites: set[int] = field(default_factory=set)  # all their lines
    lazy: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    meters: list[Meter] = field(default_factory=list)
    guards: dict[int, ast.If] = field(default_factory=dict)
    returns: bool = False


def analyse(
    scope: Scope, resolve: Resolve, *, line: int = 0, sources: Collection[ast.Call] = (), returns: bool = False
) -> Flow:
    """Sort the `.item()` calls of this scope, nested functions left out.

    Args:
        resolve: what names there stand for.
        line: where it runs now: copies to the host are told in the loop around it.
        sources: calls in the scope that give a deferred value too.
        returns: a value may be returned as it is.
    """
    return _Analysis(scope, resolve, returns).run(line, sources)


class _Analysis:
    def __init__(self, scope: Scope, resolve: Resolve, returns: bool) -> None:
        self.scope = scope
        self.may_return, self.returns = returns, False
        self.resolve = resolve
        self.guards: dict[int, ast.If] = {}
        self._meters: dict[str, Meter | str] = {}
        self.parents: dict[ast.AST, ast.AST] = {}
        self.own: list[ast.AST] = []
        self.foreign: set[str] = set()  # names that nested scopes read, or that live elsewhere
        self._collect(scope)
        self.containers = Containers(self.own, self.parents, self.foreign, resolve)

    def _collect(self, scope: Scope) -> None:
        stack: list[ast.AST] = [scope]
        while stack:
            node = stack.pop()
            self.own.append(node)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.foreign.update(node.names)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                if isinstance(child, (*NESTED, *COMPREHENSIONS)):
                    self.foreign.update(reads(child))
                else:
                    stack.append(child)

    def run(self, line: int, sources: Collection[ast.Call]) -> Flow:
        flow = Flow(guards=self.guards)
        items = [node for node in self.own if isinstance(node, ast.Call) and (is_item(node) or node in sources)]
        if any(isinstance(n, ast.Name) and n.id in _SPIES for n in self.own):
            flow.refused = {node.lineno: "the function looks at its own variables" for node in items}
            return flow
        bad: dict[str, str] = {}
        while True:
            tainted, statements = self._propagate(items, bad)
            found = {name: why for name in tainted if name not in bad and (why := self._misuse(name, bad))}
            if not found:
                break
            bad |= found
        crowded = self._crowded_lines()
        flow.refused |= self._copies(line)
        for node in items:
            why = self._refuses(node, bad, crowded)
            if why:
                flow.refused.setdefault(node.lineno, why)
        refused_lines = set(flow.refused)
        crowded |= self._mixed_lines(items, tainted)
        for node in items:
            statement = self._statement(node)
            if statement is not None and not lines_of(statement) & refused_lines:
                flow.calls.add(node.lineno)
                flow.sites |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
                flow.lazy |= lines_of(statement) - crowded
        for statement in statements:
            if not lines_of(statement) & (refused_lines | crowded):
                flow.lazy |= lines_of(statement)
        flow.returns = self.returns
        flow.meters = [meter for meter in self._meters.values() if isinstance(meter, Meter)]
        return flow

    def _copies(self, line: int) -> dict[int, str]:
        """Lines of the loop around `line` that copy a tensor to the host."""
        loops = [n for n in self.own if isinstance(n, (ast.For, ast.While)) and line in lines_of(n)]
        if not loops:
            return {}
        within = lines_of(max(loops, key=lambda loop: loop.lineno))
        return {
            n.lineno: COPIES
            for n in self.own
            if isinstance(n, ast.Call)
            and isinstance(n.func, ast.Attribute)
            and n.func.attr in _COPIES
            and not n.args
            and n.lineno in within
        }

    def _top(self, node: ast.AST) -> ast.AST:
        """The arithmetic expression around `node`."""
        while isinstance(self.parents.get(node), (ast.BinOp, ast.UnaryOp)) and not self._formats(node):
            node = self.parents[node]
        return node

    def _formats(self, node: ast.AST) -> bool:
        """Whether `node` is what a `"…" % node` formats."""
        parent = self.parents.get(node)
        return (
            isinstance(parent, ast.BinOp)
            and isinstance(parent.op, ast.Mod)
            and parent.right is node
            and (isinstance(parent.left, ast.JoinedStr) or is_text(parent.left))
        )

    def _statement(self, node: ast.AST) -> ast.stmt | None:
        current: ast.AST | None = node
        while current is not None and not isinstance(current, ast.stmt):
            current = self.parents.get(current)
        return current

    def _target(self, node: ast.AST) -> str | None:
        """The local name that the arithmetic around `node` is assigned to."""
        top = self._top(node)
        parent = self.parents.get(top)
        if isinstance(parent, ast.AugAssign) and parent.value is top and isinstance(parent.target, ast.Name):
            return parent.target.id
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1 and isinstance(parent.targets[0], ast.Name):
            return parent.targets[0].id
        return None

    def _meter_call(self, top: ast.AST) -> Meter | str | None:
        """The meter that this expression is given to, or why that may not be; None where it is given to none."""
        parent = self.parents.get(top)
        keyword = isinstance(parent, ast.keyword) and parent.value is top
        call = self.parents.get(parent) if keyword and parent is not None else parent
        if not (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "update"
            and (keyword or call.args[:1] == [top])
            and isinstance(self.parents.get(call), ast.Expr)
        ):
            return None
        name = ast.unparse(call.func.value)
        if name not in self._meters:
            owner = self.resolve(call.func.value)
            self._meters[name] = meter_of(owner) if owner is not None else f"{name} is not known before it is called"
        found = self._meters[name]
        if isinstance(found, Meter) and found.keywords is not keyword:
            return f"{name} takes its numbers {'by name' if found.keywords else 'by their place'}"
        return found

    def _refuses(self, node: ast.Call, bad: dict[str, str], crowded: set[int]) -> str:
        statement = self._statement(node)
        if statement is None or lines_of(statement) & crowded:
            return "shares its line with another statement"
        target = self._target(node)
        if target is not None:
            return f"{target} {bad[target]}" if target in bad else ""
        meter = self._meter_call(self._top(node))
        if meter is not None:
            return meter if isinstance(meter, str) else ""
        top = self._top(node)
        if self._guards(node) or self.containers.kept(top) or self._returned(top) or self.containers.added_up(top):
            return ""
        return "its value is needed at once, or leaves the function"

    def _looks(self, node: ast.AST) -> bool:
        """Whether `node` is an argument of a call of `math`, or of NumPy's for each element: which only computes."""
        call = self.parents.get(node)
        if not (isinstance(call, ast.Call) and node in call.args and isinstance(call.func, ast.Attribute)):
            return False
        module = self.resolve(call.func.value)
        numpy: Any = sys.modules.get("numpy")
        if numpy is not None and module is numpy:
            return isinstance(getattr(numpy, call.func.attr, None), numpy.ufunc)
        return module is math

    def _returned(self, node: ast.AST) -> bool:
        """Whether this is what the function gives back, to callers that are known to take it as a deferred value."""
        found = self.may_return and isinstance(self.parents.get(node), ast.Return)
        self.returns |= found
        return found

    def _guards(self, node: ast.AST) -> bool:
        """Whether `node` is only asked if it is finite, by an `if` whose one branch ends the program."""
        call = self.parents.get(node)
        if not (isinstance(call, ast.Call) and self._looks(node) and getattr(call.func, "attr", "") in _TESTS):
            return False
        above: ast.AST = call
        while not isinstance(above, ast.stmt):
            above = self.parents[above]
            if not isinstance(above, (ast.UnaryOp, ast.stmt)):
                return False
        if not isinstance(above, ast.If) or above.orelse or not ends(above) or self._in_try(above):
            return False
        negated = isinstance(above.test, ast.UnaryOp) and isinstance(above.test.op, ast.Not)
        if negated is not (getattr(call.func, "attr", "") == "isfinite"):
            return False  # a finite number would end it
        self.guards[call.lineno] = above
        return True

    def _at_the_end(self, node: ast.AST) -> bool:
        """Whether this is where the program ends because a number is not finite."""
        child, above = node, self.parents.get(node)
        while above is not None:
            if isinstance(above, ast.If) and child in above.body:
                asked = [n for n in ast.walk(above.test) if isinstance(n, ast.Name) and self._guards(n)]
                if asked:
                    return True
            child, above = above, self.parents.get(above)
        return False

    def _in_try(self, node: ast.AST) -> bool:
        above: ast.AST | None = node
        while above is not None and not isinstance(above, ast.Try):
            above = self.parents.get(above)
        return above is not None

    def _propagate(self, items: list[ast.Call], bad: dict[str, str]) -> tuple[set[str], list[ast.stmt]]:
        """Names that hold deferred values, and the statements that pass them on."""
        tainted = {target for node in items if (target := self._target(node)) and target not in bad}
        statements: dict[int, ast.stmt] = {}
        changed = True
        while changed:
            changed = False
            for node in self.own:
                if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load) and node.id in tainted:
                    target, statement = self._target(node), self._statement(node)
                    if statement is not None and self.containers.added_up(self._top(node)):
                        statements[id(statement)] = statement
                    if target is None or target in bad or statement is None:
                        continue
                    statements[id(statement)] = statement
                    if target not in tainted:
                        tainted.add(target)
                        changed = True
        return tainted, list(statements.values())

    def _misuse(self, name: str, bad: dict[str, str]) -> str:
        """How this name lets a value out bare; "" when it does not."""
        if name in self.foreign:
            return "is read by another scope"
        for node in self.own:
            if not isinstance(node, ast.Name) or node.id != name or not isinstance(node.ctx, ast.Load):
                continue
            parent = self.parents[node]
            if isinstance(parent, (ast.BinOp, ast.UnaryOp, ast.FormattedValue, ast.AugAssign)):
                continue
            if isinstance(parent, ast.Compare):
                if asks_identity(parent, node):
                    return f"is asked what it is on line {node.lineno}"
                continue
            if isinstance(parent, (ast.If, ast.While, ast.Assert)) and parent.test is node:
                continue
            if isinstance(parent, ast.Assign) and self._target(node) not in (None, *bad):
                continue
            if isinstance(parent, ast.Tuple) and self._formats(parent):
                continue
            if isinstance(parent, ast.Call) and node in parent.args and only_looks(parent.func):
                continue
            if isinstance(parent, ast.keyword) and only_formats(self.parents[parent]):
                continue
            if (
                isinstance(self._meter_call(node), Meter)
                or self._guards(node)
                or self._looks(node)
                or self._at_the_end(node)
                or self.containers.kept(node)
                or self._returned(node)
                or self.containers.added_up(node)
            ):
                continue
            return f"leaves the function on line {node.lineno}"
        return ""

    def _mixed_lines(self, items: list[ast.Call], tainted: set[str]) -> set[int]:
        """Lines of statements with arithmetic beside that which is passed on: left lazy, its result would leave (`y = x + f(2 * x)`)."""
        reads = [n for n in self.own if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load) and n.id in tainted]
        lines: set[int] = set()
        for node in [*items, *reads]:
            top, statement = self._top(node), self._statement(node)
            if top is node or not isinstance(statement, (ast.Assign, ast.AugAssign, ast.Expr)):
                continue
            if (
                self._target(node) is None
                and not isinstance(self._meter_call(top), Meter)
                and not self.containers.added_up(top)
            ):
                lines |= lines_of(statement)
        return lines

    def _crowded_lines(self) -> set[int]:
        """Lines that hold more than one statement: an operator there cannot be told apart by its line."""
        count: dict[int, int] = {}
        for node in self.own:
            if isinstance(node, ast.stmt):
                body = getattr(node, "body", None)
                last = body[0].lineno if isinstance(body, list) and body else (node.end_lineno or node.lineno) + 1
                for line in {node.lineno, *range(node.lineno, last)}:
                    count[line] = count.get(line, 0) + 1
        return {line for line, n in count.items() if n > 1}
