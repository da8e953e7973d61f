"""What the first-convolution kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch_table, occupancy, storage
from advisor.ops.convolution_support import Sizes, Support, told
from advisor.ops.dispatch import with_moments

FORWARD = "first_conv/first_conv_forward.cu"
BACKWARD_WEIGHT = "first_conv/first_conv_backward_weight.cu"
KERNELS = {
    FORWARD: ("first_conv_forward",),
    BACKWARD_WEIGHT: ("first_conv_backward_weight", "first_conv_backward_weight_sum"),
}

COMPUTE = ("float16", "bfloat16")  # what the tensor cores multiply; the image may be fp32 and is rounded when loaded
IN_CHANNELS = 3
TAPS = (3, 4, 5, 6, 7)  # a side
STRIDES = (1, 2, 3, 4)
CHANNELS = 8  # 16 bytes of a pixel: a lane's store, and its load of a gradient
MAX_CHANNELS = 96  # a block has all of them, in registers
MAX_COLUMNS = 128  # of a tile
TILE = 512  # output pixels between two barriers, as far as shared memory allows
THREADS = 128
# Registers of a thread for the sums of the weight gradient: 160 are 30 % faster on an H200 than 96 for 7 x 7 taps, and spill 8 bytes on
# sm_100 (ptxas 13.5), where fewer were not measured.
SUMS, ROOMY_SUMS = 160, 152
TAPS_AND_SUMS = (
    128  # registers of a thread for weights and sums of the forward: two thirds of what three blocks an SM leave
)
TUNABLE = {"TILE": (256, 512), "THREADS": (128, 256), "SUMS": (96, 160), "TAPS_AND_SUMS": (64, 128)}
SHARED_BYTES = 47 * 1024  # what a block gets without asking for more, and room for the bias
# A thread's registers beside weights, sums and pixels of the forward, and beside sums, pixels and gradients (ptxas 13.0, sm_80 to
# sm_100: 57 and 41 for 7 x 7 taps and 64 channels).
FORWARD_REGISTERS, WEIGHT_REGISTERS = 64, 40
SUM_COLUMNS = 32  # that a block of the last pass adds up; written into the source as well
MAX_ELEMENTS = 2**31 - 1  # of an image and of its result: offsets inside them are 32 bits wide


class FirstConv(NamedTuple):
    """One first convolution: sizes of input and output, k x k taps."""

    batch: int
    height: int
    width: int
    channels: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    padding: tuple[int, int]
    bias: bool


@lru_cache(maxsize=4096)
def call(
    shape: tuple[int, ...], channels: int, kernel: int, stride: int, padding: tuple[int, int], bias: bool
) -> FirstConv:
    """The call on an input of `shape` [N, 3, H, W] with `channels` outputs."""
    n, _, h, w = shape
    rows, columns = ((size + 2 * pad - kernel) // stride + 1 for size, pad in zip((h, w), padding, strict=True))
    return FirstConv(n, h, w, channels, rows, columns, kernel, stride, padding, bias)


def name(kernel: int, stride: int, channels: int, *, bias: bool = False) -> str:
    """`first conv k7 s2 to 64`."""
    return f"first conv k{kernel} s{stride} to {channels}" + (" bias" if bias else "")


def wins(*, dtype: str, kernel: int, stride: int, channels: int) -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels win.

    On file for one H200, for 3x3, 4x4 and 7x7 taps in bf16: 3.6 to 10 times faster forward and 1.8 to 5.4 backward; 7x7 in fp16
    2.3 and 1.6.
    """
    return dispatch_table.refusal("first_conv", kind(kernel, stride), dtype)


def kind(kernel: int, stride: int, *, bias: bool = False) -> str:
    """`first conv k7 s2`."""
    return f"first conv k{kernel} s{stride}" + (" bias" if bias else "")


IN_FP32 = "first conv of fp32 images"  # that autocast would cast: any taps


def moments_win(kernel: int, stride: int, channels: int) -> str:
    """Why the batch norm behind the convolution reads its result for its statistics itself; empty where it need not."""
    return dispatch_table.refusal("first_conv", with_moments(name(kernel, stride, channels)))


def _channels(sizes: Sizes) -> str:
    three = sizes.groups == 1 and sizes.weight_shape[1] == IN_CHANNELS
    return "" if three else f"not {IN_CHANNELS} channels in one group"


def _padding(sizes: Sizes) -> str:
    inside = min(sizes.padding) >= 0 and max(sizes.padding) < sizes.weight_shape[-1]
    return "" if inside else f"{told('padding', sizes.padding)} is as wide as the taps"


def _outputs(sizes: Sizes) -> str:
    outputs = sizes.weight_shape[0]
    if outputs % CHANNELS:
        return f"{outputs} output channels are no multiple of {CHANNELS}"
    return f"{outputs} output channels are more than {MAX_CHANNELS}" if outputs > MAX_CHANNELS else ""


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    outputs, *_, kernel = sizes.weight_shape
    sized = call(sizes.shape, outputs, kernel, sizes.stride[0], sizes.padding, False)
    if sized.out_height < 1 or sized.out_width < 1:
        return "empty output"
    most = max(IN_CHANNELS * sized.height * sized.width, outputs * sized.out_height * sized.out_width)
    return "an image is beyond 32-bit offsets" if most > MAX_ELEMENTS else ""


SUPPORTS = Support(
    channels=_channels,
    square=True,
    taps=lambda rows, columns: columns in TAPS,
    strides=STRIDES,
    padding=_padding,
    vectors=_outputs,
    compute=COMPUTE,
    storage=storage.STORAGE,
    weight=storage.STORAGE,
    limit=_limit,
)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def copied(call: FirstConv, *, dtype: str, compute: str, dense: bool) -> bool:
    """Whether the kernels copy rows of pixels as they are: `dense` says that x is NHWC and begins at a multiple of 16 bytes."""
    return dense and dtype == compute and call.stride % 2 == 0 and call.width % CHANNELS == 0


# ---- tiles


def pitch(call: FirstConv, columns: int) -> int:
    """Values of a row of pixels in shared memory, as kernels/include/first_conv.cuh lays it out."""
    pixel = 4 if call.stride % 2 else 3
    before = call.padding[1] * pixel
    left = _ceil(before + before % 2, 8) * 8
    return _ceil(left + ((columns - 1) * call.stride + call.kernel - call.padding[1]) * pixel, 8) * 8


def tile(call: FirstConv) -> tuple[int, int]:
    """Rows and columns of output pixels that a block takes at a time; columns are a multiple of 16.

    As even as can be, and two tiles' pixels fit in shared memory.
    """
    columns = _ceil(_ceil(call.out_width, _ceil(call.out_width, MAX_COLUMNS)), 16) * 16
    fitting = SHARED_BYTES // (2 * 2 * pitch(call, columns))  # rows of pixels
    rows = max(1, min(TILE // columns, (fitting - 1 - call.kernel) // call.stride + 1, call.out_height))
    return _ceil(call.out_height, _ceil(call.out_height, rows)), columns


# ---- what is compiled


def _blocks(threads: int, registers: int) -> int:
    """Blocks that run on an SM at once: it caps a thread's registers. Each of the SM's four parts holds whole warps."""
    warps = occupancy.warps_at_once(registers)
    return max(1, warps * 32 // threads)


def _base_defines(call: FirstConv, dtype: str, compute: str, weight_dtype: str, raw: bool) -> dict[str, int]:
    rows, columns = tile(call)
    return {
        "STORAGE": storage.STORAGE[compute],
        "X_STORAGE": storage.STORAGE[dtype],
        "WEIGHT_STORAGE": storage.STORAGE[weight_dtype],
        "SIDE": call.kernel,
        "STRIDE": call.stride,
        "PAD": call.padding[1],
        "OUT": call.channels,
        "ROWS": rows,
        "COLS": columns,
        "RAW": int(raw),
    }


def forward_defines(
    call: FirstConv, dtype: str, compute: str, weight_dtype: str, *, raw: bool, moments: bool = False
) -> dict[str, int]:
    """Macros of FORWARD: as many channels a warp as its registers hold weights for, in groups of 32 (or 16).

    With `moments` it leaves those of its result, a part a warp of pixels: `moment_parts`.
    """
    pixel = 4 if call.stride % 2 else 3
    lead = call.padding[1] * pixel % 2
    steps = _ceil(call.kernel * _ceil(call.kernel * pixel + lead, 2), 8)
    group, groups = (2, 1) if call.channels <= 16 else (4, _ceil(call.channels, 32))

    def registers(products: int) -> int:
        return products * (2 * steps + 4)

    each = max(n for n in range(1, groups + 1) if groups % n == 0 and (n == 1 or registers(n * group) <= TAPS_AND_SUMS))
    beside = groups // each
    threads = 32 * beside * max(1, THREADS // 32 // beside)
    found = {
        **_base_defines(call, dtype, compute, weight_dtype, raw),
        "NT": each * group,
        "WARPS_N": beside,
        "THREADS": threads,
        "MIN_BLOCKS": _blocks(threads, registers(each * group) + FORWARD_REGISTERS),
    }
    return {**found, "MOMENTS": 1} if moments else found


def moment_parts(defines: dict[str, int], grid: int) -> int:
    """Parts of the moments that `grid` blocks of FORWARD leave."""
    return grid * (defines["THREADS"] // 32 // defines["WARPS_N"])


def weight_defines(
    call: FirstConv, dtype: str, compute: str, weight_dtype: str, *, raw: bool, arch: int = 90
) -> dict[str, int]:
    """Macros of BACKWARD_WEIGHT: as many taps a warp as its registers hold sums for."""
    sums = ROOMY_SUMS if architectures.of(arch).roomy else SUMS
    widths = (1,) if call.channels <= 16 else (2, 4)
    vector = min(widths, key=lambda v: (_ceil(call.channels, 16 * v) * v, -v))
    chunks = _ceil(call.channels, 16 * vector)
    products = vector * chunks
    columns = _ceil(IN_CHANNELS * call.kernel**2 + call.bias, 8)
    warps = _ceil(columns, max(1, sums // (4 * products)))
    each = _ceil(columns, warps)
    threads = 32 * warps * max(1, THREADS // 32 // warps)
    return {
        **_base_defines(call, dtype, compute, weight_dtype, raw),
        "V": vector,
        "CHUNKS": chunks,
        "KT": each,
        "WARPS_K": warps,
        "BIAS": int(call.bias),
        "PARTIAL": int(call.out_width % 16 > 0),
        "THREADS": threads,
        "MIN_BLOCKS": _blocks(threads, each * (4 * products + 3) + 8 * products + WEIGHT_REGISTERS),
    }


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros to compile `source` with in the test for spills: the first convolutions of networks, and the widest kernels."""
    found = []
    for side, channels, kernel, stride, bias in (
        (224, 64, 7, 2, False),
        (224, 64, 3, 1, True),
        (224, 96, 4, 4, True),
        (224, 32, 3, 2, False),
        (32, 16, 3, 1, False),
        (224, 96, 7, 2, True),
        (32, 64, 7, 1, False),
        (231, 24, 5, 3, True),
    ):
        pad = 0 if stride == kernel else kernel // 2
        sized = call((1, 3, side, side), channels, kernel, stride, (pad, pad), bias)
        for dtype, compute, weight_dtype in (
            ("bfloat16", "bfloat16", "float32"),
            ("float32", "bfloat16", "float32"),
            ("float16", "float16", "float16"),
        ):
            if dtype == "float16" and (kernel, stride) != (7, 2):
                continue  # fp16 differs from bf16 in conversions only
            raw = copied(sized, dtype=dtype, compute=compute, dense=True)
            names = dtype, compute, weight_dtype
            if source == FORWARD:
                leaves = (False,) if moments_win(kernel, stride, channels) else (False, True)
                found += [forward_defines(sized, *names, raw=raw, moments=moments) for moments in leaves]
            else:
                found.append(weight_defines(sized, *names, raw=raw, arch=arch))
    return tuple(found)


# ---- how it is launched


@dataclass(frozen=True, slots=True)
class FirstGeometry:
    """Launch geometry: `grid` blocks walk over `tiles` = images x bands of rows x strips of columns."""

    grid: int
    tiles: int
    strips: int
    bands: int


def geometry(call: FirstConv, defines: dict[str, int], sm_count: int) -> FirstGeometry:
    """Of a kernel compiled with `defines`: as many blocks as run at once, none without a tile."""
    strips, bands = _ceil(call.out_width, defines["COLS"]), _ceil(call.out_height, defines["ROWS"])
    tiles = call.batch * bands * strips
    return FirstGeometry(min(tiles, sm_count * defines["MIN_BLOCKS"]), tiles, strips, bands)


def partials(defines: dict[str, int]) -> int:
    """Sums that each block of BACKWARD_WEIGHT leaves, fp32."""
    return defines["WARPS_K"] * defines["KT"] * defines["V"] * defines["CHUNKS"] * 4 * 32


def bytes_moved(call: FirstConv, itemsize: int, compute_itemsize: int = 2) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in. Weights are left out."""
    x = call.batch * IN_CHANNELS * call.height * call.width * itemsize
    y = call.batch * call.channels * call.out_height * call.out_width * compute_itemsize
    return x + y, x + y


def flops(call: FirstConv) -> tuple[int, int]:
    """Operations of forward and backward (weights only): two a tap, channel and output, each."""
    taps = IN_CHANNELS * call.kernel**2
    products = 2 * call.batch * call.channels * call.out_height * call.out_width * taps
    return products, products
