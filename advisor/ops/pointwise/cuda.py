"""Launches of the 1 x 1 convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.batchnorm_act import cuda as batchnorm_cuda
from advisor.ops.pointwise import spec


@dataclass(frozen=True, slots=True)
class _Launch:
    """A kernel with all that depends on shapes, dtype and variant only."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, ...]  # rows, and octets of what comes in and goes out
    shared_bytes: int
    moments: bool = False

    def run(self, *tensors: torch.Tensor | None, numbers: tuple[Any, ...] = ()) -> None:
        """Launch with the tensors' addresses (None: no address), the sizes and these numbers. The first tensor's device is taken."""
        addresses = map(nvrtc.address, tensors)
        device = 0 if tensors[0] is None else tensors[0].device.index or 0
        arguments = (*addresses, *self.sizes, *numbers)
        self.kernel(self.grid, self.block, arguments, self.shared_bytes, nvrtc.stream(device))


def launch_of(
    plan: spec.Plan, rows: int, in_channels: int, out_channels: int, dtype: torch.dtype, device: int, *, moments: bool
) -> _Launch:
    """The launch that a plan says."""
    macros = tuple(spec.defines(plan, storage.name(dtype), moments=moments).items())
    (entry,) = spec.KERNELS[spec.FORWARD]
    return _Launch(
        kernel=nvrtc.function(spec.FORWARD, entry, macros, device, plan.shared_bytes),
        grid=(*plan.grid, 1),
        block=(plan.threads, 1, 1),
        sizes=(np.int32(rows), np.int32(in_channels // spec.OCTET), np.int32(out_channels // spec.OCTET)),
        shared_bytes=plan.shared_bytes,
        moments=moments,
    )


@lru_cache(maxsize=4096)
def _launch(rows: int, in_channels: int, out_channels: int, dtype: torch.dtype, device: int, moments: bool) -> _Launch:
    plan = spec.plan(rows, in_channels, out_channels, nvrtc.sm_count(device), nvrtc.arch(device))
    return launch_of(plan, rows, in_channels, out_channels, dtype, device, moments=moments)


def run(launch: _Launch, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As `forward`, with this launch."""
    n, _, h, w = x.shape
    channels = weight.shape[0]
    y = empty_nhwc((n, channels, h, w), x)
    parts = torch.empty((launch.grid[0], 3, channels), dtype=torch.float32, device=x.device) if launch.moments else None
    launch.run(x, weight, y, *(() if parts is None else (parts,)))
    return y, parts


def forward(x: torch.Tensor, weight: torch.Tensor, *, moments: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, CO, H, W] channels_last in x's dtype and, if asked for, its moments [parts, 3, CO] fp32 (ops/moments.py).

    x: [N, CI, H, W] channels_last; weight [CO, CI, 1, 1] contiguous, in x's dtype, from a multiple of 16 bytes on.
    """
    n, c, h, w = x.shape
    return run(_launch(n * h * w, c, weight.shape[0], x.dtype, x.device.index or 0, moments), x, weight)


def gradient_launch_of(
    plan: spec.Plan,
    rows: int,
    channels: int,
    out_channels: int,
    dtype: torch.dtype,
    device: int,
    activation: str,
    residual: bool,
    forked: bool,
) -> _Launch:
    """The launch that a plan says."""
    macros = tuple(spec.gradient_defines(plan, storage.name(dtype), activation, residual, forked=forked).items())
    (entry,) = spec.KERNELS[spec.NORM_GRADIENT]
    return _Launch(
        kernel=nvrtc.function(spec.NORM_GRADIENT, entry, macros, device, plan.shared_bytes),
        grid=(*plan.grid, 1),
        block=(plan.threads, 1, 1),
        sizes=(np.int32(rows), np.int32(out_channels // spec.OCTET), np.int32(channels // spec.OCTET)),
        shared_bytes=plan.shared_bytes,
    )


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
) -> _Launch:
    plan = spec.plan(rows, out_channels, channels, nvrtc.sm_count(device), nvrtc.arch(device), gradient=True)
    return gradient_launch_of(plan, rows, channels, out_channels, dtype, device, activation, residual, forked)


def run_gradient(
    launch: _Launch,
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
    launch.run(dz, conv_weight, dy, x, mask, *norm, g, sums, numbers=(np.float32(slope),))
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
) -> _Launch:
    variant = storage.name(dtype), activation, residual
    macros = tuple(spec.norm_forward_defines(channels, out_channels, *variant, moments=moments).items())
    (entry,) = spec.KERNELS[spec.NORM_FORWARD]
    nbytes = spec.norm_forward_shared_bytes(channels, out_channels)
    return _Launch(
        kernel=nvrtc.function(spec.NORM_FORWARD, entry, macros, device, nbytes),
        grid=(spec.norm_forward_blocks(rows, channels, out_channels, nvrtc.sm_count(device)), 1, 1),
        block=(spec.NORM_FORWARD_THREADS, 1, 1),
        sizes=(np.int32(rows), np.int32(out_channels // spec.OCTET)),
        shared_bytes=nbytes,
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
    launch.run(x, residual, *norm, conv_weight, *outputs, numbers=(np.float32(slope),))
    return y, mask, z, parts
