"""Launches of a batch norm over channels that are no multiple of a vector's: some rows are taken for one.

As `cuda`: one launch a pass, or with one more between two (kernels/batchnorm/batchnorm_joined.cu). Shapes and dtypes have been checked by
the caller (spec).
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.batchnorm_act import cuda, spec
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=4096)
def _join(entry: str, sizes: tuple[float, ...], device: int) -> Launch:
    """One of the launches between, over the channels, the first of its sizes."""
    defines = spec.joined_defines()
    threads = defines["THREADS"]
    blocks = -(-int(sizes[0]) // threads)
    return launch(spec.JOINED_ROWS, defines, device, blocks, threads, sizes, entry=entry)


def _pass(name: str, x: torch.Tensor, joined: int, activation: str, residual: bool) -> Launch:
    n, c, h, w = x.shape
    shape, device = (n * h * w // joined, c * joined), x.device.index or 0
    return cuda.one_of_two(name, shape, x.dtype, activation, residual, False, device, joined=True)


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """As `cuda.forward` in place; of several launches what is saved is [6, joined, C] fp32, as the kernels have it."""
    n, channels, h, w = x.shape
    joined = spec.joined(channels, storage.name(x.dtype))
    found = cuda.forward_at_once(x, residual, norm, joined=joined)
    if found is not None:
        return found
    device, (weight, bias) = x.device.index or 0, norm.affine
    of = x, joined, norm.activation, residual is not None
    y = torch.empty_like(x)
    saved = weight.new_empty(6, joined, channels)
    stats = _pass("stats", *of)
    partial = weight.new_empty(stats.partials)
    mask = cuda.mask_memory(x, norm.activation, residual=residual is not None)
    row = 4 * joined * channels
    at = [saved.data_ptr() + i * row for i in range(6)]
    # The first launch reads old running values of each of its columns and writes new ones: here x's bits, to where the next one writes anew.
    stats.run(x, partial, nvrtc.tickets(x.device), at[4], x, x, at[2], at[3], behind=(1.0, 0.0))
    # Without running statistics as in `cuda`: something is read, and written to where nobody looks.
    running: tuple[Any, ...] = (bias, weight, at[4], at[5]) if norm.running is None else norm.running * 2
    join = _join("batchnorm_join_statistics", (channels, joined, float(n * h * w)), device)
    join.run(saved, weight, bias, *running, behind=(norm.momentum, norm.eps))
    _pass("apply", *of).run(x, residual, at[0], at[2], at[3], y, mask, behind=(norm.slope,))
    return y, saved, mask


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    norm: Norm,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """As `cuda.backward` with one gradient."""
    channels, device = x.shape[1], dy.device.index or 0
    joined = spec.joined(channels, storage.name(x.dtype))
    if saved.dim() == 2:  # of a forward in one launch
        found = cuda.backward_at_once(dy, None, x, saved, mask, norm, residual, joined=joined)
        if found is not None:
            return found
        saved = torch.stack((*saved[:2], *norm.affine)).unsqueeze(1).repeat(1, joined, 1)
    of = x, joined, norm.activation, residual
    reduce = _pass("backward_reduce", *of)
    dx, dresidual = cuda.gradient_memory(dy, x, norm.activation, residual=residual, forked=False)
    columns, partial = saved.new_empty(4, joined, channels), saved.new_empty(reduce.partials)
    dweight, dbias = saved.new_empty(channels), saved.new_empty(channels)
    row = 4 * joined * channels
    at, read = columns.data_ptr(), (saved, saved.data_ptr() + 2 * row, saved.data_ptr() + 3 * row)
    sums = dresidual, partial, nvrtc.tickets(x.device), at, at + 2 * row, at + 3 * row
    reduce.run(dy, None, x, mask, *read, *sums, behind=(norm.slope,))
    _join("batchnorm_join_sums", (channels, joined), device).run(at, dweight, dbias)
    given = dresidual if residual else dy
    _pass("backward_apply", *of).run(given, None, x, *read, at, dx, behind=(norm.slope,))
    return dx, dresidual, dweight, dbias
