"""How the kernels whose warps have whole groups cut a convolution into blocks (kernels/include/grouped_whole.cuh). Plain arithmetic.

Measured on an H200 in bf16, against blocks that give each octet of 8 channels a warp (docs/notes/kernels/convolutions-grouped.md). What a block has of a pixel
should begin and end where sectors of 32 bytes do: 3 groups of 24 channels are half a sector off in every other slab, which costs
stride 2, whose larger tensor it is, up to 1.9 times the time (576x28x28, gradient of the input: 0.185 ms, 0.097 with 6 groups).
"""

from __future__ import annotations

from dataclasses import dataclass

from advisor.core import architectures
from advisor.ops import shared_memory

OCTET = 8  # channels in 16 bytes: what a product has of the result
TILE = 16  # pixels of a product
BLOCK_BYTES = 96 * 1024  # of shared memory, at most
# What an SM has, of the GPUs that were measured, and what the system takes for each block.
SM_BYTES, RESERVED_BYTES = shared_memory.of_an_sm(architectures.MEASURED.sm), shared_memory.OF_THE_SYSTEM
STAGES = 4  # rows in the ring
MAX_BLOCKS = 8  # on an SM; more hide nothing


@dataclass(frozen=True, slots=True)
class WholeShape:
    """A block of `beside` groups by `across` times `tiles` * 16 pixels; how many warps of its kind an SM's registers hold."""

    tiles: int
    beside: int
    across: int
    at_once: int


@dataclass(frozen=True, slots=True)
class WholeCut:
    """`strip` columns of `images` images to a block, `strips` a row; `loads` vectors a thread fetches of a row."""

    shape: WholeShape
    images: int
    strip: int
    strips: int
    loads: int
    stages: int
    blocks: int
    shared_bytes: int


# By channels a group and stride. The forward of stride 1 is the gradient of the input too.
FORWARD = {
    (16, 1): (WholeShape(2, 4, 1, 12), WholeShape(2, 2, 2, 12)),
    (24, 1): (WholeShape(1, 3, 2, 12), WholeShape(1, 2, 2, 12)),
    (24, 2): (WholeShape(1, 6, 2, 12), WholeShape(1, 3, 2, 12), WholeShape(1, 2, 2, 12)),
}
BACKWARD_DATA = {
    (16, 2): (WholeShape(1, 4, 2, 16), WholeShape(1, 2, 2, 16)),
    (24, 2): (WholeShape(1, 6, 2, 12), WholeShape(1, 3, 2, 12), WholeShape(1, 2, 2, 12)),
}


def cut(*, data: bool, group: int, stride: int, groups: int, columns: int, batch: int) -> WholeCut:
    """The block with few idle warps and many neighbouring groups, for rows of `columns` pixels of the smaller tensor.

    Args:
        data: the gradient of the input of a stride of 2, which writes two rows of two columns for a pixel.
    """

    def used(shape: WholeShape) -> float:
        return groups / (-(-groups // shape.beside) * shape.beside) * (1 + shape.beside / 32)

    shape = max((BACKWARD_DATA if data else FORWARD)[group, stride], key=used)
    warps, slab, most = shape.beside * shape.across, shape.beside * group // OCTET, shape.across * shape.tiles * TILE
    pixel = slab | 1
    strips = -(-columns // most)
    strip = -(-columns // strips)
    images = min(most // strip, batch)
    fetched = images * (strip + 1 if data else stride * (strip - 1) + 3)
    staged = (4 if data else 2) * most * pixel
    stages = max(2, min(STAGES, (BLOCK_BYTES // 16 - staged) // (fetched * pixel)))
    taps = 3 * (group // OCTET) ** 2 * OCTET * shape.beside  # units that the weights pass through
    nbytes = 16 * max(stages * fetched * pixel + staged, taps)
    return WholeCut(
        shape=shape,
        images=images,
        strip=strip,
        strips=strips,
        loads=-(-fetched * slab // (32 * warps)),
        stages=stages,
        blocks=max(1, min(shape.at_once // warps, SM_BYTES // (nbytes + RESERVED_BYTES))),
        shared_bytes=nbytes,
    )
