"""What Winograd's F(4x4, 3x3) supports, where it wins, and how it is launched. Plain arithmetic.

A product takes pixels of `inputs` channels to pixels of `outputs`: the forward from the convolution's input to its result, the gradient
of the input the other way. The gradient of the weight is F(3x3, 4x4) at the same points; it is made where the input's is.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from advisor.ops import dispatch, dispatch_table, shared_memory
from advisor.ops.convolution_support import Sizes, Support, told, whole_channels
from advisor.ops.dispatch import UNMEASURED

FILTER = "winograd/winograd_filter.cu"
INPUT = "winograd/winograd_input.cu"
OUTPUT = "winograd/winograd_output.cu"
GRADIENT = "winograd/winograd_gradient.cu"
WEIGHT = "winograd/winograd_weight.cu"
PRODUCT = (FILTER, INPUT, OUTPUT)  # sources of a forward, and of the gradient of an input
KERNELS = {
    FILTER: ("winograd_filter",),
    INPUT: ("winograd_input",),
    OUTPUT: ("winograd_output",),
    GRADIENT: ("winograd_gradient",),
    WEIGHT: ("winograd_weight",),
}

DTYPE = "bfloat16"  # fp16's own convolution has a tenth of this one's error
WEIGHT_STORAGE = {"float32": 0, "bfloat16": 2}
TILE = 4  # rows and columns of results; at its corners the error is twice that at its middle, so images are no smaller
FREQUENCIES = 36  # of six rows and columns of pixels
CHANNELS = (192, 1024)  # the least and the most: two a thread of a block that has them all
MULTIPLE = 64  # of which they are a multiple
FILTER_OUTPUTS, FILTER_THREADS = 4, 256  # of a block
OUTPUT_THREADS = 256
RESIDENT = 512  # threads of INPUT that an SM is to hold, each with 128 registers
WEIGHT_THREADS = 256  # of a block of GRADIENT and of WEIGHT
OUTPUT_RESIDENT = 768  # and of OUTPUT, with 80
PIXELS_BOUND = 8.0  # 2^PIXELS_BELOW of include/winograd.cuh: what no pixel times its tile's scale is above
WALK = 4  # tiles side by side that a block of INPUT makes, of which neighbours share two columns
STAGED = 3 * 6 * 4  # pixels, all channels, that it has in shared memory
TUNABLE = {"WALK": (2, 4, 7), "OUTPUT_THREADS": (128, 256)}
MAX_OFFSET = 2**31 - 1
WORKSPACE = 1 << 30  # bytes of pixels and products; in two parts a call takes a tenth longer


class WinogradConv(NamedTuple):
    """One product: [batch, inputs, height, width] to `outputs` channels; `turned` is the one that gives the gradient of an input."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    padding: int = 1
    turned: bool = False

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return self.height + 2 * self.padding - 2

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return self.width + 2 * self.padding - 2

    @property
    def tiles_h(self) -> int:
        """Tiles of the result above each other; the last may hang over."""
        return -(-self.out_height // TILE)

    @property
    def tiles_w(self) -> int:
        """Tiles side by side."""
        return -(-self.out_width // TILE)

    def gradient(self) -> WinogradConv:
        """Of a forward: the product that gives the gradient of its input."""
        return WinogradConv(
            self.batch, self.outputs, self.inputs, self.out_height, self.out_width, 2 - self.padding, turned=True
        )


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], outputs: int, padding: int = 1) -> WinogradConv:
    """The forward on an input of `shape` [N, I, H, W]."""
    n, inputs, h, w = shape
    return WinogradConv(n, inputs, outputs, h, w, padding)


def tiles(product: WinogradConv) -> int:
    """Of all images."""
    return product.batch * product.tiles_h * product.tiles_w


@lru_cache(maxsize=4096)
def parts(product: WinogradConv) -> tuple[tuple[int, int], ...]:
    """The images that are transformed together, [first, last) of each part: few enough that what is transformed takes WORKSPACE at most."""
    each = 2 * FREQUENCIES * product.tiles_h * product.tiles_w * (product.inputs + product.outputs)
    count = -(-product.batch // max(1, WORKSPACE // each))
    images = -(-product.batch // count)
    return tuple((first, min(first + images, product.batch)) for first in range(0, product.batch, images))


def name(inputs: int, outputs: int) -> str:
    """`winograd 512 to 256`."""
    return f"winograd {inputs} to {outputs}"


# ---- where it wins


@lru_cache(maxsize=4096)
def product_wins(product: WinogradConv) -> str:
    """Why PyTorch's own operation makes this product; empty where this one is measured to be faster."""
    sizes = (product.outputs, product.inputs) if product.turned else (product.inputs, product.outputs)
    pixels = {"pixels": product.batch * product.out_height * product.out_width, "filled": _filled(product)}
    return dispatch_table.refusal(
        "winograd", name(*sizes), DTYPE, pixels, part="gradient" if product.turned else "forward"
    )


def product_left(product: WinogradConv) -> str:
    """Why PyTorch's own operation makes this product of a call that the kernels took; empty where they make it."""
    return dispatch.refusal("", product_wins(product))


@lru_cache(maxsize=4096)
def wins(call: WinogradConv, dtype: str) -> str:
    """Why PyTorch's own operation is left in place; empty where at least one of its products is faster."""
    if dtype != DTYPE:
        return UNMEASURED
    forward = product_wins(call)
    return forward if forward and product_wins(call.gradient()) else ""


def wins_on(call: WinogradConv, arch: int) -> str:
    """Why PyTorch's own operation is left in place on this architecture (90 for sm_90) at any size."""
    return dispatch_table.elsewhere("winograd", name(call.inputs, call.outputs), arch)


def wins_between(inputs: int, outputs: int, dtype: str) -> str:
    """As `wins`, of convolutions from so many channels to so many, whatever their other sizes: those are told when one runs."""
    return dispatch_table.refusal("winograd", name(inputs, outputs), dtype)


def _filled(product: WinogradConv) -> float:
    """The share of the tiles' pixels that are the image's."""
    return product.out_height * product.out_width / (TILE * TILE * product.tiles_h * product.tiles_w)


# ---- what is supported


def _widths(sizes: Sizes) -> str:
    least, most = CHANNELS
    outputs, inputs = sizes.weight_shape[:2]
    fits = all(c % MULTIPLE == 0 and least <= c <= most for c in (inputs, outputs))
    return "" if fits else f"{inputs} channels to {outputs}"


def _padded(sizes: Sizes) -> str:
    return "" if sizes.padding in ((0, 0), (1, 1)) else told("padding", sizes.padding)


def _limit(sizes: Sizes, _dtype: str, arch: int) -> str:
    n, inputs, h, w = sizes.shape
    most = max(inputs, sizes.weight_shape[0])
    sized = call(sizes.shape, sizes.weight_shape[0], sizes.padding[0])
    if min(h, w, sized.out_height, sized.out_width) < TILE:
        return f"images of {h} x {w} pixels"
    if staged_bytes(most) + 1024 > shared_memory.of_a_block(arch):
        return f"{most} channels do not fit in the shared memory of sm_{arch}"
    return "more tiles than a grid has" if n * sized.tiles_h * sized.tiles_w * most > MAX_OFFSET else ""


SUPPORTS = Support(
    source=INPUT,
    channels=whole_channels,
    taps=lambda rows, columns: rows == columns == 3,
    strides=(1,),
    padding=_padded,
    vectors=_widths,
    storage=(DTYPE,),
    limit=_limit,
)


# ---- what is compiled, and what it must do


def input_defines(product: WinogradConv) -> dict[str, int]:
    """Macros of INPUT."""
    threads = product.inputs // 2
    return {"THREADS": threads, "LEAST_BLOCKS": max(1, RESIDENT // threads), "WALK": WALK, "PAD": product.padding}


def staged_bytes(channels: int) -> int:
    """Of shared memory that a block of INPUT has."""
    return 2 * STAGED * channels


def weight_defines(weight_dtype: str, *, turned: bool) -> dict[str, int]:
    """Macros of FILTER."""
    return {"WEIGHT_STORAGE": WEIGHT_STORAGE[weight_dtype], "TRANSPOSED": int(turned)}


def output_defines(weight_dtype: str, padding: int = 1, *, turned: bool) -> dict[str, int]:
    """Macros of OUTPUT."""
    threads = {"THREADS": OUTPUT_THREADS, "LEAST_BLOCKS": OUTPUT_RESIDENT // OUTPUT_THREADS, "PAD": padding}
    return {**weight_defines(weight_dtype, turned=turned), **threads}


def gradient_defines(weight_dtype: str, padding: int = 1) -> dict[str, int]:
    """Macros of WEIGHT."""
    return {"WEIGHT_STORAGE": WEIGHT_STORAGE[weight_dtype], "THREADS": WEIGHT_THREADS, "PAD": padding}


# (batch, inputs, outputs, side) of convolutions in trained networks: VGG-16, UNet, an EDSR of 256 channels, ResNets.
TRAINED = (
    (128, 512, 512, 28),
    (128, 256, 512, 28),
    (32, 512, 512, 32),
    (32, 256, 512, 32),
    (32, 1024, 512, 32),
    (32, 1024, 1024, 16),
    (128, 512, 512, 14),
    (128, 256, 256, 56),
    (16, 256, 256, 48),
    (16, 256, 1024, 48),
    (16, 256, 1024, 96),
    (256, 512, 512, 7),
    (256, 256, 256, 14),
)


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that the trained networks ask for."""
    if source == INPUT:
        return tuple(input_defines(call((1, inputs, 8, 8), inputs)) for inputs in (192, 256, 512, 1024))
    if source == GRADIENT:
        return ({"THREADS": WEIGHT_THREADS},)
    if source == WEIGHT:
        return tuple(gradient_defines(dtype) for dtype in WEIGHT_STORAGE)
    made = output_defines if source == OUTPUT else weight_defines
    return tuple(made(dtype, turned=turned) for dtype in WEIGHT_STORAGE for turned in (False, True))


def bytes_moved(call: WinogradConv) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in, dx out. Weights are left out."""
    x = 2 * call.batch * call.inputs * call.height * call.width
    y = 2 * call.batch * call.outputs * call.out_height * call.out_width
    return x + y, 2 * x + y


def flops(call: WinogradConv) -> tuple[int, int]:
    """Operations of forward and backward: a product a frequency, of each of the gradients too."""
    product = 2 * FREQUENCIES * call.batch * call.tiles_h * call.tiles_w * call.inputs * call.outputs
    return product, 2 * product
