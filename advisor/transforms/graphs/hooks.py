"""Forward hooks that only compute are part of a forward, and a CUDA graph of it holds what they do.

Those of `torch.nn.utils` (weight_norm, spectral_norm, pruning) make a weight of parameters and set it on their module. A script's own are
told by their source: assignments, arithmetic, calls of torch, and attributes set on the module they hang on. One that appends to a list,
prints, counts or calls something unknown does what no replay would repeat.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch

from advisor.transforms.source import scope_of

_BUILTINS = ("getattr", "isinstance", "len", "float", "int", "max", "min", "tuple", "abs")
_NO_COMPUTATION = ("backward", "register_hook", "item", "tolist", "numpy", "cpu", "retain_grad")
_STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Return, ast.Expr, ast.With, ast.Pass)
_DEEPEST = 4  # methods that call methods


def unfit(module: torch.nn.Module) -> str:
    """Why the hooks below this module keep it from being graphed: the first that does more than compute; "" where none does.

    The module's own run around its forward, in each call.
    """
    for path, child in module.named_modules():
        if not path:
            continue
        for hook in (*child._backward_hooks.values(), *child._backward_pre_hooks.values()):
            return f"{path} has a backward hook ({_named(hook)}), which a replay would not run"
        for hook in (*child._forward_pre_hooks.values(), *child._forward_hooks.values()):
            if why := _more_than_computes(hook):
                return f"{path} has a hook ({_named(hook)}) that {why}, which a replay would not do"
    return ""


def computing(module: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules below with forward hooks, which may set tensors there."""
    return [
        child
        for child in module.modules()
        if child is not module and (child._forward_pre_hooks or child._forward_hooks)
    ]


@functools.lru_cache(maxsize=256)
def _of_source(function: FunctionType) -> str:
    return _Source(function).why()


def _more_than_computes(hook: Any) -> str:
    if type(hook).__module__.startswith("torch.nn.utils."):
        return ""
    function = _function(hook)
    return _of_source(function) if function is not None else "has no source that could be read"


def _function(hook: Any) -> FunctionType | None:
    """The Python function that a hook calls."""
    if isinstance(hook, functools.partial):
        hook = hook.func
    if not isinstance(hook, (FunctionType, MethodType)):
        hook = vars(type(hook)).get("__call__")
    found = getattr(hook, "__func__", hook)
    return found if isinstance(found, FunctionType) else None


def _named(hook: Any) -> str:
    """What a hook is called, with its line."""
    function = _function(hook)
    if function is None:
        return type(hook).__name__
    code = function.__code__
    return f"{function.__qualname__}, {code.co_filename}:{code.co_firstlineno}"


class _Source:
    """Reads one hook, and its own methods that it calls."""

    def __init__(self, function: FunctionType) -> None:
        self._function = function
        self._sets: set[str] = set()  # names, as expressions, of attributes that it sets
        self._gets: set[str] = set()

    def why(self) -> str:
        """What it does more than compute; "" when nothing."""
        try:
            self._check(self._function, _DEEPEST)
        except _More as more:
            return str(more)
        return "reads what it has set before" if self._sets & self._gets else ""

    def _check(self, function: FunctionType, depth: int) -> None:
        scope = scope_of(function.__code__)
        if not isinstance(scope, ast.FunctionDef) or depth == 0:
            raise _More("has no source that could be read")
        for statement in scope.body:
            self._statement(statement, function, depth)

    def _statement(self, statement: ast.stmt, function: FunctionType, depth: int) -> None:
        if not isinstance(statement, _STATEMENTS):
            raise _More(f"does more than compute (line {statement.lineno})")
        if isinstance(statement, ast.With):
            for inner in statement.body:
                self._statement(inner, function, depth)
            for item in statement.items:
                self._expressions(item.context_expr, function, depth)
            return
        if isinstance(statement, ast.Assign):
            for target in statement.targets:
                self._target(target, statement.lineno)
        value = statement.value if not isinstance(statement, ast.Pass) else None
        if isinstance(statement, ast.Expr):
            if isinstance(value, ast.Constant):
                return
            if not (isinstance(value, ast.Call) and _called(value) == "setattr" and len(value.args) == 3):
                raise _More(f"does more than compute (line {statement.lineno})")
            self._sets.add(ast.unparse(value.args[1]))
            for argument in value.args:
                self._expressions(argument, function, depth)
            return
        if value is not None:
            self._expressions(value, function, depth)

    def _target(self, target: ast.expr, line: int) -> None:
        if isinstance(target, (ast.Tuple, ast.List)):
            for each in target.elts:
                self._target(each, line)
        elif isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id != "self":
            self._sets.add(repr(target.attr))
        elif not isinstance(target, ast.Name):
            raise _More(f"keeps something (line {line})")

    def _expressions(self, expression: ast.expr, function: FunctionType, depth: int) -> None:
        for node in ast.walk(expression):
            if isinstance(node, (ast.Lambda, ast.Yield, ast.YieldFrom, ast.Await, ast.NamedExpr, *_COMPREHENSIONS)):
                raise _More(f"does more than compute (line {node.lineno})")
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self._gets.add(repr(node.attr))
            if isinstance(node, ast.Call):
                self._call(node, function, depth)

    def _call(self, call: ast.Call, function: FunctionType, depth: int) -> None:
        name = _called(call)
        if name in _BUILTINS and getattr(builtins, name) is function.__globals__.get(name, getattr(builtins, name)):
            if name == "getattr" and len(call.args) > 1:
                self._gets.add(ast.unparse(call.args[1]))
            return
        if isinstance(call.func, ast.Name) and _of_torch(function.__globals__.get(call.func.id)):
            return
        if isinstance(call.func, ast.Attribute):
            root = call.func
            while isinstance(root.value, ast.Attribute):
                root = root.value
            if isinstance(root.value, ast.Name):
                held = function.__globals__.get(root.value.id)
                if isinstance(held, ModuleType) and (held is math or held.__name__.partition(".")[0] == "torch"):
                    return
                if root.value.id == "self" and root is call.func and (own := self._method(call.func.attr)) is not None:
                    self._check(own, depth - 1)
                    return
            attribute = call.func.attr
            if hasattr(torch.Tensor, attribute) and attribute not in _NO_COMPUTATION and not attribute.endswith("_"):
                return
        raise _More(f"calls {ast.unparse(call.func)} (line {call.lineno})")

    def _method(self, name: str) -> FunctionType | None:
        """A method of the hook's class, by the name that its function is qualified with."""
        owner: Any = self._function.__globals__
        for part in self._function.__qualname__.split(".")[:-1]:
            owner = owner.get(part) if isinstance(owner, dict) else getattr(owner, part, None)
        found = getattr(owner, name, None)
        return found if isinstance(found, FunctionType) else None


class _More(Exception):
    """What a hook does more than compute."""


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)


def _called(call: ast.Call) -> str:
    return call.func.id if isinstance(call.func, ast.Name) else ""


def _of_torch(value: Any) -> bool:
    return str(getattr(value, "__module__", "") or "").partition(".")[0] in ("torch", "math")
