"""Which of a training's processes this one is."""

from __future__ import annotations

import os

from torch import distributed


def in_group() -> bool:
    """Whether this process has joined a process group."""
    return distributed.is_available() and distributed.is_initialized()


def joined() -> tuple[int, int]:
    """This process's rank and the number of ranks, of its process group: 0 of 1 where there is none."""
    return (distributed.get_rank(), distributed.get_world_size()) if in_group() else (0, 1)


def group() -> tuple[int, int]:
    """The same, and before there is a process group as the launcher told."""
    if in_group():
        return joined()
    try:
        return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    except ValueError:
        return 0, 1
