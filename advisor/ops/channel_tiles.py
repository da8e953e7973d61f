"""Launch geometry of kernels over [rows, channels] that are built on kernels/include/channel_reduce.cuh. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LINE_VECTORS = 8  # 128 bytes


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


def lines_tile(vectors: int, max_tile: int) -> int:
    """`widest_tile`, but of rows in several pieces the widest that is whole cache lines, where there is one (docs/decisions/0052-flat-passes.md)."""
    tile = widest_tile(vectors, max_tile)
    return tile if vectors <= max_tile or vectors % LINE_VECTORS or tile % LINE_VECTORS == 0 else LINE_VECTORS


def flat_blocks(vectors: int, *, threads: int, unroll: int) -> int:
    """Blocks of a pass over all the 16-byte vectors of a tensor as one row (kernels/include/flat.cuh)."""
    return -(-vectors // (threads * unroll))


def fullest_tile(vectors: int, threads: int, otherwise: int) -> int:
    """For passes without sums: all the vectors a row has, or whole cache lines of it, where that leaves fewer threads idle.

    Of rows that have no such piece, `widest_tile` up to `otherwise`.
    """
    pieces = [
        d for d in range(1, min(vectors, threads) + 1) if vectors % d == 0 and (d == vectors or d % LINE_VECTORS == 0)
    ]
    return max(pieces, key=lambda d: (threads // d * d, d), default=widest_tile(vectors, otherwise))


@lru_cache(maxsize=4096)
def geometry(
    rows: int, vectors: int, *, threads: int, max_tile: int, unroll: int, blocks: int, tile: int = 0
) -> Geometry:
    """At most `blocks` blocks of `threads`, and none without a full pass of rows, of which a thread takes `unroll`.

    `blocks` are as many as run at once: each goes over rows in a loop, and a second wave would be nearly empty. `tile`: 0 for the widest.
    """
    tile = tile or widest_tile(vectors, max_tile)
    tiles = -(-vectors // tile)
    rows_per_pass = threads // tile
    useful = max(1, -(-rows // (rows_per_pass * unroll)))
    row_blocks = max(1, min(useful, blocks // tiles))
    return Geometry(row_blocks=row_blocks, tiles=tiles, tile=tile, vectors=vectors, rows=rows)


@lru_cache(maxsize=4096)
def one_pass(rows: int, vectors: int, *, threads: int, unroll: int, otherwise: int) -> Geometry:
    """As many blocks of `threads` as leave a thread one pass, of `unroll` rows. For passes without sums; `otherwise`: see `fullest_tile`."""
    tile = fullest_tile(vectors, threads, otherwise)
    row_blocks = -(-rows // (threads // tile * unroll))
    return Geometry(row_blocks=row_blocks, tiles=-(-vectors // tile), tile=tile, vectors=vectors, rows=rows)
