"""Drop gradients instead of filling them with zeros: no fill kernels, and the first backward writes instead of adding.

Loses nothing. The step sees the same gradients: where a parameter gets none in a step, it is given the zeros that it would have
had, so weight decay and momentum go on as in the plain script. Only gradients of the training's optimizers are dropped: another one
would miss the zeros. Scripts that read `.grad` themselves are left alone, because they may do so between `zero_grad` and `backward`:
that is looked for in the files of the script, of its models and of the functions that run the step, not in those of functions that
these call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing, replace_attribute, script_frames
from advisor.transforms.targets import UPDATES_COMPILED

# `zero_()` and the accumulation after it raise a gradient's version by two a step; a gradient dropped in each step is fresh,
# and clipping, unscaling and accumulation over a few micro-batches raise it by less than this.
_ZEROED_VERSION = 8

_converted: dict[str, int] = {"calls": 0}


class SetToNone(Transform):
    """Make `zero_grad(set_to_none=False)` drop the gradients. Match from inside the step: its callers' source is read."""

    id = "set_to_none"
    traced = False  # calls are counted

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        versions = [
            parameter.grad._version
            for optimizer in training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        # `backward(create_graph=True)` makes new gradients instead of adding into those that were zeroed: their versions stay low.
        if not versions or (max(versions) < _ZEROED_VERSION and not training.zeroes_gradients):
            return Match(applies=False, reason="gradients are not zeroed in place")
        if training.updates_compiled:
            return Match(applies=False, reason=UPDATES_COMPILED)
        readers = grad_readers(training)
        if readers:
            return Match(
                applies=False, reason=f"the script reads .grad itself ({readers[0]})", unmatched=tuple(readers)
            )
        return Match(applies=True, sites=tuple(type(optimizer).__name__ for optimizer in training.optimizers))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        zeroed: dict[int, torch.Tensor] = {}  # parameters whose zeros were dropped and that have no gradient yet

        def drop(parameters: Iterable[torch.Tensor]) -> None:
            _converted["calls"] += 1
            for parameter in parameters:
                if parameter.grad is not None:
                    zeroed[id(parameter)] = parameter
                    parameter.grad = None

        def dropping(plain: Callable[..., None], optimizer: torch.optim.Optimizer) -> Callable[..., None]:
            @functools.wraps(plain)
            def zero_grad(*args: Any, **kwargs: Any) -> None:
                if _zeros(args, kwargs):
                    drop(_parameters(optimizer))
                plain(*args, **kwargs)

            return zero_grad

        plain_of_modules = torch.nn.Module.zero_grad

        @functools.wraps(plain_of_modules)
        def zero_grad_of_module(self: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
            if _zeros(args, kwargs):
                owned = {id(parameter) for optimizer in training.optimizers for parameter in _parameters(optimizer)}
                drop(parameter for parameter in self.parameters() if id(parameter) in owned)
            plain_of_modules(self, *args, **kwargs)

        def restore_missing(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for parameter in _parameters(optimizer):
                if zeroed.pop(id(parameter), None) is not None and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        with all_or_nothing() as undo:
            _converted["calls"] = 0
            undo.push(lambda: _converted.update(calls=0))
            for optimizer in training.optimizers:
                undo.push(optimizer.register_step_pre_hook(restore_missing).remove)
                replace_attribute(undo, optimizer, "zero_grad", dropping(optimizer.zero_grad, optimizer))
            replace_attribute(undo, torch.nn.Module, "zero_grad", zero_grad_of_module)
            # Gradients that a trial leaves dropped come back as the zeros that the plain script would have.
            undo.steps.insert(0, lambda: _fill(zeroed))
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        calls = _converted["calls"]
        if calls == 0:
            return Check(passed=False, detail="no zero_grad(set_to_none=False) call has been made since")
        return Check(passed=True, detail=f"{calls} zero_grad calls dropped gradients", numbers={"calls": float(calls)})


def _fill(zeroed: dict[int, torch.Tensor]) -> None:
    for parameter in zeroed.values():
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)


def _zeros(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a `zero_grad` was asked for zeros."""
    return not (args[0] if args else kwargs.get("set_to_none", True))


def _parameters(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def grad_readers(training: Training) -> list[str]:
    """`file:line` of each place in the files of the script, of its models and of what runs the step that reads a `.grad` attribute."""
    files = {getattr(sys.modules.get("__main__"), "__file__", None)}
    files |= {_file_of(type(root.module)) for root in training.roots}
    files |= {frame.f_code.co_filename for frame in script_frames(sys._getframe())}
    found: list[str] = []
    for file in sorted(file for file in files if file and not file.startswith(torch.__path__[0])):
        try:
            with open(file, encoding="utf-8") as stream:
                tree = ast.parse(stream.read())
        except (OSError, SyntaxError, ValueError):
            found.append(f"{file}: cannot be read to make sure")
            continue
        found += [
            f"{file}:{node.lineno}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and node.attr == "grad"
            and isinstance(node.ctx, ast.Load)
            and not _is_autograd_function(node)
        ]
    return found


def _is_autograd_function(node: ast.Attribute) -> bool:
    owner = node.value  # torch.autograd.grad, autograd.grad
    return (isinstance(owner, ast.Attribute) and owner.attr == "autograd") or (
        isinstance(owner, ast.Name) and owner.id == "autograd"
    )


def _file_of(cls: type[Any]) -> str | None:
    try:
        return inspect.getfile(cls)
    except (TypeError, OSError):
        return None
