"""Launches of the kernels for exact fp32 convolutions. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from advisor.ops import nvrtc, sources
from advisor.ops.alignment import empty_nhwc
from advisor.ops.dispatch import UNMEASURED
from advisor.ops.exact_conv import spec
from advisor.ops.exact_conv.spec import ExactConv
from advisor.ops.launches import Launch, launch


class HalfParts(NamedTuple):
    """An fp32 tensor as two fp16 parts, and the bits of its largest magnitude (include/two_parts.cuh)."""

    high: torch.Tensor
    low: torch.Tensor
    most: torch.Tensor


def _hopper() -> bool:
    """Whether the compiler here makes Hopper's products."""
    return not nvrtc.refused(spec.HOPPER)


def unmeasured(device: int) -> str:
    """Why the kernels are not dispatched on this device, whatever the call; empty where they were measured."""
    lacks = sources.lacks(spec.HOPPER, nvrtc.arch(device))
    return "" if not lacks and _hopper() else f"{UNMEASURED} but of Hopper's products"


@lru_cache(maxsize=4096)
def _flat(entry: str, threads: int, sizes: tuple[int, ...], device: int) -> Launch:
    """A pass over memory, by so many threads if they are no more than fill the device."""
    blocks = max(1, min(-(-threads // spec.FLAT_THREADS), 8 * nvrtc.sm_count(device)))
    return launch(spec.PARTS, {}, device, blocks, spec.FLAT_THREADS, sizes, entry=entry)


def _largest(x: torch.Tensor, device: int) -> torch.Tensor:
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    _flat("exact_conv_largest", -(-x.numel() // 16), (x.numel(),), device).run(x, most)
    return most


def _room(rows: int, columns: int, most: torch.Tensor) -> HalfParts:
    shape = rows, spec.octets(columns) * spec.OCTET
    high, low = (torch.empty(shape, dtype=torch.float16, device=most.device) for _ in range(2))
    return HalfParts(high, low, most)


def split(x: torch.Tensor) -> HalfParts:
    """The parts of x [N, C, H, W] fp32, channels_last and 16-byte aligned, as rows of pixels, C filled up to a multiple of 8."""
    n, c, h, w = x.shape
    device = x.device.index or 0
    parts = _room(n * h * w, c, _largest(x, device))
    octets = parts.high.numel() // spec.OCTET
    _flat("exact_conv_split", octets, (octets, c), device).run(x, parts.most, parts.high, parts.low)
    return parts


def split_weight(weight: torch.Tensor, groups: int, *, gradient: bool) -> HalfParts:
    """The parts of a weight [O, I, R, S] fp32, dense in memory: rows of outputs [O][R][S][I]; for the input's gradient rows of inputs
    [groups][I][R][S][O of a group]."""
    device = weight.device.index or 0
    most = _largest(weight, device)
    outputs, inputs, r, s = weight.shape
    rows, columns = (inputs, outputs // groups) if gradient else (outputs, inputs)
    parts = _room(groups * rows * r * s if gradient else rows * r * s, columns, most)
    strides = weight.stride()
    order = (strides[1], strides[0]) if gradient else (strides[0], strides[1])
    each = rows * r * s * spec.octets(columns)
    for group in range(groups if gradient else 1):
        ahead, begin = group * each * 16, group * columns * strides[0] * 4
        plan = _flat("exact_conv_weight", each, (rows, columns, r, s, *order, *strides[2:]), device)
        to = (part.data_ptr() + ahead for part in (parts.high, parts.low))
        plan.run(weight.data_ptr() + begin, most, *to)
    return parts


@lru_cache(maxsize=4096)
def _conv(walk: spec.Walk, call: ExactConv, bias: bool, gradient: bool, device: int) -> Launch:
    inputs, outputs = (call.outputs, call.inputs) if gradient else (call.inputs, call.outputs)
    size, to = (call.height, call.width), (call.out_height, call.out_width)
    if gradient:
        size, to = to, size
    units, columns = spec.octets(inputs // call.groups), outputs // call.groups
    plan = spec.plan(columns, nvrtc.arch(device), hopper=_hopper())
    rows = call.batch * walk.rows[0] * walk.rows[1]
    sizes = (
        *(rows, *walk.rows, *size, *to, units, units * call.groups, columns),
        *(*walk.first, walk.out_step, walk.in_step, *walk.origin, walk.reach, walk.reach, *walk.taps),
        *(*walk.begin, walk.tap_step, call.taps_h, call.taps_w),
    )
    grid, macros = (-(-rows // plan.rows), -(-columns // plan.columns), call.groups), dict(plan.macros)
    macros["BIAS"] = int(bias)
    return launch(plan.source, macros, device, grid, plan.threads, sizes, shared_bytes=plan.shared_bytes)


def _convolve(
    a: HalfParts,
    b: HalfParts,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    walk: spec.Walk,
    call: ExactConv,
    *,
    gradient: bool,
) -> None:
    plan = _conv(walk, call, bias is not None, gradient, y.device.index or 0)
    plan.run(a.high, a.low, b.high, b.low, a.most, b.most, bias, y)


def forward(
    x: HalfParts, weight: HalfParts, bias: torch.Tensor | None, like: torch.Tensor, call: ExactConv
) -> torch.Tensor:
    """Returns y [N, O, OH, OW] fp32, channels_last, on the device of `like`."""
    y = empty_nhwc((call.batch, call.outputs, call.out_height, call.out_width), like, torch.float32)
    _convolve(x, weight, bias, y, spec.forward_walk(call), call, gradient=False)
    return y


def backward_data(dy: HalfParts, weight: HalfParts, like: torch.Tensor, call: ExactConv) -> torch.Tensor:
    """Returns dx [N, I, H, W] fp32, channels_last. `weight`: split for the gradient."""
    dx = empty_nhwc((call.batch, call.inputs, call.height, call.width), like, torch.float32)
    for walk in spec.gradient_walks(call):
        _convolve(dy, weight, None, dx, walk, call, gradient=True)
    return dx


@lru_cache(maxsize=4096)
def _weight(call: ExactConv, device: int) -> tuple[Launch, int]:
    """The launch, and how many parts of the sum it leaves."""
    plan = spec.weight_plan(call, nvrtc.sm_count(device), nvrtc.arch(device), hopper=_hopper())
    outputs, inputs = call.outputs // call.groups, call.inputs // call.groups
    units, taps = spec.octets(inputs), call.taps_h * call.taps_w
    sizes = (
        *(call.batch * call.out_height * call.out_width, call.height, call.width, call.out_height, call.out_width),
        *(spec.octets(outputs), units, call.groups, outputs, inputs, call.stride, call.pad_h, call.pad_w),
        *(call.dilation, call.dilation, call.taps_h, call.taps_w, plan.split_rows),
    )
    grid = -(-outputs // plan.rows), -(-taps * units * spec.OCTET // plan.columns), plan.splits * call.groups
    macros, nbytes = dict(plan.macros), plan.shared_bytes
    return launch(plan.source, macros, device, grid, plan.threads, sizes, shared_bytes=nbytes), plan.splits


def backward_weight(dy: HalfParts, x: HalfParts, weight: torch.Tensor, call: ExactConv) -> torch.Tensor:
    """Returns dweight [O, I / groups, R, S] fp32, channels_last."""
    plan, splits = _weight(call, weight.device.index or 0)
    inputs = call.inputs // call.groups
    left = torch.empty(
        (splits, call.outputs, call.taps_h * call.taps_w, inputs), dtype=torch.float32, device=weight.device
    )
    plan.run(dy.high, dy.low, x.high, x.low, dy.most, x.most, left)
    total = left[0] if splits == 1 else left.sum(0)
    return total.view(call.outputs, call.taps_h, call.taps_w, inputs).permute(0, 3, 1, 2)
