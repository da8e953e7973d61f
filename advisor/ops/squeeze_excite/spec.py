"""What the squeeze-and-excite kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from advisor.ops import dispatch_table, pixel_columns, sample_geometry, storage

FORWARD = "squeeze_excite/squeeze_excite_forward.cu"
GATE = "squeeze_excite/squeeze_excite_gate.cu"
BACKWARD = "squeeze_excite/squeeze_excite_backward.cu"
KERNELS = {
    FORWARD: ("squeeze_excite_pool", "squeeze_excite_scale"),
    GATE: (
        "squeeze_excite_squeeze",
        "squeeze_excite_excite",
        "squeeze_excite_excite_backward",
        "squeeze_excite_squeeze_backward",
    ),
    BACKWARD: ("squeeze_excite_backward_reduce", "squeeze_excite_backward_apply"),
}

# A part of kernels/include/activation.cuh: what networks put between the two products.
ACTIVATIONS = {"relu": 1, "silu": 4}
GATES = {"sigmoid": 0, "hardsigmoid": 1}

# The widest squeeze-and-excite of the usual networks is SE-ResNet's (2048, 128); beyond twice that nothing is verified.
MAX_CHANNELS = 4096
MAX_HIDDEN = 1024
THREADS = 256
# What a block of the passes reads of one tensor: small enough that several waves of blocks balance themselves, large enough
# that a block's start and the sums of its threads hide behind the others of its SM.
BYTES_PER_BLOCK = 131_072
# Blocks of 256 threads with 8 x 16 bytes under way: 96 KiB an SM.
BLOCKS_PER_SM = 3
UNROLL = 8  # 16-byte loads that a thread has under way
# The products (kernels/include/warp_product.cuh): a warp makes 16 * tall x 32 of a result; those with K = C have few pieces and
# are made 16 tall.
GATE_THREADS = 256
TALL = 2
PIECE_COLUMNS = 32
STEP = 16
# Constants that a tuning run may try other values of.
TUNABLE = {"BYTES_PER_BLOCK": (65_536, 131_072), "UNROLL": (4, 8), "TALL": (1, 2)}


def name(activation: str, gate: str) -> str:
    """`se+relu+hardsigmoid`."""
    return f"se+{activation}+{gate}"


def wins(*, channels: int, hidden: int, activation: str, gate: str, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win.

    On file for one H200, from 32 to 1152 channels: 1.3 to 2.4 times faster forward, 3.4 to 5.9 backward.
    """
    return dispatch_table.refusal("squeeze_excite", name(activation, gate), dtype)


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
    reason = sample_geometry.TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
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
class ExciteProduct:
    """Blocks of one product, and the warps that share a piece of it."""

    blocks: int
    slices: int


@dataclass(frozen=True, slots=True)
class ExciteGeometry:
    """`sums` and `apply`: blocks of the passes that sum and that write. `weight_blocks`: of dW1, which follow the first
    `pool_blocks` of `squeeze_backward`; there `weight_slices` warps share a piece of a weight's gradient.
    """

    sums: pixel_columns.ColumnGeometry
    apply: pixel_columns.ColumnGeometry
    squeeze: ExciteProduct  # and excite_backward, the same sizes
    excite: ExciteProduct
    squeeze_backward: ExciteProduct
    weight_slices: int
    pool_blocks: int
    weight_blocks: int


def _pieces(rows: int, columns: int, tall: int) -> int:
    return -(-rows // (16 * tall)) * -(-columns // PIECE_COLUMNS)


def slices(pieces: int, size: int, sm_count: int) -> int:
    """Warps that share a piece and its `size` values of k: a power of two, so many that every SM has a block."""
    warps, found = GATE_THREADS // 32, 1
    while found < warps and pieces * found < sm_count * warps and found * STEP < size:
        found *= 2
    return found


def product(rows: int, columns: int, size: int, tall: int, sm_count: int) -> ExciteProduct:
    """One result of [rows, columns], summed over `size`."""
    pieces = _pieces(rows, columns, tall)
    shared = slices(pieces, size, sm_count)
    return ExciteProduct(-(-pieces // (GATE_THREADS // 32 // shared)), shared)


@lru_cache(maxsize=4096)
def geometry(samples: int, rows: int, channels: int, hidden: int, dtype: str, sm_count: int) -> ExciteGeometry:
    """`rows` is H * W."""
    vectors = channels // storage.vector_width(dtype)
    cut = partial(
        pixel_columns.geometry,
        samples,
        rows,
        vectors,
        threads=THREADS,
        unroll=UNROLL,
        bytes_per_block=BYTES_PER_BLOCK,
        least_blocks=sm_count * BLOCKS_PER_SM,
    )
    results = ((samples, channels), (hidden, channels + 1), (channels, hidden + 1))  # dpool, dW1 | db1, dW2 | db2
    pieces = [_pieces(*size, TALL) for size in results]
    by_pool, by_weights = (slices(sum(pieces), size, sm_count) for size in (hidden, samples))
    pool, w1, w2 = (
        -(-count // (GATE_THREADS // 32 // shared))
        for count, shared in zip(pieces, (by_pool, by_weights, by_weights), strict=True)
    )
    return ExciteGeometry(
        sums=cut(most_splits=sample_geometry.MAX_PARTS),
        apply=cut(most_splits=rows),
        squeeze=product(samples, hidden, channels, 1, sm_count),
        excite=product(samples, channels, hidden, TALL, sm_count),
        squeeze_backward=ExciteProduct(pool + w1 + w2, by_pool),
        weight_slices=by_weights,
        pool_blocks=pool,
        weight_blocks=w1,
    )


def stream_defines(dtype: str, gate: str) -> dict[str, int]:
    """Macros of one variant of the passes over the tensor."""
    return {"STORAGE": storage.STORAGE[dtype], "GATE": GATES[gate], "THREADS": THREADS, "UNROLL": UNROLL}


def gate_defines(dtype: str, activation: str, gate: str, hidden: int) -> dict[str, int]:
    """Macros of one variant of the products between them: tf32 is exact enough beside 16-bit tensors."""
    return {
        "ACT": ACTIVATIONS[activation],
        "GATE": GATES[gate],
        "SPLIT": int(dtype == "float32"),
        "HIDDEN4": int(hidden % 4 == 0),
        "TALL": TALL,
        "THREADS": GATE_THREADS,
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at: EfficientNet's and MobileNetV3's in
    bf16, and fp32. fp16 differs from bf16 in its conversions alone.
    """
    pairs = (("silu", "sigmoid"), ("relu", "hardsigmoid"))
    if source == GATE:
        return (
            *(gate_defines("bfloat16", *pair, 8) for pair in pairs),
            *(gate_defines("float32", *pairs[0], hidden) for hidden in (8, 6)),
        )
    return (
        *(stream_defines("bfloat16", gate) for _, gate in pairs),
        stream_defines("float32", "sigmoid"),
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
