"""How much memory there is for copies of what a step's layers hold, and a call of fewer samples where that is too little.

A script fills the memory of its GPU as far as it likes. Each layer by itself is judged from copies of what goes in and comes out,
several times what one step holds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils import _pytree as pytree

from advisor.trials.numerics.plain import LONG_S, PlainStep
from advisor.trials.numerics.replay import ReplayedCall

# Copies of inputs, outputs and both gradients of every layer and of each module around several, and one such module run again, in
# activations of a plain step. Seen on an H200: DeepLabV3+ with ResNet-101 110 GB of copies for 20 GB of activations.
_COPIES = 6.0
# Layers of a step that takes longer than `LONG_S` are judged on fewer samples, but not fewer than this: what is wrong with one shows in some.
_FEWEST = 4


def free_bytes(device: torch.device) -> float:
    """What can be allocated on a GPU, with what PyTorch has reserved and does not use; no bound elsewhere."""
    if device.type != "cuda":
        return math.inf
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def step_bytes(device: torch.device) -> int:
    """What the largest step so far held beside what lies there now; 0 where nothing tells it."""
    if device.type != "cuda":
        return 0
    return max(0, torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device))


def fewer(plain: PlainStep) -> Iterator[PlainStep]:
    """The step of as many samples as have room and are not too slow, then of half as many each time; of all, where it cannot be cut."""
    samples = count(plain.call)
    if samples < 2:
        yield plain
        return
    device, seconds = plain.saved.device, plain.base.seconds
    needed = _COPIES * step_bytes(device)
    fit = samples * min(1.0, free_bytes(device) / needed if needed else 1.0)
    if seconds > LONG_S:
        fit = min(fit, max(_FEWEST, samples * LONG_S / seconds))
    kept = min(samples, max(1, int(fit)))
    while kept:
        yield plain if kept == samples else dataclasses.replace(plain, call=cut(plain.call, kept))
        kept //= 2


def count(call: ReplayedCall) -> int:
    """How many samples the call is of, as all its tensors and its outputs' gradients say; 0 where they do not agree."""
    tensors = [t for t in pytree.tree_leaves((call.args, call.kwargs, call.grads)) if isinstance(t, torch.Tensor)]
    sizes = {t.size(0) for t in tensors if t.dim()}
    return sizes.pop() if len(sizes) == 1 else 0


def cut(call: ReplayedCall, samples: int) -> ReplayedCall:
    """The call of the first so many."""

    def first(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim():
            return leaf
        return leaf.detach()[:samples].requires_grad_(leaf.requires_grad)

    args, kwargs, grads = (pytree.tree_map(first, part) for part in (call.args, call.kwargs, call.grads))
    return dataclasses.replace(call, args=args, kwargs=kwargs, grads=grads)
