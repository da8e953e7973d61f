"""How the tensor-core kernels cut a depthwise convolution into strips (kernels/include/band.cuh). Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from advisor.core import architectures
from advisor.ops import shared_memory

STRIPS = 16  # rows of one matrix product
MOST_PIXELS = 8  # columns of it
MOST_WINDOW = 16  # its depth
SHARED_BYTES = shared_memory.WITHOUT_ASKING
BANK_BYTES = 128  # of all banks of shared memory, one after the other
ROWS = 2  # of pixels that depthwise_band.cu takes a step, and has in a stage
SM_SHARED_BYTES = shared_memory.of_a_block(
    architectures.MEASURED.sm
)  # what an SM has for its blocks, of the GPUs that were measured
COPY_COST = 6  # a copied pixel, in columns of a product: what neighbours in a row share is copied once


@dataclass(frozen=True, slots=True)
class BandLayout:
    """How a row of output pixels is cut.

    Attributes:
        strips: neighbours in one image of the 16 strips that a block has: 1, 2, 4, 8 or 16.
        pixels: output pixels of a strip.
        window: input pixels that a strip reaches.
        piece: input pixels of one image's row that these strips reach.
        origin: the first column of the first window. lead: by how much it lies behind the first tap of the first pixel.
        column_tiles: how many such groups of strips make a row.
    """

    strips: int
    pixels: int
    window: int
    piece: int
    origin: int
    lead: int
    column_tiles: int


def layout(*, batch: int, width: int, out_width: int, kernel: int, pad: int) -> BandLayout:
    """The cut with the fewest products and copied pixels.

    A row of at most 8 outputs that reach at most 16 inputs is one strip, whose window leaves the padding out.
    """
    if out_width <= MOST_PIXELS:
        window = min(width, out_width - 1 + kernel - pad)
        if window <= MOST_WINDOW:
            return BandLayout(1, out_width, window, window, 0, pad, 1)
    most = min(MOST_PIXELS, MOST_WINDOW - kernel + 1)

    def cut(strips: int) -> tuple[int, BandLayout]:
        tiles = -(-out_width // (strips * most))
        pixels = -(-out_width // (strips * tiles))
        window = pixels - 1 + kernel
        tiles = -(-out_width // (strips * pixels))
        piece = (strips - 1) * pixels + window
        images = -(-batch * strips // STRIPS) * (STRIPS // strips)  # a block's images may be more than there are
        return images * tiles * (strips * MOST_PIXELS + COPY_COST * piece), BandLayout(
            strips, pixels, window, piece, -pad, 0, tiles
        )

    return min((cut(strips) for strips in (1, 2, 4, 8, 16)), key=lambda found: found[0])[1]


@dataclass(frozen=True, slots=True)
class Block:
    """What a block is compiled for: `tile` channels, `channels` of them a warp, pixels `stages` steps ahead.

    A thread copies `copy` bytes at once.
    """

    tile: int
    channels: int
    copy: int
    stages: int
    blocks: int  # on an SM at once, which caps registers

    @property
    def threads(self) -> int:
        """A warp for each group of channels."""
        return 32 * self.tile // self.channels


def shared(shape: BandLayout, block: Block, *, weight: bool) -> int:
    """Bytes of shared memory of a block."""
    at_once = 16 * block.copy // block.channels
    units = 2 * block.tile // block.copy  # copies that make a pixel
    row_pixels, out_pixels = STRIPS // shape.strips * shape.piece, STRIPS * shape.pixels

    def copied(pixels: int) -> int:
        return -(-pixels // at_once) * at_once

    if weight:  # an odd number of copies a pixel: pixels begin in different banks
        pixels = copied(row_pixels) + copied(out_pixels)
        return block.stages * pixels * block.copy * (units | 1) + 2 * 4 * pixels

    def planes(pixels: int) -> int:  # a plane for each copy of a pixel, which begin in different banks
        skew = BANK_BYTES // units // block.copy * block.copy
        return units * (-(-(pixels * block.copy - skew) // BANK_BYTES) * BANK_BYTES + skew)

    # Finished rows: a step's are written out while the next's are made.
    rows = ROWS * (block.stages * planes(row_pixels) + 2 * planes(out_pixels))
    return rows + 4 * (2 * copied(row_pixels) + copied(out_pixels)) + 4 * block.tile + 16  # the bias, a Part


def tile(channels: int, step: int, most: int) -> int:
    """Channels a block covers, of the `channels` there are: in tiles of equal size, a multiple of `step`, at most `most`."""
    tiles = -(-channels // most)
    return min(-(-channels // tiles // step) * step, most // step * step)


@dataclass(frozen=True, slots=True)
class BandGeometry:
    """Launch geometry: grid (blocks over items, channel tiles). An item is (segment of rows, column tile, group of images)."""

    grid: tuple[int, int, int]
    items: int
    vectors: int
    groups: int
    column_tiles: int
    segments: int
    segment_rows: int


def geometry(
    shape: BandLayout,
    block: Block,
    *,
    batch: int,
    channels: int,
    rows: int,
    halo: int,
    most_segments: int,
    sm_count: int,
) -> BandGeometry:
    """As many blocks as run at once, all with equally many items; images are cut into segments of rows where that evens it out.

    Args:
        rows: of the output, as the kernel counts them. halo: rows of work that a segment repeats.
    """
    tiles = -(-channels // block.tile)
    groups = -(-batch * shape.strips // STRIPS)
    at_once = max(1, sm_count * block.blocks // tiles)
    best: tuple[int, int, int, int] | None = None
    for wanted in range(1, min(most_segments, rows) + 1):
        segment_rows = -(-rows // wanted)
        segments = -(-rows // segment_rows)
        items = groups * shape.column_tiles * segments
        passes = -(-items // at_once)
        cost = passes * (segment_rows + halo)
        if best is None or cost < best[0]:
            best = (cost, passes, segments, segment_rows)
    assert best is not None  # rows is at least 1
    _, passes, segments, segment_rows = best
    items = groups * shape.column_tiles * segments
    return BandGeometry(
        grid=(-(-items // passes), tiles, 1),
        items=items,
        vectors=channels // block.channels,
        groups=groups,
        column_tiles=shape.column_tiles,
        segments=segments,
        segment_rows=segment_rows,
    )
