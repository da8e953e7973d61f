"""What the pooling kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from advisor.ops import dispatch_table, pixel_columns
from advisor.ops.storage import STORAGE
from advisor.ops.tensor_support import TensorSupport

MAX_FORWARD = "pooling/max_pool_forward.cu"
MAX_BACKWARD = "pooling/max_pool_backward.cu"
BIAS_BACKWARD = "pooling/bias_max_pool_backward.cu"
AVG_FORWARD = "pooling/avg_pool_forward.cu"
AVG_BACKWARD = "pooling/avg_pool_backward.cu"
GLOBAL_AVG = "pooling/global_avg_pool.cu"
BIAS_RELU = "bias+relu+max_pool"  # the operation's name
OPERATIONS = ("max_pool", BIAS_RELU, "avg_pool", "global_avg_pool")
KERNELS = {
    MAX_FORWARD: ("max_pool_forward",),
    MAX_BACKWARD: ("max_pool_backward",),
    BIAS_BACKWARD: ("bias_max_pool_backward",),
    AVG_FORWARD: ("avg_pool_forward",),
    AVG_BACKWARD: ("avg_pool_backward",),
    GLOBAL_AVG: ("global_avg_pool_forward", "global_avg_pool_backward"),
}

THREADS = 256
# Channel vectors a block covers: 32 x 16 bytes are four cache lines; the rest of the block are neighbouring windows, whose
# common elements then meet in one SM's L1.
MAX_CHANNEL_TILE = 32
# Neighbouring windows have taps in common, at stride 1 most of them: up to this stride a thread makes two outputs along w and loads
# their taps once. At stride 2 that saves a sixth of the loads and costs half the occupancy.
STRIP_STRIDE = 1
# In the backward at stride 1: elements along w that a thread makes together.
BACKWARD_GROUP = 4
# Blocks an SM of max-pooling's backward with a bias: 85 registers a thread.
BIAS_BLOCKS_PER_SM = 3
# Global mean: pixels that a thread of the backward writes, and loads that one of the forward has under way: four threads take
# 49 pixels at once, with registers (128) for two blocks an SM and so 104 KiB of loads. In fp32 there are twice as many
# columns with half the arithmetic a load: more blocks an SM, of fewer loads each, where 13 took 0.044 ms at 256x2048x7x7.
GLOBAL_PIXELS = 8
GLOBAL_UNROLL = {"float16": 13, "bfloat16": 13, "float32": 8}
TUNABLE = {
    "THREADS": (128, 256),
    "MAX_CHANNEL_TILE": (8, 32),
    "STRIP_STRIDE": (0, 1, 2),
    "BACKWARD_GROUP": (1, 2, 4),
    "BIAS_BLOCKS_PER_SM": (2, 3, 4),
}

# Taps are unrolled when a kernel is compiled; 49 are the largest windows of ImageNet networks (7 x 7).
MAX_TAPS = 49
MAX_STRIDE = 4  # the backward keeps a gradient a phase in registers
_MAX_GRID = 65535


Pair = tuple[int, int]


class PoolWindow(NamedTuple):
    """A pooling window: kernel, stride, padding and dilation as (along h, along w)."""

    kernel: Pair
    stride: Pair
    padding: Pair = (0, 0)
    dilation: Pair = (1, 1)
    ceil_mode: bool = False

    def output(self, height: int, width: int) -> tuple[int, int]:
        """Output size, by PyTorch's rule: in ceil_mode no window begins in the padding behind the image."""
        sizes = []
        for size, k, s, p, d in zip(
            (height, width), self.kernel, self.stride, self.padding, self.dilation, strict=True
        ):
            room = size + 2 * p - d * (k - 1) - 1
            out = (-(-room // s) if self.ceil_mode else room // s) + 1
            if self.ceil_mode and (out - 1) * s >= size + p:
                out -= 1
            sizes.append(out)
        return sizes[0], sizes[1]

    @property
    def taps(self) -> int:
        """Positions in it."""
        return self.kernel[0] * self.kernel[1]

    @property
    def arguments(self) -> tuple[Pair, Pair, Pair, Pair, bool]:
        """As the public functions take a window: kernel, stride, padding, dilation, ceil_mode."""
        return self.kernel, self.stride, self.padding, self.dilation, self.ceil_mode

    @property
    def label(self) -> str:
        """`k3s2`, `k3x2s2x1d2`."""

        def pair(values: tuple[int, int]) -> str:
            return f"{values[0]}" if values[0] == values[1] else f"{values[0]}x{values[1]}"

        dilated = "" if self.dilation == (1, 1) else f"d{pair(self.dilation)}"
        return f"k{pair(self.kernel)}s{pair(self.stride)}{dilated}" + ("ceil" if self.ceil_mode else "")


@lru_cache(maxsize=4096)
def window(
    kernel: Pair, stride: Pair, padding: Pair = (0, 0), dilation: Pair = (1, 1), ceil_mode: bool = False
) -> PoolWindow:
    """The window with these arguments, one object for equal ones."""
    return PoolWindow(kernel=kernel, stride=stride, padding=padding, dilation=dilation, ceil_mode=ceil_mode)


def _limit(shape: tuple[int, ...], width: int) -> str:
    n, c, h, w = shape
    if n > _MAX_GRID:
        return f"{n} images are more than {_MAX_GRID}"
    if h * w * c // width >= 2**31 or n * c // width >= 2**31:
        return "an image, or a pixel of all images, of 2^31 vectors or more"
    return ""


TENSORS = TensorSupport(limit=_limit)


def unsupported_window(window: PoolWindow, *, height: int, width: int) -> str:
    """Why the kernels do not take this window; empty when they do."""
    if window.taps > MAX_TAPS:
        return f"a window of {window.taps} elements is more than {MAX_TAPS}"
    if max(window.stride) > MAX_STRIDE:
        return f"stride {max(window.stride)} is more than {MAX_STRIDE}"
    if any(2 * p > k for k, p in zip(window.kernel, window.padding, strict=True)):
        return "padding is more than half the window"
    if min(window.output(height, width)) < 1:
        return "the window is larger than the image"
    return ""


def unsupported_bias(window: PoolWindow) -> str:
    """Why max-pooling with a bias and ReLU before it does not take a window that max-pooling takes; empty when it does."""
    if min(window.stride) < 2 or any(p >= s for p, s in zip(window.padding, window.stride, strict=True)):
        return "not every window begins in a group of elements of its own"
    return ""


def wins(operation: str, *, dtype: str, nbytes: int) -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels are measured to win.

    Args:
        nbytes: of the input.
        operation: "max_pool", "bias+relu+max_pool", "avg_pool" or "global_avg_pool".

    On file for one H200, forward / backward: max-pooling 3 to 6 / 7 to 12 times faster, average pooling 5 to 11 / 14 to 27, the
    mean over a whole image 0.8 to 1.2 / 2.3 to 3.4, in all dtypes. Behind a bias and ReLU 5 to 10 / 6 to 10 times, from
    25 MB of input on.
    """
    return dispatch_table.refusal("pooling", operation, dtype, {"megabytes": nbytes / 1e6})


@dataclass(frozen=True, slots=True)
class PoolGeometry:
    """Block (channel vectors, columns, rows) and how many tiles of it cover the work along each."""

    block: tuple[int, int, int]
    channel_tiles: int
    column_tiles: int
    row_tiles: int
    vectors: int


def channel_tile(vectors: int, most: int) -> int:
    """The widest divisor of `vectors` up to `most`, so that no thread idles, unless only narrow ones exist."""
    tile = max(d for d in range(1, min(vectors, most) + 1) if vectors % d == 0)
    return most if tile < most // 4 and vectors > most else tile


@lru_cache(maxsize=4096)
def geometry(
    vectors: int, columns: int, rows: int, reach: tuple[int, int], step: tuple[int, int], threads: int, most: int
) -> PoolGeometry:
    """The tile of threads that fetches fewest elements, over all tiles.

    Args:
        columns, rows: threads wanted along w and h.
        reach, step: elements that one thread's windows cover, and that its neighbour's are away, along (h, w).
        most: channel vectors a block may cover.
    """
    tile = channel_tile(vectors, most)
    positions = max(1, threads // tile)
    best: tuple[int, int, int] | None = None
    for across in range(1, min(positions, columns) + 1):
        down = min(positions // across, rows, 64)
        tiles = -(-columns // across) * -(-rows // down)
        fetched = tiles * ((down - 1) * step[0] + reach[0]) * ((across - 1) * step[1] + reach[1])
        if best is None or fetched <= best[0]:
            best = (fetched, across, down)
    _, across, down = best or (0, 1, 1)
    return PoolGeometry((tile, across, down), -(-vectors // tile), -(-columns // across), -(-rows // down), vectors)


def forward_strip(window: PoolWindow) -> int:
    """Outputs along w that a thread makes together."""
    overlap = window.kernel[1] > window.stride[1] and window.dilation[1] == 1
    return 2 if overlap and window.stride[1] <= STRIP_STRIDE else 1


def backward_group(window: PoolWindow) -> int:
    """Groups of stride-many elements along w that a thread makes together."""
    return BACKWARD_GROUP if window.stride[1] == 1 and window.kernel[1] > 1 else 1


def forward_geometry(window: PoolWindow, vectors: int, out_height: int, out_width: int) -> PoolGeometry:
    """Launch over outputs."""
    strip = forward_strip(window)
    covered = [d * (k - 1) + 1 for k, d in zip(window.kernel, window.dilation, strict=True)]
    return geometry(
        vectors,
        -(-out_width // strip),
        out_height,
        (covered[0], covered[1] + (strip - 1) * window.stride[1]),
        (window.stride[0], window.stride[1] * strip),
        THREADS,
        MAX_CHANNEL_TILE,
    )


def groups(window: PoolWindow, height: int, width: int) -> tuple[int, int]:
    """Groups of (stride x stride) elements along h and w that together hold the image, as the backward cuts it."""
    rows, columns = (
        (size - 1 + p) // s - p // s + 1
        for size, p, s in zip((height, width), window.padding, window.stride, strict=True)
    )
    return rows, columns


def backward_geometry(window: PoolWindow, vectors: int, height: int, width: int) -> PoolGeometry:
    """Launch over groups of elements."""
    group = backward_group(window)
    rows, columns = groups(window, height, width)
    near = [d * (k - 1) // s + 1 for k, d, s in zip(window.kernel, window.dilation, window.stride, strict=True)]
    return geometry(
        vectors, -(-columns // group), rows, (near[0], near[1] + group - 1), (1, group), THREADS, MAX_CHANNEL_TILE
    )


@lru_cache(maxsize=4096)
def bias_grid(tile: PoolGeometry, images: int, sm_count: int) -> tuple[int, int, int]:
    """Of BIAS_BACKWARD over tiles as of `backward_geometry`: as many blocks as run at once, and none without a tile."""
    walked = images * tile.row_tiles * tile.column_tiles
    return tile.channel_tiles, max(1, min(walked, sm_count * BIAS_BLOCKS_PER_SM // tile.channel_tiles)), 1


@dataclass(frozen=True, slots=True)
class GlobalGeometry:
    """Blocks for the global mean: of the forward, and (channel vectors, pixels) of the backward."""

    columns: pixel_columns.ColumnGeometry
    block: tuple[int, int, int]
    channel_tiles: int
    pixel_tiles: int
    vectors: int


@lru_cache(maxsize=4096)
def global_geometry(images: int, vectors: int, pixels: int) -> GlobalGeometry:
    """The forward sums a column in one block; the backward has as many rows of threads as pixels, up to THREADS threads."""
    columns = pixel_columns.geometry(
        images,
        pixels,
        vectors,
        threads=THREADS,
        unroll=1,  # matters only where blocks share a column
        bytes_per_block=pixels * THREADS * 16,
        least_blocks=1,
        most_splits=1,
    )
    tile = channel_tile(vectors, MAX_CHANNEL_TILE)
    down = max(1, min(THREADS // tile, pixels))
    return GlobalGeometry(columns, (tile, down, 1), -(-vectors // tile), -(-pixels // (down * GLOBAL_PIXELS)), vectors)


def window_defines(window: PoolWindow, dtype: str) -> dict[str, int]:
    """Macros that every window kernel needs; dilation is not among average pooling's."""
    return {
        "STORAGE": STORAGE[dtype],
        "THREADS": THREADS,
        "KH": window.kernel[0],
        "KW": window.kernel[1],
        "SH": window.stride[0],
        "SW": window.stride[1],
    }


def max_defines(
    source: str, window: PoolWindow, dtype: str, *, indices: bool = True, bias: bool = False
) -> dict[str, int]:
    """Macros of one variant of a max-pooling source. `bias`: of the forward, with a bias and ReLU before it."""
    dilated = {**window_defines(window, dtype), "DH": window.dilation[0], "DW": window.dilation[1]}
    if source == MAX_FORWARD:
        return {**dilated, "OUT_W": forward_strip(window), "INDICES": int(indices), "BIAS": int(bias)}
    blocks = {"BLOCKS": BIAS_BLOCKS_PER_SM} if source == BIAS_BACKWARD else {}
    return {**dilated, "GROUP_W": backward_group(window), **blocks}


# What a window's sum is divided by.
WITH_PADDING, WITHOUT_PADDING, CONSTANT = 0, 1, 2


def divisor_mode(window: PoolWindow, *, count_include_pad: bool, divisor_override: int | None) -> int:
    """A constant where all windows have the same divisor, else how it is counted."""
    if divisor_override is not None or (not any(window.padding) and not window.ceil_mode):
        return CONSTANT
    return WITH_PADDING if count_include_pad else WITHOUT_PADDING


def avg_defines(source: str, window: PoolWindow, dtype: str, mode: int) -> dict[str, int]:
    """Macros of one variant of an average-pooling source."""
    strip = {"OUT_W": forward_strip(window)} if source == AVG_FORWARD else {"GROUP_W": backward_group(window)}
    return {**window_defines(window, dtype), **strip, "DIVISOR": mode}


def global_defines(dtype: str) -> dict[str, int]:
    """Macros of one variant of the global mean."""
    return {
        "STORAGE": STORAGE[dtype],
        "THREADS": THREADS,
        "PIXELS": GLOBAL_PIXELS,
        "UNROLL": GLOBAL_UNROLL[dtype],
    }


K3S2 = PoolWindow(kernel=(3, 3), stride=(2, 2), padding=(1, 1))
K2S2 = PoolWindow(kernel=(2, 2), stride=(2, 2))
K3S1 = PoolWindow(kernel=(3, 3), stride=(1, 1), padding=(1, 1))
K5S1 = PoolWindow(kernel=(5, 5), stride=(1, 1), padding=(2, 2))


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of variants that networks ask for: every dtype, and in bf16 every common window."""
    if source == GLOBAL_AVG:
        return tuple(global_defines(dtype) for dtype in STORAGE)
    common = [(K3S2, dtype) for dtype in STORAGE]
    biased = tuple(
        max_defines(source, window, dtype, bias=True) for window, dtype in (*common, *((K2S2, d) for d in STORAGE))
    )
    if source == BIAS_BACKWARD:
        return biased
    if source in (MAX_FORWARD, MAX_BACKWARD):
        plain = tuple(
            max_defines(source, window, dtype)
            for window, dtype in (*common, (K2S2, "bfloat16"), (K3S1, "bfloat16"), (K5S1, "bfloat16"))
        )
        return (*plain, *biased) if source == MAX_FORWARD else plain
    return tuple(
        avg_defines(source, window, dtype, mode)
        for window, dtype, mode in (
            *((w, dtype, WITHOUT_PADDING) for w, dtype in common),
            (K2S2, "bfloat16", CONSTANT),
            (K3S1, "bfloat16", WITH_PADDING),
        )
    )


def bytes_max(*, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward and the backward of max-pooling must move: both tensors and one byte an output."""
    each = (inputs + outputs) * itemsize + outputs
    return each, each


def bytes_avg(*, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward and the backward of average pooling must move: both tensors."""
    each = (inputs + outputs) * itemsize
    return each, each
