"""What the squeeze-and-excite kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from advisor.ops import sample_geometry, storage

FORWARD = "squeeze_excite/squeeze_excite_forward.cu"
GATE = "squeeze_excite/squeeze_excite_gate.cu"
BACKWARD = "squeeze_excite/squeeze_excite_backward.cu"
KERNELS = {
    FORWARD: ("squeeze_excite_pool", "squeeze_excite_scale"),
    GATE: ("squeeze_excite_gate", "squeeze_excite_gate_backward"),
    BACKWARD: ("squeeze_excite_backward_reduce", "squeeze_excite_backward_apply"),
}

# A part of kernels/include/activation.cuh: what networks put between the two products.
ACTIVATIONS = {"relu": 1, "silu": 4}
GATES = {"sigmoid": 0, "hardsigmoid": 1}

# The products' kernel: the widest squeeze-and-excite of the usual networks is SE-ResNet's (2048, 128); 512 hidden units of
# four samples beside it fill the 48 KiB of shared memory that every block may have.
GATE_THREADS = 512
SAMPLES = 4
MAX_CHANNELS = 2048
MAX_HIDDEN = 512
SQUARE = 32  # a block makes 32 x 32 of both weights' gradients (squeeze_excite_backward.cu)
THREADS = 256
# Channel vectors a block covers: 16 x 16 bytes of a row is two cache lines (measured for batch norm,
# docs/decisions/0001-batchnorm-launch.md).
MAX_TILE = 16
# What a block reads of one tensor. Small enough that many waves of blocks balance themselves, large enough that a block's
# start (joining the partial sums, loading its channels' constants: about 2 us) hides behind the others of its SM.
BYTES_PER_BLOCK = 131_072
# Blocks of 256 threads with 4 x 16 bytes under way: 64 KiB an SM, 4.2 TB/s at 2 us of loaded latency.
BLOCKS_PER_SM = 4
UNROLL = 4  # rows a thread has under way
# Constants that a tuning run may try other values of.
TUNABLE = {"MAX_TILE": (8, 16, 32), "BYTES_PER_BLOCK": (65_536, 131_072, 262_144), "SAMPLES": (2, 4)}


def name(activation: str, gate: str) -> str:
    """`se+relu+hardsigmoid`."""
    return f"se+{activation}+{gate}"


def wins(*, channels: int, hidden: int, activation: str, gate: str, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    On file for one H200, from 32 to 1152 channels: 1.2 to 2.3 times faster forward (0.9 at 256x960x7x7), 1.9 to 4.7 backward.
    """
    return ""


def unsupported(
    *,
    shape: tuple[int, ...],
    channels_last: bool,
    hidden: int,
    dtype: str,
    parameters: tuple[str, ...],
    activation: str,
    gate: str,
    arch: int,
) -> str:
    """Why the kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    reason = sample_geometry.unsupported(shape)
    if reason:
        return reason
    reason = storage.unsupported(dtype=dtype, result=dtype, channels=shape[1], arch=arch)
    if reason:
        return reason
    if not channels_last:
        return "input is not channels_last"
    if activation not in ACTIVATIONS:
        return f"activation {activation}"
    if gate not in GATES:
        return f"gate {gate}"
    if shape[1] > MAX_CHANNELS:
        return f"{shape[1]} channels are more than {MAX_CHANNELS}"
    if hidden > MAX_HIDDEN:
        return f"{hidden} hidden units are more than {MAX_HIDDEN}"
    for parameter in parameters:
        if parameter != "float32":
            return f"parameters in {parameter}"
    return ""


@dataclass(frozen=True, slots=True)
class Geometry:
    """`sums` and `apply`: blocks of the passes that sum and that write; `lanes` threads share an output of each product."""

    sums: sample_geometry.SampleGeometry
    apply: sample_geometry.SampleGeometry
    gate_blocks: int
    lanes: tuple[int, int]
    weight_blocks: int


def lanes(inputs: int) -> int:
    """Threads that share an output: a power of two, each with four or more loads (16 bytes, or 4 where rows are not aligned).

    Four outputs at a time and two loads of each under way make eight, which hide L2's latency with 512 threads; fewer lanes
    take fewer rounds over the outputs, and fewer shuffles.
    """
    loads = inputs // 4 if inputs % 4 == 0 else inputs
    return min(32, 1 << max(0, (loads // 4).bit_length() - 1))


@lru_cache(maxsize=4096)
def geometry(samples: int, rows: int, channels: int, hidden: int, dtype: str, sm_count: int) -> Geometry:
    """`rows` is H * W."""
    vectors = channels // storage.vector_width(dtype)
    cut = partial(
        sample_geometry.geometry,
        samples,
        rows,
        vectors,
        threads=THREADS,
        max_tile=MAX_TILE,
        unroll=UNROLL,
        bytes_per_block=BYTES_PER_BLOCK,
        least_blocks=sm_count * BLOCKS_PER_SM,
    )
    return Geometry(
        sums=cut(most_splits=sample_geometry.MAX_PARTS),
        apply=cut(most_splits=rows),
        gate_blocks=-(-samples // SAMPLES),
        lanes=(lanes(channels), lanes(hidden)),
        weight_blocks=-(-channels // SQUARE) * -(-hidden // SQUARE),
    )


def stream_defines(dtype: str, activation: str, gate: str) -> dict[str, int]:
    """Macros of one variant of the passes over the tensor."""
    return {
        "STORAGE": storage.STORAGE[dtype],
        "ACT": ACTIVATIONS[activation],
        "GATE": GATES[gate],
        "THREADS": THREADS,
        "MAX_TILE": MAX_TILE,
        "UNROLL": UNROLL,
    }


def gate_defines(activation: str, gate: str) -> dict[str, int]:
    """Macros of one variant of the products between them."""
    return {
        "ACT": ACTIVATIONS[activation],
        "GATE": GATES[gate],
        "SAMPLES": SAMPLES,
        "MAX_CHANNELS": MAX_CHANNELS,
        "MAX_HIDDEN": MAX_HIDDEN,
        "THREADS": GATE_THREADS,
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at: EfficientNet's and MobileNetV3's in
    bf16, and fp32. fp16 differs from bf16 in its conversions alone.
    """
    pairs = (("silu", "sigmoid"), ("relu", "hardsigmoid"))
    if source == GATE:
        return tuple(gate_defines(*pair) for pair in pairs)
    return (
        *(stream_defines("bfloat16", *pair) for pair in pairs),
        stream_defines("float32", *pairs[0]),
    )


def bytes_moved(*, elements: int, dtype: str) -> tuple[int, int]:
    """Bytes the forward and the backward must move: x twice and y; x, dy twice and dx. The weights are nothing beside it."""
    size = storage.itemsize(dtype)
    return 3 * elements * size, 4 * elements * size


def flops(*, shape: tuple[int, ...], hidden: int) -> tuple[int, int]:
    """fp32 operations of the forward and the backward: the passes, and two products forward and four backward."""
    n, c, h, w = shape
    product = 2 * n * c * hidden
    return 2 * n * c * h * w + 2 * product, 4 * n * c * h * w + 4 * product
