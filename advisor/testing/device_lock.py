"""One measurement at a time on a GPU, over all processes of this user: the workers of pytest-xdist share it."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import locks
from advisor.core.errors import AdvisorError

if TYPE_CHECKING:
    import torch

_here = threading.Lock()  # advisor's hooks are the process's: one measurement at a time in it


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """Nothing else is being measured in this process.

    Raises:
        AdvisorError: when something is: a step that measures, or another thread.
    """
    if not _here.acquire(blocking=False):
        raise AdvisorError(
            "a measurement is running in this process already",
            expected="one at a time",
            fix="Do not measure in a step.",
        )
    try:
        yield
    finally:
        _here.release()


@contextlib.contextmanager
def locked(device: torch.device) -> Iterator[None]:
    """The GPU is this process's until the end; waits for its turn. A CPU is not locked, nor is anything on Windows."""
    if device.type != "cuda":
        yield
        return
    with locks.exclusive(lock_file(device)):
        yield


def lock_file(device: torch.device) -> Path:
    """The file that stands for a GPU: the same one in every process, whatever CUDA_VISIBLE_DEVICES says."""
    import torch

    index = device.index if device.index is not None else torch.cuda.current_device()
    identity = str(getattr(torch.cuda.get_device_properties(index), "uuid", index))
    return locks.of_user(f"gpu-{identity}")
