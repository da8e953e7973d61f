"""Modules whose parameters get gradients that nobody reads: a teacher that records a graph, a backbone that no optimizer was given."""

from __future__ import annotations

import torch

from advisor.core.profile import WHOLE
from advisor.loop.optimizers import living_optimizers
from advisor.loop.training import Training
from advisor.profiling.inside.annotate import module_names


def modules(training: Training) -> tuple[str, ...]:
    """Their paths, as rows name them: each has parameters of its own with a gradient, all of which no optimizer in the process holds. A
    model that has none but such is told as `WHOLE` behind its name too.

    Empty where there is no optimizer at all: then the script updates its weights itself.
    """
    optimizers = [*training.optimizers, *living_optimizers()]
    held = {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}
    if not held:
        return ()
    names = module_names(training.roots)
    found: dict[str, None] = {}
    for root in training.roots:
        own = {module: _with_gradient(module) for module in root.module.modules()}
        unheld = [module for module, given in own.items() if given and not any(id(p) in held for p in given)]
        found |= dict.fromkeys(names[id(module)].partition("|")[0] for module in unheld)
        if unheld and len(unheld) == sum(map(bool, own.values())):
            found[root.name + WHOLE] = None
    return tuple(found)


def _with_gradient(module: torch.nn.Module) -> list[torch.nn.Parameter]:
    return [p for p in module.parameters(recurse=False) if p.requires_grad and p.grad is not None]
