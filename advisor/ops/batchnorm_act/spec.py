"""What the BatchNorm(+add)+activation kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from math import gcd

from advisor.core import architectures
from advisor.ops import channel_tiles, dispatch_table, shared_memory, sources
from advisor.ops.channel_tiles import TileGeometry
from advisor.ops.storage import STORAGE, itemsize, vector_width
from advisor.ops.tensor_support import TensorSupport

FORWARD = "batchnorm/batchnorm_act_forward.cu"
BACKWARD = "batchnorm/batchnorm_act_backward.cu"
HELD_FORWARD = "batchnorm/batchnorm_act_held_forward.cu"
HELD_BACKWARD = "batchnorm/batchnorm_act_held_backward.cu"
MOMENTS = "batchnorm/batchnorm_moments.cu"
GRADIENT_SUMS = "batchnorm/batchnorm_gradient_sums.cu"
GRID_FORWARD = "batchnorm/batchnorm_act_grid_forward.cu"
GRID_BACKWARD = "batchnorm/batchnorm_act_grid_backward.cu"
JOINED_ROWS = "batchnorm/batchnorm_joined.cu"
FROZEN_FORWARD = "batchnorm/batchnorm_act_frozen_forward.cu"
FROZEN_BACKWARD = "batchnorm/batchnorm_act_frozen_backward.cu"
KERNELS = {
    FORWARD: ("batchnorm_act_stats", "batchnorm_act_apply"),
    BACKWARD: ("batchnorm_act_backward_reduce", "batchnorm_act_backward_apply"),
    HELD_FORWARD: ("batchnorm_act_held_forward",),
    HELD_BACKWARD: ("batchnorm_act_held_backward",),
    MOMENTS: ("batchnorm_merge_moments",),
    GRADIENT_SUMS: ("batchnorm_gradient_sums",),
    GRID_FORWARD: ("batchnorm_act_grid_forward",),
    GRID_BACKWARD: ("batchnorm_act_grid_backward",),
    JOINED_ROWS: ("batchnorm_join_statistics", "batchnorm_join_sums"),
    FROZEN_FORWARD: ("batchnorm_act_frozen_forward",),
    FROZEN_BACKWARD: ("batchnorm_act_frozen_backward",),
}
# Sources that older architectures than this do not compile: thread-block clusters.

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "leaky_relu": 3, "silu": 4, "hardswish": 5, "gelu": 6}
# With a residual the backward reads one bit an element, so the slope must be 0 or 1.
RESIDUAL_ACTIVATIONS = frozenset({"none", "relu", "relu6"})
# What a batch norm may do without, and the one that normalises by its running statistics.
NO_AFFINE, NO_STATISTICS, FROZEN = "no affine parameters", "no running statistics", "frozen"
FROZEN_AFFINE = "frozen affine"  # whose parameters are frozen too; `wins` is asked about FROZEN
# A batch norm whose result is used twice: it gives out two handles of it and takes a gradient for each, which the kernels add
# up (docs/notes/kernels/batch-norm.md).
FORKED = "forked"
# Over channels that are no multiple of a vector's: some rows are taken for one (kernels/batchnorm/batchnorm_joined.cu).
JOINED = "joined rows"

# How a pass over a tensor is launched: in two launches, in one whose clusters of blocks hold their channels' rows, or in one
# whose blocks hold the whole tensor (docs/notes/kernels/batch-norm.md).
TWO, CLUSTER, GRID = "two launches", "one launch", "whole grid"
WAYS = (TWO, CLUSTER, GRID)

THREADS = 512
# Channel vectors a block covers at most; of the rows of most networks 16, two cache lines, and the last block of a tile has little to
# add up (`channel_tiles.piece`). Measured against 8, 32 and 64 (docs/notes/kernels/batch-norm.md).
MAX_TILE = channel_tiles.WIDEST_PIECE
# Loads in flight an SM: a reading thread of the statistics pass has 4 x 16 bytes, of the others 8 x 16 bytes or as much again
# in stores, so one pass wants two blocks of 512 threads and the others one. Bandwidth of 4.2 TB/s at 2 us of loaded latency
# is 64 KiB an SM.
STATS_BLOCKS_PER_SM = 2
BLOCKS_PER_SM = 1
UNROLL = 4
# One launch in place of two, which reads its tensors once: all rows of a channel tile in the registers of one cluster of
# blocks. Taken for tensors of at most this many bytes, and with a residual of half as many. Against two launches on an H200 it
# saves 10 % of both passes at 128x512x4x4 and, without residual, at 128x256x8x8; it loses from 128x128x16x16 on: a cluster
# holds too little, and blocks that wait for each other leave the memory idle.
HELD_BYTES = 4 << 20
HELD_CLUSTER = 8  # the most that every device of sm_90 takes
# The forward's; the backward, which holds two tensors, has half. 512 x 128 registers, or 256 x 255, are all of an SM's.
HELD_THREADS = 512
HELD_ROWS = {HELD_FORWARD: 14, HELD_BACKWARD: 16}  # a thread's, as many as its registers hold without spilling
HELD_FORKED_ROWS = 10  # of HELD_BACKWARD with two gradients: three tensors
MAX_HELD_TILE = 8  # vectors, as in kernels/include/held_tile.cuh: 128 bytes of a row, a cache line
# Of a block that merges moments, or the sums of a gradient; the channels are written into the sources as well.
MOMENTS_THREADS, MOMENTS_CHANNELS = 1024, 8
JOINED_THREADS = 128
# Joined rows go in pieces of a cache line up to this size, of two beyond it (docs/notes/kernels/batch-norm.md).
JOINED_LINE_MOST_BYTES = 32 << 20
SECTOR_VECTORS = 2  # 32 bytes: what DRAM and L2 move at least
# One cooperative launch with a block on every SM, whose registers and shared memory hold the tensor (some 30 MB of a forward, 17 of
# a backward, on an H200), or as much of it as they can: the rest is read twice. Taken for tensors from so many bytes on: at 1 MB the
# cluster's launch is as fast (docs/notes/kernels/batch-norm.md).
GRID_LEAST_BYTES = 3 << 19
# And up to so many: beyond, two launches are as fast or faster (docs/notes/kernels/batch-norm.md).
GRID_MOST_BYTES = 128 << 20
# Of those where two tensors are read, some rows twice, in tiles that split cache lines: each such line is fetched by two SMs. Forward
# and backward (docs/notes/kernels/batch-norm.md); the latter also of backwards with a residual whose lines two launches split no more.
GRID_SPLIT_LINES_MOST_BYTES = {False: 44 << 20, True: 36 << 20}
# A kernel ahead has no use for leaving moments of a result of up to so many bytes: the forward reads it once.
GRID_HELD_BYTES = 29 << 20
GRID_THREADS = 512
# Rows of a thread in registers; shared memory holds the rest. More of them, 14 of a forward, are 1 us slower where a thread has
# only a few rows (their code is unrolled) and no faster where it has many.
GRID_ROWS = 4
# Where rows are read twice: in registers, and under way at a time; by pass and residual. As many as spill nothing.
GRID_STREAMED_ROWS = {(False, False): (4, 4), (False, True): (1, 8), (True, False): (2, 3), (True, True): (2, 3)}
MAX_GRID_TILE = 16  # vectors
GRID_TILES = tuple(range(1, MAX_GRID_TILE + 1))  # those to choose from
GRID_COPIES = 16  # of what is exchanged second of whole rows, one a lane of half a warp
MAX_WHOLE_ROW = 96  # vectors of a row that a block takes whole, where pieces of it would split cache lines
WHOLE_ROWS = 1  # 0: in pieces all the same
# What lines of which two SMs have a part must cost a block (`Grid.split`) for whole rows to win, whose sums are exchanged twice: by pass and
# residual (docs/notes/kernels/batch-norm.md).
WHOLE_ROW_BYTES = {
    (False, False): 208 << 10,
    (False, True): 125 << 10,
    (True, False): 98 << 10,
    (True, True): 98 << 10,
}
# Constants that `advisor bench tune` may try other values of. Those of the two launches have been: see
# docs/notes/kernels/batch-norm.md.
TUNABLE = {
    "HELD_BYTES": (0, 4 << 20, 1 << 40),
    "HELD_THREADS": (256, 512),
    "HELD_CLUSTER": (4, 8),
    "GRID_LEAST_BYTES": (GRID_LEAST_BYTES, 1 << 40),
    "WHOLE_ROWS": (0, 1),
}


def name(activation: str, residual: bool) -> str:
    """`bn+add+relu`."""
    return "bn" + ("+add" if residual else "") + ("" if activation == "none" else f"+{activation}")


def wins(*, activation: str, residual: bool, dtype: str, variant: str = "") -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    `variant` is one of NO_AFFINE, NO_STATISTICS, FROZEN, FORKED and JOINED, or empty for the batch norm that most networks train.

    On file for one H200 are bn, bn+relu, bn+add+relu and bn+hardswish, in all dtypes and from 256x64x112x112 down to
    128x512x4x4. So are bn with LeakyReLU, SiLU and GELU; bn+relu frozen, without affine parameters and without running statistics;
    and bn, bn+relu and bn+add+relu of joined rows. What is taken to do as these, dispatch_table.json has. In fp32 cuDNN's batch norm alone, with nothing to fuse, is 1 % faster than
    these kernels on 256x64x112x112.
    """
    return dispatch_table.refusal("batchnorm_act", kind(activation, residual, variant), dtype)


def kind(activation: str, residual: bool, variant: str = "") -> str:
    """`bn+add+relu forked`."""
    return " ".join(filter(None, (name(activation, residual), variant)))


_PAIRS = (*((a, False) for a in ACTIVATIONS), *((a, True) for a in sorted(RESIDUAL_ACTIVATIONS)))


def ways(nbytes: int, residual: bool, *, alone: bool = True) -> tuple[str, ...]:
    """TWO, CLUSTER and GRID by measured speed for an x of this size: the first that can be had is taken, TWO always can.

    Not `alone` are kernels beside which others run for long: gradients' collectives, on whose SMs a launch that wants all SMs
    at once would wait.
    """
    grid = (GRID,) if alone and GRID_LEAST_BYTES <= nbytes <= GRID_MOST_BYTES else ()
    return (*grid, CLUSTER, TWO) if nbytes <= (HELD_BYTES // 2 if residual else HELD_BYTES) else (*grid, TWO)


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant of `source` that a launch can ask for: what the compile test goes over."""
    if source in (MOMENTS, GRADIENT_SUMS):
        return (moments_defines(),)
    if source == JOINED_ROWS:
        return (joined_defines(),)
    forks = (False, True) if source in (BACKWARD, HELD_BACKWARD, GRID_BACKWARD) else (False,)
    if source in (GRID_FORWARD, GRID_BACKWARD):
        options = product((False, True), (False, True), forks, STORAGE, _PAIRS)
        return tuple(
            grid_defines(source, dtype, *pair, forked=f, streams=s, whole=w) for w, s, f, dtype, pair in options
        )
    if source in HELD_ROWS:
        return tuple(
            held_defines(source, dtype, *pair, forked=f) for f in forks for dtype in STORAGE for pair in _PAIRS
        )
    if source in (FROZEN_FORWARD, FROZEN_BACKWARD):
        found = (frozen_defines(source, dtype, *pair, r) for dtype in STORAGE for pair in _PAIRS for r in (False, True))
        return tuple(dict(d) for d in dict.fromkeys(tuple(d.items()) for d in found))
    return tuple(defines(dtype, *pair, forked=f) for f in forks for dtype in STORAGE for pair in _PAIRS)


def _macros(dtype: str, activation: str, residual: bool) -> dict[str, int]:
    return {"STORAGE": STORAGE[dtype], "ACT": ACTIVATIONS[activation], "RESIDUAL": int(residual)}


def defines(dtype: str, activation: str, residual: bool, *, forked: bool = False) -> dict[str, int]:
    """Macros of one variant of the two launches. `forked`, of BACKWARD alone, takes two gradients."""
    found = {**_macros(dtype, activation, residual), "THREADS": THREADS, "MAX_TILE": MAX_TILE}
    return {**found, "FORK": 1} if forked else found


def moments_defines() -> dict[str, int]:
    """Macros of MOMENTS and GRADIENT_SUMS."""
    return {"THREADS": MOMENTS_THREADS}


def joined_defines() -> dict[str, int]:
    """Macros of JOINED_ROWS."""
    return {"THREADS": JOINED_THREADS}


@lru_cache(maxsize=4096)
def joined(channels: int, dtype: str) -> int:
    """How many rows are taken for one, so that their channels are whole vectors; 1 where a row's are."""
    width = vector_width(dtype)
    return width // gcd(channels, width)


def takes_moments(nbytes: int, residual: bool) -> str:
    """Why a norm over a tensor of this size has no use for the moments that the kernel before it can leave; empty where it has."""
    held = GRID_LEAST_BYTES <= nbytes <= GRID_HELD_BYTES
    return "one launch reads the tensor once" if held or CLUSTER in ways(nbytes, residual) else ""


def held_threads(source: str) -> int:
    """Threads of a block of HELD_FORWARD or HELD_BACKWARD."""
    return HELD_THREADS if source == HELD_FORWARD else HELD_THREADS // 2


def held_rows(source: str, *, forked: bool) -> int:
    """Rows that a thread of HELD_FORWARD or HELD_BACKWARD holds. `forked`, of the latter alone, takes two gradients."""
    return min(HELD_FORKED_ROWS, HELD_ROWS[source]) if forked else HELD_ROWS[source]


def held_defines(source: str, dtype: str, activation: str, residual: bool, *, forked: bool = False) -> dict[str, int]:
    """Macros of one variant of HELD_FORWARD or HELD_BACKWARD."""
    found = {
        **_macros(dtype, activation, residual),
        "THREADS": held_threads(source),
        "CLUSTER": HELD_CLUSTER,
        "HOLD": held_rows(source, forked=forked),
    }
    return {**found, "FORK": 1} if forked else found


def grid_rows(source: str, activation: str, residual: bool, *, forked: bool, streams: bool, whole: bool = False) -> int:
    """Rows that a thread of GRID_FORWARD or GRID_BACKWARD holds in registers: one more spills.

    `forked`, of the latter alone, takes two gradients; `whole`: `Grid.whole`.
    """
    if streams:
        return GRID_STREAMED_ROWS[source == GRID_BACKWARD, residual][0]
    sloped = source == GRID_BACKWARD and activation not in ("none", "relu")
    return max(1, GRID_ROWS - (forked + whole if sloped else 0))


def grid_defines(
    source: str,
    dtype: str,
    activation: str,
    residual: bool,
    *,
    forked: bool = False,
    streams: bool = False,
    whole: bool = False,
) -> dict[str, int]:
    """Macros of one variant of GRID_FORWARD or GRID_BACKWARD. `streams`: there are rows that are read twice. `whole`: `Grid.whole`."""
    found = {
        **_macros(dtype, activation, residual),
        "THREADS": GRID_THREADS,
        "MAX_TILE": MAX_WHOLE_ROW if whole else MAX_GRID_TILE,
        "HOLD": grid_rows(source, activation, residual, forked=forked, streams=streams, whole=whole),
    }
    if streams:
        found["STREAM"] = GRID_STREAMED_ROWS[source == GRID_BACKWARD, residual][1]
    if whole:
        found |= {"WHOLE_ROWS": 1, "COPIES": GRID_COPIES}
    return {**found, "FORK": 1} if forked else found


def writes_residual_gradient(activation: str, residual: bool, *, forked: bool) -> bool:
    """Whether the backward makes the residual's gradient; without, and with a residual, that is the gradient from above."""
    return residual and (activation != "none" or forked)


def frozen_masked(activation: str, residual: bool, affine_gradients: bool) -> bool:
    """Whether a frozen norm's backward reads the activation's slopes, which are 0 or 1, from the forward's bits.

    It has to with a residual, which it does not read; and it reads a sixteenth of x then where nothing else needs x: where the
    affine parameters want no gradient, x need not even be kept.
    """
    return activation != "none" and activation in RESIDUAL_ACTIVATIONS and (residual or not affine_gradients)


def frozen_keeps_input(activation: str, residual: bool, affine_gradients: bool) -> bool:
    """Whether a frozen norm's backward reads x again."""
    return affine_gradients or (activation != "none" and not frozen_masked(activation, residual, affine_gradients))


def frozen_defines(source: str, dtype: str, activation: str, residual: bool, affine_gradients: bool) -> dict[str, int]:
    """Macros of one variant of FROZEN_FORWARD or FROZEN_BACKWARD."""
    masked = frozen_masked(activation, residual, affine_gradients)
    found = {**defines(dtype, activation, residual), "MASKED": int(masked)}
    return found if source == FROZEN_FORWARD else {**found, "REDUCE": int(affine_gradients)}


# Rows of channels that are no whole vectors may be taken for one; how many values a channel has is asked below.
TENSORS = TensorSupport(empty=True, vectors=False, limit=lambda _shape, _width: "")


def unsupported(
    *,
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: str,
    activation: str,
    residual: bool,
    arch: int,
    joins: bool = False,
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]; `joins`: rows may be taken for one."""
    reason = TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if residual and activation not in RESIDUAL_ACTIVATIONS:
        return f"residual with {activation}"
    n, c, h, w = shape
    rows, one = n * h * w, joined(c, dtype)
    if one > 1 and not joins:
        return f"{c} channels are no multiple of {vector_width(dtype)}"
    if rows % one:
        return f"{rows} pixels are no multiple of {one}, as many as have whole vectors of {c} channels"
    if rows < 2 * one:
        return "fewer than two values a channel" + (f" and of {one} pixels" if one > 1 else "")
    return ""


def geometry(
    rows: int, channels: int, dtype: str, sm_count: int, blocks_per_sm: int, *, joined: bool = False
) -> TileGeometry:
    """Launch geometry for as many blocks as run at once on `sm_count` SMs. `joined`: a row is several, and its channels their columns."""
    vectors = channels // vector_width(dtype)
    tile = channel_tiles.piece(vectors)
    # Small tensors mostly: what the last block of a tile adds up counts for more than sectors that two blocks read.
    if joined:
        large = rows * vectors * 16 > JOINED_LINE_MOST_BYTES
        tile = min(tile, channel_tiles.PIECE_VECTORS if large else channel_tiles.LINE_VECTORS)
    return channel_tiles.geometry(
        rows,
        vectors,
        threads=THREADS,
        unroll=UNROLL,
        blocks=sm_count * blocks_per_sm,
        tile=tile,
    )


@dataclass(frozen=True, slots=True)
class Held:
    """Launch geometry of HELD_FORWARD and HELD_BACKWARD: grid (HELD_CLUSTER, tiles), `tile` of a row's `vectors` a cluster."""

    tile: int
    tiles: int
    vectors: int


@lru_cache(maxsize=4096)
def held(source: str, rows: int, channels: int, dtype: str, *, sm_count: int, forked: bool = False) -> Held | None:
    """The geometry in which a cluster holds all rows of its tile; None where not even the narrowest tile fits.

    The widest tile that fits and leaves no more than a quarter of the SMs without a block; at least a sector wide where that
    fits.
    """
    vectors = channels // vector_width(dtype)
    room = HELD_CLUSTER * held_threads(source) * held_rows(source, forked=forked) // rows
    if not room or rows * vectors >= 2**31:
        return None
    tile = next(t for t in (8, 4, 2, 1) if t <= min(room, MAX_HELD_TILE))
    while tile // 2 >= vectors or (tile > SECTOR_VECTORS and 4 * HELD_CLUSTER * -(-vectors // tile) < 3 * sm_count):
        tile //= 2
    return Held(tile=tile, tiles=-(-vectors // tile), vectors=vectors)


@dataclass(frozen=True, slots=True)
class Grid:
    """Launch geometry of GRID_FORWARD and GRID_BACKWARD: grid (blocks, tiles), `tile` of a row's `vectors` a block."""

    tile: int
    tiles: int
    blocks: int
    vectors: int
    passes: int  # rows of a thread
    kept: int  # of those in shared memory
    ahead: int  # rows of the residual, likewise
    slots: int  # vectors of a thread in shared memory
    again: int  # rows beyond those, which are read twice
    streams: bool  # the kernel that reads rows twice, if there are any
    whole: bool  # a block has whole rows: two exchanges (include/grid_tile.cuh)

    @property
    def moved(self) -> int:
        """Bytes of one tensor that a block reads and writes."""
        return 2 * 16 * GRID_THREADS * self.passes

    @property
    def split(self) -> float:
        """And of lines that another block has a part of.

        Of rows that are read twice 256 bytes in a piece are 2 to 5 % faster than 128, of those that are kept they are 10 % slower.
        """
        piece = channel_tiles.LINE_VECTORS * (2 if self.streams else 1)
        return 0.0 if self.tiles == 1 else self.moved * 2 / min(self.tile, piece)

    @property
    def merged(self) -> int:
        """Bytes of the partial sums that a block adds, for each of a vector's channels."""
        return self.blocks * 2 * self.tile * 4


def grid_slots(source: str, arch: int, dtype: str, *, whole: bool = False) -> int:
    """Vectors of a thread for which a block's shared memory has room, beside the sums and constants of its channels."""
    width = vector_width(dtype)
    constants = 3 if whole and source == GRID_FORWARD else 5  # a channel
    channels = (MAX_WHOLE_ROW if whole else MAX_GRID_TILE) * width
    sums = max(2 * width * 4, 32) * GRID_THREADS + constants * channels * 4
    return (shared_memory.of_a_block(arch) - sums) // (16 * GRID_THREADS)


def grid_exchange(sm_count: int) -> int:
    """Words of the partial sums of any launch of the whole grid, at most (include/exchange.cuh): two sums of each channel of a block's tile.

    Of whole rows two of each channel from each block, and copies of what comes of them; channels are an even number there.
    """
    width = max(map(vector_width, STORAGE))
    return max(sm_count * 2 * MAX_GRID_TILE * width, 2 * (sm_count + GRID_COPIES) * MAX_WHOLE_ROW * width)


def _takes_whole_rows(vectors: int, channels: int, joined: int, blocks: int) -> bool:
    """Whether pieces would split cache lines, and each warp has but two channels to finish. Joined rows have no other way."""
    fits = vectors <= MAX_WHOLE_ROW and channels <= blocks * 2 * GRID_THREADS // 32
    wanted = vectors > MAX_GRID_TILE and vectors % channel_tiles.LINE_VECTORS != 0
    return bool(WHOLE_ROWS) and fits and (wanted or joined > 1)


@lru_cache(maxsize=4096)
def grid(
    source: str,
    rows: int,
    channels: int,
    dtype: str,
    activation: str,
    *,
    residual: bool,
    forked: bool = False,
    sm_count: int,
    arch: int,
    joined: int = 1,
) -> Grid | None:
    """The geometry in which all blocks together hold the tensor, or else of it what they can; None where there are too many tiles.

    Rows are of `joined` rows of the tensor, and `channels` their columns.

    Of the tiles that fit the one whose blocks have the least to move: their rows in and out, with another half where only 64
    bytes of a row are a block's own (a cache line goes to two SMs then), and the partial sums of their column. Tiles that
    split a sector are not taken: 256x80x14x14 in tiles of five vectors is 5 to 10 % slower than in one of ten. Of rows of whole cache
    lines no tiles are taken that split one: 256x192x28x28 in tiles of twelve is 12 % slower than in eight. Where that costs more than
    WHOLE_ROW_BYTES, whole rows if they fit.
    """
    vectors, backward = channels // vector_width(dtype), source == GRID_BACKWARD
    if rows * vectors >= 2**31:
        return None
    odd_lines, odd_sectors = vectors % channel_tiles.LINE_VECTORS != 0, vectors % SECTOR_VECTORS != 0
    unit = SECTOR_VECTORS if odd_lines else channel_tiles.LINE_VECTORS

    def shape(tile: int, *, streams: bool, whole: bool) -> Grid | None:
        tiles = -(-vectors // tile)
        rows_per_pass = max(1, GRID_THREADS // tile)
        blocks = min(sm_count // tiles, -(-rows // rows_per_pass))
        if whole and not _takes_whole_rows(vectors, channels // joined, joined, blocks):
            return None
        slots = grid_slots(source, arch, dtype, whole=whole)
        hold = grid_rows(source, activation, residual, forked=forked, streams=streams, whole=whole)
        passes = -(-rows // (blocks * rows_per_pass))
        kept = min(max(0, passes - hold), slots // (1 + backward))
        again = max(0, rows - (hold + kept) * blocks * rows_per_pass)
        if again and not streams:
            return None
        used = kept * (1 + backward)
        ahead = min(passes, slots - used) if residual and not backward and not streams else 0
        return Grid(
            tile=tile,
            tiles=tiles,
            blocks=blocks,
            vectors=vectors,
            passes=passes,
            kept=kept,
            ahead=ahead,
            slots=used + ahead,
            again=again,
            streams=streams,
            whole=whole,
        )

    widths = [
        tile
        for tile in GRID_TILES
        if joined == 1 and tile <= vectors and -(-vectors // tile) <= sm_count and (tile == vectors or tile % unit == 0)
    ]
    for streams in (False, True):
        pieces = [found for tile in widths if (found := shape(tile, streams=streams, whole=False)) is not None]
        best = min(
            pieces, key=lambda found: found.moved + found.split + found.merged * vector_width(dtype), default=None
        )
        whole = shape(vectors, streams=streams, whole=True)
        if whole is not None:
            # Rows that are read twice are fetched so once more, and pieces of odd rows split sectors too.
            reads = 1 + (residual or backward)
            times = (1 + best.again / rows * reads / (reads + 1)) * (1 + odd_sectors) if best else 0.0
            if best is None or best.split * times > WHOLE_ROW_BYTES[backward, residual]:
                return whole
        if best is not None:
            return best
    return None


@lru_cache(maxsize=4096)
def launch(
    rows: int,
    channels: int,
    dtype: str,
    activation: str,
    *,
    residual: bool,
    forked: bool,
    backward: bool,
    sm_count: int,
    arch: int,
    way: str | None = None,
    alone: bool = True,
    joined: int = 1,
) -> tuple[str, Held | Grid | None]:
    """The source that a pass is launched from, and its geometry where that is one launch. `joined` as of `grid`.

    `way` of WAYS, and TWO where what it names cannot hold the rows; None for the first of `ways` that can, `alone` or not. `forked` takes
    two gradients.
    """
    nbytes = rows * channels * itemsize(dtype)
    forked = forked and backward
    for wanted in (way,) if way else ways(nbytes, residual, alone=alone):
        found: Held | Grid | None = None
        if joined > 1 and wanted != GRID:
            continue
        source = {CLUSTER: (HELD_FORWARD, HELD_BACKWARD), GRID: (GRID_FORWARD, GRID_BACKWARD)}.get(wanted, ("", ""))[
            backward
        ]
        if wanted == CLUSTER and not sources.lacks(source, arch):
            found = held(source, rows, channels, dtype, sm_count=sm_count, forked=forked)
        elif wanted == GRID:
            options = {"residual": residual, "forked": forked, "sm_count": sm_count, "arch": arch}
            found = grid(source, rows, channels, dtype, activation, joined=joined, **options)
            if (
                found is not None
                and found.again
                and not way
                and not streaming_wins(found, nbytes, residual=residual, backward=backward, arch=arch)
            ):
                found = None
        if found is not None:
            return source, found
    return (BACKWARD if backward else FORWARD), None


def streaming_wins(shape: Grid, nbytes: int, *, residual: bool, backward: bool, arch: int) -> bool:
    """Whether one launch that reads some rows twice was measured to be faster than two, within GRID_MOST_BYTES."""
    if not architectures.of(arch).streams:
        return False
    odd_lines = shape.vectors % channel_tiles.LINE_VECTORS != 0
    splits_lines = shape.tiles > 1 and (odd_lines or shape.tile % channel_tiles.LINE_VECTORS != 0)
    no_better = residual and backward and not odd_lines
    limited = no_better or (splits_lines and (residual or backward))
    return nbytes <= (GRID_SPLIT_LINES_MOST_BYTES[backward] if limited else GRID_MOST_BYTES)


def work(
    rows: int,
    channels: int,
    dtype: str,
    activation: str,
    *,
    residual: bool,
    forked: bool,
    backward: bool,
    sm_count: int,
    arch: int,
    way: str | None = None,
) -> tuple[str, int]:
    """The source that a pass is launched from, as of `launch`, and the bytes that it must move."""
    one = joined(channels, dtype)
    source, shape = launch(
        rows // one,
        channels * one,
        dtype,
        activation,
        residual=residual,
        forked=forked,
        backward=backward,
        sm_count=sm_count,
        arch=arch,
        way=way,
        joined=one,
    )
    size = itemsize(dtype)
    count = bytes_moved if shape is None else held_bytes_moved
    moved = count(elements=rows * channels, itemsize=size, activation=activation, residual=residual, forked=forked)[
        backward
    ]
    if not isinstance(shape, Grid):
        return source, moved
    # x again; of a backward also what came from above, or its sum where the first reading has written that.
    tensors = 2 + (forked and not residual) if backward else 1
    return source, moved + shape.again * channels * one * size * tensors


def bytes_moved(*, elements: int, itemsize: int, activation: str, residual: bool, forked: bool) -> tuple[int, int]:
    """Bytes the two launches of the forward and of the backward must move: tensor passes, with one bit an element for the mask."""
    mask = elements // 8 if residual and activation != "none" else 0
    forward = elements * itemsize * (4 if residual else 3) + mask
    written = writes_residual_gradient(activation, residual, forked=forked)
    tensors = 6 + forked if written else 5 + 2 * forked
    return forward, elements * itemsize * tensors + mask


def held_bytes_moved(*, elements: int, itemsize: int, activation: str, residual: bool, forked: bool) -> tuple[int, int]:
    """Bytes that the forward and the backward must move in one launch each, of either kind: every tensor once."""
    mask = elements // 8 if residual and activation != "none" else 0
    forward = elements * itemsize * (3 if residual else 2) + mask
    tensors = 3 + forked + writes_residual_gradient(activation, residual, forked=forked)
    return forward, elements * itemsize * tensors + mask


def frozen_bytes_moved(
    *, elements: int, itemsize: int, activation: str, residual: bool, affine_gradients: bool
) -> tuple[int, int]:
    """Bytes that a frozen norm's forward and backward must move."""
    masked = frozen_masked(activation, residual, affine_gradients)
    mask = elements // 8 if masked else 0
    forward = elements * itemsize * (3 if residual else 2) + mask
    reads_x = frozen_keeps_input(activation, residual, affine_gradients)
    backward = elements * itemsize * (2 + residual + reads_x) + mask
    return forward, backward
