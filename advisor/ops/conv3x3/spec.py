"""What the 3 x 3 convolution kernels support, where they win, and how they are launched. Plain arithmetic.

A product takes pixels of `inputs` channels to pixels of `outputs`: the forward from the convolution's input to its result, the
gradient of the input the other way. The gradient of the weight is a third, with kernels and blocks of its own (weight.py);
those of wide groups and stride 2 are made with it too (ops/grouped).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch, dispatch_table, shared_memory
from advisor.ops.conv3x3 import weight
from advisor.ops.convolution_support import Sizes, Support, padded_by_one, whole_channels
from advisor.ops.dispatch import UNMEASURED

CONV = "conv3x3/conv3x3.cu"
BACKWARD_WEIGHT = "conv3x3/conv3x3_backward_weight.cu"
KERNELS = {
    CONV: ("conv3x3",),
    BACKWARD_WEIGHT: ("conv3x3_backward_weight", "conv3x3_backward_weight_sum"),
}

STORAGE = {"float16": 1, "bfloat16": 2}
WEIGHT_STORAGE = {"float32": 0, **STORAGE}
LINE = 64  # channels of a pixel in shared memory, 128 bytes
INPUTS, OUTPUTS = (64, 128), (32, 64, 128)
THREADS = 288
COLUMNS = (64, 112, 128, 224, 256)  # pixels of a tile, rows of 8
SUMS = 256  # columns of all bands of a warpgroup: 128 registers a thread
SHARED_BYTES = shared_memory.of_a_block(architectures.MEASURED.sm)  # of a block, the only one of its SM
# Warpgroups take tiles by turns. A stage has to be one warpgroup's alone: one that sees every other filling of a stage only cannot tell,
# by the parity that its barrier has, the filling it waits for from the one before the last. So stages are a multiple of twice a tile's
# lines of channels; four are one tile under way for each warpgroup beside the one that it works on.
STAGES = 4
PITCH = 10  # pixels of a tile's row with its halo
TILE_COST = 32  # what a tile takes beside its products, in columns of them (H200: 256 for 0.9 of the time of 2 x 128)
TUNABLE = {"COLUMNS": ((64, 112, 128, 224, 256), (64, 112, 128))}
MAX_OFFSET = 2**31 - 1  # of values inside an image

WEIGHT_CHANNELS = (32, 128)  # multiples of the one up to the other: past that cuDNN's is as fast, or faster
# Of the weight's gradient: its blocks' sums, which are gone before the input's gradient is made, may take as much memory as that does
# and some more, which PyTorch's own needs for its workspace and its weight in half precision.
_SMS, ROOM = architectures.MEASURED.sms, 1.15


class Conv3x3(NamedTuple):
    """One product: [batch, inputs, height, width] to `outputs` channels; `turned` is the one that gives the gradient of an input.

    Of the gradient of a weight alone there are `groups` of so many channels, and a `stride`; `height` and `width` are x's.
    """

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    turned: bool = False
    groups: int = 1
    stride: int = 1

    def gradient(self) -> Conv3x3:
        """Of a forward: the product that gives the gradient of its input."""
        return Conv3x3(self.batch, self.outputs, self.inputs, self.height, self.width, turned=True)


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], outputs: int) -> Conv3x3:
    """The forward on an input of `shape` [N, I, H, W]."""
    n, inputs, h, w = shape
    return Conv3x3(n, inputs, outputs, h, w)


def name(inputs: int, outputs: int) -> str:
    """`3x3 64 to 128`."""
    return f"3x3 {inputs} to {outputs}"


# ---- where it wins


@lru_cache(maxsize=4096)
def product_wins(product: Conv3x3) -> str:
    """Why PyTorch's own operation makes this product; empty where the kernel is measured to be faster."""
    sizes = (product.outputs, product.inputs) if product.turned else (product.inputs, product.outputs)
    return _product_unsupported(product) or _part(product, *sizes, "gradient" if product.turned else "forward")


def product_left(product: Conv3x3) -> str:
    """Why PyTorch's own operation makes this product of a call that the kernels took; empty where the kernel makes it."""
    return dispatch.refusal(_product_unsupported(product), product_wins(product))


@lru_cache(maxsize=4096)
def weight_wins(call: Conv3x3) -> str:
    """Why PyTorch's own operation makes the weight's gradient; empty where the kernels are measured to be faster."""
    return _weight_unsupported(call) or _part(call, call.inputs, call.outputs, "weight") or room(call)


def weight_left(call: Conv3x3) -> str:
    """Why PyTorch's own operation makes the weight's gradient of a call that the kernels took; empty where the kernels do."""
    return dispatch.refusal(_weight_unsupported(call), weight_wins(call))


@lru_cache(maxsize=4096)
def _product_unsupported(product: Conv3x3) -> str:
    if _fits(product.inputs, product.outputs, product.turned):
        return ""
    return f"products from {product.inputs} to {product.outputs} channels"


@lru_cache(maxsize=4096)
def _weight_unsupported(call: Conv3x3) -> str:
    if _weight_fits(call.inputs, call.outputs):
        return ""
    return f"the weight's gradient from {call.inputs} to {call.outputs} channels"


def _part(product: Conv3x3, inputs: int, outputs: int, part: str) -> str:
    sizes = {"pixels": product.batch * product.height * product.width, "filled": _filled(product)}
    return dispatch_table.refusal("conv3x3", name(inputs, outputs), "", sizes, part=part)


def room(call: Conv3x3) -> str:
    """Why the sums of the weight's blocks take too much memory; empty where they do not."""
    left, gradient = (
        weight_plan(call, _SMS).left_bytes,
        2 * call.batch * call.groups * call.inputs * call.height * call.width,
    )
    return f"sums of {left / 1e6:.0f} MB beside a gradient of {gradient / 1e6:.0f} MB" if left > ROOM * gradient else ""


@lru_cache(maxsize=4096)
def wins(call: Conv3x3, dtype: str) -> str:
    """Why PyTorch's own operation is left in place; empty where at least one of its products is faster."""
    if dtype not in STORAGE:
        return UNMEASURED
    forward = product_wins(call)
    return forward if forward and product_wins(call.gradient()) and weight_wins(call) else ""


def wins_between(inputs: int, outputs: int, dtype: str) -> str:
    """As `wins`, of convolutions from so many channels to so many, whatever their other sizes: those are told when one runs."""
    return dispatch_table.refusal("conv3x3", name(inputs, outputs), dtype)


def moments_win(inputs: int, outputs: int) -> str:
    """Why the batch norm behind the convolution reads its result for its statistics itself; empty where it need not."""
    return dispatch_table.refusal("conv3x3", dispatch.with_moments(name(inputs, outputs)))


# ---- what is supported


def _widths(sizes: Sizes) -> str:
    outputs, inputs = sizes.weight_shape[:2]
    fits = _fits(inputs, outputs, False) or _fits(outputs, inputs, True) or _weight_fits(inputs, outputs)
    return "" if fits else f"{inputs} channels to {outputs}"


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    _, inputs, h, w = sizes.shape
    beyond = h * w * max(inputs, sizes.weight_shape[0]) > MAX_OFFSET
    return "an image is beyond 32-bit offsets" if beyond else ""


SUPPORTS = Support(
    source=CONV,
    channels=whole_channels,
    taps=lambda rows, columns: rows == columns == 3,
    strides=(1,),
    padding=padded_by_one,
    vectors=_widths,
    limit=_limit,
)


def _fits(inputs: int, outputs: int, turned: bool) -> bool:
    """Whether a block holds the weights of this product, and tiles beside them."""
    if outputs not in OUTPUTS or inputs not in INPUTS:
        return False
    return any(_shared_bytes(inputs, outputs, columns, turned) for columns in COLUMNS)


def _weight_fits(inputs: int, outputs: int) -> bool:
    step, most = WEIGHT_CHANNELS
    return all(0 < channels <= most and channels % step == 0 for channels in (inputs, outputs))


# ---- what is compiled, and how it is launched


@dataclass(frozen=True, slots=True)
class Conv3x3Plan:
    """One launch: `tiles` of `columns` pixels, `bands` of rows by `strips` of 8 columns an image."""

    columns: int
    shared_bytes: int
    bands: int
    strips: int
    tiles: int
    grid: int

    @property
    def moment_parts(self) -> int:
        """Parts of the moments that a launch leaves."""
        return 2 * self.grid


def _round_up(nbytes: int) -> int:
    return -(-nbytes // 1024) * 1024


def _weight_bytes(inputs: int, outputs: int, turned: bool) -> int:
    lines, rows = (outputs, inputs) if turned else (inputs, outputs)
    return _round_up(9 * -(-lines // LINE) * rows * 2 * LINE)


def _stage_bytes(columns: int) -> int:
    return _round_up((columns // 8 + 2) * PITCH * 2 * LINE)


def _shared_bytes(inputs: int, outputs: int, columns: int, turned: bool) -> int:
    """Of a block, with a KiB for barriers; 0 where there is not as much, or the sums need more registers than there are."""
    found = _weight_bytes(inputs, outputs, turned) + STAGES * _stage_bytes(columns) + 1024
    return found if found <= SHARED_BYTES and -(-outputs // 64) * columns <= SUMS else 0


def _bands(product: Conv3x3, columns: int) -> int:
    return -(-product.height // (columns // 8))


def _filled(product: Conv3x3) -> float:
    """The share of pixels in tiles that are the image's, of the tiles that fit it best."""
    rows = min(_bands(product, columns) * (columns // 8) for columns in COLUMNS)
    return product.height / rows * product.width / (-(-product.width // 8) * 8)


@lru_cache(maxsize=4096)
def plan(product: Conv3x3, sm_count: int) -> Conv3x3Plan:
    """The launch that should end first: the longest block's tiles, with what each takes beside its products."""
    best: tuple[float, Conv3x3Plan] | None = None
    for columns in COLUMNS:
        nbytes = _shared_bytes(product.inputs, product.outputs, columns, product.turned)
        if not nbytes:
            continue
        bands, strips = _bands(product, columns), -(-product.width // 8)
        tiles = product.batch * bands * strips
        cost = -(-tiles // sm_count) * (columns + TILE_COST)
        if best is None or cost < best[0]:
            best = cost, Conv3x3Plan(columns, nbytes, bands, strips, tiles, min(tiles, sm_count))
    if best is None:  # `_fits` said otherwise
        raise ValueError(f"no launch for {product}")
    return best[1]


def defines(
    product: Conv3x3, plan: Conv3x3Plan, dtype: str, weight_dtype: str, *, moments: bool = False
) -> dict[str, int]:
    """Macros of CONV."""
    return {
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": WEIGHT_STORAGE[weight_dtype],
        "IN": product.inputs,
        "OUT": product.outputs,
        "TRANSPOSED": int(product.turned),
        "WGMMA_N": plan.columns,
        "STAGES": STAGES,
        "MOMENTS": int(moments),
    }


# (batch, inputs, outputs, side) of convolutions in trained networks: ResNet on ImageNet and at 32 x 32, DenseNet, VGG, UNet.
TRAINED = (
    (256, 64, 64, 56),
    (128, 64, 64, 32),
    (32, 64, 64, 256),
    (128, 64, 64, 224),
    (32, 128, 64, 256),
    (128, 64, 128, 112),
    (256, 128, 128, 28),
    (128, 128, 128, 16),
    *((256, 128, 32, side) for side in (56, 28, 14, 7)),
    *((n, 64, 64, side) for n, side in ((8, 56), (1, 224), (128, 16))),
)
TRAINED_WITH_NORM = ((256, 64, 64, 56), (32, 64, 64, 256), (32, 128, 64, 256), (128, 64, 64, 32))


def weight_defines(call: Conv3x3, plan: weight.Conv3x3WeightPlan, dtype: str, weight_dtype: str) -> dict[str, int]:
    """Macros of BACKWARD_WEIGHT."""
    windowed, plain = (call.inputs, call.outputs) if plan.x_windowed else (call.outputs, call.inputs)
    return {
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": WEIGHT_STORAGE[weight_dtype],
        "PLAIN": plain,
        "WINDOWED": windowed,
        "X_WINDOWED": int(plan.x_windowed),
        "COLUMNS": plan.columns,
        "ROWS": plan.rows,
        "WIDE": plan.wide,
        "STRIDE": plan.stride,
        "STAGES": plan.stages,
        "WGMMA_N": 3 * plan.columns if plan.stride == 1 else plan.columns,
    }


def weight_plan(call: Conv3x3, sm_count: int) -> weight.Conv3x3WeightPlan:
    """The launch of BACKWARD_WEIGHT."""
    height, width = ((size - 1) // call.stride + 1 for size in (call.height, call.width))
    return weight.plan(call.batch, call.inputs, call.outputs, height, width, sm_count, call.groups, call.stride)


# (channels a group, stride, side) of weights of wide groups: RegNetX-3.2GF, RegNetY-8GF, ResNeXt-101 64x8d.
_GROUPED = ((48, 1, 56), (48, 1, 14), (48, 2, 112), (48, 2, 28), (56, 1, 28), (64, 1, 7), (64, 2, 14))


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros to compile `source` with in the test for spills: all widths of a tile and both directions, weights of groups."""
    dense = (
        (64, 64, 256, True),
        (64, 64, 56, False),
        (128, 32, 56, True),
        (128, 64, 256, True),
        (64, 128, 112, True),
        (64, 64, 14, False),
        (64, 64, 8, False),
    )
    grouped = (Conv3x3(256, wide, wide, side, side, groups=4, stride=stride) for wide, stride, side in _GROUPED)
    found = []
    for forward, moments in (
        *((call((256, inputs, side, side), outputs), moments) for inputs, outputs, side, moments in dense),
        *((forward, False) for forward in grouped if source == BACKWARD_WEIGHT),
    ):
        names = ("float16", "float16") if forward.height == 14 else ("bfloat16", "float32")
        if source == BACKWARD_WEIGHT:
            found.append(weight_defines(forward, weight_plan(forward, _SMS), *names))
            continue
        for product in (forward, forward.gradient()):
            if _fits(product.inputs, product.outputs, product.turned):
                chosen = plan(product, _SMS)
                found.append(defines(product, chosen, *names, moments=moments and not product.turned))
    return tuple(found)


def kernels(call: Conv3x3, *, backward: bool = False) -> tuple[str, ...]:
    """The sources that a pass of this call runs, of those that the kernels can make."""
    product = call.gradient() if backward else call
    found = (CONV,) if _fits(product.inputs, product.outputs, product.turned) else ()
    return (*found, BACKWARD_WEIGHT) if backward and _weight_fits(call.inputs, call.outputs) else found


def bytes_moved(call: Conv3x3, itemsize: int) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in, dx out. Weights are left out."""
    x = call.batch * call.inputs * call.height * call.width * itemsize
    y = call.batch * call.outputs * call.height * call.width * itemsize
    return x + y, 2 * x + y


def flops(call: Conv3x3) -> tuple[int, int]:
    """Operations of forward and backward (both gradients): two a tap, input and output, each."""
    products = 18 * call.inputs * call.outputs * call.batch * call.height * call.width
    return products, 2 * products
