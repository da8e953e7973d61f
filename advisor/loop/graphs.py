"""Whether captured CUDA graphs are alive in this process, whoever captured them: advisor, Inductor, or the script itself."""

from __future__ import annotations

import torch

from advisor.loop import heap


def alive() -> bool:
    """True while any captured graph exists. Looks through all objects: tens of milliseconds, so not for a timed step."""
    if not torch.cuda.is_initialized():
        return False
    return bool(heap.living(heap.classes(torch.cuda.CUDAGraph)))
