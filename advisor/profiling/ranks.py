"""Which of a training's processes this one is."""

from __future__ import annotations

import os

import torch


def group() -> tuple[int, int]:
    """This process's rank and the number of ranks: of the process group, or, before there is one, as its launcher told."""
    if joined()[1] > 1:
        return joined()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1


def joined() -> tuple[int, int]:
    """The same of the process group alone: 0 of 1 where there is none."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    return 0, 1
