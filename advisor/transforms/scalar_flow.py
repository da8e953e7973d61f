"""Where a scalar that `.item()` reads can go in the script's own source: decided on the syntax tree, before anything is changed.

A site is safe to defer when its value only meets arithmetic, comparison, formatting and printing, through local names, or goes into
the `update` method of a meter that does no more than that. Returned, stored, passed on or captured bare: not safe. Operators on
lines that are not listed as lazy make plain numbers, so what leaves through them is a plain number.
"""

from __future__ import annotations

import ast
import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import CodeType

_NESTED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PLAIN_CALLS = frozenset({"print", "str", "repr", "float", "int", "round", "bool", "format"})
_SPIES = frozenset({"locals", "vars", "exec", "eval", "globals", "dir"})

Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Module
MeterOf = Callable[[str], "CodeType | str"]
"""Name of a local → code of its `update` method when that is safe, else why it is not."""


@dataclass(slots=True)
class Flow:
    """Lines of one scope: where to defer, where arithmetic stays deferred, and why other sites are left alone."""

    calls: set[int] = field(default_factory=set)  # first lines of the calls to defer
    sites: set[int] = field(default_factory=set)  # all their lines
    lazy: set[int] = field(default_factory=set)
    refused: dict[int, str] = field(default_factory=dict)
    meters: set[str] = field(default_factory=set)


@functools.lru_cache(maxsize=64)
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


def analyse(scope: Scope, meter_of: MeterOf) -> Flow:
    """Sort the `.item()` calls of this scope, nested functions left out."""
    return _Analysis(scope, meter_of).run()


def safe_update(method: Scope, deferred: int) -> str:
    """Why a meter's `update(self, …)` must not be given deferred values as its first `deferred` arguments; "" when it may.

    Allowed are assignments of arithmetic, on its arguments and its own attributes, to its own attributes.
    """
    if not isinstance(method, ast.FunctionDef) or method.args.vararg or method.args.kwarg or method.decorator_list:
        return "its update is no plain method"
    names = [argument.arg for argument in method.args.args]
    if len(names) <= deferred:
        return "its update takes other arguments"
    for statement in method.body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue  # a docstring
        if isinstance(statement, (ast.Assign, ast.AugAssign)):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            if all(_own_attribute(t, names[0]) for t in targets) and _is_arithmetic(statement.value, names):
                continue
        return f"its update does more than arithmetic (line {statement.lineno})"
    return ""


def lines_of(node: ast.stmt) -> set[int]:
    """All lines of a statement."""
    return set(range(node.lineno, (node.end_lineno or node.lineno) + 1))


class _Analysis:
    def __init__(self, scope: Scope, meter_of: MeterOf) -> None:
        self.scope = scope
        self.meter_of = meter_of
        self.parents: dict[ast.AST, ast.AST] = {}
        self.own: list[ast.AST] = []
        self.foreign: set[str] = set()  # names that nested scopes read, or that live elsewhere
        self._collect(scope)

    def _collect(self, scope: Scope) -> None:
        stack: list[ast.AST] = [scope]
        while stack:
            node = stack.pop()
            self.own.append(node)
            if isinstance(node, (ast.Global, ast.Nonlocal)):
                self.foreign.update(node.names)
            for child in ast.iter_child_nodes(node):
                self.parents[child] = node
                if isinstance(child, (*_NESTED, *_COMPREHENSIONS)):
                    self.foreign.update(_reads(child))
                else:
                    stack.append(child)

    def run(self) -> Flow:
        flow = Flow()
        items = [node for node in self.own if isinstance(node, ast.Call) and _is_item(node)]
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
                meter = self._meter_call(self._top(node))
                if meter is not None:
                    flow.meters.add(meter)
                flow.lazy |= lines_of(statement) - crowded
        for statement in statements:
            if not lines_of(statement) & (refused_lines | crowded):
                flow.lazy |= lines_of(statement)
        return flow

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
            and (isinstance(parent.left, ast.JoinedStr) or _is_text(parent.left))
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

    def _meter_call(self, top: ast.AST) -> str | None:
        call = self.parents.get(top)
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "update"
            and isinstance(call.func.value, ast.Name)
            and call.args[:1] == [top]
            and isinstance(self.parents.get(call), ast.Expr)
        ):
            return call.func.value.id
        return None

    def _refuses(self, node: ast.Call, bad: dict[str, str], crowded: set[int]) -> str:
        statement = self._statement(node)
        if statement is None or lines_of(statement) & crowded:
            return "shares its line with another statement"
        target = self._target(node)
        if target is not None:
            return f"{target} {bad[target]}" if target in bad else ""
        meter = self._meter_call(self._top(node))
        if meter is not None:
            update = self.meter_of(meter)
            return update if isinstance(update, str) else ""
        return "its value is needed at once, or leaves the function"

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
                if _asks_identity(parent, node):
                    return f"is asked what it is on line {node.lineno}"
                continue
            if isinstance(parent, (ast.If, ast.While, ast.Assert)) and parent.test is node:
                continue
            if isinstance(parent, ast.Assign) and self._target(node) not in (None, *bad):
                continue
            if isinstance(parent, ast.Tuple) and self._formats(parent):
                continue
            if isinstance(parent, ast.Call) and node in parent.args and _only_looks(parent.func):
                continue
            if isinstance(parent, ast.keyword) and _only_formats(self.parents[parent]):
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
            if self._target(node) is None and self._meter_call(top) is None:
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


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _same(left: CodeType, right: CodeType) -> bool:
    return (left.co_name, left.co_firstlineno, left.co_code) == (right.co_name, right.co_firstlineno, right.co_code)


def _is_item(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args and not call.keywords


def _asks_identity(compare: ast.Compare, node: ast.expr) -> bool:
    """Whether `compare` asks if `node` is some object; not where that is None, which no number is."""
    sides = [compare.left, *compare.comparators]
    return any(
        isinstance(op, (ast.Is, ast.IsNot))
        and any(a is node and not (isinstance(b, ast.Constant) and b.value is None) for a, b in (pair, pair[::-1]))
        for op, pair in zip(compare.ops, itertools.pairwise(sides), strict=True)
    )


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def _only_looks(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id in _PLAIN_CALLS) or (
        isinstance(function, ast.Attribute) and function.attr == "format" and _is_text(function.value)
    )


def _only_formats(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and _only_looks(call.func)


def _reads(nested: ast.AST) -> set[str]:
    """Names that a nested scope takes from outside: what it loads and neither stores nor has as an argument."""
    loads = {n.id for n in ast.walk(nested) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    declared = {name for n in ast.walk(nested) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    if isinstance(nested, (ast.ClassDef, *_COMPREHENSIONS)):
        return loads | declared
    stores = {n.id for n in ast.walk(nested) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    arguments = {n.arg for n in ast.walk(nested) if isinstance(n, ast.arg)}
    return (loads - stores - arguments) | declared


def _own_attribute(node: ast.AST, owner: str) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == owner


def _is_arithmetic(node: ast.AST, names: list[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left, names) and _is_arithmetic(node.right, names)
    if isinstance(node, ast.UnaryOp):
        return _is_arithmetic(node.operand, names)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    return (isinstance(node, ast.Name) and node.id in names[1:]) or _own_attribute(node, names[0])
