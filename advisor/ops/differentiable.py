"""Gradients of an operation through PyTorch's own operations, for second derivatives and where kernels cannot run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import cast

import torch
from torch._C._functorch import is_legacy_batchedtensor

from advisor.ops import nvrtc, storage


def wanted(dy: torch.Tensor) -> bool:
    """Whether a backward that got `dy` is to be made of PyTorch's own operations, asked inside it.

    So it is when a second derivative is wanted (create_graph=True), and when `dy` is a batch of gradients (is_grads_batched=True,
    or torch.func.vmap over a backward), which has no memory that a kernel could read.
    """
    return torch.is_grad_enabled() or bool(nvrtc.transformed()) or is_legacy_batchedtensor(dy)


def gradients(
    function: Callable[..., torch.Tensor], dy: torch.Tensor, inputs: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor | None, ...]:
    """One gradient an input of `function(*inputs)`, given `dy` from above; None for an input that is None.

    With gradients enabled (create_graph=True) they are part of the graph that `inputs` belong to.
    """
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        leaves = [
            None if t is None else (t if again and t.requires_grad else t.detach().requires_grad_()) for t in inputs
        ]
        there = [t for t in leaves if t is not None]
        found = iter(torch.autograd.grad(function(*leaves), there, dy, create_graph=again))
    return tuple(None if t is None else next(found) for t in leaves)


def gradient(function: Callable[[torch.Tensor], torch.Tensor], dy: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """As `gradients`, of the one input `x`."""
    return cast(torch.Tensor, gradients(function, dy, (x,))[0])


def shaped(
    dy: torch.Tensor, function: Callable[..., torch.Tensor], shape: Sequence[int], *others: object
) -> tuple[torch.Tensor]:
    """The gradient of `function(x, *others)`, of whose x [shape] it reads no value; `dy` may be a batch."""
    like = torch.zeros((), dtype=dy.dtype, device=dy.device).expand(tuple(shape))
    return (gradient(lambda x: function(x, *others), dy, like),)


def bits(mask: torch.Tensor, like: torch.Tensor, *, dim: int = 1) -> torch.Tensor:
    """A forward's bits, a byte for each 16 bytes of a tensor as it lies in memory, as booleans of that tensor's shape.

    `like` has its shape and dtype: [N, C, H, W] channels_last with `dim` 1, [..., C] contiguous with -1.
    """
    width = storage.vector_width(storage.name(like.dtype))
    flat = ((mask.unsqueeze(-1) >> torch.arange(width, device=mask.device)) & 1).bool()
    if dim != 1:
        return flat.view(like.shape)
    n, c, h, w = like.shape
    return flat.view(n, h, w, c).permute(0, 3, 1, 2)
