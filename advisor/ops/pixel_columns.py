"""Launch geometry of kernels on kernels/include/pixel_columns.cuh: blocks over the channel vectors of all samples.

Plain arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass

# Columns a block covers where a pixel has more vectors: 64 x 16 bytes are eight cache lines in a row.
WIDEST = 64
# Pixels that a thread should have at the least; fewer do not pay for adding up a column's threads.
LEAST_PIXELS = 4


@dataclass(frozen=True, slots=True)
class ColumnGeometry:
    """Blocks tiles * splits; `tile` columns a block, `vectors` a pixel."""

    tile: int
    tiles: int
    splits: int
    vectors: int

    @property
    def blocks(self) -> int:
        """Blocks of the launch."""
        return self.tiles * self.splits


def tile_for(vectors: int, pixels: int, threads: int) -> int:
    """A pixel's vectors where they leave few threads idle, else WIDEST; more where there are too few pixels for all threads."""
    least = -(-threads * LEAST_PIXELS // pixels)
    tile = vectors if vectors <= WIDEST and threads % vectors * 10 <= threads else WIDEST
    return min(threads, tile * -(-least // tile))


def geometry(
    samples: int,
    pixels: int,
    vectors: int,
    *,
    threads: int,
    unroll: int,
    bytes_per_block: int,
    least_blocks: int,
    most_splits: int,
) -> ColumnGeometry:
    """`least_blocks`, to fill the GPU, none without a full pass of pixels, none that reads more than about `bytes_per_block`.

    `unroll` pixels a thread are a full pass.
    """
    tile = tile_for(vectors, pixels, threads)
    tiles = -(-samples * vectors // tile)
    balance = -(-pixels * tile * 16 // bytes_per_block)
    fill = -(-least_blocks // tiles)
    useful = -(-pixels // (threads // tile * unroll))
    return ColumnGeometry(tile, tiles, max(1, min(max(balance, fill), useful, most_splits)), vectors)
