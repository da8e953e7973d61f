"""What the kernels for large depthwise taps support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch_table, shared_memory
from advisor.ops.convolution_support import Sizes, Support, padded_within_taps
from advisor.ops.storage import STORAGE, itemsize

CONV = "large_depthwise/large_depthwise.cu"
BACKWARD_WEIGHT = "large_depthwise/large_depthwise_weight.cu"
PLANES = "large_depthwise/large_depthwise_planes.cu"
KERNELS = {
    CONV: ("large_depthwise",),
    BACKWARD_WEIGHT: ("large_depthwise_weight",),
    PLANES: ("large_depthwise_planes",),
}

TAPS = 11, 63  # the least and the most, of the longer side; the shorter may have 1
EIGHTS = 8  # of columns a warp at most, and of 16 rows a tile 4
SIXTEENS = 4
WARPS = 8  # of CONV at most
HELD = 48  # sums that a thread of BACKWARD_WEIGHT holds at most, in fp32 registers
MOST_WARPS = 16  # of BACKWARD_WEIGHT
BLOCKS_AN_SM = 8  # of BACKWARD_WEIGHT, so that the last ones leave few SMs without work
MAX_VALUES = 2**31 - 1  # of a plane
TUNABLE = {"WARPS": (4, 8), "HELD": (24, 48), "BLOCKS_AN_SM": (2, 4, 8)}


class LargeConv(NamedTuple):
    """A convolution of [batch, channels, height, width] with one filter of [kernel_h, kernel_w] taps a channel."""

    batch: int
    channels: int
    height: int
    width: int
    kernel_h: int
    kernel_w: int
    pad_h: int
    pad_w: int

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return self.height + 2 * self.pad_h - self.kernel_h + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return self.width + 2 * self.pad_w - self.kernel_w + 1

    @property
    def lead(self) -> int:
        """Zero columns ahead of the padding, so that a tile's columns begin with a whole vector."""
        return -self.pad_w % 8

    def gradient(self) -> LargeConv:
        """The convolution with reversed taps that makes the input's gradient of the result's."""
        pads = self.kernel_h - 1 - self.pad_h, self.kernel_w - 1 - self.pad_w
        return self._replace(height=self.out_height, width=self.out_width, pad_h=pads[0], pad_w=pads[1])


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], taps: tuple[int, int], padding: tuple[int, int]) -> LargeConv:
    """The convolution of an input of `shape` [N, C, H, W]."""
    n, c, h, w = shape
    return LargeConv(n, c, h, w, *taps, *padding)


# ---- what is compiled, and how it is launched


@dataclass(frozen=True, slots=True)
class LargePlan:
    """One launch of CONV: tiles of 16 * `sixteens` rows by 8 * `eights` columns of `planes` images."""

    eights: int
    sixteens: int
    planes: int
    row_tiles: int
    column_tiles: int
    steps: int
    chunks: tuple[int, int]
    shared_bytes: int

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.sixteens * self.planes


def _tiles(size: int, unit: int, most: int) -> tuple[int, int]:
    """Tiles along a side, and how many units (of at most `most`) each has."""
    units = -(-size // unit)
    tiles = -(-units // most)
    return tiles, -(-units // tiles)


def _odd(columns: int) -> int:
    """Values of a row in shared memory: an odd number of 16 bytes."""
    return (columns // 8 | 1) * 8


def _inside(call: LargeConv, tiles: int, most: int) -> tuple[int, int]:
    """The eights of staged columns [first, last) from which 16 columns on meet the image."""
    if tiles > 1:
        return 0, most
    padding = (call.pad_w + call.lead) // 8
    return max(0, padding - 1), min(most, -(-call.width // 8) + padding)


@lru_cache(maxsize=4096)
def plan(call: LargeConv, dtype: str, arch: int) -> LargePlan:
    """The launch of CONV, with as many planes a block as give it WARPS warps, within shared memory."""
    column_tiles, eights = _tiles(call.out_width, 8, EIGHTS)
    steps = -(-(call.kernel_w + 7 + call.lead) // 16)
    pitch = _odd(8 * (eights - 1) + 16 * steps)
    parts = 2 if dtype == "float32" else 1
    taps = call.kernel_h * 2 * (16 * steps + 16)
    for most in range(SIXTEENS, 0, -1):
        row_tiles, sixteens = _tiles(call.out_height, 16, most)
        rows = 16 * sixteens + call.kernel_h - 1
        planes = max(1, min(call.batch, WARPS // sixteens))
        while planes > 1 and 2 * parts * (planes * rows * pitch + taps) > 56 * 1024:
            planes -= 1
        nbytes = 2 * parts * (planes * rows * pitch + taps)
        if nbytes + 1024 <= shared_memory.of_a_block(arch):
            break
    chunks = _inside(call, column_tiles, eights + 2 * (steps - 1))
    return LargePlan(eights, sixteens, planes, row_tiles, column_tiles, steps, chunks, nbytes)


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """One launch of BACKWARD_WEIGHT: tiles of 16 * `sixteens` rows by 16 * `quads` columns of dy; `held` rows of taps a warp."""

    quads: int
    sixteens: int
    row_tiles: int
    column_tiles: int
    eights: int
    held: int
    warps: int
    groups: int
    splits: int
    chunks: tuple[int, int]
    shared_bytes: int

    @property
    def tap_rows(self) -> int:
        """Rows of taps a block."""
        return self.held * self.warps


@lru_cache(maxsize=4096)
def weight_plan(call: LargeConv, dtype: str, sm_count: int, arch: int) -> WeightPlan:
    """The launch of BACKWARD_WEIGHT."""
    column_tiles, quads = _tiles(call.out_width, 16, EIGHTS // 2)
    eights = -(-(call.kernel_w + 15 + call.lead) // 8)
    held = max(1, min(HELD // (4 * eights), -(-call.kernel_h // MOST_WARPS)))
    warps = min(MOST_WARPS, -(-call.kernel_h // held))
    groups = -(-call.kernel_h // (held * warps))
    parts = 2 if dtype == "float32" else 1
    x_pitch, dy_pitch = _odd(16 * (quads - 1) + 8 * eights), _odd(16 * quads)
    for most in range(SIXTEENS, 0, -1):
        row_tiles, sixteens = _tiles(call.out_height, 16, most)
        staged = parts * ((16 * sixteens + held * warps - 1) * x_pitch + 16 * sixteens * dy_pitch)
        nbytes = max(4 * staged, warps * 16 * (8 * eights + 1) * 4)
        if nbytes + 1024 <= shared_memory.of_a_block(arch):
            break
    items = call.batch * row_tiles * column_tiles
    splits = max(1, min(items, BLOCKS_AN_SM * sm_count // (call.channels * groups)))
    chunks = _inside(call, column_tiles, 2 * (quads - 1) + eights)
    return WeightPlan(quads, sixteens, row_tiles, column_tiles, eights, held, warps, groups, splits, chunks, nbytes)


def copy(width: int, dtype: str) -> int:
    """Elements of a row that are copied at once."""
    most = 16 // itemsize(dtype)
    return next(n for n in (8, 4, 2, 1) if n <= most and width % n == 0)


PLANES_THREADS, PLANES_TILE = 256, (64, 128)  # rows, and bytes of a row


def turns(pixels: int, dtype: str) -> bool:
    """Whether PLANES makes planes of so many pixels sooner than PyTorch's copy: not where it writes them value by value (7 x 7)."""
    return copy(pixels, dtype) > 1


def planes_defines(rows: int, columns: int, dtype: str) -> dict[str, int]:
    """Macros of PLANES, for matrices of `rows` by `columns` that are turned."""
    size = itemsize(dtype)
    return {"SIZE": size, "IN": size * copy(columns, dtype), "OUT": size * copy(rows, dtype)}


def planes_grid(images: int, rows: int, columns: int, dtype: str) -> tuple[tuple[int, int], int]:
    """The grid of PLANES, and how many of its tiles lie side by side."""
    across = -(-columns // (PLANES_TILE[1] // itemsize(dtype)))
    return (across * -(-rows // PLANES_TILE[0]), images), across


def defines(
    call: LargeConv, plan: LargePlan, dtype: str, weight_dtype: str, *, flip: bool, bias: bool
) -> dict[str, int]:
    """Macros of CONV."""
    return {
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": STORAGE[weight_dtype],
        "KH": call.kernel_h,
        "KW": call.kernel_w,
        "KS": plan.steps,
        "NT": plan.eights,
        "MT": plan.sixteens,
        "PLANES": plan.planes,
        "THREADS": plan.threads,
        "COPY": copy(call.width, dtype),
        "PAIRED": int(call.out_width % 2 == 0),
        "FIRST": plan.chunks[0],
        "LAST": plan.chunks[1],
        "FLIP": int(flip),
        "BIAS": int(bias),
    }


def weight_defines(call: LargeConv, plan: WeightPlan, dtype: str) -> dict[str, int]:
    """Macros of BACKWARD_WEIGHT."""
    return {
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": STORAGE[dtype],
        "KH": call.kernel_h,
        "KW": call.kernel_w,
        "V": plan.eights,
        "QN": plan.quads,
        "MT": plan.sixteens,
        "RW": plan.held,
        "TAP_ROWS": plan.tap_rows,
        "THREADS": 32 * plan.warps,
        "COPY": min(copy(call.width, dtype), copy(call.out_width, dtype)),
        "FIRST": plan.chunks[0],
        "LAST": plan.chunks[1],
    }


# ---- where it wins


KIND = "large depthwise"


def name(taps: tuple[int, int], *, bias: bool = False) -> str:
    """`large depthwise k31x31 bias`."""
    return f"{KIND} k{taps[0]}x{taps[1]}" + (" bias" if bias else "")


def kind(taps: tuple[int, int]) -> str:
    """Strips of fewer taps than the least square has are a kind of their own."""
    return KIND + (" strip" if taps[0] * taps[1] < TAPS[0] ** 2 else "")


def wins(taps: tuple[int, int], dtype: str) -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels are measured to win.

    On an H200 they are faster than cuDNN's at every case measured, forward and backward together 3.5 to 80 times. Strips were not measured in
    fp32.
    """
    return dispatch_table.refusal("large_depthwise", kind(taps), dtype, {"longer_side": max(taps)})


# ---- what is supported


def _channels(sizes: Sizes) -> str:
    c, outputs, inputs = sizes.shape[1], *sizes.weight_shape[:2]
    return "" if (sizes.groups, outputs, inputs) == (c, c, 1) else f"{sizes.groups} groups of {c} channels to {outputs}"


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    sized = call(sizes.shape, (sizes.weight_shape[2], sizes.weight_shape[3]), sizes.padding)
    if sized.out_height < 1 or sized.out_width < 1:
        return "empty output"
    if sized.channels > 65535 or sized.batch > 65535:
        return "more images or channels than a grid has"
    beyond = max(sized.height * sized.width, sized.out_height * sized.out_width) > MAX_VALUES
    return "a plane is beyond 32-bit offsets" if beyond else ""


SUPPORTS = Support(
    channels=_channels,
    taps=lambda rows, columns: TAPS[0] <= max(rows, columns) <= TAPS[1],
    strides=(1,),
    padding=padded_within_taps,
    storage=STORAGE,
    limit=_limit,
)


# (batch, channels, side, taps) of convolutions in trained networks: RepLKNet-31B's four stages at 224 x 224, its 13 taps in SLaK's and
# UniRepLKNet's place, and the strips of InceptionNeXt and SLaK.
TRAINED = (
    (64, 128, 56, (31, 31)),
    (64, 256, 28, (29, 29)),
    (64, 512, 14, (27, 27)),
    (64, 1024, 7, (13, 13)),
    (64, 128, 56, (13, 13)),
    (64, 96, 56, (51, 5)),
    (64, 96, 56, (5, 51)),
    (64, 24, 56, (1, 11)),
    (64, 24, 56, (11, 1)),
)


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros of the variants that the trained networks ask for."""
    found: list[dict[str, int]] = []
    for dtype in ("float32", "bfloat16"):
        for n, c, side, taps in TRAINED:
            if source == PLANES:
                found += [planes_defines(*sizes, dtype) for sizes in ((side * side, c), (c, side * side))]
                continue
            forward = call((n, c, side, side), taps, (taps[0] // 2, taps[1] // 2))
            if source == BACKWARD_WEIGHT:
                found.append(
                    weight_defines(forward, weight_plan(forward, dtype, architectures.of(arch).sms, arch), dtype)
                )
            else:
                planned = plan(forward, dtype, arch)
                found.append(defines(forward, planned, dtype, "float32", flip=False, bias=dtype == "float32"))
    return tuple(dict(macros) for macros in dict.fromkeys(tuple(macros.items()) for macros in found))


def bytes_moved(call: LargeConv, itemsize: int) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in, dx out."""
    x = call.batch * call.channels * call.height * call.width * itemsize
    y = call.batch * call.channels * call.out_height * call.out_width * itemsize
    return x + y, 2 * x + y


def flops(call: LargeConv) -> tuple[int, int]:
    """Operations of forward and backward (both gradients)."""
    values = call.batch * call.channels * call.out_height * call.out_width
    products = 2 * call.kernel_h * call.kernel_w * values
    return products, 2 * products
