"""Launches of the LayerNorm kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.launches import Launch, launch
from advisor.ops.layer_norm import spec


@lru_cache(maxsize=4096)
def _plan(source: str, rows: int, channels: int, dtype: torch.dtype, result: torch.dtype, device: int) -> Launch:
    names = storage.name(dtype), storage.name(result)
    shape = spec.geometry(rows, channels, *names, nvrtc.sm_count(device))
    blocks = shape.forward_blocks if source == spec.FORWARD else shape.backward_blocks
    return launch(
        source,
        spec.defines(source, *names, shape.lanes, shape.lane_vectors),
        device,
        blocks,
        spec.threads(source, shape.lane_vectors),
        (rows, shape.vectors),
    ).leaving((blocks + -(-blocks // spec.FAN)) * shape.width * storage.vector_width(names[0]))


def _launch(source: str, x: torch.Tensor, dim: int, result: torch.dtype) -> Launch:
    channels = x.shape[dim]
    return _plan(source, x.numel() // channels, channels, x.dtype, result, x.device.index or 0)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns y, x's shape and layout in `dtype`. x: its channels, dimension `dim`, contiguous in memory."""
    y = torch.empty_like(x, dtype=dtype)
    _launch(spec.FORWARD, x, dim, dtype).run(x, weight, bias, y, behind=(eps,))
    return y


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dweight and dbias [C] fp32. dy: the forward's result's dtype, x's layout."""
    plan = _launch(spec.BACKWARD, x, dim, dy.dtype)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    dweight = partial.new_empty(x.shape[dim])
    dbias = torch.empty_like(dweight)  # one of its own: autograd takes 4 us longer with a view
    plan.run(dy, x, weight, dx, partial, nvrtc.tickets(x.device), dweight, dbias, behind=(eps,))
    return dx, dweight, dbias
