"""Launches of the BatchNorm(+add)+activation kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import aligned
from advisor.ops.batchnorm_act import spec


@dataclass(frozen=True, slots=True)
class Launch:
    """Everything about a launch that depends on shape, dtype and variant only, ready to pass."""

    stats: Any
    apply: Any
    reduce: Any
    backward_apply: Any
    block: tuple[int, int, int]
    stats_grid: tuple[int, int, int]
    grid: tuple[int, int, int]
    stats_partials: int  # fp32 values
    partials: int
    rows: Any
    vectors: Any
    tile: Any


@lru_cache(maxsize=4096)
def launch(
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    forked: bool,
    device: int,
    joined: bool = False,
) -> Launch:
    """`joined`: rows and channels are of some rows taken for one."""
    name = storage.name(dtype)
    sms = nvrtc.sm_count(device)
    statistics = spec.geometry(rows, channels, name, sms, spec.STATS_BLOCKS_PER_SM, joined=joined)
    shape = spec.geometry(rows, channels, name, sms, spec.BLOCKS_PER_SM, joined=joined)
    (stats, apply), (reduce, backward_apply) = (
        [nvrtc.function(source, entry, tuple(defines.items()), device) for entry in spec.KERNELS[source]]
        for source, defines in (
            (spec.FORWARD, spec.defines(name, activation, residual)),
            (spec.BACKWARD, spec.defines(name, activation, residual, forked=forked)),
        )
    )
    return Launch(
        stats=stats,
        apply=apply,
        reduce=reduce,
        backward_apply=backward_apply,
        block=(spec.THREADS, 1, 1),
        stats_grid=(statistics.row_blocks, statistics.tiles, 1),
        grid=(shape.row_blocks, shape.tiles, 1),
        stats_partials=statistics.row_blocks * 2 * channels,
        partials=shape.row_blocks * 2 * channels,
        rows=np.int64(rows),
        vectors=np.int32(shape.vectors),
        tile=np.int32(shape.tile),
    )


@dataclass(frozen=True, slots=True)
class _OneLaunch:
    """A launch in which a cluster holds its tile's rows, or, where blocks exchange their sums, all hold the tensor; ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[
        Any, ...
    ]  # rows, vectors, tile; with an exchange `kept`, forward `ahead`, of whole rows channels and `joined`
    shared: int = 0  # bytes of dynamic shared memory
    half: int = 0  # words of an exchange

    def run(self, memory: int, before: tuple[Any, ...], behind: tuple[Any, ...], stream: Any) -> None:
        """Launch with these arguments before and behind the exchange, whose `memory` is nvrtc's; a cluster has none.

        With an exchange the launch is cooperative: its blocks wait for each other.
        """
        if not self.half:
            self.kernel(self.grid, self.block, (*before, *behind), 0, stream)
            return
        arguments = (*before, memory, np.int32(self.half), *behind)
        self.kernel(self.grid, self.block, arguments, self.shared, stream, cooperative=True)


@lru_cache(maxsize=4096)
def _one_launch(
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    forked: bool,
    backward: bool,
    way: str | None,
    alone: bool,
    joined: int,
    device: int,
) -> _OneLaunch | None:
    """The one launch where spec says so, or `way`; None for two. Rows are of `joined` rows, and channels their columns."""
    name, arch = storage.name(dtype), nvrtc.arch(device)
    source, shape = spec.launch(
        rows,
        channels,
        name,
        activation,
        residual=residual,
        forked=forked,
        backward=backward,
        sm_count=nvrtc.sm_count(device),
        arch=arch,
        way=way,
        alone=alone,
        joined=joined,
    )
    if shape is None:
        return None
    entry, sizes = spec.KERNELS[source][0], (rows, shape.vectors, shape.tile)
    if isinstance(shape, spec.Held):
        held = tuple(spec.held_defines(source, name, activation, residual, forked=forked).items())
        return _OneLaunch(
            kernel=nvrtc.function(source, entry, held, device),
            grid=(spec.HELD_CLUSTER, shape.tiles, 1),
            block=(spec.held_threads(source), 1, 1),
            sizes=tuple(map(np.int32, sizes)),
        )
    defines = tuple(
        spec.grid_defines(
            source, name, activation, residual, forked=forked, streams=shape.streams, whole=shape.whole
        ).items()
    )
    slot = 16 * spec.GRID_THREADS
    kept = (shape.kept,) if backward else (shape.kept, shape.ahead)
    if shape.whole:
        kept = *kept, channels // joined, joined
    return _OneLaunch(
        kernel=nvrtc.function(
            source, entry, defines, device, spec.grid_slots(source, arch, name, whole=shape.whole) * slot
        ),
        grid=(shape.blocks, shape.tiles, 1),
        block=(spec.GRID_THREADS, 1, 1),
        sizes=tuple(map(np.int32, (*sizes, *kept))),
        shared=shape.slots * slot,
        half=spec.grid_exchange(nvrtc.sm_count(device)),
    )


def _one(device: torch.device, *of: Any) -> tuple[_OneLaunch, int] | None:
    """`_one_launch` with the memory that it needs, where that can be had."""
    one = _one_launch(*of, device.index or 0)
    if one is None or not one.half:
        return None if one is None else (one, 0)
    memory = nvrtc.exchange(device, one.half)
    return (one, memory) if memory else None


@dataclass(frozen=True, slots=True)
class _Frozen:
    """A frozen norm's launch, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    partials: int  # fp32 values
    sizes: tuple[Any, Any, Any]  # rows, vectors, tile


@lru_cache(maxsize=4096)
def _frozen(
    source: str,
    rows: int,
    channels: int,
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    affine_gradients: bool,
    device: int,
) -> _Frozen:
    name = storage.name(dtype)
    shape = spec.geometry(rows, channels, name, nvrtc.sm_count(device), spec.BLOCKS_PER_SM)
    defines = tuple(spec.frozen_defines(source, name, activation, residual, affine_gradients).items())
    return _Frozen(
        kernel=nvrtc.function(source, spec.KERNELS[source][0], defines, device),
        grid=(shape.row_blocks, shape.tiles, 1),
        block=(spec.THREADS, 1, 1),
        partials=shape.row_blocks * 2 * channels if affine_gradients else 0,
        sizes=(np.int64(rows), np.int32(shape.vectors), np.int32(shape.tile)),
    )


def _plan(x: torch.Tensor, activation: str, residual: bool, *, forked: bool = False) -> Launch:
    n, c, h, w = x.shape
    return launch(n * h * w, c, x.dtype, activation, residual, forked, x.device.index or 0)


def mask_memory(x: torch.Tensor, activation: str, *, residual: bool) -> torch.Tensor | None:
    """Memory for the bits of a forward's slopes, a byte a vector; None where the backward needs none."""
    if not residual or activation == "none":
        return None
    return x.new_empty(x.numel() // storage.vector_width(storage.name(x.dtype)), dtype=torch.uint8)


def gradient_memory(
    dy: torch.Tensor, x: torch.Tensor, activation: str, *, residual: bool, forked: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A backward's dx and dresidual, to be written; the latter is dy where that is the residual's gradient, None without a residual."""
    written = spec.writes_residual_gradient(activation, residual, forked=forked)
    return torch.empty_like(x), torch.empty_like(x) if written else dy if residual else None


def _statistics_memory(
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    *,
    in_place: bool,
) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """What a forward saves of its statistics, fp32 (see `forward`), and the addresses of old and of new running values."""
    if running_mean is None or running_var is None:
        # The kernels read old running values and write new ones, whoever wants them: they read what there is to read.
        running_mean, running_var, in_place = bias, weight, False
    channels = weight.shape[0]
    saved = weight.new_empty(2 if in_place else 4, channels)
    running = (running_mean.data_ptr(), running_var.data_ptr())
    updated = running if in_place else (saved.data_ptr() + 8 * channels, saved.data_ptr() + 12 * channels)
    return saved, running, updated


def forward_at_once(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    *,
    in_place: bool = True,
    way: str | None = None,
    joined: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """As `forward`, where that is one launch; else None. `joined` rows are taken for one."""
    n, c, h, w = x.shape
    shape = n * h * w // joined, c * joined, x.dtype, activation, residual is not None
    found = _one(x.device, *shape, False, False, way, nvrtc.alone(), joined)
    if found is None:
        return None
    one, memory = found
    weight, bias = aligned(weight), aligned(bias)
    y = torch.empty_like(x)
    saved, running, updated = _statistics_memory(running_mean, running_var, weight, bias, in_place=in_place)
    mask = mask_memory(x, activation, residual=residual is not None)
    affine = weight.data_ptr(), bias.data_ptr()
    outputs = saved.data_ptr(), *updated, y.data_ptr(), nvrtc.address(mask)
    numbers = np.float32(momentum), np.float32(eps), np.float32(slope)
    one.run(
        memory,
        (x.data_ptr(), nvrtc.address(residual)),
        (*running, *affine, *outputs, *one.sizes, *numbers),
        nvrtc.stream(x.device.index or 0),
    )
    return y, saved, mask


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    slope: float,
    *,
    in_place: bool = True,
    way: str | None = None,
    moments: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns y (like x), saved fp32, and mask (bytes; None without a residual or an activation).

    saved is [2, C], mean and inverse standard deviation, or, when not `in_place`, [4, C] with the new running mean and
    variance after them; `in_place` updates `running_mean` and `running_var` instead. x and residual: [N, C, H, W] channels_last, fp16, bf16 or fp32.

    Without running statistics saved is [4, C] too, and its last two rows mean nothing. `way` is one of spec.WAYS, and TWO is taken
    where what it names cannot hold the rows; None takes what spec says is fastest. `moments` of x (ops/moments.py) spare two launches the
    first's pass over x: they are taken whatever the way.
    """
    arguments = x, residual, running_mean, running_var, weight, bias, momentum, eps, activation, slope
    found = forward_at_once(*arguments, in_place=in_place, way=way) if moments is None else None
    if found is not None:
        return found
    weight, bias = aligned(weight), aligned(bias)
    device = x.device.index or 0
    y = torch.empty_like(x)
    saved, running, updated = _statistics_memory(running_mean, running_var, weight, bias, in_place=in_place)
    mask = mask_memory(x, activation, residual=residual is not None)
    stream = nvrtc.stream(device)
    plan = _plan(x, activation, residual is not None)
    _statistics(plan, x, saved, running, updated, momentum, eps, moments)
    plan.apply(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            nvrtc.address(residual),
            saved.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
            nvrtc.address(mask),
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        stream,
    )
    return y, saved, mask


def _statistics(
    plan: Launch,
    x: torch.Tensor,
    saved: torch.Tensor,
    running: tuple[int, int],
    updated: tuple[int, int],
    momentum: float,
    eps: float,
    moments: torch.Tensor | None,
) -> None:
    """The forward's first launch, or what `moments` need in its place. `running`, `updated`: addresses, as of `merge_moments`."""
    if moments is not None:
        merge_moments(moments, saved, running, updated, momentum, eps)
        return
    partial = saved.new_empty(plan.stats_partials)
    addresses = (x.data_ptr(), partial.data_ptr(), nvrtc.tickets(x.device), saved.data_ptr(), *running, *updated)
    sizes = (plan.rows, plan.vectors, plan.tile, np.float32(momentum), np.float32(eps))
    plan.stats(plan.stats_grid, plan.block, (*addresses, *sizes), 0, nvrtc.stream(x.device.index or 0))


def statistics(
    x: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    momentum: float,
    eps: float,
    activation: str,
    residual: bool,
    moments: torch.Tensor | None,
) -> torch.Tensor:
    """The first of the forward's two launches: mean and inverse standard deviation, the first two rows of what it returns, fp32.

    Running statistics are updated in place. weight and bias are aligned. Args: as of `forward`.
    """
    saved, running, updated = _statistics_memory(running_mean, running_var, weight, bias, in_place=True)
    _statistics(_plan(x, activation, residual), x, saved, running, updated, momentum, eps, moments)
    return saved


@dataclass(frozen=True, slots=True)
class _Merge:
    """The launch that merges moments, or the sums of a gradient, ready to pass."""

    kernel: Any
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    sizes: tuple[Any, Any]  # parts, channels


@lru_cache(maxsize=4096)
def _merge(source: str, parts: int, channels: int, device: int) -> _Merge:
    defines = tuple(spec.moments_defines().items())
    return _Merge(
        kernel=nvrtc.function(source, spec.KERNELS[source][0], defines, device),
        grid=(-(-channels // spec.MOMENTS_CHANNELS), 1, 1),
        block=(spec.MOMENTS_THREADS, 1, 1),
        sizes=(np.int32(parts), np.int32(channels)),
    )


def merge_moments(
    moments: torch.Tensor,
    saved: torch.Tensor,
    running: tuple[int, int],
    updated: tuple[int, int],
    momentum: float,
    eps: float,
) -> None:
    """A norm's statistics from the moments [parts, 3, C] that the kernel before it left (ops/moments.py).

    Writes mean and inverse standard deviation to `saved`, and the new running statistics to the addresses `updated`; `running` are
    those of the old ones.
    """
    device = moments.device.index or 0
    plan = _merge(spec.MOMENTS, moments.shape[0], moments.shape[2], device)
    addresses = (moments.data_ptr(), saved.data_ptr(), *running, *updated)
    arguments = (*addresses, *plan.sizes, np.float32(momentum), np.float32(eps))
    plan.kernel(plan.grid, plan.block, arguments, 0, nvrtc.stream(device))


def backward_at_once(
    dy: torch.Tensor,
    dy2: torch.Tensor | None,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
    *,
    way: str | None = None,
    joined: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor] | None:
    """As `backward`, where that is one launch; else None. `joined` rows are taken for one."""
    n, c, h, w = x.shape
    forked = dy2 is not None
    shape = n * h * w // joined, c * joined, x.dtype, activation, residual
    found = _one(x.device, *shape, forked, True, way, nvrtc.alone(), joined)
    if found is None:
        return None
    one, memory = found
    weight, bias = aligned(weight), aligned(bias)
    dx, dresidual = gradient_memory(dy, x, activation, residual=residual, forked=forked)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    common = saved.data_ptr(), weight.data_ptr(), bias.data_ptr()
    outputs = dx.data_ptr(), nvrtc.address(dresidual), dweight.data_ptr(), dbias.data_ptr()
    one.run(
        memory,
        (dy.data_ptr(), nvrtc.address(dy2), x.data_ptr(), nvrtc.address(mask)),
        (*common, *outputs, *one.sizes, np.float32(slope)),
        nvrtc.stream(x.device.index or 0),
    )
    return dx, dresidual, dweight, dbias


def backward(
    dy: torch.Tensor,
    dy2: torch.Tensor | None,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor,
    activation: str,
    slope: float,
    residual: bool,
    *,
    way: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dresidual (like x; None without a residual), dweight and dbias [C] fp32.

    dy, dy2: like x, channels_last; the caller makes them so. What came from above is their sum, or dy alone, which is dresidual
    itself then where there is no activation. `way` as in `forward`; the two need not agree.
    """
    found = backward_at_once(dy, dy2, x, saved, mask, weight, bias, activation, slope, residual, way=way)
    if found is not None:
        return found
    weight, bias = aligned(weight), aligned(bias)
    device = x.device.index or 0
    channels = x.shape[1]
    forked = dy2 is not None
    dx, dresidual = gradient_memory(dy, x, activation, residual=residual, forked=forked)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    other, bits = nvrtc.address(dresidual), nvrtc.address(mask)
    sums = dweight.data_ptr(), dbias.data_ptr()
    above = (dy.data_ptr(), nvrtc.address(dy2))
    common = (saved.data_ptr(), weight.data_ptr(), bias.data_ptr())
    stream = nvrtc.stream(device)
    plan = _plan(x, activation, residual, forked=forked)
    partial, coefficients = weight.new_empty(plan.partials), weight.new_empty(2, channels)
    plan.reduce(
        plan.grid,
        plan.block,
        (
            *above,
            x.data_ptr(),
            bits,
            *common,
            other,
            partial.data_ptr(),
            nvrtc.tickets(x.device),
            coefficients.data_ptr(),
            *sums,
            plan.rows,
            plan.vectors,
            plan.tile,
            np.float32(slope),
        ),
        0,
        stream,
    )
    _apply_gradient(plan, (other, 0) if residual else above, x, common, coefficients.data_ptr(), dx, slope)
    return dx, dresidual, dweight, dbias


def _apply_gradient(
    plan: Launch,
    above: tuple[int, int],
    x: torch.Tensor,
    common: tuple[int, int, int],
    coefficient: int,
    dx: torch.Tensor,
    slope: float,
) -> None:
    """The backward's second launch."""
    sizes = (plan.rows, plan.vectors, plan.tile, np.float32(slope))
    arguments = (*above, x.data_ptr(), *common, coefficient, dx.data_ptr(), *sizes)
    plan.backward_apply(plan.grid, plan.block, arguments, 0, nvrtc.stream(x.device.index or 0))


def backward_of_sums(
    g: torch.Tensor, sums: torch.Tensor, x: torch.Tensor, saved: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `backward`, where a kernel before it has made the gradient behind the activation and its sums: dx, dweight and dbias.

    g: like x; sums: [parts, 2, C] fp32, of g and g (x - mean) over each part's pixels.
    """
    weight, bias = aligned(weight), aligned(bias)
    n, channels, h, w = x.shape
    device = x.device.index or 0
    dx = torch.empty_like(x)
    dweight, dbias, coefficients = torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(2, channels)
    merge = _merge(spec.GRADIENT_SUMS, sums.shape[0], channels, device)
    outputs = coefficients.data_ptr(), dweight.data_ptr(), dbias.data_ptr()
    arguments = (sums.data_ptr(), saved.data_ptr(), *outputs, *merge.sizes, np.int32(n * h * w))
    merge.kernel(merge.grid, merge.block, arguments, 0, nvrtc.stream(device))
    # Any variant whose first launch leaves g: its second one knows no activation.
    plan = _plan(x, "relu", True)
    norm = saved.data_ptr(), weight.data_ptr(), bias.data_ptr()
    _apply_gradient(plan, (g.data_ptr(), 0), x, norm, coefficients.data_ptr(), dx, 0.0)
    return dx, dweight, dbias


def frozen_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    activation: str,
    slope: float,
    affine_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns y (like x) and mask (bytes; empty where `spec.frozen_masked` says that the backward needs none).

    x and residual: [N, C, H, W] channels_last, fp16, bf16 or fp32; the rest [C] fp32.
    """
    n, c, h, w = x.shape
    device = x.device.index or 0
    plan = _frozen(
        spec.FROZEN_FORWARD, n * h * w, c, x.dtype, activation, residual is not None, affine_gradients, device
    )
    y = torch.empty_like(x)
    masked = spec.frozen_masked(activation, residual is not None, affine_gradients)
    width = storage.vector_width(storage.name(x.dtype))
    mask = torch.empty(x.numel() // width if masked else 0, dtype=torch.uint8, device=x.device)
    plan.kernel(
        plan.grid,
        plan.block,
        (
            x.data_ptr(),
            nvrtc.address(residual),
            running_mean.data_ptr(),
            running_var.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            y.data_ptr(),
            mask.data_ptr(),
            *plan.sizes,
            np.float32(eps),
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )
    return y, mask


def frozen_backward(
    dy: torch.Tensor,
    x: torch.Tensor | None,
    mask: torch.Tensor,
    running_mean: torch.Tensor,
    running_var: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    activation: str,
    slope: float,
    residual: bool,
    affine_gradients: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns dx and dresidual (like dy; empty without a residual), dweight and dbias ([C] fp32; empty without `affine_gradients`).

    dy: [N, C, H, W] channels_last, like x, which is None where `spec.frozen_keeps_input` says that it is not read.
    """
    n, c, h, w = dy.shape
    device = dy.device.index or 0
    plan = _frozen(spec.FROZEN_BACKWARD, n * h * w, c, dy.dtype, activation, residual, affine_gradients, device)
    dx = torch.empty_like(dy)
    dresidual = torch.empty_like(dy) if residual else dy.new_empty(0)
    partial = torch.empty(plan.partials, dtype=torch.float32, device=dy.device)
    dweight, dbias = (dy.new_empty(c if affine_gradients else 0, dtype=torch.float32) for _ in range(2))
    plan.kernel(
        plan.grid,
        plan.block,
        (
            dy.data_ptr(),
            nvrtc.address(x),
            mask.data_ptr(),
            running_mean.data_ptr(),
            running_var.data_ptr(),
            weight.data_ptr(),
            bias.data_ptr(),
            partial.data_ptr(),
            nvrtc.tickets(dy.device),
            dx.data_ptr(),
            dresidual.data_ptr(),
            dweight.data_ptr(),
            dbias.data_ptr(),
            *plan.sizes,
            np.float32(eps),
            np.float32(slope),
        ),
        0,
        nvrtc.stream(device),
    )
    return dx, dresidual, dweight, dbias
