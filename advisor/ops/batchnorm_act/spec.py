"""What the BatchNorm(+add)+activation kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

FORWARD = "batchnorm/batchnorm_act_forward.cu"
BACKWARD = "batchnorm/batchnorm_act_backward.cu"
KERNELS = {
    FORWARD: ("batchnorm_act_stats", "batchnorm_act_apply"),
    BACKWARD: ("batchnorm_act_backward_reduce", "batchnorm_act_backward_apply"),
}

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "leaky_relu": 3, "silu": 4, "hardswish": 5, "gelu": 6}
# With a residual the backward reads one bit an element, so the slope must be 0 or 1.
RESIDUAL_ACTIVATIONS = frozenset({"none", "relu", "relu6"})
STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}

THREADS = 512
# Channel vectors a block covers. 16 x 16 bytes of a row is two cache lines, and the last block of a tile has little to add
# up. Measured against 8, 32 and 64 (docs/decisions/0001-batchnorm-launch.md).
MAX_TILE = 16
# Loads in flight an SM: a reading thread of the statistics pass has 4 x 16 bytes, of the others 8 x 16 bytes or as much again
# in stores, so one pass wants two blocks of 512 threads and the others one. Bandwidth of 4.2 TB/s at 2 us of loaded latency
# is 64 KiB an SM.
STATS_BLOCKS_PER_SM = 2
BLOCKS_PER_SM = 1
UNROLL = 4
MIN_ARCH = 80


def vector_width(dtype: str) -> int:
    """Elements in 16 bytes."""
    return 4 if dtype == "float32" else 8


def unsupported(
    *, shape: tuple[int, ...], channels_last: bool, dtype: str, activation: str, residual: bool, arch: int
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if len(shape) != 4:
        return f"{len(shape)}-D input"
    if not channels_last:
        return "input is not channels_last"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if residual and activation not in RESIDUAL_ACTIVATIONS:
        return f"residual with {activation}"
    n, c, h, w = shape
    if c % vector_width(dtype):
        return f"{c} channels are no multiple of {vector_width(dtype)}"
    if n * h * w < 2:
        return "fewer than two values a channel"
    return ""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Launch geometry: grid (row_blocks, tiles), THREADS threads; `tile` channel vectors a block."""

    row_blocks: int
    tiles: int
    tile: int
    vectors: int
    rows: int


@lru_cache(maxsize=4096)
def geometry(rows: int, channels: int, dtype: str, sm_count: int, blocks_per_sm: int) -> Geometry:
    """As many blocks as run at once on `sm_count` SMs, never a second wave, and none without a full pass of rows.

    The tile is the widest divisor of the vectors a row has (so that no thread idles), unless only narrow ones exist.
    """
    vectors = channels // vector_width(dtype)
    tile = max(d for d in range(1, min(vectors, MAX_TILE) + 1) if vectors % d == 0)
    if tile < MAX_TILE // 2 and vectors > MAX_TILE:
        tile = MAX_TILE
    tiles = -(-vectors // tile)
    rows_per_pass = THREADS // tile
    useful = max(1, -(-rows // (rows_per_pass * UNROLL)))
    row_blocks = max(1, min(useful, sm_count * blocks_per_sm // tiles))
    return Geometry(row_blocks=row_blocks, tiles=tiles, tile=tile, vectors=vectors, rows=rows)


def bytes_moved(*, elements: int, itemsize: int, residual: bool) -> tuple[int, int]:
    """Bytes the forward and the backward must move: tensor passes, with one bit an element for the mask."""
    mask = elements // 8 if residual else 0
    forward = elements * itemsize * (4 if residual else 3) + mask
    backward = elements * itemsize * (6 if residual else 5) + 2 * mask
    return forward, backward
