"""Launches of the LayerNorm kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.layer_norm import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape and dtypes only, ready to pass."""

    forward: Any
    backward: Any
    forward_block: tuple[int, int, int]
    backward_block: tuple[int, int, int]
    forward_grid: tuple[int, int, int]
    backward_grid: tuple[int, int, int]
    partials: int  # fp32 values
    rows: Any
    vectors: Any


@lru_cache(maxsize=4096)
def _launch(rows: int, channels: int, dtype: torch.dtype, result: torch.dtype, device: int) -> _Launch:
    names = storage.name(dtype), storage.name(result)
    shape = spec.geometry(rows, channels, *names, nvrtc.sm_count(device))

    def function(source: str) -> Any:
        macros = spec.defines(source, *names, shape.lanes, shape.lane_vectors)
        return nvrtc.function(source, spec.KERNELS[source][0], tuple(macros.items()), device)

    blocks = shape.backward_blocks
    return _Launch(
        forward=function(spec.FORWARD),
        backward=function(spec.BACKWARD),
        forward_block=(spec.threads(spec.FORWARD, shape.lane_vectors), 1, 1),
        backward_block=(spec.threads(spec.BACKWARD, shape.lane_vectors), 1, 1),
        forward_grid=(shape.forward_blocks, 1, 1),
        backward_grid=(blocks, 1, 1),
        partials=(blocks + -(-blocks // spec.FAN)) * shape.width * storage.vector_width(names[0]),
        rows=np.int64(rows),
        vectors=np.int32(shape.vectors),
    )


def _plan(x: torch.Tensor, dim: int, result: torch.dtype) -> _Launch:
    channels = x.shape[dim]
    return _launch(x.numel() // channels, channels, x.dtype, result, x.device.index or 0)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    eps: float,
    dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Returns y, x's shape and layout in `dtype`. x: its channels, dimension `dim`, contiguous in memory."""
    plan = _plan(x, dim, dtype)
    y = torch.empty_like(x, dtype=dtype)
    plan.forward(
        plan.forward_grid,
        plan.forward_block,
        (
            x.data_ptr(),
            nvrtc.address(weight),
            nvrtc.address(bias),
            y.data_ptr(),
            plan.rows,
            plan.vectors,
            np.float32(eps),
        ),
        0,
        nvrtc.stream(x.device.index or 0),
    )
    return y


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor | None, eps: float, dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dweight and dbias [C] fp32. dy: the forward's result's dtype, x's layout."""
    plan = _plan(x, dim, dy.dtype)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    dweight = partial.new_empty(x.shape[dim])
    dbias = torch.empty_like(dweight)  # one of its own: autograd takes 4 us longer with a view
    plan.backward(
        plan.backward_grid,
        plan.backward_block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            nvrtc.address(weight),
            dx.data_ptr(),
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            dweight.data_ptr(),
            dbias.data_ptr(),
            plan.rows,
            plan.vectors,
            np.float32(eps),
        ),
        0,
        nvrtc.stream(x.device.index or 0),
    )
    return dx, dweight, dbias
