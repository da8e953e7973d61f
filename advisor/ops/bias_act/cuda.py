"""Launches of the bias + activation and the scale + add kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import channel_tiles, nvrtc, storage
from advisor.ops.bias_act import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, ...]
    partials: int = 0  # fp32 values


def _flat(source: str, defines: dict[str, int], total: int, sizes: tuple[int, ...], device: int) -> _Launch:
    """Of a pass over `total` vectors; `sizes` stand behind that among its arguments."""
    blocks = channel_tiles.flat_blocks(total, threads=defines["THREADS"], unroll=defines["UNROLL"])
    return _Launch(
        kernel=nvrtc.function(source, *spec.KERNELS[source], tuple(defines.items()), device),
        grid=(blocks, 1, 1),
        block=(defines["THREADS"], 1, 1),
        sizes=tuple(map(np.uint32, (total, *sizes))),
    )


def _summing(
    source: str, defines: dict[str, int], sizes: tuple[Any, ...], rows: int, channels: int, dtype: str, device: int
) -> _Launch:
    """Of a pass over [rows, channels] that ends in sums over rows; `sizes` stand before a row's vectors and tile among its arguments."""
    shape = spec.geometry(rows, channels, dtype, nvrtc.sm_count(device), defines)
    return _Launch(
        kernel=nvrtc.function(source, *spec.KERNELS[source], tuple(defines.items()), device),
        grid=(shape.row_blocks, shape.tiles, 1),
        block=(defines["THREADS"], 1, 1),
        sizes=(*sizes, np.int32(shape.vectors), np.int32(shape.tile)),
        partials=shape.row_blocks * 2 * channels,
    )


@lru_cache(maxsize=4096)
def _bias_act(
    source: str,
    x: torch.Size,
    dim: int,
    dtype: torch.dtype,
    activation: str,
    bias: bool,
    residual: bool,
    masks: bool,
    device: int,
) -> _Launch:
    name, rows = storage.name(dtype), x.numel() // x[dim]
    defines = spec.defines(source, name, activation, bias=bias, residual=residual, masks=masks)
    if source == spec.BACKWARD:
        return _summing(source, defines, (np.int64(rows),), rows, x[dim], name, device)
    vectors = x[dim] // storage.vector_width(name)
    return _flat(source, defines, rows * vectors, (vectors,) if source == spec.FORWARD else (), device)


@lru_cache(maxsize=4096)
def _scale_add(
    source: str,
    x: torch.Size,
    dtype: torch.dtype,
    result: torch.dtype,
    variant: spec.Scaled,
    half_keep: bool,
    device: int,
) -> _Launch:
    n, channels, h, w = x
    name, rows = storage.name(dtype), n * h * w
    defines = spec.scale_defines(source, name, variant, wide=result != dtype, half_keep=half_keep)
    if source == spec.SCALE_BACKWARD:
        return _summing(source, defines, (np.int32(rows), np.int32(h * w)), rows, channels, name, device)
    vectors = channels // storage.vector_width(name)
    sizes = (h * w * vectors, vectors) if source == spec.SCALE_FORWARD else (h * w * vectors,)
    return _flat(source, defines, rows * vectors, sizes, device)


def mask_memory(x: torch.Tensor, activation: str) -> torch.Tensor | None:
    """Memory for the bits of a forward's slopes, a byte a vector; None where the backward reads x instead."""
    if activation not in spec.MASKED:
        return None
    return x.new_empty(x.numel() // storage.vector_width(storage.name(x.dtype)), dtype=torch.uint8)


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float,
    out: torch.Tensor,
    dim: int = 1,
    mask: torch.Tensor | None = None,
) -> None:
    """act(x + bias + residual) into `out`, which may be x; the bits of its slopes into `mask`, of `mask_memory`.

    x, residual, out: [N, C, H, W] channels_last with `dim` 1, [..., C] contiguous with -1, of one dtype; bias: [C] fp32,
    contiguous.
    """
    device = x.device.index or 0
    variant = bias is not None, residual is not None, mask is not None
    plan = _bias_act(spec.FORWARD, x.shape, dim, x.dtype, activation, *variant, device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            nvrtc.address(bias),
            nvrtc.address(residual),
            out.data_ptr(),
            nvrtc.address(mask),
            *plan.sizes,
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )


def bias_act_backward(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, activation: str, slope: float, dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns dx (like dy) and dbias [C] fp32, None without a bias.

    dy: as x in `bias_act`; saved is the forward's mask where `spec.MASKED` has the activation, else its input.
    """
    device = dy.device.index or 0
    source = spec.backward(bias=bias is not None)
    plan = _bias_act(source, dy.shape, dim, dy.dtype, activation, bias is not None, False, False, device)
    dx = torch.empty_like(dy)
    sizes, stream = (*plan.sizes, np.float32(slope)), nvrtc.stream(device)
    above, kept, below = dy.data_ptr(), saved.data_ptr(), dx.data_ptr()
    if bias is None:
        plan.kernel(plan.grid, plan.block, (above, kept, below, *sizes), 0, stream)
        return dx, None
    dbias, partial = torch.empty_like(bias), bias.new_empty(plan.partials)
    sums = (partial.data_ptr(), nvrtc.tickets(dy.device), dbias.data_ptr())
    read = (0, kept) if activation in spec.MASKED else (kept, 0)  # x, or the mask
    plan.kernel(plan.grid, plan.block, (above, *read, bias.data_ptr(), below, *sums, *sizes), 0, stream)
    return dx, dbias


def scale_add(
    branch: torch.Tensor,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    residual: torch.Tensor,
    result: torch.dtype,
    *,
    twin: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """residual + (branch + bias) * scale * keep in the dtype `result`, and with `twin` the same in the branch's.

    branch, residual: [N, C, H, W] channels_last; bias, scale: C fp32 values and keep: N, fp32 or like the branch, contiguous.
    """
    device = branch.device.index or 0
    variant = spec.Scaled(
        scale is not None, keep is not None, bias is not None, mixed=residual.dtype != result, twin=twin
    )
    plan = _scale_add(spec.SCALE_FORWARD, branch.shape, branch.dtype, result, variant, _is_half(keep), device)
    y = torch.empty_like(residual, dtype=result)
    half = torch.empty_like(branch) if twin else None
    plan.kernel(
        plan.grid,
        plan.block,
        (
            branch.data_ptr(),
            nvrtc.address(bias),
            nvrtc.address(scale),
            nvrtc.address(keep),
            residual.data_ptr(),
            y.data_ptr(),
            nvrtc.address(half),
            *plan.sizes,
        ),
        0,
        nvrtc.stream(device),
    )
    return y, half


def scale_add_backward(
    dy: torch.Tensor,
    half: torch.Tensor | None,
    branch: torch.Tensor | None,
    bias: torch.Tensor | None,
    scale: torch.Tensor | None,
    keep: torch.Tensor | None,
    dtype: torch.dtype,
    residual: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None, torch.Tensor]:
    """Returns dbranch (in `dtype`, the branch's), dbias and dscale, C fp32 values each, None without one, and dresidual.

    dy: the gradient of the result, `half`: of its twin, branch: all [N, C, H, W] channels_last; the branch is read for dscale
    alone. `residual`: its dtype; dresidual is dy itself where that and a missing twin allow. The rest as in `scale_add`.
    """
    device = dy.device.index or 0
    variant = spec.Scaled(
        scale is not None, keep is not None, bias is not None, mixed=residual != dy.dtype, twin=half is not None
    )
    source = spec.scale_backward(scale=scale is not None)
    plan = _scale_add(source, dy.shape, dtype, dy.dtype, variant, _is_half(keep), device)
    dbranch = torch.empty_like(dy, dtype=dtype)
    dresidual = torch.empty_like(dy, dtype=residual) if variant.mixed or variant.twin else None
    above, below = (dy.data_ptr(), nvrtc.address(half)), (dbranch.data_ptr(), nvrtc.address(dresidual))
    factors, stream = nvrtc.address(keep), nvrtc.stream(device)
    if dresidual is None:
        dresidual = dy
    if scale is None:
        plan.kernel(plan.grid, plan.block, (*above, factors, *below, *plan.sizes), 0, stream)
        return dbranch, None, None, dresidual
    dscale, partial = scale.new_empty(scale.numel()), scale.new_empty(plan.partials)
    dbias = None if bias is None else torch.empty_like(bias)
    operands = (nvrtc.address(branch), nvrtc.address(bias), scale.data_ptr(), factors)
    sums = (partial.data_ptr(), nvrtc.tickets(dy.device), dscale.data_ptr(), nvrtc.address(dbias))
    plan.kernel(plan.grid, plan.block, (*above, *operands, *below, *sums, *plan.sizes), 0, stream)
    return dbranch, dbias, dscale, dresidual


def _is_half(keep: torch.Tensor | None) -> bool:
    return keep is not None and keep.dtype != torch.float32
