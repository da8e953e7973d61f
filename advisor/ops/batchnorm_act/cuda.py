"""Launches of the BatchNorm(+add)+activation kernels. Shapes and dtypes have been checked by the caller (spec)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from advisor.ops import nvrtc, storage
from advisor.ops.alignment import aligned
from advisor.ops.batchnorm_act import spec
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.launches import Launch, launch

# The two launches of a pass.
FORWARD, BACKWARD = ("stats", "apply"), ("backward_reduce", "backward_apply")


@lru_cache(maxsize=4096)
def one_of_two(
    name: str,
    shape: tuple[int, int],
    dtype: torch.dtype,
    activation: str,
    residual: bool,
    forked: bool,
    device: int,
    joined: bool = False,
) -> Launch:
    """One of the launches of FORWARD or BACKWARD, over `shape`, rows and channels.

    `joined`: rows and channels are of some rows taken for one.
    """
    kind, backward = storage.name(dtype), name.startswith("backward")
    blocks = spec.STATS_BLOCKS_PER_SM if name == "stats" else spec.BLOCKS_PER_SM
    found = spec.geometry(*shape, kind, nvrtc.sm_count(device), blocks, joined=joined)
    return launch(
        spec.BACKWARD if backward else spec.FORWARD,
        spec.defines(kind, activation, residual, **({"forked": forked} if backward else {})),
        device,
        (found.row_blocks, found.tiles),
        spec.THREADS,
        (shape[0], found.vectors, found.tile),
        entry=f"batchnorm_act_{name}",
    ).leaving(found.row_blocks * 2 * shape[1])


class _OneLaunch(NamedTuple):
    """A launch in which a cluster holds its tile's rows, or, where blocks exchange their sums, all hold the tensor.

    `half`: words of the exchange; 0 where there is none.
    """

    launch: Launch
    half: int = 0

    def exchange(self, device: torch.device) -> tuple[Any, ...] | None:
        """What the kernel takes for it, none for a cluster; None where there is no room for it."""
        if not self.half:
            return ()
        memory = nvrtc.exchange(device, self.half)
        return (memory, self.half) if memory else None


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
    sizes = rows, shape.vectors, shape.tile
    if isinstance(shape, spec.Held):
        held = spec.held_defines(source, name, activation, residual, forked=forked)
        grid = spec.HELD_CLUSTER, shape.tiles
        return _OneLaunch(launch(source, held, device, grid, spec.held_threads(source), sizes))
    defines = spec.grid_defines(
        source, name, activation, residual, forked=forked, streams=shape.streams, whole=shape.whole
    )
    slot = 16 * spec.GRID_THREADS
    kept = (shape.kept,) if backward else (shape.kept, shape.ahead)
    whole = (channels // joined, joined) if shape.whole else ()
    grid, every = (shape.blocks, shape.tiles), (*sizes, *kept, *whole)
    most = spec.grid_slots(source, arch, name, whole=shape.whole) * slot
    made = launch(source, defines, device, grid, spec.GRID_THREADS, every, shared_bytes=most)
    made = replace(made, shared_bytes=shape.slots * slot, cooperative=True)
    return _OneLaunch(made, spec.grid_exchange(nvrtc.sm_count(device)))


def _one(device: torch.device, *of: Any) -> tuple[Launch, tuple[Any, ...]] | None:
    """`_one_launch` with what it takes for its exchange, where that can be had."""
    one = _one_launch(*of, device.index or 0)
    exchange = None if one is None else one.exchange(device)
    return None if one is None or exchange is None else (one.launch, exchange)


@lru_cache(maxsize=4096)
def _two(names: tuple[str, str], *of: Any) -> tuple[Launch, Launch]:
    return one_of_two(names[0], *of), one_of_two(names[1], *of)


def _launches(
    names: tuple[str, str], x: torch.Tensor, activation: str, residual: bool, *, forked: bool = False
) -> tuple[Launch, Launch]:
    n, c, h, w = x.shape
    return _two(names, (n * h * w, c), x.dtype, activation, residual, forked, x.device.index or 0)


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


def _statistics_memory(norm: Norm, *, in_place: bool) -> tuple[torch.Tensor, tuple[int, int], tuple[int, int]]:
    """What a forward saves of its statistics, fp32 (see `forward`), and the addresses of old and of new running values."""
    weight, bias = norm.affine
    # The kernels read old running values and write new ones, whoever wants them: they read what there is to read.
    mean, var = norm.running or (bias, weight)
    in_place = in_place and norm.running is not None
    channels = weight.shape[0]
    saved = weight.new_empty(2 if in_place else 4, channels)
    running = (mean.data_ptr(), var.data_ptr())
    updated = running if in_place else (saved.data_ptr() + 8 * channels, saved.data_ptr() + 12 * channels)
    return saved, running, updated


def forward_at_once(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    *,
    in_place: bool = True,
    way: str | None = None,
    joined: int = 1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None] | None:
    """As `forward`, where that is one launch; else None. `joined` rows are taken for one."""
    n, c, h, w = x.shape
    shape = n * h * w // joined, c * joined, x.dtype, norm.activation, residual is not None
    found = _one(x.device, *shape, False, False, way, nvrtc.alone(), joined)
    if found is None:
        return None
    one, exchange = found
    norm = norm.aligned()
    y = torch.empty_like(x)
    saved, running, updated = _statistics_memory(norm, in_place=in_place)
    mask = mask_memory(x, norm.activation, residual=residual is not None)
    tensors = x, residual, *exchange, *running, *norm.affine, saved, *updated, y, mask
    one.run(*tensors, behind=(norm.momentum, norm.eps, norm.slope))
    return y, saved, mask


def forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    *,
    in_place: bool = True,
    way: str | None = None,
    moments: torch.Tensor | None = None,
    between: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Returns y (like x), saved fp32, and mask (bytes; None without a residual or an activation).

    saved is [2, C], mean and inverse standard deviation, or, when not `in_place`, [4, C] with the new running mean and
    variance after them; `in_place` updates the norm's running statistics instead. x and residual: [N, C, H, W] channels_last, fp16, bf16 or fp32.

    Without running statistics saved is [4, C] too, and its last two rows mean nothing. `way` is one of spec.WAYS, and TWO is taken
    where what it names cannot hold the rows; None takes what spec says is fastest. `moments` of x (ops/moments.py) spare two launches the
    first's pass over x: they are taken whatever the way. `between` the two launches saved may become another: one launch has no such place.
    """
    in_two = moments is not None or between is not None
    found = None if in_two else forward_at_once(x, residual, norm, in_place=in_place, way=way)
    if found is not None:
        return found
    norm = norm.aligned()
    y = torch.empty_like(x)
    memory = _statistics_memory(norm, in_place=in_place)
    mask = mask_memory(x, norm.activation, residual=residual is not None)
    stats, apply = _launches(FORWARD, x, norm.activation, residual is not None)
    _statistics(stats, x, *memory, norm, moments)
    saved = memory[0] if between is None else between(memory[0])
    apply.run(x, residual, saved, *norm.affine, y, mask, behind=(norm.slope,))
    return y, saved, mask


def _statistics(
    stats: Launch,
    x: torch.Tensor,
    saved: torch.Tensor,
    running: tuple[int, int],
    updated: tuple[int, int],
    norm: Norm,
    moments: torch.Tensor | None,
) -> None:
    """The forward's first launch, or what `moments` need in its place. `running`, `updated`: addresses, as of `merge_moments`."""
    if moments is not None:
        merge_moments(moments, saved, running, updated, norm)
        return
    partial = saved.new_empty(stats.partials)
    stats.run(x, partial, nvrtc.tickets(x.device), saved, *running, *updated, behind=(norm.momentum, norm.eps))


def statistics(x: torch.Tensor, norm: Norm, residual: bool, moments: torch.Tensor | None) -> torch.Tensor:
    """The first of the forward's two launches: mean and inverse standard deviation, the first two rows of what it returns, fp32.

    Running statistics are updated in place. The norm's weight and bias are aligned. Args: as of `forward`.
    """
    memory = _statistics_memory(norm, in_place=True)
    stats, _ = _launches(FORWARD, x, norm.activation, residual)
    _statistics(stats, x, *memory, norm, moments)
    return memory[0]


@lru_cache(maxsize=4096)
def merge_launch(source: str, parts: int, channels: int, rows: tuple[int, ...], device: int) -> Launch:
    """The launch that merges moments, or the sums of a gradient over so many `rows`."""
    blocks, sizes = -(-channels // spec.MOMENTS_CHANNELS), (parts, channels, *rows)
    return launch(source, spec.moments_defines(), device, blocks, spec.MOMENTS_THREADS, sizes)


def merge_moments(
    moments: torch.Tensor,
    saved: torch.Tensor,
    running: tuple[int, int],
    updated: tuple[int, int],
    norm: Norm,
) -> None:
    """A norm's statistics from the moments [parts, 3, C] that the kernel before it left (ops/moments.py).

    Writes mean and inverse standard deviation to `saved`, and the new running statistics to the addresses `updated`; `running` are
    those of the old ones.
    """
    plan = merge_launch(spec.MOMENTS, moments.shape[0], moments.shape[2], (), moments.device.index or 0)
    plan.run(moments, saved, *running, *updated, behind=(norm.momentum, norm.eps))


def backward_at_once(
    dy: torch.Tensor,
    dy2: torch.Tensor | None,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    norm: Norm,
    residual: bool,
    *,
    way: str | None = None,
    joined: int = 1,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor] | None:
    """As `backward`, where that is one launch; else None. `joined` rows are taken for one."""
    n, c, h, w = x.shape
    forked = dy2 is not None
    shape = n * h * w // joined, c * joined, x.dtype, norm.activation, residual
    found = _one(x.device, *shape, forked, True, way, nvrtc.alone(), joined)
    if found is None:
        return None
    one, exchange = found
    weight, bias = norm.aligned().affine
    dx, dresidual = gradient_memory(dy, x, norm.activation, residual=residual, forked=forked)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    results = dx, dresidual, dweight, dbias
    one.run(*(dy, dy2, x, mask, *exchange, saved, weight, bias, *results), behind=(norm.slope,))
    return dx, dresidual, dweight, dbias


def backward(
    dy: torch.Tensor,
    dy2: torch.Tensor | None,
    x: torch.Tensor,
    saved: torch.Tensor,
    mask: torch.Tensor | None,
    norm: Norm,
    residual: bool,
    *,
    way: str | None = None,
    between: Callable[[torch.Tensor], None] | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """Returns dx (like x), dresidual (like x; None without a residual), dweight and dbias [C] fp32.

    dy, dy2: like x, channels_last; the caller makes them so. What came from above is their sum, or dy alone, which is dresidual
    itself then where there is no activation. `way` as in `forward`; the two need not agree. `between` the two launches the means of the
    gradient and of its product with x [2, C] may be changed.
    """
    found = None if between is not None else backward_at_once(dy, dy2, x, saved, mask, norm, residual, way=way)
    if found is not None:
        return found
    weight, bias = norm.aligned().affine
    forked = dy2 is not None
    reduce, apply = _launches(BACKWARD, x, norm.activation, residual, forked=forked)
    dx, dresidual = gradient_memory(dy, x, norm.activation, residual=residual, forked=forked)
    dweight, dbias = torch.empty_like(weight), torch.empty_like(weight)
    partial, coefficients = weight.new_empty(reduce.partials), weight.new_empty(2, x.shape[1])
    sums = dresidual, partial, nvrtc.tickets(x.device), coefficients, dweight, dbias
    reduce.run(dy, dy2, x, mask, saved, weight, bias, *sums, behind=(norm.slope,))
    if between is not None:
        between(coefficients)
    above = (dresidual, None) if residual else (dy, dy2)
    apply.run(*above, x, saved, weight, bias, coefficients, dx, behind=(norm.slope,))
    return dx, dresidual, dweight, dbias


def backward_of_sums(
    g: torch.Tensor, sums: torch.Tensor, x: torch.Tensor, saved: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As `backward`, where a kernel before it has made the gradient behind the activation and its sums: dx, dweight and dbias.

    g: like x; sums: [parts, 2, C] fp32, of g and g (x - mean) over each part's pixels.
    """
    weight, bias = aligned(weight), aligned(bias)
    n, channels, h, w = x.shape
    dx = torch.empty_like(x)
    dweight, dbias, coefficients = torch.empty_like(weight), torch.empty_like(weight), weight.new_empty(2, channels)
    merge = merge_launch(spec.GRADIENT_SUMS, sums.shape[0], channels, (n * h * w,), x.device.index or 0)
    merge.run(sums, saved, coefficients, dweight, dbias)
    # Any variant whose first launch leaves g: its second one knows no activation.
    _, apply = _launches(BACKWARD, x, "relu", True)
    apply.run(g, None, x, saved, weight, bias, coefficients, dx, behind=(0.0,))
    return dx, dweight, dbias
