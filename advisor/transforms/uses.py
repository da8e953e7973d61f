"""What an expression does with a value: looks at it, formats it, asks what it is, ends the program because of it."""

from __future__ import annotations

import ast
import itertools

COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_PLAIN_CALLS = frozenset({"print", "str", "repr", "float", "int", "round", "bool", "format"})
_ENDS = frozenset({"sys.exit", "exit", "quit", "os._exit", "os.abort"})


def is_item(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and call.func.attr == "item" and not call.args and not call.keywords


def asks_identity(compare: ast.Compare, node: ast.expr) -> bool:
    """Whether `compare` asks if `node` is some object; not where that is None, which no number is."""
    sides = [compare.left, *compare.comparators]
    return any(
        isinstance(op, (ast.Is, ast.IsNot))
        and any(a is node and not (isinstance(b, ast.Constant) and b.value is None) for a, b in (pair, pair[::-1]))
        for op, pair in zip(compare.ops, itertools.pairwise(sides), strict=True)
    )


def ends(branch: ast.If) -> bool:
    """Whether what is done there ends the program, and nothing in it leads elsewhere."""
    last = branch.body[-1]
    ends = isinstance(last, ast.Raise) or (
        isinstance(last, ast.Expr) and isinstance(last.value, ast.Call) and ast.unparse(last.value.func) in _ENDS
    )
    elsewhere = (ast.Return, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom, ast.Await)
    return ends and not any(isinstance(node, elsewhere) for statement in branch.body for node in ast.walk(statement))


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def only_looks(function: ast.expr) -> bool:
    return (isinstance(function, ast.Name) and function.id in _PLAIN_CALLS) or (
        isinstance(function, ast.Attribute) and function.attr == "format" and is_text(function.value)
    )


def only_formats(call: ast.AST) -> bool:
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and only_looks(call.func)


def reads(nested: ast.AST) -> set[str]:
    """Names that a nested scope takes from outside: what it loads and neither stores nor has as an argument."""
    loads = {n.id for n in ast.walk(nested) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    declared = {name for n in ast.walk(nested) if isinstance(n, (ast.Global, ast.Nonlocal)) for name in n.names}
    if isinstance(nested, (ast.ClassDef, *COMPREHENSIONS)):
        return loads | declared
    stores = {n.id for n in ast.walk(nested) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    arguments = {n.arg for n in ast.walk(nested) if isinstance(n, ast.arg)}
    return (loads - stores - arguments) | declared
