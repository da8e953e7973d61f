"""Launches of the kernels over a growing concatenation. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_concat import spec
from advisor.ops.channel_tiles import TileGeometry
from advisor.ops.launches import Launch, launch

Pair = tuple[torch.Tensor, torch.Tensor]


def _launch(
    source: str,
    defines: dict[str, int],
    shape: TileGeometry,
    channels: int,
    pitches: tuple[int, ...],
    dtype: torch.dtype,
    device: int,
    entry: str = "",
) -> Launch:
    """`pitches`: channels from a pixel to the next one, of each tensor that is told."""
    grid, width = (shape.row_blocks, shape.tiles), storage.vector_width(storage.name(dtype))
    sizes = shape.rows, shape.vectors, *(pitch // width for pitch in pitches), shape.tile
    partials = shape.row_blocks * 2 * channels
    return launch(source, defines, device, grid, defines["THREADS"], sizes, entry=entry).leaving(partials)


@lru_cache(maxsize=4096)
def _append(
    rows: int, channels: int, pitches: tuple[int, ...], dtype: torch.dtype, backward: bool, device: int
) -> Launch:
    name, blocks = storage.name(dtype), spec.BLOCKS_PER_SM if backward else spec.APPEND_BLOCKS_PER_SM
    shape = spec.geometry(rows, channels, name, nvrtc.sm_count(device), blocks_per_sm=blocks, unroll=spec.UNROLL)
    entry = spec.KERNELS[spec.APPEND][backward]
    return _launch(spec.APPEND, spec.append_defines(name), shape, channels, pitches, dtype, device, entry)


@lru_cache(maxsize=4096)
def _forward(rows: int, channels: int, pitch: int, dtype: torch.dtype, activation: str, device: int) -> Launch:
    name = storage.name(dtype)
    shape, defines = spec.forward_geometry(rows, channels, name), spec.forward_defines(name, activation)
    return _launch(spec.FORWARD, defines, shape, channels, (pitch,), dtype, device, "batchnorm_concat_apply")


@lru_cache(maxsize=4096)
def _backward(
    rows: int,
    channels: int,
    pitches: tuple[int, int],
    dtype: torch.dtype,
    activation: str,
    later: bool,
    device: int,
) -> Launch:
    name, sms = storage.name(dtype), nvrtc.sm_count(device)
    of_blocks = {"blocks_per_sm": spec.BLOCKS_PER_SM, "unroll": spec.BACKWARD_UNROLL}
    shape = spec.geometry(rows, channels, name, sms, **of_blocks, lines=True)
    defines = spec.backward_defines(name, activation, later)
    return _launch(spec.BACKWARD, defines, shape, channels, pitches, dtype, device)


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
    channels = whole.shape[1]
    plan = _append(n * h * w, c, (channels,), feature.dtype, False, device)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=feature.device)
    mean, to = moments.data_ptr() + 4 * first, whole.data_ptr() + first * whole.element_size()
    plan.run(feature, to, partial, nvrtc.tickets(feature.device), mean, mean + 4 * channels)


def append_backward(
    gradient: torch.Tensor, corrections: torch.Tensor, x: torch.Tensor, moments: torch.Tensor, first: int, channels: int
) -> torch.Tensor:
    """The gradient of the feature in `channels` channels from `first` on, [N, channels, H, W] channels_last.

    gradient, x: as `rows` gives them. corrections, moments: [2, C] fp32, rows at any distance.
    """
    n, _, h, w = x.shape
    device = x.device.index or 0
    plan = _append(n * h * w, channels, (gradient.stride(3), x.stride(3)), x.dtype, True, device)
    feature = concatenation(x, channels)
    offset, a = first * x.element_size(), corrections.data_ptr() + 4 * first
    of = gradient.data_ptr() + offset, x.data_ptr() + offset, moments.data_ptr() + 4 * first
    plan.run(*of, a, a + 4 * corrections.stride(0), feature)
    return feature


def forward(
    x: torch.Tensor,
    moments: torch.Tensor,
    norm: Norm,
) -> torch.Tensor:
    """y, [N, C, H, W] channels_last; running statistics are updated in place.

    x: as `rows` gives it. moments: [2, C] fp32, rows at any distance. Of the norm nothing is None.
    """
    n, c, h, w = x.shape
    device = x.device.index or 0
    plan = _forward(n * h * w, c, x.stride(3), x.dtype, norm.activation, device)
    y = torch.empty_like(x, memory_format=torch.channels_last)
    mean = moments.data_ptr()
    of = mean, mean + 4 * moments.stride(0), *norm.aligned().affine, norm.running_mean, norm.running_var
    plan.run(x, *of, y, behind=(norm.momentum, norm.eps, norm.slope))
    return y


def backward(
    dy: torch.Tensor,
    x: torch.Tensor,
    later: Pair | None,
    moments: torch.Tensor,
    norm: Norm,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns gradient (like dy) and corrections [2, C] fp32 as the kernel's header defines them, dweight and dbias [C] fp32.

    dy: [N, C, H, W] channels_last. x: as `rows` gives it. later: gradient, as `rows` gives it, and corrections from behind.
    """
    weight, bias = norm.aligned().affine
    n, c, h, w = x.shape
    device = x.device.index or 0
    pitches = x.stride(3), 0 if later is None else later[0].stride(3)
    plan = _backward(n * h * w, c, pitches, x.dtype, norm.activation, later is not None, device)
    gradient = torch.empty_like(x, memory_format=torch.channels_last)
    corrections = weight.new_empty(2, c)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=x.device)
    own, mean, a = corrections.data_ptr(), moments.data_ptr(), 0 if later is None else later[1].data_ptr()
    b = 0 if later is None else a + 4 * later[1].stride(0)
    of = mean, mean + 4 * moments.stride(0), weight, bias
    results = gradient, own, own + 4 * c, dweight, dbias
    behind = None if later is None else later[0]
    plan.run(dy, x, behind, *of, a, b, partial, nvrtc.tickets(x.device), *results, behind=(norm.eps, norm.slope))
    return gradient, corrections, dweight, dbias
