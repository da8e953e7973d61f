"""Launches of the BatchNorm+activation+max-pool kernels. Shapes and dtypes have been checked by the caller (spec).

The statistics and the backward's two sums are the kernels of kernels/batchnorm: the sums run over the outputs, with the chosen
elements of x for x.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import aligned, empty_nhwc
from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.batchnorm_act.cuda import merge_moments
from advisor.ops.batchnorm_max_pool import spec
from advisor.ops.pooling.spec import Window


@dataclass(frozen=True, slots=True)
class _Launch:
    """One kernel's launch at one shape, dtype and variant, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, ...]
    partials: int = 0  # fp32 values of scratch


@dataclass(frozen=True, slots=True)
class _Plan:
    stats: _Launch
    forward: _Launch
    reduce: _Launch
    backward: _Launch
    out_size: tuple[int, int]
    share: Any  # outputs / inputs of a channel


def _channels(
    source: str, entry: int, rows: int, c: int, name: str, activation: str, per_sm: int, device: int
) -> _Launch:
    """A launch of one of kernels/batchnorm over [rows, c]."""
    shape = batchnorm_act.geometry(rows, c, name, nvrtc.sm_count(device), per_sm)
    defines = tuple(batchnorm_act.defines(name, activation, False).items())
    return _Launch(
        nvrtc.function(source, batchnorm_act.KERNELS[source][entry], defines, device),
        (shape.row_blocks, shape.tiles, 1),
        (batchnorm_act.THREADS, 1, 1),
        (np.int64(rows), np.int32(shape.vectors), np.int32(shape.tile)),
        shape.row_blocks * 2 * c,
    )


def _tiles(
    source: str, shape: tuple[int, int, int, int], name: str, activation: str, window: Window, device: int
) -> _Launch:
    n, _, h, w = shape
    tile = spec.geometry(window, shape, name, nvrtc.sm_count(device), backward=source == spec.BACKWARD)
    (entry,) = spec.KERNELS[source]
    values = (tile.vectors, h, w, *window.output(h, w), *window.padding, tile.row_tiles, tile.column_tiles, n)
    return _Launch(
        nvrtc.function(source, entry, tuple(spec.defines(window, name, activation).items()), device),
        tile.grid,
        tile.block,
        tuple(np.int32(value) for value in values),
    )


@lru_cache(maxsize=1024)
def _plan(shape: tuple[int, int, int, int], dtype: torch.dtype, activation: str, window: Window, device: int) -> _Plan:
    n, c, h, w = shape
    name = storage.name(dtype)
    oh, ow = window.output(h, w)
    return _Plan(
        stats=_channels(
            batchnorm_act.FORWARD, 0, n * h * w, c, name, activation, batchnorm_act.STATS_BLOCKS_PER_SM, device
        ),
        forward=_tiles(spec.FORWARD, shape, name, activation, window, device),
        reduce=_channels(
            batchnorm_act.BACKWARD, 0, n * oh * ow, c, name, activation, batchnorm_act.BLOCKS_PER_SM, device
        ),
        backward=_tiles(spec.BACKWARD, shape, name, activation, window, device),
        out_size=(oh, ow),
        share=np.float32(oh * ow / (h * w)),
    )


def forward(
    x: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    window: Window,
    *,
    in_place: bool = True,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW], saved fp32, positions (bytes, like y) and the chosen elements of x (like y).

    saved is [2, C], mean and inverse standard deviation, or, when not `in_place`, [4, C] with the new running mean and
    variance after them; `in_place` updates `running_mean` and `running_var` instead. x: [N, C, H, W] channels_last, fp16, bf16
    or fp32. `moments` of x (ops/moments.py) spare a pass over it.
    """
    device = x.device.index or 0
    n, c, h, w = x.shape
    weight, bias = aligned(weight), aligned(bias)
    plan = _plan((n, c, h, w), x.dtype, activation, window, device)
    shape = (n, c, *plan.out_size)
    y, chosen, index = empty_nhwc(shape, x), empty_nhwc(shape, x), empty_nhwc(shape, x, torch.uint8)
    saved = torch.empty((2 if in_place else 4, c), dtype=torch.float32, device=x.device)
    stream = nvrtc.stream(device)
    running = running_mean.data_ptr(), running_var.data_ptr()
    updated = running if in_place else (saved.data_ptr() + 8 * c, saved.data_ptr() + 12 * c)
    if moments is not None:
        merge_moments(moments, saved, running, updated, momentum, eps)
    else:
        partial = torch.empty(plan.stats.partials, dtype=torch.float32, device=x.device)
        plan.stats.kernel(
            plan.stats.grid,
            plan.stats.block,
            (
                x.data_ptr(),
                partial.data_ptr(),
                nvrtc.tickets(x.device),
                saved.data_ptr(),
                *running,
                *updated,
                *plan.stats.sizes,
                np.float32(momentum),
                np.float32(eps),
            ),
            0,
            stream,
        )
    plan.forward.kernel(
        plan.forward.grid,
        plan.forward.block,
        (
            x.data_ptr(),
            saved.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
            index.data_ptr(),
            chosen.data_ptr(),
            *plan.forward.sizes,
            np.float32(slope),
        ),
        0,
        stream,
    )
    return y, saved, index, chosen


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    window: Window,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dweight and dbias [C] fp32. dy: like the forward's y, channels_last; the caller makes it so."""
    device = x.device.index or 0
    n, c, h, w = x.shape
    weight, bias = aligned(weight), aligned(bias)
    plan = _plan((n, c, h, w), x.dtype, activation, window, device)
    dx = torch.empty_like(x)
    partial = torch.empty(plan.reduce.partials, dtype=torch.float32, device=x.device)
    dweight, dbias, coefficients = torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(2, c)
    constants = (saved.data_ptr(), weight.data_ptr(), bias.data_ptr())
    stream = nvrtc.stream(device)
    plan.reduce.kernel(
        plan.reduce.grid,
        plan.reduce.block,
        (
            dy.data_ptr(),
            0,  # no second gradient
            chosen.data_ptr(),
            0,  # no mask: that is the residual's
            *constants,
            0,  # no gradient of a residual
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            coefficients.data_ptr(),
            dweight.data_ptr(),
            dbias.data_ptr(),
            *plan.reduce.sizes,
            np.float32(slope),
        ),
        0,
        stream,
    )
    plan.backward.kernel(
        plan.backward.grid,
        plan.backward.block,
        (
            dy.data_ptr(),
            index.data_ptr(),
            x.data_ptr(),
            *constants,
            coefficients.data_ptr(),
            dx.data_ptr(),
            *plan.backward.sizes,
            plan.share,
            np.float32(slope),
        ),
        0,
        stream,
    )
    return dx, dweight, dbias
