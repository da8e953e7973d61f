"""What the bias + activation and the scale + add kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import NamedTuple

from advisor.ops import channel_tiles, dispatch_table
from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.channel_tiles import TileGeometry
from advisor.ops.storage import STORAGE, vector_width
from advisor.ops.tensor_support import TensorSupport

FORWARD = "bias_act/bias_act_forward.cu"
BACKWARD = "bias_act/bias_act_backward.cu"  # with a bias
ADD_BACKWARD = "bias_act/add_act_backward.cu"  # without
SCALE_FORWARD = "bias_act/scale_add_forward.cu"
SCALE_BACKWARD = "bias_act/scale_add_backward.cu"  # with a scale
DROP_BACKWARD = "bias_act/drop_add_backward.cu"  # without
KERNELS = {
    FORWARD: ("bias_act_forward",),
    BACKWARD: ("bias_act_backward",),
    ADD_BACKWARD: ("add_act_backward",),
    SCALE_FORWARD: ("scale_add_forward",),
    SCALE_BACKWARD: ("scale_add_backward",),
    DROP_BACKWARD: ("drop_add_backward",),
}

ACTIVATIONS = {**batchnorm_act.ACTIVATIONS, "gelu_tanh": 7}
# Activations whose slope is one of two: a bit an element is kept for the backward, and the output may lie where the input lay. For the
# others the input is kept and z computed again, which with a residual would take a third read.
MASKED = frozenset({"relu", "relu6", "leaky_relu"})

# Passes that end in sums over rows are one block an SM that goes over rows: a thread has 2 to 3 x UNROLL x 16 bytes in flight, with 512
# threads the 64 KiB which 4.2 TB/s at 2 us of loaded latency want.
THREADS = 512
MAX_TILE = channel_tiles.WIDEST_PIECE
UNROLL, MASKED_UNROLL = 3, 4
# GELU's backward computes for about half of the time that its bytes take: the warps of one block would go through loads and arithmetic
# much together and leave DRAM idle meanwhile. As many bytes in flight from two, whose threads have half of the registers.
GELU_BLOCKS, GELU_UNROLL = 2, 2
# The others are flat (kernels/include/flat.cuh): short blocks of one pass, one vector a thread. With GELU two, and no more registers than
# leave an SM its 2048 threads (docs/notes/kernels/elementwise.md).
FLAT_THREADS = 128
FLAT_UNROLL, GELU_FLAT_UNROLL = 1, 2
GELU_SM_THREADS = 2048
TUNABLE = {
    "FLAT_THREADS": (128, 256),
    "FLAT_UNROLL": (1, 2),
    "GELU_FLAT_UNROLL": (1, 2),
    "GELU_SM_THREADS": (1024, 1536, 2048),
    "UNROLL": (2, 3, 4),
    "MASKED_UNROLL": (3, 4, 6, 8),
}


def name(activation: str, *, bias: bool, residual: bool, dim: int = 1) -> str:
    """`bias+add+relu`; `linear bias+gelu` where the channels are the last dimension (`dim` -1)."""
    operands = "+".join([*(["bias"] if bias else []), *(["add"] if residual else []), activation])
    return operands if dim == 1 else f"linear {operands}"


class Scaled(NamedTuple):
    """A variant of scale + add: residual + (branch + bias) * scale * keep.

    Attributes:
        mixed: the residual is stored like the branch, in half precision, and the result in fp32.
        twin: the result, in fp32, is given out in the branch's dtype too, as autocast casts it for the convolution that follows.
    """

    scale: bool
    keep: bool
    bias: bool = False
    mixed: bool = False
    twin: bool = False

    @property
    def name(self) -> str:
        """`bias+scale+drop+add+cast of 16 bits`."""
        parts = {"bias": self.bias, "scale": self.scale, "drop": self.keep, "add": True, "cast": self.twin}
        return "+".join(part for part, there in parts.items() if there) + (" of 16 bits" if self.mixed else "")


def wins(kind: str, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels are measured to win.

    On file for one H200, forward and backward together, times as fast as PyTorch:
    - bias+relu 2.2 to 3.6, bias+silu 2.5, bias+gelu 2.6 to 2.7, add+relu 1.5
    - linear bias+gelu 1.4 to 1.5 (in fp32 1.2, its forward alone 2 % slower)
    - linear bias+relu 1.4 (its forward alone 7 % slower), with other activations 1.3
    - scale+add 2.9 to 4.4, scale+drop+add 3.3 to 5.7, with the bias, the cast or both 3.8 to 6.7, drop+add 2.7

    Args:
        kind: of `name` or `scaled_kind`.
    """
    return dispatch_table.refusal("bias_act", kind, dtype)


def scaled_kind(variant: Scaled, dtype: str, result: str) -> str:
    """`scale+drop+add to float32` where the result is stored in another type."""
    return variant.name if result == dtype else f"{variant.name} to {result}"


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant of `source` that a launch can ask for: what the compile test goes over."""
    if source in (SCALE_FORWARD, SCALE_BACKWARD, DROP_BACKWARD):
        return tuple(
            scale_defines(source, dtype, Scaled(scale, keep, mixed=mixed, twin=twin), wide=wide, half_keep=half_keep)
            for dtype in STORAGE
            for wide, mixed, twin, scale, keep, half_keep in itertools.product((False, True), repeat=6)
            if not half_keep or (keep and dtype != "float32")
            if (scale or keep) and (scale or not mixed)
            if not (wide and dtype == "float32") and (wide or not (mixed or twin))
            if source in (SCALE_FORWARD, scale_backward(scale=scale))
        )
    return tuple(
        defines(source, dtype, activation, bias=bias, residual=residual, masks=masks)
        for dtype in STORAGE
        for activation in ACTIVATIONS
        for bias, residual in ((True, False), (True, True), (False, True))
        for masks in ((False, True) if source == FORWARD and activation in MASKED else (False,))
        if not unsupported_variant(activation, bias=bias, residual=residual)
        if source == FORWARD
        or (source == backward(bias=bias) and not (bias and residual))  # which is all the same to them
    )


def backward(*, bias: bool) -> str:
    """The source of the backward of bias + activation."""
    return BACKWARD if bias else ADD_BACKWARD


def scale_backward(*, scale: bool) -> str:
    """The source of the backward of scale + add."""
    return SCALE_BACKWARD if scale else DROP_BACKWARD


def defines(
    source: str, dtype: str, activation: str, *, bias: bool, residual: bool, masks: bool = False
) -> dict[str, int]:
    """Macros of one variant of the bias + activation kernels. `masks`, of FORWARD: it writes the bits of slopes."""
    found = {"STORAGE": STORAGE[dtype], "ACT": ACTIVATIONS[activation]}
    gelu = activation in ("gelu", "gelu_tanh") and dtype != "float32"  # fp32 leaves time enough
    if source == FORWARD:
        blocks, unroll = (GELU_SM_THREADS // FLAT_THREADS, GELU_FLAT_UNROLL) if gelu else (1, FLAT_UNROLL)
        found |= {"BIAS": int(bias), "RESIDUAL": int(residual), "MASK": int(masks), "BLOCKS": blocks}
        return {**found, "THREADS": FLAT_THREADS, "UNROLL": unroll}
    if source == ADD_BACKWARD:
        return {**found, "THREADS": FLAT_THREADS, "UNROLL": FLAT_UNROLL}
    blocks, unroll = (GELU_BLOCKS, GELU_UNROLL) if gelu else (1, MASKED_UNROLL if activation in MASKED else UNROLL)
    return {**found, "THREADS": THREADS, "MAX_TILE": MAX_TILE, "BLOCKS": blocks, "UNROLL": unroll}


def scale_defines(source: str, dtype: str, variant: Scaled, *, wide: bool, half_keep: bool) -> dict[str, int]:
    """Macros of one variant of the scale + add kernels.

    Args:
        dtype: the branch's.
        wide: the result is fp32 beside it.
        half_keep: a drop path's factors are stored like the branch, in 16 bits, and not in fp32.
    """
    found = {"STORAGE": STORAGE[dtype], "WIDE": int(wide), "TWIN": int(variant.twin)}
    found |= {"KEEP": 1 + half_keep if variant.keep else 0}
    if source == DROP_BACKWARD:
        return {**found, "THREADS": FLAT_THREADS, "UNROLL": FLAT_UNROLL}
    found |= {"MIXED": int(variant.mixed)}
    if source == SCALE_FORWARD:
        return {**found, "SCALE": int(variant.scale), "THREADS": FLAT_THREADS, "UNROLL": FLAT_UNROLL}
    return {**found, "THREADS": THREADS, "MAX_TILE": MAX_TILE, "UNROLL": UNROLL}


def unsupported_variant(activation: str, *, bias: bool, residual: bool) -> str:
    """Why there is no kernel for this combination; empty when there is one."""
    if activation not in ACTIVATIONS or activation == "none":
        return f"activation {activation}"
    if not bias and not residual:
        return "neither a bias nor an addition"
    if residual and activation not in MASKED:
        return f"residual with {activation}"
    return ""


def unsupported(
    *,
    shape: tuple[int, ...],
    dim: int,
    dense: bool,
    dtype: str,
    activation: str,
    slope: float,
    bias: bool,
    residual: bool,
    arch: int,
) -> str:
    """Why the bias + activation kernels cannot take this call; empty when they can.

    `shape` is [N, C, H, W] with `dim` 1, or [..., C] with -1; `dense`: channels_last, or contiguous.
    """
    if activation == "leaky_relu" and slope < 0:
        return "a LeakyReLU with a negative slope"
    return unsupported_variant(activation, bias=bias, residual=residual) or TENSORS[dim].refusal(
        shape=shape, channels_last=dense, dtype=dtype, arch=arch
    )


def scale_unsupported(
    *,
    shape: tuple[int, ...],
    channels_last: bool,
    dtype: str,
    residual: str,
    result: str,
    variant: Scaled,
    arch: int,
) -> str:
    """Why the scale + add kernels cannot take this call; empty when they can.

    `dtype` is the branch's, `residual` and `result` are theirs; `shape` is [N, C, H, W].
    """
    if not variant.scale and not variant.keep:
        return "neither a scale nor a drop path"
    if variant.bias and not variant.scale:
        return "a bias without a scale"
    if residual not in (dtype, "float32"):
        return f"a branch in {dtype} beside a residual in {residual}"
    if result != ("float32" if variant.mixed or variant.twin else residual) or variant.mixed != (residual != result):
        return f"a sum in {result} of a residual in {residual}"
    if variant.twin and dtype == "float32":
        return "a second result in fp32"
    if variant.mixed and not variant.scale:
        return "a residual in half precision without a scale"
    return TENSORS[1].refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)


# By where the channels are: [N, C, H, W], or [..., C].
TENSORS = {1: TensorSupport(), -1: TensorSupport(dimensions=None, channels=-1, layout="contiguous")}


def geometry(rows: int, channels: int, dtype: str, sm_count: int, defines: Mapping[str, int]) -> TileGeometry:
    """Launch geometry of a pass that ends in sums over rows, of the variant of these macros."""
    vectors = channels // vector_width(dtype)
    return channel_tiles.geometry(
        rows,
        vectors,
        threads=defines["THREADS"],
        unroll=defines["UNROLL"],
        blocks=sm_count * defines.get("BLOCKS", 1),
        tile=channel_tiles.piece(vectors),
    )


def bytes_moved(*, elements: int, itemsize: int, activation: str, residual: bool) -> tuple[int, int]:
    """Bytes that forward and backward of bias + activation must move in training."""
    mask = elements // 8 if activation in MASKED else 0
    return elements * itemsize * (3 if residual else 2) + mask, elements * itemsize * (2 if mask else 3) + mask


def scale_bytes_moved(*, elements: int, itemsize: int, result: int, variant: Scaled) -> tuple[int, int]:
    """Bytes that forward and backward of scale + add must move; `itemsize` is the branch's, `result` the result's."""
    half = itemsize if variant.twin else 0
    residual = itemsize if variant.mixed else result
    gradient = residual if variant.mixed or variant.twin else 0  # else it is what came
    forward = itemsize + residual + result + half
    backward = result + half + itemsize * (2 if variant.scale else 1) + gradient
    return elements * forward, elements * backward
