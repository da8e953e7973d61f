"""Drop gradients instead of filling them with zeros: no fill kernels, and the first backward writes instead of adding.

Loses nothing. The step sees the same gradients: where a parameter gets none in a step, it is given the zeros that it would have
had, so weight decay and momentum go on as in the plain script. Scripts that read `.grad` themselves are left alone, because
they may do so between `zero_grad` and `backward`.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

from advisor.core.findings import Semantics
from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.profiling.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing, replace_attribute

# `zero_()` and the accumulation after it raise a gradient's version by two a step; a gradient dropped in each step is fresh,
# and clipping, unscaling and accumulation over a few micro-batches raise it by less than this.
_ZEROED_VERSION = 8

_converted: dict[str, int] = {"calls": 0}


class SetToNone(Transform):
    """Make `zero_grad(set_to_none=False)` drop the gradients."""

    id = "set_to_none"
    semantics = Semantics.EXACT
    traced = False  # calls are counted
    order = 45

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        versions = [
            parameter.grad._version
            for optimizer in training.optimizers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if not versions or max(versions) < _ZEROED_VERSION:
            return Match(applies=False, reason="gradients are not zeroed in place")
        readers = _grad_readers(training)
        if readers:
            return Match(
                applies=False, reason=f"the script reads .grad itself ({readers[0]})", unmatched=tuple(readers)
            )
        return Match(applies=True, sites=tuple(type(optimizer).__name__ for optimizer in training.optimizers))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        zeroed: dict[int, torch.Tensor] = {}  # parameters whose zeros were dropped and that have no gradient yet

        def dropping(plain: Callable[..., None]) -> Callable[..., None]:
            @functools.wraps(plain)
            def zero_grad(self: Any, set_to_none: bool = True) -> None:
                if not set_to_none:
                    _converted["calls"] += 1
                    for parameter in _parameters(self):
                        if parameter.grad is not None:
                            zeroed[id(parameter)] = parameter
                plain(self, set_to_none=True)

            return zero_grad

        def restore_missing(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
            for parameter in _parameters(optimizer):
                if zeroed.pop(id(parameter), None) is not None and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)

        with all_or_nothing() as undo:
            _converted["calls"] = 0
            undo.push(lambda: _converted.update(calls=0))
            for optimizer in training.optimizers:
                undo.push(optimizer.register_step_pre_hook(restore_missing).remove)
            for owner in {_definer(type(o)) for o in training.optimizers} | {torch.nn.Module}:
                replace_attribute(undo, owner, "zero_grad", dropping(owner.zero_grad))
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


def _definer(cls: type[Any]) -> Any:
    return next(base for base in cls.__mro__ if "zero_grad" in vars(base))


def _parameters(owner: Any) -> list[torch.Tensor]:
    if isinstance(owner, torch.nn.Module):
        return list(owner.parameters())
    return [parameter for group in owner.param_groups for parameter in group["params"]]


def _grad_readers(training: Training) -> list[str]:
    """`file:line` of each place in the script and in the files of its models that reads a `.grad` attribute."""
    files = {getattr(sys.modules.get("__main__"), "__file__", None)}
    files |= {_file_of(type(root.module)) for root in training.roots}
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
