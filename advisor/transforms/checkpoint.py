"""Activations of some modules computed again in the backward, not kept: memory for time.

PyTorch's own checkpoint, without reentrance, around the forwards of the modules that the parameter `modules` names, by comma ("Net.layer1.0").
Which ones gain most for least time tells analysis/activations.py. Random layers draw the same numbers again. Statistics that a
module keeps of what it has seen (batch norms' running ones) are what one forward leaves: what the second leaves is taken back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from advisor.core.profile import StepProfile
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.forward import SUBMODULE, ForwardStack
from advisor.transforms.patch import all_or_nothing


class CheckpointActivations(Transform):
    """Recompute what these modules would keep."""

    id = "checkpoint_activations"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        wanted = wanted_modules(parameters)
        found = _modules(training, wanted)
        unmatched = tuple(f"{name}: no such module" for name in wanted if name not in found)
        if not found:
            return Match(applies=False, reason="no module is named, or none is there", unmatched=unmatched)
        return Match(applies=True, sites=tuple(found), unmatched=unmatched)

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        with all_or_nothing() as undo:
            for module in _modules(training, wanted_modules(parameters)).values():
                stack, layer = ForwardStack.of(module), _Recomputed()
                undo.push(lambda stack=stack, layer=layer: stack.forget(layer))
                stack.set(SUBMODULE, layer)
                undo.push(lambda stack=stack: stack.clear(SUBMODULE))
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        layers = [ForwardStack.of(m).get(SUBMODULE) for root in training.roots for m in root.module.modules()]
        again = sum(layer.again for layer in layers if isinstance(layer, _Recomputed))
        return Check(passed=again > 0, detail=f"{again} forwards were computed again", numbers={"again": float(again)})


class _Recomputed:
    """A layer for a submodule's ForwardStack."""

    def __init__(self) -> None:
        self.again = 0

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        @contextlib.contextmanager
        def second() -> Iterator[None]:
            self.again += 1
            before = [(buffer, buffer.clone()) for buffer in module.buffers()]
            try:
                yield
            finally:
                with torch.no_grad():
                    for buffer, values in before:
                        buffer.copy_(values)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            return checkpoint(
                inner, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), second()), **kwargs
            )

        return forward


def wanted_modules(parameters: Mapping[str, str]) -> list[str]:
    """Names of modules, as the parameter `modules` lists them."""
    return [name for name in parameters.get("modules", "").split(",") if name]


def _modules(training: Training, wanted: list[str]) -> dict[str, torch.nn.Module]:
    named = {
        f"{root.name}.{path}" if path else root.name: module
        for root in training.roots
        for path, module in root.module.named_modules()
    }
    return {name: named[name] for name in wanted if name in named}
