"""What the GroupNorm(+activation) kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from advisor.ops import dispatch_table, sample_geometry, storage
from advisor.ops.dispatch import UNMEASURED

FORWARD = "group_norm/group_norm_forward.cu"
BACKWARD = "group_norm/group_norm_backward.cu"
KERNELS = {
    FORWARD: ("group_norm_stats", "group_norm_apply"),
    BACKWARD: ("group_norm_backward_reduce", "group_norm_backward_apply"),
}

# A part of kernels/include/activation.cuh: what networks put behind a group norm.
ACTIVATIONS = {"none": 0, "relu": 1, "leaky_relu": 3, "silu": 4}
# Columns of partial sums that one block of the parameters' gradients adds up at a time.
PARAMETER_COLUMNS = 32
THREADS = 256
# Channel vectors a block covers: 16 x 16 bytes of a row is two cache lines (measured for batch norm,
# docs/notes/kernels/batch-norm.md).
MAX_TILE = 16
# What a block reads of one tensor. Small enough that many waves of blocks balance themselves, large enough that a block's
# start (joining the partial sums, loading its channels' constants: about 2 us) hides behind the others of its SM.
BYTES_PER_BLOCK = 131_072
# Blocks of 256 threads with 4 x 16 bytes under way: 64 KiB an SM, 4.2 TB/s at 2 us of loaded latency.
BLOCKS_PER_SM = 4
# Rows a thread has under way: of one tensor forward, of two backward. There two rows would leave 32 KiB of loads an SM (two
# blocks at 90 registers), four leave 64 (two blocks at 120).
FORWARD_UNROLL, BACKWARD_UNROLL = 4, 4
# Constants that a tuning run may try other values of.
TUNABLE = {"MAX_TILE": (8, 16, 32), "BYTES_PER_BLOCK": (65_536, 131_072, 262_144), "BACKWARD_UNROLL": (2, 4)}


def name(groups: int, channels: int, activation: str, dtype: str, result: str) -> str:
    """`groupnorm32+silu`, `instancenorm`, `groupnorm8 to float32` where the result is stored in another type."""
    norm = "instancenorm" if groups == channels else f"groupnorm{groups}"
    return norm + ("" if activation == "none" else f"+{activation}") + ("" if dtype == result else f" to {result}")


def wins(*, channels: int, groups: int, activation: str, dtype: str, result: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    On file for one H200, for 1, 32 and as many groups as channels: 4 to 12 times faster forward, 1.4 to 5.3 backward.
    """
    return dispatch_table.refusal("group_norm", kind(groups == channels, activation, dtype, result), dtype)


def narrow(parameters: tuple[str, ...]) -> str:
    """Why a call with parameters of these dtypes is left to PyTorch, whatever `wins` says; empty for fp32."""
    return UNMEASURED if any(parameter != "float32" for parameter in parameters) else ""


def kind(instance: bool, activation: str, dtype: str, result: str) -> str:
    """`groupnorm+silu to float32`; `instancenorm`, of as many groups as channels."""
    named = name(1, 1 if instance else 2, activation, dtype, result)
    return named if instance else named.replace("groupnorm1", "groupnorm")


def unsupported(
    *,
    shape: tuple[int, ...],
    channels_last: bool,
    groups: int,
    dtype: str,
    result: str,
    parameters: tuple[str, ...],
    activation: str,
    arch: int,
) -> str:
    """Why the kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    reason = sample_geometry.TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    _, c, h, w = shape
    if reason := storage.unsupported(dtype=dtype, result=result, channels=c, arch=arch):
        return reason
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if groups < 1 or c % groups:
        return f"{c} channels in {groups} groups"
    if h * w * (c // groups) < 2:
        return "fewer than two values a group"
    for parameter in parameters:
        if parameter not in storage.STORAGE:
            return f"parameters in {parameter}"
    return ""


@dataclass(frozen=True, slots=True)
class GroupNormGeometry:
    """`sums` and `apply`: blocks of the passes that sum and that write; `lanes` threads join the sums of a group."""

    sums: sample_geometry.SampleGeometry
    apply: sample_geometry.SampleGeometry
    lanes: int
    parameter_blocks: int


def _power_of_two(most: int) -> int:
    """The largest one that is no more than `most`."""
    return 1 << most.bit_length() - 1


@lru_cache(maxsize=4096)
def geometry(samples: int, rows: int, channels: int, groups: int, dtype: str, sm_count: int) -> GroupNormGeometry:
    """`rows` is H * W. The groups of a tile share out a block's threads, no more than they have partial sums to join."""
    vectors, per_group = channels // storage.vector_width(dtype), channels // groups
    cut = partial(
        sample_geometry.geometry,
        samples,
        rows,
        vectors,
        threads=THREADS,
        max_tile=MAX_TILE,
        unroll=FORWARD_UNROLL,
        bytes_per_block=BYTES_PER_BLOCK,
        least_blocks=sm_count * BLOCKS_PER_SM,
    )
    sums = cut(most_splits=sample_geometry.MAX_PARTS)
    width = sums.tile * storage.vector_width(dtype)
    in_a_tile = max(
        (min(begin + width, channels) - 1) // per_group - begin // per_group + 1 for begin in range(0, channels, width)
    )
    return GroupNormGeometry(
        sums=sums,
        apply=cut(most_splits=rows),
        lanes=min(_power_of_two(THREADS // in_a_tile), 2 * _power_of_two(per_group * sums.splits)),
        parameter_blocks=-(-2 * channels // PARAMETER_COLUMNS),
    )


def defines(source: str, dtype: str, result: str, activation: str) -> dict[str, int]:
    """Macros of one variant."""
    return {
        "STORAGE": storage.STORAGE[dtype],
        "OUT": storage.STORAGE[result],
        "ACT": ACTIVATIONS[activation],
        "THREADS": THREADS,
        "MAX_TILE": MAX_TILE,
        "UNROLL": FORWARD_UNROLL if source == FORWARD else BACKWARD_UNROLL,
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at: those of training in bf16, and the
    heaviest of each width of input and result. fp16 differs from bf16 in its conversions alone.
    """
    chosen = (
        ("bfloat16", "bfloat16", "none"),
        ("bfloat16", "bfloat16", "silu"),
        ("bfloat16", "float32", "silu"),
        ("float32", "float32", "silu"),
    )
    return tuple(defines(source, *variant) for variant in chosen)


def bytes_moved(*, elements: int, dtype: str, result: str) -> tuple[int, int]:
    """Bytes the forward and the backward must move: x twice and y; x and dy twice and dx."""
    x, y = storage.itemsize(dtype), storage.itemsize(result)
    return elements * (2 * x + y), elements * (3 * x + 2 * y)


# fp32 operations an element without the activation.
FORWARD_FLOPS, BACKWARD_FLOPS = 7, 11
