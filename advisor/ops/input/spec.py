"""What the kernel that normalises images supports, where it wins, and how it is launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from advisor.ops import dispatch_table
from advisor.ops.storage import MIN_ARCH, STORAGE, itemsize, vector_width

NORMALISE = "input/normalise_images.cu"
KERNELS = {NORMALISE: ("normalise_images",)}

CHANNELS = (1, 3)  # grey and RGB

THREADS = 256
# Bytes are a fifth of the traffic: two groups of pixels a thread are 48 KiB of loads an SM already, and more blocks even out the
# last wave. A group of elements is a third of that, and four times as many share the block's loading of the table.
UNROLL = 2
_ELEMENT_UNROLL = 4
TUNABLE = {"THREADS": (128, 256, 512), "UNROLL": (1, 2, 4)}


def unsupported(*, shape: tuple[int, ...], x_nhwc: bool, y_nhwc: bool, dtype: str, arch: int) -> str:
    """Why the kernel cannot take these images; empty when it can.

    Args:
        shape: [N, C, H, W]; x_nhwc, y_nhwc: whether pixels of the input and of the result lie channel by channel in memory.
        dtype: of the result.
    """
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if len(shape) != 4:
        return f"{len(shape)} dimensions"
    n, c, h, w = shape
    if c not in CHANNELS:
        return f"{c} channels"
    if not n * c * h * w:
        return "an empty batch"
    if n * c * h * w >= 2**31:
        return "a batch of 2^31 values or more"
    if y_nhwc and not x_nhwc and c > 1:
        return "planes to channels_last"
    return ""


def wins(channels: int, *, x_nhwc: bool, y_nhwc: bool, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernel is measured to win."""
    return dispatch_table.refusal("input", kind(channels, x_nhwc=x_nhwc, y_nhwc=y_nhwc), dtype)


def kind(channels: int, *, x_nhwc: bool, y_nhwc: bool) -> str:
    """`uint8 nhwc to normalised nchw`; one channel has no order."""
    orders = {True: "nhwc", False: "nchw"}
    return f"uint8 {orders[x_nhwc]} to normalised {orders[y_nhwc]}" if channels > 1 else "uint8 grey to normalised"


@dataclass(frozen=True, slots=True)
class BatchGeometry:
    """Blocks, groups of all threads, groups a plane or image, and the elements a group stores at once."""

    blocks: int
    groups: int
    groups_per_plane: int
    width: int


def _by_pixel(channels: int, x_nhwc: bool, y_nhwc: bool) -> bool:
    """Groups are of pixels, whose channels go apart; else of elements, in the order that they have."""
    return channels > 1 and x_nhwc and not y_nhwc


def _unroll(by_pixel: bool) -> int:
    return UNROLL if by_pixel else UNROLL * _ELEMENT_UNROLL


@lru_cache(maxsize=1024)
def geometry(
    shape: tuple[int, int, int, int], *, x_nhwc: bool, y_nhwc: bool, dtype: str, aligned: bool
) -> BatchGeometry:
    """`aligned`: both tensors begin at a multiple of 16 bytes."""
    n, c, h, w = shape
    plane = h * w
    width = vector_width(dtype)
    by_pixel = _by_pixel(c, x_nhwc, y_nhwc)
    run = n * c * plane if y_nhwc or c == 1 else plane  # elements of the result that one channel pattern covers
    if not aligned or run % width:
        width = 1
    groups = n * plane * (1 if by_pixel else c) // width
    return BatchGeometry(-(-groups // (THREADS * _unroll(by_pixel))), groups, max(1, plane // width), width)


def defines(*, channels: int, x_nhwc: bool, y_nhwc: bool, dtype: str, width: int) -> dict[str, int]:
    """Macros of one variant. One channel has no order."""
    return {
        "STORAGE": STORAGE[dtype],
        "CHANNELS": channels,
        "X_NHWC": int(x_nhwc and channels > 1),
        "Y_NHWC": int(y_nhwc and channels > 1),
        "WIDTH": width,
        "THREADS": THREADS,
        "UNROLL": _unroll(_by_pixel(channels, x_nhwc, y_nhwc)),
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant."""
    return tuple(
        defines(channels=channels, x_nhwc=x_nhwc, y_nhwc=y_nhwc, dtype=dtype, width=width)
        for dtype in STORAGE
        for width in (vector_width(dtype), 1)
        for channels, x_nhwc, y_nhwc in ((3, True, False), (3, True, True), (3, False, False), (1, False, False))
    )


def bytes_moved(elements: int, dtype: str) -> int:
    """Bytes that must be read and written for so many values."""
    return elements * (1 + itemsize(dtype))
