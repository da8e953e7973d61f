"""Meters that a script gives numbers to: which may be given numbers to come, and how their attributes then read as plain ones.

A meter is an object with an `update` that does arithmetic on its own attributes, or puts the number into a window of its own (a deque, a
list). Or it hands keywords on to meters that it holds by name, as `MetricLogger.update(loss=…)` of torchvision's references and those who
took it over do. Outside `update` its attributes are read as plain numbers: that is where they are waited for.
"""

from __future__ import annotations

import ast
import sys
from collections import deque
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from types import CodeType
from typing import Any

from advisor.transforms.base import Undo
from advisor.transforms.deferred import Deferred, plain
from advisor.transforms.patch import replace_attribute
from advisor.transforms.source import Scope, lines_of, own_attribute, scope_of

_WINDOWS = (list, deque)


@dataclass(frozen=True, slots=True)
class Meter:
    """A class whose instances may be given numbers to come.

    Attributes:
        update: the code that may leave them in its attributes.
        keywords: they come by name, through another class's `update`, `through`.
    """

    cls: type
    update: CodeType
    keywords: bool = False
    through: CodeType | None = None


def meter_of(owner: Any) -> Meter | str:
    """What `owner.update` may be given, or why its values cannot be deferred."""
    cls = type(owner)
    update = vars(cls).get("update")
    if not hasattr(update, "__code__"):
        return f"{cls.__name__} has no update method of its own"
    if any("__getattribute__" in vars(base) for base in cls.__mro__[:-1]) or not hasattr(owner, "__dict__"):
        return f"{cls.__name__} handles its attributes itself"
    if any(base.__module__.partition(".")[0] == "torch" for base in cls.__mro__):
        return f"{cls.__name__} is a torch class"
    method = scope_of(update.__code__)
    if method is None:
        return f"the source of {cls.__name__}.update cannot be read"
    if held := _hands_on(method):
        return _held(owner, held, update.__code__)
    windows = {name for name, value in vars(owner).items() if type(value) in _WINDOWS}
    why_not = safe_update(method, 1, windows)
    return f"{cls.__name__}: {why_not}" if why_not else Meter(cls, update.__code__)


def _held(owner: Any, name: str, through: CodeType) -> Meter | str:
    """What a meter's `update(**kwargs)` hands on to."""
    meters = vars(owner).get(name)
    values = list(meters.values()) if isinstance(meters, dict) else []
    if not values or any(type(value) is not type(values[0]) for value in values):
        return f"{type(owner).__name__} holds no meters yet, or of several classes"
    found = meter_of(values[0])
    if isinstance(found, str) or found.keywords:
        return found if isinstance(found, str) else f"{type(owner).__name__} holds meters that hold meters"
    return Meter(found.cls, found.update, keywords=True, through=through)


def safe_update(method: Scope, deferred: int, windows: AbstractSet[str] = frozenset()) -> str:
    """Why a meter's `update(self, …)` must not be given deferred values as its first `deferred` arguments; "" when it may.

    Allowed are assignments of arithmetic, on its arguments and its own attributes, to its own attributes, and one of its arguments put
    into one of its `windows`.
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
            if all(own_attribute(t, names[0]) for t in targets) and _is_arithmetic(statement.value, names):
                continue
        if isinstance(statement, ast.Expr) and _puts_in(statement.value, names, windows):
            continue
        return f"its update does more than arithmetic (line {statement.lineno})"
    return ""


def _puts_in(node: ast.expr, names: list[str], windows: AbstractSet[str]) -> bool:
    """`self.window.append(value)`."""
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "append"
        and own_attribute(node.func.value, names[0])
        and isinstance(node.func.value, ast.Attribute)
        and node.func.value.attr in windows
        and len(node.args) == 1
        and isinstance(node.args[0], ast.Name)
        and node.args[0].id in names[1:]
        and not node.keywords
    )


def _hands_on(method: Scope) -> str:
    """Of an `update(self, **kwargs)` that gives each value to the meter of its name: the attribute that holds these; else ""."""
    if (
        not isinstance(method, ast.FunctionDef)
        or method.args.kwarg is None
        or method.args.vararg
        or method.decorator_list
    ):
        return ""
    if len(method.args.args) != 1 or method.args.kwonlyargs:
        return ""
    own, given = method.args.args[0].arg, method.args.kwarg.arg
    body = [s for s in method.body if not (isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant))]
    if len(body) != 1 or not isinstance(loop := body[0], ast.For) or loop.orelse:
        return ""
    if ast.unparse(loop.iter) != f"{given}.items()" or not isinstance(loop.target, ast.Tuple):
        return ""
    names = [ast.unparse(name) for name in loop.target.elts]
    if len(names) != 2:
        return ""
    key, value = names
    allowed = {
        f"if {value} is None:\n    continue",
        f"if isinstance({value}, torch.Tensor):\n    {value} = {value}.item()",
        f"assert isinstance({value}, (float, int))",
        f"assert isinstance({value}, (int, float))",
    }
    *before, last = loop.body
    if not all(ast.unparse(statement) in allowed for statement in before):
        return ""
    found = last.value if isinstance(last, ast.Expr) else None
    if not (
        isinstance(found, ast.Call)
        and isinstance(found.func, ast.Attribute)
        and isinstance(found.func.value, ast.Subscript)
        and isinstance(holder := found.func.value.value, ast.Attribute)
        and ast.unparse(found) == f"{own}.{holder.attr}[{key}].update({value})"
    ):
        return ""
    return holder.attr


def update_lines(code: CodeType) -> set[int]:
    """The lines of an `update`'s body."""
    method = scope_of(code)
    return set().union(*(lines_of(statement) for statement in method.body)) if method is not None else set()


def read_plainly(undo: Undo, meter: type, update: CodeType) -> None:
    """Outside its `update`, this class's attributes read as plain numbers, and so does what is in its windows."""
    holders: dict[int, Any] = {}
    ordinary: Callable[[Any, str], Any] = object.__getattribute__

    def __getattribute__(self: Any, name: str) -> Any:
        value = ordinary(self, name)
        window = type(value) in _WINDOWS
        if type(value) is Deferred or window:
            holders[id(self)] = self
            if sys._getframe(1).f_code is not update:
                if window:
                    _settle_window(value)
                else:
                    value = ordinary(self, "__dict__")[name] = plain(value)
        elif name == "__dict__":
            settle(value)
        return value

    def settle(attributes: dict[str, Any]) -> None:
        for value in attributes.values():
            if type(value) in _WINDOWS:
                _settle_window(value)
        attributes.update({name: plain(value) for name, value in attributes.items() if type(value) is Deferred})

    def settle_all() -> None:
        for holder in holders.values():
            settle(ordinary(holder, "__dict__"))

    undo.push(settle_all)
    replace_attribute(undo, meter, "__getattribute__", __getattribute__)


def _settle_window(window: Any) -> None:
    for i, value in enumerate(window):
        if type(value) is Deferred:
            window[i] = plain(value)


def _is_arithmetic(node: ast.AST, names: list[str]) -> bool:
    if isinstance(node, ast.BinOp):
        return _is_arithmetic(node.left, names) and _is_arithmetic(node.right, names)
    if isinstance(node, ast.UnaryOp):
        return _is_arithmetic(node.operand, names)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float))
    return (isinstance(node, ast.Name) and node.id in names[1:]) or own_attribute(node, names[0])
