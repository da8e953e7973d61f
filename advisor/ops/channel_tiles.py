"""Launch geometry of kernels over [rows, channels] that are built on kernels/include/channel_reduce.cuh. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

LINE_VECTORS = 8  # 128 bytes
PIECE_VECTORS = 2 * LINE_VECTORS
WIDEST_PIECE = 3 * PIECE_VECTORS


@dataclass(frozen=True, slots=True)
class TileGeometry:
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


def piece(vectors: int) -> int:
    """The piece of a row for a block that goes over rows of a large tensor, where it has two cache lines of a long row.

    All of a row that is no longer; of a longer one two lines, one, or else whole sectors, whichever divides it; and where nothing does,
    which leaves every row begin within another sector, the whole row up to three times as much, beyond that two lines and a shorter
    rest (docs/notes/kernels/batch-norm.md).
    """
    if vectors <= PIECE_VECTORS:
        return vectors
    divisors = (PIECE_VECTORS, LINE_VECTORS, PIECE_VECTORS - 2, PIECE_VECTORS - 4)
    whole = vectors if vectors <= WIDEST_PIECE else PIECE_VECTORS
    return next((divisor for divisor in divisors if vectors % divisor == 0), whole)


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
def geometry(rows: int, vectors: int, *, tile: int, threads: int, unroll: int, blocks: int) -> TileGeometry:
    """At most `blocks` blocks of `threads`, and none without a full pass of rows, of which a thread takes `unroll`.

    `blocks` are as many as run at once: each goes over rows in a loop, and a second wave would be nearly empty.
    """
    tiles = -(-vectors // tile)
    rows_per_pass = threads // tile
    useful = max(1, -(-rows // (rows_per_pass * unroll)))
    row_blocks = max(1, min(useful, blocks // tiles))
    return TileGeometry(row_blocks=row_blocks, tiles=tiles, tile=tile, vectors=vectors, rows=rows)


@lru_cache(maxsize=4096)
def one_pass(rows: int, vectors: int, *, threads: int, unroll: int, otherwise: int) -> TileGeometry:
    """As many blocks of `threads` as leave a thread one pass, of `unroll` rows. For passes without sums; `otherwise`: see `fullest_tile`."""
    tile = fullest_tile(vectors, threads, otherwise)
    row_blocks = -(-rows // (threads // tile * unroll))
    return TileGeometry(row_blocks=row_blocks, tiles=-(-vectors // tile), tile=tile, vectors=vectors, rows=rows)
