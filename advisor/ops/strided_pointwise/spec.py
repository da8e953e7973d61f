"""What the kernels for 1 x 1 convolutions of stride 2 support, where they win, and how they are launched. Plain arithmetic.

Three products, each dispatched by itself: the forward, the gradient of the input, and the gradient of the weight, which is cuDNN's
of stride 1 on the pixels that a kernel has gathered.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch, dispatch_table, shared_memory
from advisor.ops.dispatch import UNMEASURED
from advisor.ops.pointwise import spec as pointwise

PRODUCT = "strided_pointwise/strided_pointwise.cu"
GATHER = "strided_pointwise/gather_pixels.cu"
KERNELS = {PRODUCT: ("strided_pointwise",), GATHER: ("gather_pixels",)}

STORAGE = {"float16": 1, "bfloat16": 2}
STRIDE = 2
OCTET = pointwise.OCTET
CHUNK = 64  # channels of a stage
THREADS = 128  # of PRODUCT
MAX_STAGES = 4
# (rows, columns) of a block, largest first: the first that is not wider than the result and gives FULL blocks an SM is taken, else the
# last. On an H200 that is within 3 % of the fastest of six ways at the sizes that are dispatched.
TILES = ((128, 128), (64, 128), (128, 64), (64, 64), (32, 64))
FULL = 0.95
TUNABLE = {"TILES": (TILES, TILES[1:], TILES[2:], TILES[3:], TILES[4:]), "MAX_STAGES": (2, 3, 4)}
GATHER_THREADS, GATHER_UNROLL = 256, 2
MAX_PIXELS = 2**31 - 1 - 4096  # and a tile beyond them, in 32 bits
FORWARD, GRADIENT, WEIGHT = "forward", "gradient", "weight"


class StridedConv(NamedTuple):
    """A convolution of [batch, inputs, height, width] to `outputs` channels."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int

    @property
    def rows(self) -> int:
        """Pixels of the result, of all images."""
        return self.batch * -(-self.height // STRIDE) * -(-self.width // STRIDE)

    @property
    def pixels(self) -> int:
        """Of the input, of all images."""
        return self.batch * self.height * self.width


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], outputs: int) -> StridedConv:
    """The convolution of an input of `shape` [N, I, H, W]."""
    n, inputs, h, w = shape
    return StridedConv(n, inputs, outputs, h, w)


def name(inputs: int, outputs: int) -> str:
    """`1x1 s2 64->128`."""
    return f"1x1 s2 {inputs}->{outputs}"


# ---- where it wins


@lru_cache(maxsize=4096)
def product_wins(call: StridedConv, product: str) -> str:
    """Why PyTorch's own operation makes this product; empty where the kernels are measured to be faster."""
    sizes = {
        "gflop": flops(call)[0] / 1e9,
        "rows": call.rows,
        "in_channels": call.inputs,
        "out_channels": call.outputs,
        "intensity": call.inputs * call.outputs / (call.inputs + call.outputs),
    }
    return dispatch_table.refusal("strided_pointwise", KIND, "", sizes, part=product)


def product_left(call: StridedConv, product: str) -> str:
    """Why PyTorch's own operation makes this product of a call that the kernels took; empty where the kernels make it."""
    return dispatch.refusal("", product_wins(call, product))


@lru_cache(maxsize=4096)
def wins(call: StridedConv, dtype: str) -> str:
    """Why PyTorch's own operation is left in place; empty where at least one of its products is faster."""
    if dtype not in STORAGE:
        return UNMEASURED
    reasons = [product_wins(call, product) for product in (FORWARD, GRADIENT, WEIGHT)]
    return reasons[0] if all(reasons) else ""


KIND = "1x1 s2"


# ---- what is supported


SUPPORTS = replace(pointwise.ONE_TAP, strides=(STRIDE,))


# ---- what is compiled, and how it is launched


@dataclass(frozen=True, slots=True)
class StridedPlan:
    """One launch of PRODUCT: blocks of `rows` by `columns`, with `stages` chunks of channels under way."""

    rows: int
    columns: int
    stages: int
    shared_bytes: int
    grid: tuple[int, int]


def shared_bytes(rows: int, columns: int, stages: int, *, gradient: bool) -> int:
    """Of a block: the ring, in whose place the results come."""
    units = CHUNK // OCTET + 1
    weights = CHUNK * (columns // OCTET + 1) if gradient else columns * units
    return 16 * max(stages * (rows * units + weights), rows * (columns // OCTET + 1))


@lru_cache(maxsize=4096)
def plan(call: StridedConv, sm_count: int, arch: int, *, gradient: bool = False) -> StridedPlan:
    """The largest blocks of which every SM has some, with as many stages as a block's shared memory holds."""
    depth, wide = (call.outputs, call.inputs) if gradient else (call.inputs, call.outputs)
    chunks = -(-depth // CHUNK)
    for rows, columns in TILES:
        grid = -(-call.rows // rows), -(-wide // columns)
        if grid[0] * grid[1] >= FULL * sm_count and columns <= -(-wide // CHUNK) * CHUNK:
            break

    def used(stages: int) -> int:
        return shared_bytes(rows, columns, min(stages, chunks), gradient=gradient)  # one chunk alone needs no second

    stages = max(2, min(MAX_STAGES, chunks + 1))
    while stages > 2 and used(stages) > shared_memory.of_a_block(arch):
        stages -= 1
    return StridedPlan(rows, columns, stages, used(stages), grid)


def defines(plan: StridedPlan, dtype: str, *, gradient: bool) -> dict[str, int]:
    """Macros of one variant of PRODUCT."""
    return {
        "STORAGE": STORAGE[dtype],
        "GRADIENT": int(gradient),
        "BM": plan.rows,
        "BN": plan.columns,
        "STAGES": plan.stages,
    }


def gather_defines() -> dict[str, int]:
    """Macros of GATHER."""
    return {"STORAGE": STORAGE["bfloat16"], "THREADS": GATHER_THREADS, "UNROLL": GATHER_UNROLL}


def gather_blocks(call: StridedConv) -> int:
    """Blocks of GATHER."""
    return -(-call.rows * (call.inputs // OCTET) // (GATHER_THREADS * GATHER_UNROLL))


# (batch, inputs, outputs, side) of convolutions in trained networks: ResNet-18 at 32x32 and at 224, a wide one, ResNet-50, RegNetY-3.2GF.
TRAINED = (
    *((128, channels, 2 * channels, 2048 // channels) for channels in (64, 128, 256)),
    *((256, channels, 2 * channels, 3584 // channels) for channels in (64, 128, 256)),
    (128, 160, 320, 32),
    *((256, channels, 2 * channels, side) for channels, side in ((256, 56), (512, 28), (1024, 14))),
    *((256, *shape) for shape in ((32, 72, 112), (72, 216, 56), (216, 576, 28))),
)


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros of every variant that the trained networks ask for."""
    if source == GATHER:
        return (gather_defines(),)
    found: dict[tuple[tuple[str, int], ...], None] = {}
    for dtype in ("bfloat16", "float16"):
        for n, inputs, outputs, side in TRAINED if dtype == "bfloat16" else TRAINED[:1]:
            for gradient in (False, True):
                planned = plan(
                    call((n, inputs, side, side), outputs), architectures.of(arch).sms, arch, gradient=gradient
                )
                found[tuple(defines(planned, dtype, gradient=gradient).items())] = None
    return tuple(dict(macros) for macros in found)


def bytes_moved(call: StridedConv, itemsize: int) -> tuple[int, int]:
    """Bytes of forward and backward: a quarter of x in and y out; the quarter and dy in, dx out. Weights are left out."""
    quarter, y = call.rows * call.inputs * itemsize, call.rows * call.outputs * itemsize
    return quarter + y, quarter + y + call.pixels * call.inputs * itemsize


def flops(call: StridedConv) -> tuple[int, int]:
    """Operations of forward and backward (both gradients)."""
    products = 2 * call.rows * call.inputs * call.outputs
    return products, 2 * products
