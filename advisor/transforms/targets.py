"""Which modules a transform of the forward works on: the roots, seen through single-device wrappers."""

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
