"""What the kernels over a growing concatenation support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.ops import channel_tiles, dispatch_table
from advisor.ops.batchnorm_act.spec import ACTIVATIONS
from advisor.ops.batchnorm_act.spec import name as norm_name
from advisor.ops.channel_tiles import TileGeometry
from advisor.ops.storage import STORAGE, vector_width
from advisor.ops.tensor_support import TensorSupport

APPEND = "batchnorm_concat/batchnorm_concat_append.cu"
FORWARD = "batchnorm_concat/batchnorm_concat_forward.cu"
BACKWARD = "batchnorm_concat/batchnorm_concat_backward.cu"
KERNELS = {
    APPEND: ("batchnorm_concat_append", "batchnorm_concat_append_backward"),
    FORWARD: ("batchnorm_concat_apply",),
    BACKWARD: ("batchnorm_concat_backward",),
}

THREADS = 512
MAX_TILE = 16  # channel vectors a block covers, as in batch norm's other kernels (docs/notes/kernels/batch-norm.md)
UNROLL = 4
FORWARD_THREADS, FORWARD_UNROLL = 128, 8  # short blocks, one pass a thread (docs/notes/kernels/other-norms.md)
BACKWARD_UNROLL = 3  # of three tensors each; 4 spills with GELU
# 64 KiB in flight an SM is what latency asks for. A thread of the append has 4 x 16 bytes, of the backward 9 x 16 bytes.
APPEND_BLOCKS_PER_SM = 2
BLOCKS_PER_SM = 1
TUNABLE = {"BACKWARD_UNROLL": (2, 3), "MAX_TILE": (8, 16), "FORWARD_UNROLL": (4, 8)}

# Norms over one concatenation from which on nothing of it is read twice in the forward. One alone is batchnorm_act's.
FEWEST_NORMS = 2


def wins(*, dtype: str, activation: str = "relu") -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    On file for one H200 are the four blocks of DenseNet-121 at batch 256 in bf16, and the second in fp16 and fp32, all with ReLU:
    3.1 to 5.7 times as fast forward, 2.3 to 4.5 times backward.
    """
    return dispatch_table.refusal("batchnorm_concat", kind(activation), dtype)


def kind(activation: str) -> str:
    """`cat+bn+relu`."""
    return f"cat+{norm_name(activation, False)}"


TENSORS = TensorSupport(empty=True, limit=lambda _shape, _width: "")


def unsupported(*, shape: tuple[int, ...], channels: int, channels_last: bool, dtype: str, arch: int) -> str:
    """Why these kernels cannot take this first feature map, [N, C, H, W], of a concatenation of `channels`; empty when they can."""
    reason = TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    n, c, h, w = shape
    if channels % vector_width(dtype):
        return f"{channels} channels are no multiple of {vector_width(dtype)}"
    if c > channels:
        return f"{c} channels in a concatenation of {channels}"
    if n * h * w < 2:
        return "fewer than two values a channel"
    return ""


def append_defines(dtype: str) -> dict[str, int]:
    """Macros of one variant of APPEND."""
    return {"STORAGE": STORAGE[dtype], "THREADS": THREADS, "MAX_TILE": MAX_TILE, "UNROLL": UNROLL}


def forward_defines(dtype: str, activation: str) -> dict[str, int]:
    """Macros of one variant of FORWARD."""
    return {
        "STORAGE": STORAGE[dtype],
        "THREADS": FORWARD_THREADS,
        "UNROLL": FORWARD_UNROLL,
        "ACT": ACTIVATIONS[activation],
    }


def backward_defines(dtype: str, activation: str, later: bool) -> dict[str, int]:
    """Macros of one variant of BACKWARD; `later`: whether a gradient comes from norms behind this one."""
    return {
        **append_defines(dtype),
        "ACT": ACTIVATIONS[activation],
        "UNROLL": BACKWARD_UNROLL,
        "LATER": int(later),
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant of `source` that a launch can ask for: what the compile test goes over."""
    if source == APPEND:
        return tuple(append_defines(dtype) for dtype in STORAGE)
    if source == FORWARD:
        return tuple(forward_defines(dtype, activation) for dtype in STORAGE for activation in ACTIVATIONS)
    return tuple(
        backward_defines(dtype, activation, later)
        for dtype in STORAGE
        for activation in ACTIVATIONS
        for later in (False, True)
    )


def forward_geometry(rows: int, channels: int, dtype: str) -> TileGeometry:
    """Launch geometry of FORWARD over `channels` of a row."""
    vectors = channels // vector_width(dtype)
    return channel_tiles.one_pass(rows, vectors, threads=FORWARD_THREADS, unroll=FORWARD_UNROLL, otherwise=MAX_TILE)


def geometry(
    rows: int, channels: int, dtype: str, sm_count: int, *, blocks_per_sm: int, unroll: int, lines: bool = False
) -> TileGeometry:
    """Launch geometry of the others over `channels` of a row, for as many blocks as run at once on `sm_count` SMs.

    With `lines` a block covers whole cache lines where no divisor of a row does, and the last of a row is left with fewer vectors: of
    BACKWARD, where that is faster (docs/notes/kernels/other-norms.md).
    """
    vectors = channels // vector_width(dtype)
    rest = lines and vectors > MAX_TILE and vectors % channel_tiles.LINE_VECTORS
    return channel_tiles.geometry(
        rows,
        vectors,
        threads=THREADS,
        unroll=unroll,
        blocks=sm_count * blocks_per_sm,
        tile=MAX_TILE if rest else channel_tiles.widest_tile(vectors, MAX_TILE),
    )


def bytes_moved(*, rows: int, widths: Sequence[int], itemsize: int) -> tuple[int, int]:
    """Bytes that the forward and the backward of one concatenation must move.

    `widths`: channels that each norm sees in turn. Forward: each feature is read and written once,
    each norm reads and writes what it sees. Backward: each norm reads dy, x and, but for the last, the gradient from behind,
    and writes its own; each feature's gradient is read once more with the feature, and written.
    """
    whole, seen, last = widths[-1], sum(widths), widths[-1]
    forward = 2 * whole + 2 * seen
    backward = 4 * seen - last + 3 * whole
    return forward * rows * itemsize, backward * rows * itemsize
