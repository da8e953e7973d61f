"""Which modules a transform of the forward works on: the roots, seen through single-device wrappers; and which weights are not its own."""

from __future__ import annotations

import torch

from advisor.profiling.training import Training


def targets(training: Training) -> list[torch.nn.Module]:
    """The root modules; of a DataParallel over one device the module inside, which it calls unchanged."""
    found: list[torch.nn.Module] = []
    for root in training.roots:
        module = root.module
        if isinstance(module, torch.nn.DataParallel) and len(module.device_ids or [0]) == 1:
            module = module.module
        if module not in found:
            found.append(module)
    return found


def replicated(training: Training) -> frozenset[int]:
    """Identities of the parameters whose gradients a DistributedDataParallel sends: a root, or one inside a root (a compiled one, one that
    also holds the loss).
    """
    modules = (module for root in training.roots for module in root.module.modules())
    wrappers = [module for module in modules if isinstance(module, torch.nn.parallel.DistributedDataParallel)]
    return frozenset(id(p) for wrapper in wrappers for p in wrapper.parameters() if p.requires_grad)
