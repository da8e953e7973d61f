"""What the kernels for exact fp32 convolutions on tensor cores support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch, dispatch_table, shared_memory, sources
from advisor.ops.convolution_support import Sizes, Support

PARTS = "exact_conv/exact_conv_parts.cu"
CONV = "exact_conv/exact_conv.cu"
BACKWARD_WEIGHT = "exact_conv/exact_conv_backward_weight.cu"
HOPPER = "exact_conv/exact_conv_hopper.cu"
HOPPER_WEIGHT = "exact_conv/exact_conv_hopper_weight.cu"
KERNELS = {
    PARTS: ("exact_conv_largest", "exact_conv_split", "exact_conv_weight"),
    CONV: ("exact_conv",),
    BACKWARD_WEIGHT: ("exact_conv_backward_weight",),
    HOPPER: ("exact_conv_hopper",),
    HOPPER_WEIGHT: ("exact_conv_hopper_weight",),
}
SOURCES = tuple(KERNELS)
OCTET = 8
DEPTH, HOPPER_DEPTH = 32, 64  # of a stage
FLAT_THREADS = 256
# (rows, columns, warps down, warps across, stages) of a block of CONV and BACKWARD_WEIGHT.
WIDE, NARROW = (128, 128, 2, 4, 4), (128, 64, 4, 2, 3)
# (warpgroups, columns, stages) of HOPPER and HOPPER_WEIGHT.
HOPPER_WIDE, HOPPER_NARROW = (2, 128, 3), (2, 64, 3)
PROMOTE, HOPPER_PROMOTE = 1, 32  # stages, or values of the depth, after which sums are taken over by the fp32 pipes
BLOCKS_AN_SM = 4  # of BACKWARD_WEIGHT at least, in splits
TUNABLE = {"PROMOTE": (1, 2, 4), "HOPPER_PROMOTE": (16, 32, 64), "BLOCKS_AN_SM": (2, 4, 8)}


class ExactConv(NamedTuple):
    """A convolution of [batch, inputs, height, width] to `outputs` channels."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    taps_h: int
    taps_w: int
    stride: int
    pad_h: int
    pad_w: int
    dilation: int
    groups: int

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return (self.height + 2 * self.pad_h - self.dilation * (self.taps_h - 1) - 1) // self.stride + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return (self.width + 2 * self.pad_w - self.dilation * (self.taps_w - 1) - 1) // self.stride + 1


@lru_cache(maxsize=4096)
def call(
    shape: tuple[int, ...],
    weight_shape: tuple[int, ...],
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    groups: int,
) -> ExactConv:
    """The convolution of an input of `shape` [N, I, H, W] by a weight [O, I / groups, R, S]."""
    n, inputs, h, w = shape
    return ExactConv(
        n, inputs, weight_shape[0], h, w, weight_shape[2], weight_shape[3], stride, *padding, dilation, groups
    )


def linear_call(shape: tuple[int, ...], outputs: int) -> ExactConv:
    """A linear layer of an input [.., I], as the 1 x 1 convolution of as many images of one pixel."""
    *rows, inputs = shape
    return call((math.prod(rows), inputs, 1, 1), (outputs, inputs, 1, 1), 1, (0, 0), 1, 1)


def octets(channels: int) -> int:
    """16-byte units of fp16 that hold so many channels."""
    return -(-channels // OCTET)


@dataclass(frozen=True, slots=True)
class Walk:
    """One launch of CONV: the result's rows and columns first, first + step .., and which taps meet which pixels (see the source)."""

    first: tuple[int, int]
    rows: tuple[int, int]
    out_step: int
    in_step: int
    origin: tuple[int, int]
    reach: int
    taps: tuple[int, int]
    begin: tuple[int, int]
    tap_step: int


def forward_walk(call: ExactConv) -> Walk:
    """The one launch of the forward."""
    return Walk(
        first=(0, 0),
        rows=(call.out_height, call.out_width),
        out_step=1,
        in_step=call.stride,
        origin=(-call.pad_h, -call.pad_w),
        reach=call.dilation,
        taps=(call.taps_h, call.taps_w),
        begin=(0, 0),
        tap_step=1,
    )


def _class(at: int, size: int, pad: int, taps: int, call: ExactConv) -> tuple[int, int, int, int]:
    """Of the input's rows `at`, `at` + stride ..: how many, taps that reach one, the first of these, and the row of dy that it takes."""
    rows = -(-(size - at) // call.stride)
    begin = (at + pad) % call.stride
    count = -(-(taps - begin) // call.stride) if begin < taps else 0
    return rows, count, begin, (at + pad - begin * call.dilation) // call.stride


def gradient_walks(call: ExactConv) -> Iterator[Walk]:
    """The launches of the input's gradient: one for each row and column of a stride, whose pixels meet the same taps.

    With a stride of 1 every tap reaches every row, `dilation` rows apart; else the dilation is 1.
    """
    for at_h in range(min(call.stride, call.height)):
        for at_w in range(min(call.stride, call.width)):
            h = _class(at_h, call.height, call.pad_h, call.taps_h, call)
            w = _class(at_w, call.width, call.pad_w, call.taps_w, call)
            yield Walk(
                first=(at_h, at_w),
                rows=(h[0], w[0]),
                out_step=call.stride,
                in_step=1,
                origin=(h[3], w[3]),
                reach=-call.dilation,
                taps=(h[1], w[1]),
                begin=(h[2], w[2]),
                tap_step=call.stride,
            )


@dataclass(frozen=True, slots=True)
class ExactPlan:
    """One launch of CONV or BACKWARD_WEIGHT, or of their twins for Hopper: blocks of `rows` by `columns`, `stages` of the ring."""

    source: str
    rows: int
    columns: int
    threads: int
    stages: int
    shared_bytes: int
    macros: tuple[tuple[str, int], ...]
    splits: int = 1
    split_rows: int = 0


def _general(source: str, columns: int, arch: int) -> ExactPlan:
    rows, wide, down, across, stages = WIDE if columns > NARROW[1] else NARROW
    units = (rows + wide) * (DEPTH // OCTET + 1) if source == CONV else DEPTH * (rows // OCTET + wide // OCTET + 2)
    while stages > 2 and stages * 32 * units + 2048 > shared_memory.of_a_block(arch):
        stages -= 1
    sizes = {"BM": rows, "BN": wide, "WARPS_M": down, "WARPS_N": across, "STAGES": stages, "PROMOTE": PROMOTE}
    return ExactPlan(source, rows, wide, 32 * down * across, stages, stages * 32 * units, tuple(sizes.items()))


def _hopper(source: str, columns: int) -> ExactPlan:
    groups, wide, stages = HOPPER_WIDE if columns > HOPPER_NARROW[1] else HOPPER_NARROW
    rows = 64 * groups
    beside = 4 * rows if source == HOPPER else 4 * 2 * 3 * HOPPER_DEPTH  # places of pixels
    nbytes = stages * 2 * (rows + wide) * 2 * HOPPER_DEPTH + beside
    sizes = {"GROUPS": groups, "WGMMA_N": wide, "STAGES": stages, "PROMOTE": HOPPER_PROMOTE}
    return ExactPlan(source, rows, wide, 128 * groups, stages, nbytes, tuple(sizes.items()))


@lru_cache(maxsize=4096)
def plan(columns: int, arch: int, *, hopper: bool = True) -> ExactPlan:
    """The launch of CONV or HOPPER for a result of so many channels a group."""
    return _hopper(HOPPER, columns) if hopper and not sources.lacks(HOPPER, arch) else _general(CONV, columns, arch)


@lru_cache(maxsize=4096)
def weight_plan(call: ExactConv, sm_count: int, arch: int, *, hopper: bool = True) -> ExactPlan:
    """The launch of BACKWARD_WEIGHT or HOPPER_WEIGHT: the pixels in as many splits as give every SM some blocks."""
    outputs, units = call.outputs // call.groups, octets(call.inputs // call.groups)
    columns = call.taps_h * call.taps_w * units * OCTET
    if hopper and not sources.lacks(HOPPER_WEIGHT, arch):
        chosen, depth = _hopper(HOPPER_WEIGHT, columns), HOPPER_DEPTH
    else:
        chosen, depth = _general(BACKWARD_WEIGHT, columns, arch), DEPTH
    blocks = -(-outputs // chosen.rows) * -(-columns // chosen.columns) * call.groups
    rows = call.batch * call.out_height * call.out_width
    splits = max(1, min(-(-rows // (8 * depth)), -(-BLOCKS_AN_SM * sm_count // blocks)))
    each = -(-rows // (splits * depth)) * depth
    return replace(chosen, splits=-(-rows // each), split_rows=each)


# ---- where it wins

FORWARD, GRADIENT, WEIGHT = "forward", "gradient", "weight"
GRADIENTS = (GRADIENT, WEIGHT)
KIND, LINEAR = "exact conv", "exact linear"


def name(call: ExactConv) -> str:
    """`exact conv k3x3 s1 64->128`, with `d2` where taps lie apart and `g32` where there are groups."""
    apart = f" d{call.dilation}" if call.dilation > 1 else ""
    groups = f" g{call.groups}" if call.groups > 1 else ""
    return f"{KIND} k{call.taps_h}x{call.taps_w} s{call.stride}{apart} {call.inputs}->{call.outputs}{groups}"


def linear_name(inputs: int, outputs: int) -> str:
    """`exact linear 384->1536`."""
    return f"{LINEAR} {inputs}->{outputs}"


@lru_cache(maxsize=4096)
def product_wins(call: ExactConv, product: str, kind: str = KIND) -> str:
    """Why PyTorch's own operation makes this product; empty where the kernels are measured to be faster.

    On an H200 against cuDNN's best with TF32 off, with the parts made: forward 1.2 to 11 times as fast, both gradients 1.2 to 4.8 times, at every
    size measured but for the first convolution's three channels, whose gradients took 1.7 times as long.
    """
    sizes = {
        "groups": call.groups,
        "channels": min(call.inputs, call.outputs) // call.groups,
        "dilation": call.dilation,
        "gflop": flops(call)[0] / 1e9,
        "taps_h": call.taps_h,
        "taps_w": call.taps_w,
    }
    return dispatch_table.refusal("exact_conv", kind, "float32", sizes, part=product)


def product_left(call: ExactConv, product: str, kind: str = KIND) -> str:
    """Why PyTorch's own operation makes this product of a call that the kernels took; empty where the kernels make it."""
    return dispatch.refusal("", product_wins(call, product, kind))


@lru_cache(maxsize=4096)
def wins(call: ExactConv, kind: str = KIND) -> str:
    """Why PyTorch's own operation is left in place; empty where at least one of its products is faster."""
    reasons = [product_wins(call, product, kind) for product in (FORWARD, *GRADIENTS)]
    return reasons[0] if all(reasons) else ""


# ---- what is supported

MAX_COUNT = 2**31 - 1 - 4096


def _channels(sizes: Sizes) -> str:
    (outputs, inputs), groups, stride, dilation = sizes.weight_shape[:2], sizes.groups, sizes.stride, sizes.dilation
    if stride[0] != stride[1] or dilation[0] != dilation[1]:
        return "stride or dilation differ along the sides"
    if stride[0] > 1 and dilation[0] > 1:
        return f"stride {stride[0]} with dilation {dilation[0]}"
    if groups > 1 and (inputs % OCTET or outputs // groups % OCTET):
        return f"{inputs} to {outputs // groups} channels a group are no multiples of {OCTET}"
    return ""


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    stride, dilation = sizes.stride[0], sizes.dilation[0]
    sized = call(sizes.shape, sizes.weight_shape, stride, sizes.padding, dilation, sizes.groups)
    if sized.out_height < 1 or sized.out_width < 1:
        return "empty output"
    x = sized.batch * sized.height * sized.width * octets(sized.inputs)
    y = sized.batch * sized.out_height * sized.out_width * octets(sized.outputs)
    return "more pixels or channels than 32 bits count" if max(x, y) > MAX_COUNT else ""


SUPPORTS = Support(channels=_channels, dilates=True, storage=("float32",), limit=_limit)


# (batch, inputs, outputs, side, taps, stride) of convolutions in trained networks: VGG-16, ResNet-50, UNet, EDSR.
TRAINED = (
    (128, 256, 256, 56, 3, 1),
    (128, 512, 512, 28, 3, 1),
    (128, 128, 128, 112, 3, 1),
    (256, 64, 64, 56, 3, 1),
    (256, 128, 128, 28, 3, 1),
    (256, 512, 512, 7, 3, 1),
    (256, 256, 64, 56, 1, 1),
    (256, 64, 256, 56, 1, 1),
    (256, 1024, 256, 14, 1, 1),
    (256, 128, 128, 56, 3, 2),
    (256, 256, 512, 56, 1, 2),
    (256, 3, 64, 224, 7, 2),
    (32, 512, 512, 32, 3, 1),
    (16, 256, 256, 48, 3, 1),
    (128, 64, 64, 32, 3, 1),
    (128, 256, 256, 8, 3, 1),
    (256, 64, 64, 56, 5, 1),
    (256, 512, 2048, 7, 1, 1),
)


# (batch, channels, side, dilation) of 3 x 3 convolutions with taps apart.
TRAINED_APART = ((256, 64, 56, 2),)


# (rows, inputs, outputs) of linear layers: ConvNeXt's, a classifier's of VGG-16, a vision transformer's.
TRAINED_LINEAR = (
    (802816, 96, 384),
    (50176, 384, 1536),
    (50176, 1536, 384),
    (12544, 768, 3072),
    (50432, 768, 768),
    (256, 25088, 4096),
)


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros of every variant of `source`, for a wide result and a narrow one."""
    if source == PARTS:
        return ({},)
    found = []
    for columns in (64, 128):
        hopper, weight = source in (HOPPER, HOPPER_WEIGHT), source in (BACKWARD_WEIGHT, HOPPER_WEIGHT)
        planned = _hopper(source, columns) if hopper else _general(source, columns, arch)
        found += [
            {**dict(planned.macros), **({} if weight else {"BIAS": bias})} for bias in (0, 1)[: 1 if weight else 2]
        ]
    return tuple(found)


def bytes_moved(call: ExactConv) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in, dx out. Weights are left out."""
    x = 4 * call.batch * call.inputs * call.height * call.width
    y = 4 * call.batch * call.outputs * call.out_height * call.out_width
    return x + y, 2 * x + y


def flops(call: ExactConv) -> tuple[int, int]:
    """Operations of forward and backward (both gradients), three times as many on the tensor cores."""
    values = call.batch * call.outputs * call.out_height * call.out_width
    products = 2 * call.taps_h * call.taps_w * (call.inputs // call.groups) * values
    return products, 2 * products
