"""What the BatchNorm+activation+max-pool kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from advisor.ops import dispatch_table, storage
from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.pooling import spec as pooling
from advisor.ops.pooling.spec import PoolWindow

FORWARD = "pooling/batchnorm_max_pool_forward.cu"
BACKWARD = "pooling/batchnorm_max_pool_backward.cu"
KERNELS = {FORWARD: ("batchnorm_max_pool_forward",), BACKWARD: ("batchnorm_max_pool_backward",)}

# The maximum is found among the norm's inputs, so the activation must not fall anywhere.
ACTIVATIONS = ("none", "relu", "relu6", "leaky_relu")

THREADS = 256
MAX_CHANNEL_TILE = 32
# Threads that fit an SM by registers: 80 a thread in the forward, 110 in the backward.
FORWARD_THREADS_PER_SM = 768
BACKWARD_THREADS_PER_SM = 512
STRIP = 1  # outputs along w that a thread makes together
TUNABLE = {
    "THREADS": (128, 256),
    "FORWARD_THREADS_PER_SM": (512, 768, 1536),
    "BACKWARD_THREADS_PER_SM": (512, 1024),
    "STRIP": (1, 2),
}


def unsupported(
    *,
    shape: tuple[int, ...],
    window: PoolWindow,
    channels_last: bool,
    dtype: str,
    activation: str,
    slope: float,
    arch: int,
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    if activation not in ACTIVATIONS:
        return f"activation {activation} is not monotone"
    if activation == "leaky_relu" and slope < 0.0:
        return "a LeakyReLU with negative slope is not monotone"
    reason = (
        batchnorm_act.unsupported(
            shape=shape, channels_last=channels_last, dtype=dtype, activation=activation, residual=False, arch=arch
        )
        or pooling.TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
        or pooling.unsupported_window(window, height=shape[2], width=shape[3])
    )
    if reason:
        return reason
    if max(tiles(window, shape, dtype)) >= 2**31:
        return "2^31 tiles or more"
    return ""


def wins(activation: str, dtype: str) -> str:
    """Why the norm and the pooling are left apart; empty where the kernels are measured to win.

    On file for one H200 are ReLU in all dtypes and no activation in bf16, forward and backward: 3 to 8 times faster.
    """
    return dispatch_table.refusal("batchnorm_max_pool", kind(activation), dtype)


def kind(activation: str) -> str:
    """`bn+relu+max_pool`."""
    return f"{batchnorm_act.name(activation, False)}+max_pool"


@dataclass(frozen=True, slots=True)
class NormPoolGeometry:
    """Grid (channel tiles, blocks), each block walking over tiles of all images: see kernels/pooling."""

    block: tuple[int, int, int]
    grid: tuple[int, int, int]
    row_tiles: int
    column_tiles: int
    vectors: int


def _tile(window: PoolWindow, shape: tuple[int, ...], dtype: str, *, backward: bool) -> pooling.PoolGeometry:
    _, c, h, w = shape
    vectors = c // storage.vector_width(dtype)
    if backward:
        rows, columns = pooling.groups(window, h, w)
        near = [d * (k - 1) // s + 1 for k, d, s in zip(window.kernel, window.dilation, window.stride, strict=True)]
        return pooling.geometry(vectors, columns, rows, (near[0], near[1]), (1, 1), THREADS, MAX_CHANNEL_TILE)
    covered = [d * (k - 1) + 1 for k, d in zip(window.kernel, window.dilation, strict=True)]
    rows, columns = window.output(h, w)
    reach = covered[0], covered[1] + (STRIP - 1) * window.stride[1]
    step = window.stride[0], STRIP * window.stride[1]
    return pooling.geometry(vectors, -(-columns // STRIP), rows, reach, step, THREADS, MAX_CHANNEL_TILE)


def tiles(window: PoolWindow, shape: tuple[int, ...], dtype: str) -> tuple[int, int]:
    """Tiles of all images that the forward and the backward walk over."""
    found = [_tile(window, shape, dtype, backward=backward) for backward in (False, True)]
    forward, backward = (shape[0] * tile.row_tiles * tile.column_tiles for tile in found)
    return forward, backward


@lru_cache(maxsize=4096)
def geometry(
    window: PoolWindow, shape: tuple[int, ...], dtype: str, sm_count: int, *, backward: bool
) -> NormPoolGeometry:
    """As many blocks as run at once on `sm_count` SMs, and none without a tile."""
    tile = _tile(window, shape, dtype, backward=backward)
    walked = shape[0] * tile.row_tiles * tile.column_tiles
    per_sm = (BACKWARD_THREADS_PER_SM if backward else FORWARD_THREADS_PER_SM) // THREADS
    blocks = max(1, min(walked, sm_count * per_sm // tile.channel_tiles))
    return NormPoolGeometry(
        tile.block, (tile.channel_tiles, blocks, 1), tile.row_tiles, tile.column_tiles, tile.vectors
    )


def defines(window: PoolWindow, dtype: str, activation: str) -> dict[str, int]:
    """Macros of one variant, of both sources."""
    return {
        **pooling.window_defines(window, dtype),
        "THREADS": THREADS,
        "DH": window.dilation[0],
        "DW": window.dilation[1],
        "ACT": batchnorm_act.ACTIVATIONS[activation],
        "MAX_CHANNEL_TILE": MAX_CHANNEL_TILE,
        "OUT_W": STRIP,
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the stems that networks have."""
    return (
        *(defines(pooling.K3S2, dtype, "relu") for dtype in storage.STORAGE),
        defines(pooling.K2S2, "bfloat16", "leaky_relu"),
    )


def bytes_moved(*, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward (statistics and the rest) and the backward (sums and the rest) must move.

    x is read three times in all: dx = f(x) needs the sums over everything first, as the statistics do.
    """
    forward = (2 * inputs + 2 * outputs) * itemsize + outputs
    backward = (2 * inputs + 3 * outputs) * itemsize + outputs
    return forward, backward
