"""Around an optimizer's update, for whoever has a traced window open: its begin, its end, and the closure it may be given."""

from __future__ import annotations

import functools
from typing import Any, Protocol

import torch
from torch._C._profiler import _RecordFunctionFast as RecordFunctionFast

CLOSURE = "advisor:closure"


class UpdateWatcher(Protocol):
    """What marks updates in a trace. Neither raises."""

    def open_optimizer(self, optimizer: Any) -> None:
        """This optimizer's update begins."""

    def close_optimizer(self) -> None:
        """The update that began last is over."""


_open: UpdateWatcher | None = None


def watch(window: UpdateWatcher) -> None:
    """Updates are told to this window from now on."""
    global _open
    _open = window


def let_go(window: UpdateWatcher) -> None:
    """They no longer are, if they were."""
    global _open
    if _open is window:
        _open = None


def optimizer_begins(optimizer: Any) -> None:
    """An optimizer's update begins: it is annotated if a window is open. Never raises."""
    # A compiled update must not be compiled anew because a window has opened.
    if not torch.compiler.is_compiling() and _open is not None:
        _open.open_optimizer(optimizer)


def optimizer_ends() -> None:
    """The update that began last is over."""
    if not torch.compiler.is_compiling() and _open is not None:
        _open.close_optimizer()


def closure_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The closure among the arguments of an `Optimizer.step` (the optimizer itself first), or None."""
    given = kwargs.get("closure", args[1] if len(args) > 1 else None)
    return given if callable(given) else None


def annotated_closure(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments with a closure in place of the user's that runs it inside a range `advisor:closure`: forward and backward
    happen in there, and are no part of the update around them. None where no window is open, or there is no closure.
    """
    closure = closure_of(args, kwargs)
    if closure is None or torch.compiler.is_compiling() or _open is None:
        return None

    @functools.wraps(closure)
    def annotated() -> Any:
        with RecordFunctionFast(CLOSURE):
            return closure()

    return with_closure(args, kwargs, annotated)


def with_closure(args: tuple[Any, ...], kwargs: dict[str, Any], closure: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an `Optimizer.step` that has a closure, with this one in its place."""
    return (args, {**kwargs, "closure": closure}) if "closure" in kwargs else ((args[0], closure, *args[2:]), kwargs)
