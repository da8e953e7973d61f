"""What the BatchNorm(+add)+activation kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from advisor.ops import channel_tiles
from advisor.ops.channel_tiles import Geometry
from advisor.ops.dispatch import UNMEASURED
from advisor.ops.storage import MIN_ARCH, STORAGE, vector_width

FORWARD = "batchnorm/batchnorm_act_forward.cu"
BACKWARD = "batchnorm/batchnorm_act_backward.cu"
KERNELS = {
    FORWARD: ("batchnorm_act_stats", "batchnorm_act_apply"),
    BACKWARD: ("batchnorm_act_backward_reduce", "batchnorm_act_backward_apply"),
}

ACTIVATIONS = {"none": 0, "relu": 1, "relu6": 2, "leaky_relu": 3, "silu": 4, "hardswish": 5, "gelu": 6}
# With a residual the backward reads one bit an element, so the slope must be 0 or 1.
RESIDUAL_ACTIVATIONS = frozenset({"none", "relu", "relu6"})

THREADS = 512
# Channel vectors a block covers. 16 x 16 bytes of a row is two cache lines, and the last block of a tile has little to add
# up. Measured against 8, 32 and 64 (docs/decisions/0001-batchnorm-launch.md).
MAX_TILE = 16
# Loads in flight an SM: a reading thread of the statistics pass has 4 x 16 bytes, of the others 8 x 16 bytes or as much again
# in stores, so one pass wants two blocks of 512 threads and the others one. Bandwidth of 4.2 TB/s at 2 us of loaded latency
# is 64 KiB an SM.
STATS_BLOCKS_PER_SM = 2
BLOCKS_PER_SM = 1
UNROLL = 4
# Constants that `advisor bench tune` may try other values of. UNROLL is written into the sources as well.
TUNABLE = {"THREADS": (256, 512), "MAX_TILE": (8, 16, 32), "STATS_BLOCKS_PER_SM": (1, 2, 4), "BLOCKS_PER_SM": (1, 2)}

# Activations behind the norm whose gain a benchmark or a whole training has shown (docs/benchmarks).
_MEASURED = frozenset({"none", "relu", "relu6", "silu", "hardswish"})


def name(activation: str, residual: bool) -> str:
    """`bn+add+relu`."""
    return "bn" + ("+add" if residual else "") + ("" if activation == "none" else f"+{activation}")


def wins(*, activation: str, residual: bool, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    On file for one H200 is bn+relu, in all dtypes and from 256x64x112x112 down to 128x512x4x4: 1.3 to 4.3 times faster, and
    whole trainings in which bn+add+relu (ResNets), bn, bn+add and bn+hardswish (MobileNetV3) run. ReLU6 and SiLU are taken to do
    as Hardswish, whose arithmetic lies between theirs. In fp16 and fp32 cuDNN's batch norm alone, with nothing to fuse, was 4 to
    8 % faster than these kernels on 256x64x112x112, by an earlier way of measuring.
    """
    if activation not in _MEASURED:
        return UNMEASURED
    if activation == "none" and not residual and dtype != "bfloat16":
        return f"nothing to fuse, and cuDNN's own batch norm is faster in {dtype}"
    return ""


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant of `source` that a launch can ask for: what the compile test goes over."""
    pairs = [(a, False) for a in ACTIVATIONS] + [(a, True) for a in sorted(RESIDUAL_ACTIVATIONS)]
    return tuple(defines(dtype, activation, residual) for dtype in STORAGE for activation, residual in pairs)


def defines(dtype: str, activation: str, residual: bool) -> dict[str, int]:
    """Macros of one variant."""
    return {
        "STORAGE": STORAGE[dtype],
        "ACT": ACTIVATIONS[activation],
        "RESIDUAL": int(residual),
        "THREADS": THREADS,
        "MAX_TILE": MAX_TILE,
    }


def unsupported(
    *, shape: tuple[int, ...], channels_last: bool, dtype: str, activation: str, residual: bool, arch: int
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if len(shape) != 4:
        return f"{len(shape)}-D input"
    if not channels_last:
        return "input is not channels_last"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if residual and activation not in RESIDUAL_ACTIVATIONS:
        return f"residual with {activation}"
    n, c, h, w = shape
    if c % vector_width(dtype):
        return f"{c} channels are no multiple of {vector_width(dtype)}"
    if n * h * w < 2:
        return "fewer than two values a channel"
    return ""


def geometry(rows: int, channels: int, dtype: str, sm_count: int, blocks_per_sm: int) -> Geometry:
    """Launch geometry for as many blocks as run at once on `sm_count` SMs."""
    return channel_tiles.geometry(
        rows,
        channels // vector_width(dtype),
        threads=THREADS,
        max_tile=MAX_TILE,
        unroll=UNROLL,
        blocks=sm_count * blocks_per_sm,
    )


def bytes_moved(*, elements: int, itemsize: int, residual: bool) -> tuple[int, int]:
    """Bytes the forward and the backward must move: tensor passes, with one bit an element for the mask."""
    mask = elements // 8 if residual else 0
    forward = elements * itemsize * (4 if residual else 3) + mask
    backward = elements * itemsize * (6 if residual else 5) + 2 * mask
    return forward, backward
