"""How the gradient of a grouped convolution's weight is cut into blocks (kernels/grouped/grouped_backward_weight.cu). Plain arithmetic."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from advisor.ops import occupancy
from advisor.ops.grouped import whole

OCTET, TILE = whole.OCTET, whole.TILE
MAX_STAGES = 4  # in the ring
DEEP_BYTES = 80 * 1024  # of shared memory, at most, with more than two stages
SPARE_REGISTERS = 56  # what addresses and fragments take of a thread's
SUM_THREADS = 256  # of a block that adds up splits
PART_SPLITS = 8  # splits that a thread adds up before another shares them


@dataclass(frozen=True, slots=True)
class WeightShape:
    """A block of `beside` groups by `tiles` * 16 pixels of a row; a warp has `outputs` octets of a group's outputs, a power of two. (Two
    groups of 4 channels count as one.)"""

    tiles: int
    beside: int
    outputs: int = 1

    def warps(self, octets: int) -> int:
        """Of a block, for groups of `octets`."""
        return self.beside * octets // self.outputs

    def sums(self, octets: int) -> int:
        """Products a warp sums up, four values a thread each: SUMS of the kernel."""
        return -(-3 * octets // 2) * 3 * self.outputs


@dataclass(frozen=True, slots=True)
class WeightCut:
    """`strip` columns of `images` images to a block, `strips` a row; vectors a thread fetches of a row of x and of dy."""

    shape: WeightShape
    images: int
    strip: int
    strips: int
    loads: int
    dy_loads: int
    stages: int
    blocks: int
    shared_bytes: int


# By channels a group and stride, as measured (docs/notes/kernels/convolutions-grouped.md), with fewer groups for nets that have few.
_SHAPES = {
    (8, 1): (WeightShape(4, 8), WeightShape(4, 4), WeightShape(4, 2)),
    (8, 2): (WeightShape(4, 8), WeightShape(4, 4), WeightShape(4, 2)),
    (16, 1): (WeightShape(4, 4, 2), WeightShape(4, 2, 2)),
    (16, 2): (WeightShape(4, 4, 2), WeightShape(4, 2, 2)),
    (24, 1): (WeightShape(4, 2), WeightShape(4, 1)),
    (24, 2): (WeightShape(4, 2),),
    (32, 1): (WeightShape(2, 2, 2), WeightShape(2, 1, 2)),
    (32, 2): (WeightShape(2, 2, 2), WeightShape(2, 1, 2)),
}


def shapes(octets: int, stride: int) -> Iterator[WeightShape]:
    """What may be taken for groups of `octets`: where nothing was measured, a warp has an octet of the outputs."""
    unmeasured = (WeightShape(4 if octets < 5 else 2, max(1, 8 // octets)),)
    for shape in _SHAPES.get((octets * OCTET, stride), unmeasured):
        for tiles in (4, 2, 1):
            if tiles <= shape.tiles:
                yield replace(shape, tiles=tiles)


def _registers(shape: WeightShape, octets: int, stride: int, loads: int) -> int:
    """A thread's: sums, rows of dy, places of its vectors, and what addresses and fragments take."""
    rows = 3 if stride == 1 else 2
    return 4 * shape.sums(octets) + 2 * rows * shape.tiles * shape.outputs + shape.tiles + 2 * loads + SPARE_REGISTERS


def cut(*, group: int, stride: int, groups: int, columns: int, batch: int) -> WeightCut:
    """The shape with the most pixels for its products and little of it idle.

    Args:
        group: Channels a group; 8 where two groups of 4 make one.
        groups: Of `group` channels.
        columns: Pixels of a row of dy.
    """
    octets = group // OCTET

    def found(shape: WeightShape) -> tuple[float, WeightCut] | None:
        warps, slab, most = shape.warps(octets), shape.beside * octets, shape.tiles * TILE
        strips = -(-columns // most)
        strip = -(-columns // strips)
        images = min(most // strip, batch)
        fetched = images * (stride * (strip - 1) + 3)
        stage = 16 * (slab | 1) * (stride * fetched + most)
        stages = max(2, min(MAX_STAGES, DEEP_BYTES // stage))
        if stages * stage > whole.BLOCK_BYTES:
            return None
        loads, dy_loads = -(-fetched * slab // (32 * warps)), -(-most * slab // (32 * warps))
        at_once = occupancy.warps_at_once(_registers(shape, octets, stride, loads + dy_loads)) // warps
        blocks = max(1, min(whole.SM_BYTES // (stages * stage + whole.RESERVED_BYTES), at_once, whole.MAX_BLOCKS))
        pixels = columns / strips * images / most
        busy = groups / (-(-groups // shape.beside) * shape.beside)
        # A slab of one group of 24 begins and ends in half a sector: two are better unless a fifth of them is idle.
        score = pixels * busy * shape.tiles / (shape.tiles + 0.5) * (1 + shape.beside / 4)
        return score, WeightCut(shape, images, strip, strips, loads, dy_loads, stages, blocks, stages * stage)

    return max((at for at in map(found, shapes(octets, stride)) if at is not None), key=lambda at: at[0])[1]


def threads_a_place(splits: int) -> int:
    """Threads that add up the splits of one place of the sums: a power of two."""
    threads = 1
    while threads < SUM_THREADS // 32 and splits > PART_SPLITS * threads:
        threads *= 2
    return threads
