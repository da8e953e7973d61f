"""Launch geometry of kernels whose blocks take some rows (pixels) of one sample and one channel tile of an NHWC tensor.

Their device side is kernels/include/sample_reduce.cuh. Plain arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.ops.channel_tiles import LINE_VECTORS, widest_tile
from advisor.ops.tensor_support import TensorSupport

# Partial sums a sample and channel: whoever needs the sum adds this many.
MAX_PARTS = 64
# Beyond so many parts a sample, joining them costs more than tiles of a cache line, of which fewer parts fill the GPU.
MANY_PARTS = 48
MAX_SAMPLES = 65_535  # the grid's third dimension


@dataclass(frozen=True, slots=True)
class SampleGeometry:
    """Blocks (splits, tiles, samples); `tile` channel vectors a block, `vectors` a row."""

    splits: int
    tiles: int
    tile: int
    vectors: int


def geometry(
    samples: int,
    rows: int,
    vectors: int,
    *,
    threads: int,
    max_tile: int,
    unroll: int,
    bytes_per_block: int,
    least_blocks: int,
    most_splits: int,
) -> SampleGeometry:
    """About `least_blocks`, to fill the GPU (rather an eighth fewer than a few more, which would run alone at the end), none without a full pass of rows, none that reads more than about `bytes_per_block`.

    `unroll` rows a thread are a full pass.
    """
    tile = _tile(vectors, max_tile, least_blocks / samples)
    tiles = -(-vectors // tile)
    balance = -(-rows * tile * 16 // bytes_per_block)
    fill = least_blocks // (samples * tiles)
    if 8 * fill * samples * tiles < 7 * least_blocks:
        fill += 1
    useful = -(-rows // (threads // tile * unroll))
    splits = max(1, min(max(balance, fill), useful, most_splits))
    return SampleGeometry(splits=splits, tiles=tiles, tile=tile, vectors=vectors)


def _tile(vectors: int, max_tile: int, blocks_per_sample: float) -> int:
    """The widest, or a cache line where that splits halves of lines or leaves too few blocks a sample (docs/notes/kernels/other-norms.md)."""
    tile = widest_tile(vectors, max_tile)
    splits = tile < vectors and tile % (LINE_VECTORS // 2)
    if (
        tile > LINE_VECTORS
        and not vectors % LINE_VECTORS
        and (splits or blocks_per_sample * tile > MANY_PARTS * vectors)
    ):
        return LINE_VECTORS
    return tile


def _limit(shape: tuple[int, ...], _width: int) -> str:
    n, c, h, w = shape
    if n > MAX_SAMPLES:
        return f"{n} samples are more than {MAX_SAMPLES}"
    return "a sample has 2^31 values or more" if c * h * w >= 2**31 else ""


TENSORS = TensorSupport(limit=_limit)  # of kernels of this geometry
