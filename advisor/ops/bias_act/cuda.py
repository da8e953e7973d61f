"""Launches of the bias + activation and the scale + add kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import channel_tiles, nvrtc, storage
from advisor.ops.bias_act import spec
from advisor.ops.launches import Launch, launch


def _flat(source: str, defines: dict[str, int], total: int, sizes: tuple[int, ...], device: int) -> Launch:
    """Of a pass over `total` vectors; `sizes` stand behind that among its arguments."""
    threads = defines["THREADS"]
    blocks = channel_tiles.flat_blocks(total, threads=threads, unroll=defines["UNROLL"])
    return launch(source, defines, device, blocks, threads, (total, *sizes))


def _summing(
    source: str, defines: dict[str, int], sizes: tuple[int, ...], rows: int, channels: int, dtype: str, device: int
) -> Launch:
    """Of a pass over [rows, channels] that ends in sums over rows; `sizes` stand before a row's vectors and tile among its arguments."""
    shape = spec.geometry(rows, channels, dtype, nvrtc.sm_count(device), defines)
    grid, partials = (shape.row_blocks, shape.tiles), shape.row_blocks * 2 * channels
    sizes = *sizes, shape.vectors, shape.tile
    return launch(source, defines, device, grid, defines["THREADS"], sizes).leaving(partials)


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
) -> Launch:
    name, rows = storage.name(dtype), x.numel() // x[dim]
    defines = spec.defines(source, name, activation, bias=bias, residual=residual, masks=masks)
    if source == spec.BACKWARD:
        return _summing(source, defines, (rows,), rows, x[dim], name, device)
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
) -> Launch:
    n, channels, h, w = x
    name, rows = storage.name(dtype), n * h * w
    defines = spec.scale_defines(source, name, variant, wide=result != dtype, half_keep=half_keep)
    if source == spec.SCALE_BACKWARD:
        return _summing(source, defines, (rows, h * w), rows, channels, name, device)
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
    plan.run(x, bias, residual, out, mask, behind=(slope,))


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
    if bias is None:
        plan.run(dy, saved, dx, behind=(slope,))
        return dx, None
    dbias, partial = torch.empty_like(bias), bias.new_empty(plan.partials)
    read = (None, saved) if activation in spec.MASKED else (saved, None)  # x, or the mask
    plan.run(dy, *read, bias, dx, partial, nvrtc.tickets(dy.device), dbias, behind=(slope,))
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
    plan.run(branch, bias, scale, keep, residual, y, half)
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
    below = dbranch, dresidual
    if dresidual is None:
        dresidual = dy
    if scale is None:
        plan.run(dy, half, keep, *below)
        return dbranch, None, None, dresidual
    dscale, partial = scale.new_empty(scale.numel()), scale.new_empty(plan.partials)
    dbias = None if bias is None else torch.empty_like(bias)
    sums = partial, nvrtc.tickets(dy.device), dscale, dbias
    plan.run(dy, half, branch, bias, scale, keep, *below, *sums)
    return dbranch, dbias, dscale, dresidual


def _is_half(keep: torch.Tensor | None) -> bool:
    return keep is not None and keep.dtype != torch.float32
