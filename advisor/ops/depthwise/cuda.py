"""Launches of the depthwise kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.depthwise import spec
from advisor.ops.depthwise.spec import DepthwiseConv
from advisor.ops.launches import Launch, launch


@lru_cache(maxsize=4096)
def _band(
    call: DepthwiseConv, source: str, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool, bias: bool
) -> Launch:
    """A launch of a tensor-core kernel."""
    plan = spec.band(call, weight=source == spec.BAND_WEIGHT)
    shape = spec.band_geometry(call, plan, nvrtc.sm_count(device))
    defines = spec.band_defines(call, plan, storage.name(dtype), storage.name(weight_dtype), bias=bias, flip=flip)
    sizes = (
        *(shape.items, call.batch, shape.vectors, call.height, call.width, call.out_height, call.out_width),
        *(*call.padding, plan.layout.origin, plan.layout.lead, shape.groups, shape.column_tiles, shape.segment_rows),
    )
    return launch(source, defines, device, shape.grid, plan.block.threads, sizes)


def _sizes(call: DepthwiseConv, shape: spec.DepthwiseGeometry, *dilation: int) -> tuple[int, ...]:
    """Of the kernels that walk over strips and segments."""
    return (
        *(shape.items, shape.vectors, shape.tile, call.height, call.width, call.out_height, call.out_width),
        *(*call.padding, *dilation, shape.strips, shape.segments, shape.segment_rows),
    )


@lru_cache(maxsize=4096)
def _strips(
    call: DepthwiseConv,
    dtype: torch.dtype,
    weight_dtype: torch.dtype,
    device: int,
    flip: bool,
    bias: bool,
    moments: bool = False,
) -> Launch:
    ring = spec.strips_ring(call, storage.name(dtype))
    shape = spec.ring_geometry(call, ring, storage.name(dtype), nvrtc.sm_count(device), backward=False)
    names = storage.name(dtype), storage.name(weight_dtype)
    defines = spec.ring_defines(call, ring, *names, backward=False, bias=bias, flip=flip, moments=moments)
    return launch(spec.STRIPS, defines, device, shape.grid, ring.threads, _sizes(call, shape))


@lru_cache(maxsize=4096)
def _forward(call: DepthwiseConv, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, flip: bool) -> Launch:
    config = spec.forward_config(call, storage.name(dtype), nvrtc.arch(device))
    shape = spec.forward_geometry(call, config, nvrtc.sm_count(device))
    defines = spec.forward_defines(call, config, storage.name(dtype), storage.name(weight_dtype), flip=flip)
    return launch(spec.FORWARD, defines, device, shape.grid, config.threads, _sizes(call, shape, call.dilation))


def _convolve(
    call: DepthwiseConv, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, flip: bool
) -> None:
    device, name = x.device.index or 0, storage.name(x.dtype)
    product = "data" if flip else "forward"
    if spec.banded(call, name, product):
        plan = _band(call, spec.BAND, x.dtype, weight.dtype, device, flip, bias is not None)
    elif spec.ringed(call, name, product):
        plan = _strips(call, x.dtype, weight.dtype, device, flip, bias is not None)
    else:
        plan = _forward(call, x.dtype, weight.dtype, device, flip)
    plan.run(x, weight, bias, y)


def forward(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: DepthwiseConv, *, moments: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OH, OW] channels_last in x's dtype and, if asked for and STRIPS runs, its moments [parts, 3, C] fp32.

    x: channels_last; weight [C, 1, k, k], bias [C]: contiguous.
    """
    y = empty_nhwc((call.batch, call.channels, call.out_height, call.out_width), x)
    if not moments or not spec.ringed(call, storage.name(x.dtype), "forward"):
        _convolve(call, x, weight, bias, y, False)
        return y, None
    plan = _strips(call, x.dtype, weight.dtype, x.device.index or 0, False, bias is not None, True)
    parts = torch.empty((plan.grid[0], 3, call.channels), dtype=torch.float32, device=x.device)
    plan.run(x, weight, bias, y, behind=(parts.data_ptr(),))
    return y, parts


@lru_cache(maxsize=4096)
def _strided_data(call: DepthwiseConv, dtype: torch.dtype, weight_dtype: torch.dtype, device: int) -> Launch:
    config = spec.data_config(call, storage.name(dtype))
    shape = spec.data_geometry(call, config, nvrtc.sm_count(device))
    defines = spec.data_defines(call, config, storage.name(dtype), storage.name(weight_dtype))
    return launch(spec.BACKWARD_DATA, defines, device, shape.grid, config.threads, _sizes(call, shape))


def backward_data(dy: torch.Tensor, weight: torch.Tensor, call: DepthwiseConv) -> torch.Tensor:
    """Returns dx [N, C, H, W] channels_last in dy's dtype. dy: channels_last."""
    dx = empty_nhwc((call.batch, call.channels, call.height, call.width), dy)
    if call.stride == 1:
        _convolve(call.transposed(), dy, weight, None, dx, True)
        return dx
    _strided_data(call, dy.dtype, weight.dtype, dy.device.index or 0).run(dy, weight, dx)
    return dx


class _Weight(NamedTuple):
    """A launch that writes a block's partial sums, so many fp32 values, and the one that adds them up."""

    partial: Launch
    total: Launch
    partials: int

    def sum(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *operands: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dweight like weight and dbias like bias, of the first launch's operands."""
        partial = torch.empty(self.partials, dtype=torch.float32, device=weight.device)
        dweight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
        dbias = None if bias is None else torch.empty_like(bias)
        self.partial.run(*operands, partial)
        self.total.run(partial, dweight, dbias)
        return dweight, dbias


def _summed(call: DepthwiseConv, partial: Launch, weight_dtype: torch.dtype, device: int) -> _Weight:
    defines = spec.sum_defines(call, storage.name(weight_dtype))
    columns, blocks = (call.kernel**2 + 1) * call.channels, partial.grid[0]
    grid, sizes = -(-columns // spec.SUM_COLUMNS), (blocks, call.channels)
    total = launch(spec.WEIGHT_SUM, defines, device, grid, spec.SUM_THREADS, sizes)
    return _Weight(partial, total, blocks * columns)


@lru_cache(maxsize=4096)
def _weight(call: DepthwiseConv, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, bias: bool) -> _Weight:
    if spec.banded(call, storage.name(dtype), "weight"):
        band = _band(call, spec.BAND_WEIGHT, dtype, weight_dtype, device, False, bias)
        return _summed(call, band, weight_dtype, device)
    config = spec.weight_config(call, storage.name(dtype))
    shape = spec.weight_geometry(call, config, nvrtc.sm_count(device))
    defines = spec.weight_defines(call, config, storage.name(dtype), storage.name(weight_dtype))
    sizes = _sizes(call, shape, call.dilation)
    partial = launch(spec.BACKWARD_WEIGHT, defines, device, shape.grid, config.threads, sizes)
    return _summed(call, partial, weight_dtype, device)


def backward_weight(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: DepthwiseConv
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns dweight like weight, and dbias like bias (None without one). dy and x: channels_last, one dtype."""
    plan = _weight(call, x.dtype, weight.dtype, x.device.index or 0, bias is not None)
    return plan.sum(weight, bias, dy, x)


@lru_cache(maxsize=4096)
def _backward(call: DepthwiseConv, dtype: torch.dtype, weight_dtype: torch.dtype, device: int, bias: bool) -> _Weight:
    ring = spec.backward_ring(call, storage.name(dtype))
    shape = spec.ring_geometry(call, ring, storage.name(dtype), nvrtc.sm_count(device), backward=True)
    defines = spec.ring_defines(call, ring, storage.name(dtype), storage.name(weight_dtype), backward=True, bias=bias)
    partial = launch(spec.BACKWARD, defines, device, shape.grid, ring.threads, _sizes(call, shape))
    return _summed(call, partial, weight_dtype, device)


def backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: DepthwiseConv
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns dx like x, dweight like weight and dbias like bias (None without one). dy and x: channels_last, one dtype."""
    plan = _backward(call, x.dtype, weight.dtype, x.device.index or 0, bias is not None)
    dx = empty_nhwc((call.batch, call.channels, call.height, call.width), dy)
    return dx, *plan.sum(weight, bias, dy, x, weight, dx)
