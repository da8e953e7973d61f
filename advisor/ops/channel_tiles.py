"""Launch geometry of kernels over [rows, channels] that are built on kernels/include/channel_reduce.cuh. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

ONE_PASS = 1 << 20  # blocks an SM: as many as leave a thread one pass over its rows


@dataclass(frozen=True, slots=True)
class Geometry:
    """Grid (row_blocks, tiles); `tile` channel vectors a block, of the `vectors` that a row has."""

    row_blocks: int
    tiles: int
    tile: int
    vectors: int
    rows: int


def widest_tile(vectors: int, max_tile: int) -> int:
    """The widest divisor of the vectors a row has, so that no thread idles; where only narrow ones exist, `max_tile`."""
    tile = max(d for d in range(1, min(vectors, max_tile) + 1) if vectors % d == 0)
    return max_tile if tile < max_tile // 2 and vectors > max_tile else tile


@lru_cache(maxsize=4096)
def geometry(rows: int, vectors: int, *, threads: int, max_tile: int, unroll: int, blocks: int) -> Geometry:
    """At most `blocks` blocks of `threads`, and none without a full pass of rows, of which a thread takes `unroll`.

    As many as run at once where they go over rows in a loop: a second wave would be nearly empty. Far more where each has one pass.
    """
    tile = widest_tile(vectors, max_tile)
    tiles = -(-vectors // tile)
    rows_per_pass = threads // tile
    useful = max(1, -(-rows // (rows_per_pass * unroll)))
    row_blocks = max(1, min(useful, blocks // tiles))
    return Geometry(row_blocks=row_blocks, tiles=tiles, tile=tile, vectors=vectors, rows=rows)
