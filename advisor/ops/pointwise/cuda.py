"""Launches of the 1 x 1 convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.batchnorm_act import cuda as batchnorm_cuda
from advisor.ops.launches import Launch, launch
from advisor.ops.pointwise import spec

Made = tuple[torch.Tensor, torch.Tensor | None]  # a result and, where asked for, its moments


def launch_of(
    plan: spec.PointwisePlan,
    rows: int,
    in_channels: int,
    out_channels: int,
    dtype: torch.dtype,
    device: int,
    *,
    moments: bool,
) -> Launch:
    """The launch that a plan says."""
    macros = spec.defines(plan, storage.name(dtype), moments=moments)
    sizes = rows, in_channels // spec.OCTET, out_channels // spec.OCTET
    return launch(spec.FORWARD, macros, device, plan.grid, plan.threads, sizes, shared_bytes=plan.shared_bytes)


@lru_cache(maxsize=4096)
def _launch(rows: int, in_channels: int, out_channels: int, dtype: torch.dtype, device: int, moments: bool) -> Launch:
    plan = spec.plan(rows, in_channels, out_channels, nvrtc.sm_count(device), nvrtc.arch(device))
    return launch_of(plan, rows, in_channels, out_channels, dtype, device, moments=moments)


def run(launch: Launch, x: torch.Tensor, weight: torch.Tensor, *, moments: bool) -> Made:
    """As `forward`, with this launch."""
    n, _, h, w = x.shape
    channels = weight.shape[0]
    y = empty_nhwc((n, channels, h, w), x)
    parts = torch.empty((launch.grid[0], 3, channels), dtype=torch.float32, device=x.device) if moments else None
    launch.run(x, weight, y, *(() if parts is None else (parts,)))
    return y, parts


def forward(x: torch.Tensor, weight: torch.Tensor, *, moments: bool) -> Made:
    """Returns y [N, CO, H, W] channels_last in x's dtype and, if asked for, its moments [parts, 3, CO] fp32 (ops/moments.py).

    x: [N, CI, H, W] channels_last; weight [CO, CI, 1, 1] contiguous, in x's dtype, from a multiple of 16 bytes on.
    """
    n, c, h, w = x.shape
    made = _launch(n * h * w, c, weight.shape[0], x.dtype, x.device.index or 0, moments)
    return run(made, x, weight, moments=moments)


def gradient_launch_of(
    plan: spec.PointwisePlan,
    rows: int,
    channels: int,
    out_channels: int,
    dtype: torch.dtype,
    device: int,
    activation: str,
    residual: bool,
    forked: bool,
) -> Launch:
    """The launch that a plan says."""
    macros = spec.gradient_defines(plan, storage.name(dtype), activation, residual, forked=forked)
    sizes = rows, out_channels // spec.OCTET, channels // spec.OCTET
    return launch(spec.NORM_GRADIENT, macros, device, plan.grid, plan.threads, sizes, shared_bytes=plan.shared_bytes)


@lru_cache(maxsize=4096)
def _gradient_launch(
    rows: int,
    channels: int,
    out_channels: int,
    dtype: torch.dtype,
    device: int,
    activation: str,
    residual: bool,
    forked: bool,
) -> Launch:
    plan = spec.plan(rows, out_channels, channels, nvrtc.sm_count(device), nvrtc.arch(device), gradient=True)
    return gradient_launch_of(plan, rows, channels, out_channels, dtype, device, activation, residual, forked)


def run_gradient(
    launch: Launch,
    dz: torch.Tensor,
    conv_weight: torch.Tensor,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """As `norm_gradient`, with this launch."""
    g = torch.empty_like(x)
    sums = torch.empty((launch.grid[0], 2, x.shape[1]), dtype=torch.float32, device=x.device)
    launch.run(dz, conv_weight, dy, x, mask, *norm, g, sums, behind=(slope,))
    return g, sums


def norm_gradient(
    dz: torch.Tensor,
    conv_weight: torch.Tensor,
    dy: torch.Tensor | None,
    x: torch.Tensor,
    mask: torch.Tensor | None,
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    activation: str,
    slope: float,
    residual: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient behind the activation of a norm before the convolution, and its sums, for `batchnorm_act.cuda.backward_of_sums`.

    Args:
        dz: [N, CO, H, W] channels_last, what came from above the convolution. conv_weight: [CO, C, 1, 1] contiguous, from a multiple
            of 4 bytes on, both in x's dtype.
        dy: like x, the gradient from elsewhere, or None. x: [N, C, H, W] channels_last, the norm's input.
        mask: as the norm's forward left it. norm: what it saved [2, C], its weight and bias [C], fp32.

    Returns:
        g like x and sums [parts, 2, C] fp32.
    """
    n, c, h, w = x.shape
    device = x.device.index or 0
    launch = _gradient_launch(n * h * w, c, conv_weight.shape[0], x.dtype, device, activation, residual, dy is not None)
    return run_gradient(launch, dz, conv_weight, dy, x, mask, norm, slope)


@lru_cache(maxsize=4096)
def _norm_forward_launch(
    rows: int,
    channels: int,
    out_channels: int,
    dtype: torch.dtype,
    device: int,
    activation: str,
    residual: bool,
    moments: bool,
) -> Launch:
    variant = storage.name(dtype), activation, residual
    return launch(
        spec.NORM_FORWARD,
        spec.norm_forward_defines(channels, out_channels, *variant, moments=moments),
        device,
        spec.norm_forward_blocks(rows, channels, out_channels, nvrtc.sm_count(device)),
        spec.NORM_FORWARD_THREADS,
        (rows, out_channels // spec.OCTET),
        shared_bytes=spec.norm_forward_shared_bytes(channels, out_channels),
    )


def norm_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    conv_weight: torch.Tensor,
    activation: str,
    slope: float,
    *,
    moments: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]:
    """A norm's second pass and the 1 x 1 convolution of what it makes.

    Args:
        x, residual: [N, C, H, W] channels_last. norm: the statistics [2, C], the norm's weight and bias [C], fp32.
        conv_weight: [CO, C, 1, 1] contiguous, in x's dtype, from a multiple of 16 bytes on.

    Returns:
        y like x, the mask as the norm's own forward leaves it, z [N, CO, H, W] channels_last and, if asked for, its moments.
    """
    n, c, h, w = x.shape
    out = conv_weight.shape[0]
    launch = _norm_forward_launch(
        n * h * w, c, out, x.dtype, x.device.index or 0, activation, residual is not None, moments
    )
    y = torch.empty_like(x)
    mask = batchnorm_cuda.mask_memory(x, activation, residual=residual is not None)
    z = empty_nhwc((n, out, h, w), x)
    parts = torch.empty((launch.grid[0], 3, out), dtype=torch.float32, device=x.device) if moments else None
    outputs = (y, mask, z, *(() if parts is None else (parts,)))
    launch.run(x, residual, *norm, conv_weight, *outputs, behind=(slope,))
    return y, mask, z, parts
