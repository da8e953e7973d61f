"""Launches of the kernels over a growing concatenation. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import aligned
from advisor.ops.batchnorm_concat import spec
from advisor.ops.channel_tiles import Geometry

Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class _Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    partials: int  # fp32 values
    rows: Any
    vectors: Any
    tile: Any


def _launch(source: str, entry: str, defines: dict[str, int], shape: Geometry, channels: int, device: int) -> _Launch:
    return _Launch(
        kernel=nvrtc.function(source, entry, tuple(defines.items()), device),
        grid=(shape.row_blocks, shape.tiles, 1),
        block=(defines["THREADS"], 1, 1),
        partials=shape.row_blocks * 2 * channels,
        rows=np.int64(shape.rows),
        vectors=np.int32(shape.vectors),
        tile=np.int32(shape.tile),
    )


@lru_cache(maxsize=4096)
def _append(rows: int, channels: int, dtype: torch.dtype, backward: bool, device: int) -> _Launch:
    name, blocks = storage.name(dtype), spec.BLOCKS_PER_SM if backward else spec.APPEND_BLOCKS_PER_SM
    shape = spec.geometry(rows, channels, name, nvrtc.sm_count(device), blocks_per_sm=blocks, unroll=spec.UNROLL)
    entry = spec.KERNELS[spec.APPEND][backward]
    return _launch(spec.APPEND, entry, spec.append_defines(name), shape, channels, device)


@lru_cache(maxsize=4096)
def _forward(rows: int, channels: int, dtype: torch.dtype, activation: str, device: int) -> _Launch:
    name = storage.name(dtype)
    shape = spec.forward_geometry(rows, channels, name)
    (entry,) = spec.KERNELS[spec.FORWARD]
    return _launch(spec.FORWARD, entry, spec.forward_defines(name, activation), shape, channels, device)


@lru_cache(maxsize=4096)
def _backward(rows: int, channels: int, dtype: torch.dtype, activation: str, later: bool, device: int) -> _Launch:
    name = storage.name(dtype)
    shape = spec.geometry(
        rows,
        channels,
        name,
        nvrtc.sm_count(device),
        blocks_per_sm=spec.BLOCKS_PER_SM,
        unroll=spec.BACKWARD_UNROLL,
        lines=True,
    )
    (entry,) = spec.KERNELS[spec.BACKWARD]
    return _launch(spec.BACKWARD, entry, spec.backward_defines(name, activation, later), shape, channels, device)


@lru_cache(maxsize=4096)
def _pitch(channels: int, dtype: torch.dtype) -> Any:
    return np.int32(channels // storage.vector_width(storage.name(dtype)))


def concatenation(feature: torch.Tensor, channels: int) -> torch.Tensor:
    """Room for `channels` channels beside each other in each pixel, [N, channels, H, W] channels_last, like `feature`."""
    n, _, h, w = feature.shape
    return feature.new_empty((n, h, w, channels)).permute(0, 3, 1, 2)


def rows(tensor: torch.Tensor) -> torch.Tensor:
    """The [N, C, H, W] tensor itself where its pixels are rows at one distance, on 16-byte vectors; else a copy that is so.

    That distance, in elements, is `stride(3)` of the result.
    """
    _, _, h, w = tensor.shape
    pitch = tensor.stride(3)
    width = storage.vector_width(storage.name(tensor.dtype))
    if tensor.stride() == (h * w * pitch, 1, w * pitch, pitch) and not pitch % width and not tensor.data_ptr() % 16:
        return tensor
    return concatenation(tensor, tensor.shape[1]).copy_(tensor)


def append(feature: torch.Tensor, whole: torch.Tensor, moments: torch.Tensor, first: int) -> None:
    """Write `feature`, [N, C, H, W] channels_last, into channels first ... first + C of `whole`, and its statistics into `moments`.

    whole: as `concatenation` makes it. moments: [2, channels of whole] fp32: mean and biased variance.
    """
    n, c, h, w = feature.shape
    device = feature.device.index or 0
    plan = _append(n * h * w, c, feature.dtype, False, device)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=feature.device)
    channels = whole.shape[1]
    mean = moments.data_ptr() + 4 * first
    plan.kernel(
        plan.grid,
        plan.block,
        (
            feature.data_ptr(),
            whole.data_ptr() + first * whole.element_size(),
            partial.data_ptr(),
            nvrtc.tickets(feature.device),
            mean,
            mean + 4 * channels,
            plan.rows,
            plan.vectors,
            _pitch(channels, feature.dtype),
            plan.tile,
        ),
        0,
        nvrtc.stream(device),
    )


def append_backward(
    gradient: torch.Tensor, corrections: torch.Tensor, x: torch.Tensor, moments: torch.Tensor, first: int, channels: int
) -> torch.Tensor:
    """The gradient of the feature in `channels` channels from `first` on, [N, channels, H, W] channels_last.

    gradient, x: as `rows` gives them. corrections, moments: [2, C] fp32, rows at any distance.
    """
    n, _, h, w = x.shape
    device = x.device.index or 0
    plan = _append(n * h * w, channels, x.dtype, True, device)
    feature = concatenation(x, channels)
    offset, a = first * x.element_size(), corrections.data_ptr() + 4 * first
    plan.kernel(
        plan.grid,
        plan.block,
        (
            gradient.data_ptr() + offset,
            x.data_ptr() + offset,
            moments.data_ptr() + 4 * first,
            a,
            a + 4 * corrections.stride(0),
            feature.data_ptr(),
            plan.rows,
            plan.vectors,
            _pitch(gradient.stride(3), x.dtype),
            _pitch(x.stride(3), x.dtype),
            plan.tile,
        ),
        0,
        nvrtc.stream(device),
    )
    return feature


def forward(
    x: torch.Tensor,
    moments: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
) -> torch.Tensor:
    """y, [N, C, H, W] channels_last; running statistics are updated in place.

    x: as `rows` gives it. moments: [2, C] fp32, rows at any distance. running_mean, running_var, weight, bias: [C] fp32.
    """
    weight, bias = aligned(weight), aligned(bias)
    n, c, h, w = x.shape
    device = x.device.index or 0
    plan = _forward(n * h * w, c, x.dtype, activation, device)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean = moments.data_ptr()
    plan.kernel(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            mean,
            mean + 4 * moments.stride(0),
            weight.data_ptr(),
            bias.data_ptr(),
            running_mean.data_ptr(),
            running_var.data_ptr(),
            y.data_ptr(),
            plan.rows,
            plan.vectors,
            _pitch(x.stride(3), x.dtype),
            plan.tile,
            np.float32(momentum),
            np.float32(eps),
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    later: Pair | None,
    moments: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    activation: str,
    slope: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradient (like dy) and corrections [2, C] fp32 as the kernel's header defines them, dweight and dbias [C] fp32.

    dy: [N, C, H, W] channels_last. x: as `rows` gives it. later: gradient, as `rows` gives it, and corrections from behind.
    """
    weight, bias = aligned(weight), aligned(bias)
    n, c, h, w = x.shape
    device = x.device.index or 0
    plan = _backward(n * h * w, c, x.dtype, activation, later is not None, device)
    gradient = torch.empty_like(x, memory_format=torch.channels_last)
    corrections = weight.new_empty(2, c)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    own, mean = corrections.data_ptr(), moments.data_ptr()
    behind, a, b, pitch = 0, 0, 0, 0
    if later is not None:
        behind, a, pitch = later[0].data_ptr(), later[1].data_ptr(), later[0].stride(3)
        b = a + 4 * later[1].stride(0)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            x.data_ptr(),
            behind,
            mean,
            mean + 4 * moments.stride(0),
            weight.data_ptr(),
            bias.data_ptr(),
            a,
            b,
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            gradient.data_ptr(),
            own,
            own + 4 * c,
            dweight.data_ptr(),
            dbias.data_ptr(),
            plan.rows,
            plan.vectors,
            _pitch(x.stride(3), x.dtype),
            _pitch(pitch, x.dtype),
            plan.tile,
            np.float32(eps),
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )
    return gradient, corrections, dweight, dbias
