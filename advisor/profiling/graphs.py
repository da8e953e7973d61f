"""Whether captured CUDA graphs are alive in this process, whoever captured them: advisor, Inductor, or the script itself."""

from __future__ import annotations

import gc

import torch


def alive() -> bool:
    """True while any captured graph exists. Looks through all objects: tens of milliseconds, so not for a timed step."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return False
    graph = torch.cuda.CUDAGraph
    # `type`, not isinstance: that would ask proxies and lazy modules for their `__class__`, which may run their code.
    return any(issubclass(type(o), graph) for o in gc.get_objects())
