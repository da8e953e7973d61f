"""Launches of the bias + activation and the scale + add kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.bias_act import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    partials: int  # fp32 values
    rows: Any
    pixels: Any
    vectors: Any
    tile: Any


def _launch_of(
    source: str,
    defines: dict[str, int],
    x: torch.Size,
    dim: int,
    dtype: str,
    device: int,
    *,
    reduce: bool,
    narrow: bool,
) -> _Launch:
    c = x[dim]
    rows = x.numel() // c
    shape = spec.geometry(rows, c, dtype, nvrtc.sm_count(device), defines, reduce=reduce)
    (entry,) = spec.KERNELS[source]
    return _Launch(
        kernel=nvrtc.function(source, entry, tuple(defines.items()), device),
        grid=(shape.row_blocks, shape.tiles, 1),
        block=(defines["THREADS"], 1, 1),
        partials=shape.row_blocks * 2 * c if reduce else 0,
        rows=np.int32(rows) if narrow else np.int64(rows),
        pixels=np.int32(rows // x[0]) if narrow else None,
        vectors=np.int32(shape.vectors),
        tile=np.int32(shape.tile),
    )


@lru_cache(maxsize=4096)
def _bias_act(
    source: str, x: torch.Size, dim: int, dtype: torch.dtype, activation: str, bias: bool, residual: bool, device: int
) -> _Launch:
    name = storage.name(dtype)
    defines = spec.defines(source, name, activation, bias=bias, residual=residual)
    reduce = spec.sums(source, channels=bias)
    return _launch_of(source, defines, x, dim, name, device, reduce=reduce, narrow=False)


@lru_cache(maxsize=4096)
def _scale_add(
    source: str, x: torch.Size, dtype: torch.dtype, result: torch.dtype, variant: spec.Scaled, device: int
) -> _Launch:
    name = storage.name(dtype)
    defines = spec.scale_defines(source, name, variant, wide=result != dtype)
    reduce = spec.sums(source, channels=variant.scale)
    return _launch_of(source, defines, x, 1, name, device, reduce=reduce, narrow=True)


def bias_act(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    activation: str,
    slope: float,
    out: torch.Tensor,
    dim: int = 1,
) -> None:
    """act(x + bias + residual) into `out`, which may be x.

    x, residual, out: [N, C, H, W] channels_last with `dim` 1, [..., C] contiguous with -1, of one dtype; bias: [C] fp32,
    contiguous.
    """
    device = x.device.index or 0
    plan = _bias_act(spec.FORWARD, x.shape, dim, x.dtype, activation, bias is not None, residual is not None, device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            nvrtc.address(bias),
            nvrtc.address(residual),
            out.data_ptr(),
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )


def bias_act_backward(
    dy: torch.Tensor, saved: torch.Tensor, bias: torch.Tensor | None, activation: str, slope: float, dim: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns dx (like saved) and dbias [C] fp32 (empty without a bias).

    dy, saved: as x in `bias_act`; saved is the output where `spec.FROM_OUTPUT` has the activation, else the input.
    """
    device = dy.device.index or 0
    plan = _bias_act(spec.BACKWARD, dy.shape, dim, dy.dtype, activation, bias is not None, False, device)
    dx = torch.empty_like(saved)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dbias = torch.empty(0 if bias is None else bias.numel(), dtype=torch.float32, device=dy.device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            saved.data_ptr(),
            nvrtc.address(bias),
            dx.data_ptr(),
            partial.data_ptr(),
            nvrtc.tickets(dy.device),
            dbias.data_ptr(),
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )
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

    branch, residual: [N, C, H, W] channels_last; bias, scale: C and keep: N fp32 values, contiguous.
    """
    device = branch.device.index or 0
    variant = spec.Scaled(
        scale is not None, keep is not None, bias is not None, mixed=residual.dtype != result, twin=twin
    )
    plan = _scale_add(spec.SCALE_FORWARD, branch.shape, branch.dtype, result, variant, device)
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
            plan.rows,
            plan.pixels,
            plan.vectors,
            plan.tile,
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
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dbranch (in `dtype`, the branch's), dbias and dscale, C fp32 values each (empty without one), and dresidual.

    dy: the gradient of the result, `half`: of its twin, branch: all [N, C, H, W] channels_last; the branch is read for dscale
    alone. `residual`: its dtype; dresidual is dy itself where that and a missing twin allow.
    """
    device = dy.device.index or 0
    variant = spec.Scaled(
        scale is not None, keep is not None, bias is not None, mixed=residual != dy.dtype, twin=half is not None
    )
    plan = _scale_add(spec.SCALE_BACKWARD, dy.shape, dtype, dy.dtype, variant, device)
    dbranch = torch.empty_like(dy, dtype=dtype)
    dresidual = torch.empty_like(dy, dtype=residual) if variant.mixed or variant.twin else None
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dscale = torch.empty(0 if scale is None else scale.numel(), dtype=torch.float32, device=dy.device)
    dbias = torch.empty(0 if bias is None else bias.numel(), dtype=torch.float32, device=dy.device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            nvrtc.address(half),
            nvrtc.address(branch),
            nvrtc.address(bias),
            nvrtc.address(scale),
            nvrtc.address(keep),
            dbranch.data_ptr(),
            nvrtc.address(dresidual),
            partial.data_ptr(),
            nvrtc.tickets(dy.device),
            dscale.data_ptr(),
            dbias.data_ptr(),
            plan.rows,
            plan.pixels,
            plan.vectors,
            plan.tile,
        ),
        0,
        nvrtc.stream(device),
    )
    return dbranch, dbias, dscale, dy if dresidual is None else dresidual
