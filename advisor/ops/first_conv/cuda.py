"""Launches of the first-convolution kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import empty_nhwc
from advisor.ops.first_conv import spec
from advisor.ops.first_conv.spec import FirstConv
from advisor.ops.launches import Launch, launch

Dtypes = tuple[torch.dtype, torch.dtype, torch.dtype]  # of x, of what is computed in, and of the weight


def _dense(x: torch.Tensor) -> bool:
    """Whether x is NHWC without gaps and its pixels can be copied 16 bytes at a time."""
    return x.is_contiguous(memory_format=torch.channels_last) and x.data_ptr() % 16 == 0


def _channels_last(weight: torch.Tensor) -> bool:
    return not weight.is_contiguous()


def _parameter(weight: torch.Tensor) -> torch.Tensor:
    """The weight itself where it is contiguous or channels_last, else a copy that is."""
    return weight if weight.is_contiguous(memory_format=torch.channels_last) else weight.contiguous()


def _launch(
    source: str,
    call: FirstConv,
    defines: dict[str, int],
    strides: tuple[int, ...],
    device: int,
    last: tuple[int, ...],
    partials: int = 0,
) -> Launch:
    """`strides`: of x. `last`: of the sizes. `partials`: of a block."""
    shape = spec.geometry(call, defines, nvrtc.sm_count(device))
    n, c, h, w = strides
    sizes = (
        *(shape.tiles, n, h, w, c, call.height, call.width, call.out_height, call.out_width),
        *(call.padding[0], shape.strips, shape.bands, *last),
    )
    return launch(
        *(source, defines, device, shape.grid, defines["THREADS"], sizes), entry=spec.KERNELS[source][0]
    ).leaving(shape.grid * partials)


@lru_cache(maxsize=4096)
def _forward(
    call: FirstConv,
    dtypes: Dtypes,
    dense: bool,
    strides: tuple[int, ...],
    weight_channels_last: bool,
    device: int,
    moments: bool,
) -> tuple[Launch, int]:
    """The launch, and the parts of the moments that it leaves."""
    names = storage.name(dtypes[0]), storage.name(dtypes[1]), storage.name(dtypes[2])
    raw = spec.copied(call, dtype=names[0], compute=names[1], dense=dense)
    defines = spec.forward_defines(call, *names, raw=raw, moments=moments)
    plan = _launch(spec.FORWARD, call, defines, strides, device, (int(weight_channels_last),))
    return plan, spec.moment_parts(defines, plan.grid[0])


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    call: FirstConv,
    compute: torch.dtype,
    *,
    moments: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns y [N, C, OH, OW] channels_last in the dtype `compute` and, if asked for, its moments [parts, 3, C] fp32.

    x: [N, 3, H, W] of any strides; bias [C]: contiguous.
    """
    weight = _parameter(weight)
    layout = _dense(x), x.stride(), _channels_last(weight)
    plan, parts = _forward(call, (x.dtype, compute, weight.dtype), *layout, x.device.index or 0, moments)
    y = empty_nhwc((call.batch, call.channels, call.out_height, call.out_width), x, compute)
    if not moments:
        plan.run(x, weight, bias, y)
        return y, None
    left = torch.empty((parts, 3, call.channels), dtype=torch.float32, device=x.device)
    plan.run(x, weight, bias, y, behind=(left.data_ptr(),))
    return y, left


@lru_cache(maxsize=4096)
def _weight(
    call: FirstConv,
    dtypes: Dtypes,
    dense: bool,
    strides: tuple[int, ...],
    weight_channels_last: bool,
    device: int,
) -> tuple[Launch, Launch]:
    """The launch that leaves a block's partial sums, and the one that adds them up."""
    names = storage.name(dtypes[0]), storage.name(dtypes[1]), storage.name(dtypes[2])
    raw = spec.copied(call, dtype=names[0], compute=names[1], dense=dense)
    defines = spec.weight_defines(call, *names, raw=raw, arch=nvrtc.arch(device))
    each = spec.partials(defines)
    partial = _launch(spec.BACKWARD_WEIGHT, call, defines, strides, device, (), each)
    grid, sizes = each // spec.SUM_COLUMNS, (partial.grid[0], int(weight_channels_last))
    entry = spec.KERNELS[spec.BACKWARD_WEIGHT][1]
    return partial, launch(spec.BACKWARD_WEIGHT, defines, device, grid, defines["THREADS"], sizes, entry=entry)


def backward_weight(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, call: FirstConv
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns dweight like weight, and dbias like bias (None without one). dy: channels_last, 16-byte aligned."""
    weight = _parameter(weight)
    layout = _dense(x), x.stride(), _channels_last(weight)
    first, second = _weight(call, (x.dtype, dy.dtype, weight.dtype), *layout, x.device.index or 0)
    partial = torch.empty(first.partials, dtype=torch.float32, device=x.device)
    dweight = torch.empty_like(weight)
    dbias = None if bias is None else torch.empty_like(bias)
    first.run(x, dy, partial)
    second.run(partial, dweight, dbias)
    return dweight, dbias
