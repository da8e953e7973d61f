"""Groups so wide that they fill the products of Hopper's warpgroups: which, and how those kernels are launched. Plain arithmetic.

The gradient of the weight is made by the kernel of ops/conv3x3, a job a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product as pairs

from advisor.ops.conv3x3 import spec as conv3x3
from advisor.ops.conv3x3.weight import halo
from advisor.ops.grouped.conv import GroupedConv

CONVOLUTION = "grouped/grouped_wide.cu"
BACKWARD_WEIGHT = conv3x3.BACKWARD_WEIGHT
# (channels a group, stride) whose products are made so. Of 32 channels half of a product's rows are nobody's: 1.15 to 1.4 of the time of the
# kernels of warps; of 24, twice as long.
TAKEN = frozenset(pairs((48, 56, 64), (1, 2)))
# Whose weight's gradient is: of 32 channels in 0.86 of the time at stride 1.
WEIGHT_TAKEN = TAKEN | {(32, 1)}
THREADS = 256
LINE = 64  # channels of a pixel in shared memory, 128 bytes
SHARED_BYTES = conv3x3.SHARED_BYTES  # of a block, the only one of its SM
# Pixels of a tile, rows of 8, by stride and whether it is transposed.
COLUMNS = {(1, False): (64, 112, 128), (1, True): (64, 112, 128), (2, False): (64, 112), (2, True): (64,)}
MAX_DEPTH = 4  # tiles that a warpgroup has copied ahead
TILE_COST = 32  # what a tile takes beside its products, in columns of them
SECTOR = 32  # bytes: a group that ends inside of one shares it with its neighbour


@dataclass(frozen=True, slots=True)
class WidePlan:
    """One launch: `tiles` of `columns` pixels, `bands` of rows by `strips` of 8 columns an image; a block has `beside` groups."""

    columns: int
    depth: int
    beside: int
    shared_bytes: int
    bands: int
    strips: int
    tiles: int
    grid: int


def planes(stride: int, *, transposed: bool) -> int:
    """Parts in which a tile is read: odd and even rows and columns of what has twice as many."""
    return 4 if stride == 2 and not transposed else 1


def _shared_bytes(columns: int, depth: int, stride: int, parts: int) -> int:
    """Of a block: what its two warpgroups have copied, two boxes of y that each stores from, and a KiB for barriers."""
    pixels = (columns // 8 + halo(stride)) * (8 + halo(stride))
    return 2 * depth * parts * -(-pixels * 2 * LINE // 1024) * 1024 + 4 * columns * 2 * LINE + 1024


@lru_cache(maxsize=4096)
def plan(call: GroupedConv, sm_count: int, *, transposed: bool) -> WidePlan:
    """The launch that should end first: the longest block's tiles, with what each takes beside its products."""
    groups = call.channels // call.group
    beside = 2 if call.group * 2 % SECTOR and groups % 2 == 0 else 1
    parts = planes(call.stride, transposed=transposed)
    found = []
    for columns in COLUMNS[call.stride, transposed]:
        bands, strips = -(-call.out_height // (columns // 8)), -(-call.out_width // 8)
        tiles = call.batch * bands * strips
        lines = max(1, min(sm_count // (groups // beside), tiles))
        sizes = {depth: _shared_bytes(columns, depth, call.stride, parts) for depth in range(1, MAX_DEPTH + 1)}
        depth = max(depth for depth, nbytes in sizes.items() if nbytes <= SHARED_BYTES)
        planned = WidePlan(columns, depth, beside, sizes[depth], bands, strips, tiles, lines * (groups // beside))
        found.append((-(-tiles // lines) * (columns + TILE_COST), planned))
    return min(found, key=lambda cost: cost[0])[1]


def defines(
    call: GroupedConv, plan: WidePlan, storage: int, weight_storage: int, *, transposed: bool
) -> dict[str, int]:
    """Macros of CONVOLUTION."""
    return {
        "STORAGE": storage,
        "WEIGHT_STORAGE": weight_storage,
        "GROUP": call.group,
        "STRIDE": call.stride,
        "TRANSPOSED": int(transposed),
        "BESIDE": plan.beside,
        "WGMMA_N": plan.columns,
        "DEPTH": plan.depth,
    }


@lru_cache(maxsize=4096)
def convolution(call: GroupedConv) -> conv3x3.Conv3x3:
    """As ops/conv3x3 has it, for the gradient of the weight."""
    groups = call.channels // call.group
    return conv3x3.Conv3x3(
        call.batch, call.group, call.group, call.height, call.width, groups=groups, stride=call.stride
    )


@lru_cache(maxsize=4096)
def sums_fit(call: GroupedConv) -> bool:
    """Whether what the blocks of the weight's gradient leave takes no more memory than the input's gradient, which is made behind it."""
    return not conv3x3.room(convolution(call))
