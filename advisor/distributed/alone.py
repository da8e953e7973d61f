"""This rank's models without the other ranks: what one of them does with its batch, again and again, as often as it likes.

The numeric gate replays a step as often as its noise asks for, which hangs on the rank's own numbers. A replay that sent gradients would
leave the others waiting.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from advisor.ops.batchnorm_act.over_ranks import of_one_rank
from advisor.transforms.forward import REPLICATED, ForwardStack


@contextlib.contextmanager
def alone(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, calls and backward passes of these models meet no other rank: gradients are not sent, buffers not broadcast, and synchronised
    batch norms take this rank's statistics.
    """
    roots = list(modules)
    wrappers = [m for root in roots for m in root.modules() if isinstance(m, DistributedDataParallel)]
    with contextlib.ExitStack() as stack:
        for wrapper in wrappers:
            stack.enter_context(_unsent(wrapper))
        stack.enter_context(ForwardStack.without([m for root in roots for m in root.modules()], REPLICATED))
        stack.enter_context(of_one_rank())
        stack.enter_context(_one_process())
        yield


@contextlib.contextmanager
def _unsent(wrapper: Any) -> Iterator[None]:
    names = ("require_backward_grad_sync", "require_forward_param_sync")
    before = {name: getattr(wrapper, name) for name in names}
    for name in names:
        setattr(wrapper, name, False)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(wrapper, name, value)


@contextlib.contextmanager
def _one_process() -> Iterator[None]:
    """Modules that ask how many they are (nn.SyncBatchNorm) are told that they are one."""
    plain = distributed.get_world_size
    distributed.get_world_size = lambda group=None: 1
    try:
        yield
    finally:
        distributed.get_world_size = plain
