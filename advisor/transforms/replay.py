"""Run a root's forward once more on its latest inputs, to look at it, and leave no trace."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from advisor.profiling.training import RootModule


def replay(root: RootModule) -> Any:
    """The output of `root`'s forward on the arguments of its latest call, without gradients.

    Buffers and random-number state are as before afterwards. Hooks on the root itself do not run; those on its submodules do.
    """
    device = next((parameter.device for parameter in root.module.parameters()), torch.device("cpu"))
    devices = [device] if device.type == "cuda" else []
    with torch.no_grad(), _buffers_kept(root.module), torch.random.fork_rng(devices, device_type="cuda"):
        return root.module.forward(*root.args, **root.kwargs)


@contextmanager
def _buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    saved = [(buffer, buffer.clone()) for buffer in module.buffers()]
    try:
        yield
    finally:
        for buffer, value in saved:
            buffer.copy_(value)
