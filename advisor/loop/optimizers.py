"""The optimizers of this process, and where they are."""

from __future__ import annotations

import torch

from advisor.loop import heap


def living_optimizers() -> list[torch.optim.Optimizer]:
    """All optimizer objects in the process whose steps would be seen, stepped or not; a scan of the heap, milliseconds.

    Torch's hooks do not reach a wrapper that never ran `Optimizer.__init__` (Accelerate's): the one inside is told.
    """
    return [
        found
        for found in heap.living(heap.classes(torch.optim.Optimizer))
        if getattr(type(found).step, "hooked", False) and getattr(found, "param_groups", None)
    ]


def device_of(optimizer: torch.optim.Optimizer) -> torch.device:
    """Where its first parameter is."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            device: torch.device = parameter.device
            return device
    return torch.device("cpu")
