"""What the upsampling kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from advisor.ops import dispatch_table
from advisor.ops.pooling.spec import TENSORS, Pair, channel_tile
from advisor.ops.storage import STORAGE, vector_width

FORWARD = "upsample/upsample_forward.cu"
BACKWARD = "upsample/upsample_backward.cu"
KERNELS = {FORWARD: ("upsample_forward", "concat_copy"), BACKWARD: ("upsample_backward",)}

MODES = ("nearest", "nearest-exact", "bilinear")

THREADS = 256
MAX_CHANNEL_TILE = 32  # channel vectors a block covers: four cache lines
# Rows a thread walks down: source rows (forward) or output rows (backward) between two of its rows are read once for both.
FORWARD_ROWS = 4
BACKWARD_ROWS = 8
COPY_PIXELS = 4
TUNABLE = {
    "THREADS": (128, 256),
    "MAX_CHANNEL_TILE": (8, 32),
    "FORWARD_ROWS": (2, 4, 8),
    "BACKWARD_ROWS": (4, 8, 16),
}
# Outputs that one column goes into are unrolled when the backward is compiled: 16 are bilinear x 8.
MAX_TAPS = 16


class Axis(NamedTuple):
    """One axis of an upsampling. `scale`: input pixels an output pixel, rounded to fp32 as PyTorch rounds it."""

    size: int
    out_size: int
    scale: float

    @property
    def inverse(self) -> float:
        """Output pixels an input pixel; 0 where every output takes the first input pixel."""
        return 1.0 / self.scale if self.scale > 0.0 else 0.0


def _single(value: float) -> float:
    rounded: float = struct.unpack("f", struct.pack("f", value))[0]
    return rounded


def axis(size: int, out_size: int, factor: float | None, *, align_corners: bool) -> Axis:
    """The axis with PyTorch's scale: a given factor counts as 1 / factor, unless corners are aligned."""
    if align_corners:
        scale = (size - 1) / (out_size - 1) if out_size > 1 else 0.0
    elif factor is not None and factor > 0.0:
        scale = 1.0 / factor
    else:
        scale = size / out_size
    return Axis(size=size, out_size=out_size, scale=_single(scale))


def half_pixel(mode: str, *, align_corners: bool) -> bool:
    """Whether pixel centres lie at halves."""
    return mode == "nearest-exact" or (mode == "bilinear" and not align_corners)


@lru_cache(maxsize=1024)
def taps(line: Axis, mode: str, *, align_corners: bool) -> int:
    """The most output pixels that any input pixel goes into along this axis.

    The kernel computes source positions in fp32, with or without a fused multiply-add; the larger count of both is taken.
    """
    most = 1
    shift = 0.5 if half_pixel(mode, align_corners=align_corners) else 0.0
    for fused in (False, True):
        counts = [0] * (line.size + 1)
        for out in range(line.out_size):
            product = line.scale * (out + shift)
            at = product if fused else _single(product)
            if mode == "bilinear":
                at = max(_single(at - shift), 0.0)
            index = min(math.floor(at), line.size - 1)
            counts[index] += 1
            if mode == "bilinear" and at != index:
                counts[index + 1] += 1
        most = max(most, *counts[: line.size])
    return most


def unsupported(
    *,
    shape: tuple[int, ...],
    others: tuple[tuple[int, ...], ...],
    size: Pair,
    factors: tuple[float, float] | None,
    mode: str,
    align_corners: bool,
    channels_last: bool,
    dtype: str,
    arch: int,
) -> str:
    """Why these kernels cannot take this call; empty when they can.

    Args:
        shape: of the tensor to upsample, [N, C, H, W]; others: of what it is concatenated with along C.
        size: the output's height and width.
    """
    reason = TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    if mode not in MODES:
        return f"mode {mode}"
    n, channels, height, width = shape
    for other in others:
        if other[:1] + other[2:] != (n, *size):
            return "concatenated tensors differ in size"
        if other[1] % vector_width(dtype):
            return f"{other[1]} concatenated channels are no multiple of {vector_width(dtype)}"
        channels += other[1]
    if min(size) < 1:
        return "an empty output"
    if size[0] * size[1] * channels // vector_width(dtype) >= 2**31:
        return "an image of 2^31 vectors or more"
    _, columns = axes(height, width, size, factors, align_corners=align_corners)
    wide = taps(columns, mode, align_corners=align_corners)
    if wide > MAX_TAPS:
        return f"a column goes into {wide} outputs, more than {MAX_TAPS}"
    return ""


def axes(
    height: int, width: int, size: Pair, factors: tuple[float, float] | None, *, align_corners: bool
) -> tuple[Axis, Axis]:
    """Along h and w."""
    vertical, horizontal = factors or (None, None)
    return (
        axis(height, size[0], vertical, align_corners=align_corners),
        axis(width, size[1], horizontal, align_corners=align_corners),
    )


def wins(mode: str, *, align_corners: bool, concatenates: bool, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels are measured to win.

    On file for one H200: bilinear 4 to 12 times faster forward and 8 to 18 backward, with and without the concat behind it,
    nearest 6 to 9 and 4 to 8.
    """
    return dispatch_table.refusal("upsample", kind(mode, align_corners=align_corners, concatenates=concatenates), dtype)


def kind(mode: str, *, align_corners: bool, concatenates: bool) -> str:
    """`bilinear corners+cat`."""
    return mode + (" corners" if align_corners else "") + ("+cat" if concatenates else "")


@dataclass(frozen=True, slots=True)
class UpsampleGeometry:
    """Block (channel vectors, columns, strips of rows) and how many tiles of it cover the work along each."""

    block: tuple[int, int, int]
    channel_tiles: int
    column_tiles: int
    row_tiles: int
    vectors: int


@lru_cache(maxsize=4096)
def geometry(vectors: int, columns: int, rows: int, strip: int) -> UpsampleGeometry:
    """Columns side by side first, so that a warp writes whole cache lines; strips of `strip` rows in what is left of a block."""
    tile = channel_tile(vectors, MAX_CHANNEL_TILE)
    positions = max(1, THREADS // tile)
    across = min(positions, columns)
    strips = -(-rows // strip)
    down = max(1, min(positions // across, strips, 64))
    return UpsampleGeometry(
        (tile, across, down), -(-vectors // tile), -(-columns // across), -(-strips // down), vectors
    )


@lru_cache(maxsize=4096)
def copy_geometry(vectors: int, pixels: int) -> UpsampleGeometry:
    """For copying `pixels` pixels into a wider buffer: `row_tiles` is 1."""
    tile = channel_tile(vectors, MAX_CHANNEL_TILE)
    across = max(1, min(THREADS // tile, pixels))
    return UpsampleGeometry((tile, across, 1), -(-vectors // tile), -(-pixels // (across * COPY_PIXELS)), 1, vectors)


def defines(source: str, dtype: str, mode: str, *, align_corners: bool, columns: int = 0) -> dict[str, int]:
    """Macros of one variant; `columns` is the backward's `taps`."""
    common = {
        "STORAGE": STORAGE[dtype],
        "THREADS": THREADS,
        "BILINEAR": int(mode == "bilinear"),
        "HALF_PIXEL": int(half_pixel(mode, align_corners=align_corners)),
    }
    if source == FORWARD:
        return {**common, "ROWS": FORWARD_ROWS, "PIXELS": COPY_PIXELS}
    return {**common, "ROWS": BACKWARD_ROWS, "TAPS": columns}


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants of x 2, and the widest."""
    return (
        *(defines(source, dtype, "bilinear", align_corners=False, columns=4) for dtype in STORAGE),
        defines(source, "bfloat16", "bilinear", align_corners=True, columns=5),
        defines(source, "bfloat16", "nearest", align_corners=False, columns=2),
        defines(source, "bfloat16", "bilinear", align_corners=False, columns=MAX_TAPS),
    )


def bytes_moved(*, inputs: int, outputs: int, copied: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward and the backward must move. `copied`: elements of the other inputs of the concatenation, whose
    gradients are views."""
    return (inputs + outputs + 2 * copied) * itemsize, (inputs + outputs) * itemsize
