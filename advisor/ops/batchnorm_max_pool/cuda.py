"""Launches of the BatchNorm+activation+max-pool kernels. Shapes and dtypes have been checked by the caller (spec).

The statistics and the backward's two sums are the kernels of kernels/batchnorm: the sums run over the outputs, with the chosen
elements of x for x.
"""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.batchnorm_act.cuda import merge_moments, one_of_two
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_max_pool import spec
from advisor.ops.launches import Launch, launch
from advisor.ops.pooling.cuda import output
from advisor.ops.pooling.spec import PoolWindow

Shape = tuple[int, int, int, int]


def _tiles(source: str, shape: Shape, dtype: torch.dtype, activation: str, window: PoolWindow, device: int) -> Launch:
    n, _, h, w = shape
    name, (oh, ow) = storage.name(dtype), window.output(h, w)
    tile = spec.geometry(window, shape, name, nvrtc.sm_count(device), backward=source == spec.BACKWARD)
    sizes = tile.vectors, h, w, oh, ow, *window.padding, tile.row_tiles, tile.column_tiles, n
    share = (oh * ow / (h * w),) if source == spec.BACKWARD else ()  # outputs / inputs of a channel
    return launch(source, spec.defines(window, name, activation), device, tile.grid, tile.block, (*sizes, *share))


@lru_cache(maxsize=1024)
def _launches(
    names: tuple[str, str], shape: Shape, dtype: torch.dtype, activation: str, window: PoolWindow, device: int
) -> tuple[Launch, Launch]:
    """Of kernels/batchnorm over rows of channels, and of the windows. `names`: the first one's, and the second's source."""
    n, c, h, w = shape
    oh, ow = (h, w) if names[1] == spec.FORWARD else window.output(h, w)
    rows = one_of_two(names[0], (n * oh * ow, c), dtype, activation, False, False, device)
    return rows, _tiles(names[1], shape, dtype, activation, window, device)


def forward(
    x: torch.Tensor,
    norm: Norm,
    window: PoolWindow,
    *,
    in_place: bool = True,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns y [N, C, OH, OW], saved fp32, positions (bytes, like y) and the chosen elements of x (like y).

    saved is [2, C], mean and inverse standard deviation, or, when not `in_place`, [4, C] with the new running mean and
    variance after them; `in_place` updates the norm's running statistics instead. x: [N, C, H, W] channels_last, fp16, bf16
    or fp32. `moments` of x (ops/moments.py) spare a pass over it.
    """
    device = x.device.index or 0
    n, c, h, w = x.shape
    norm = norm.aligned()
    stats, pooled = _launches(("stats", spec.FORWARD), (n, c, h, w), x.dtype, norm.activation, window, device)
    shape = output(x.shape, window)
    y, chosen, index = empty_nhwc(shape, x), empty_nhwc(shape, x), empty_nhwc(shape, x, torch.uint8)
    saved = torch.empty((2 if in_place else 4, c), dtype=torch.float32, device=x.device)
    mean, var, weight, bias = norm.read
    running = mean.data_ptr(), var.data_ptr()
    updated = running if in_place else (saved.data_ptr() + 8 * c, saved.data_ptr() + 12 * c)
    if moments is not None:
        merge_moments(moments, saved, running, updated, norm)
    else:
        partial = torch.empty(stats.partials, dtype=torch.float32, device=x.device)
        stats.run(x, partial, nvrtc.tickets(x.device), saved, *running, *updated, behind=(norm.momentum, norm.eps))
    pooled.run(x, saved, weight, bias, y, index, chosen, behind=(norm.slope,))
    return y, saved, index, chosen


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    index: torch.Tensor,
    chosen: torch.Tensor,
    norm: Norm,
    window: PoolWindow,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dweight and dbias [C] fp32. dy: like the forward's y, channels_last; the caller makes it so."""
    device = x.device.index or 0
    n, c, h, w = x.shape
    weight, bias = norm.aligned().affine
    dx = torch.empty_like(x)
    names = "backward_reduce", spec.BACKWARD
    reduce, pooled = _launches(names, (n, c, h, w), x.dtype, norm.activation, window, device)
    partial = torch.empty(reduce.partials, dtype=torch.float32, device=x.device)
    dweight, dbias, coefficients = torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(2, c)
    read = saved, weight, bias
    sums = partial, nvrtc.tickets(x.device), coefficients, dweight, dbias
    # Without a second gradient, a mask, which is the residual's, and its gradient.
    reduce.run(dy, None, chosen, None, *read, None, *sums, behind=(norm.slope,))
    pooled.run(dy, index, x, *read, coefficients, dx, behind=(norm.slope,))
    return dx, dweight, dbias
