"""What the LayerNorm kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from advisor.ops import dispatch_table, storage

FORWARD = "layer_norm/layer_norm_forward.cu"
BACKWARD = "layer_norm/layer_norm_backward.cu"
KERNELS = {FORWARD: ("layer_norm_forward",), BACKWARD: ("layer_norm_backward",)}

THREADS = 128  # of a forward block
LANES = (1, 2, 4, 8, 16, 32)
# Vectors a lane may hold, the ones to prefer first: with two or three, a warp has whole sectors of several rows under way and
# a lane's channel sums (2 x 8 x vectors fp32 values) leave registers for loads.
VECTORS = (2, 3, 4, 1, 6, 8)
# Bytes of x that a lane has under way (with ptxas' registers on sm_90, bf16, forward 64 to 127, backward 119 to 255, none
# spilled: 48 to 64 KiB of loads an SM), and rows at most.
FORWARD_BYTES, BACKWARD_BYTES = 96, 64
MAX_ROWS = 4
# Threads of a backward block, by the vectors of a lane: as many as an SM holds at once. It is persistent, one block an SM:
# each leaves one row of partial sums.
BACKWARD_THREADS = {1: 512, 2: 512, 3: 512, 4: 384, 6: 256, 8: 256}
# A forward block loads the weights once for all its rounds of rows. Short blocks are faster as long as a round's rows are this many
# times as large as the weights; of fp32 tensors, where that was measured to win nothing, a block takes FORWARD_ROUNDS
# (docs/notes/kernels/other-norms.md).
FORWARD_WEIGHTS = 2
FORWARD_ROUNDS = 4
# A tensor too small for that many takes fewer, so that an SM still has this many blocks.
FORWARD_BLOCKS_PER_SM = 5
FAN = 12  # kernels/include/tree_reduce.cuh
# Constants that a tuning run may try other values of.
TUNABLE = {"THREADS": (128, 256), "FORWARD_BYTES": (64, 96), "FORWARD_WEIGHTS": (1, 2, 4), "BACKWARD_BYTES": (32, 64)}


def name(dtype: str, result: str) -> str:
    """`layernorm`, or `layernorm to float32` where the result is stored in another type."""
    return "layernorm" if dtype == result else f"layernorm to {result}"


def wins(*, channels: int, dtype: str, result: str) -> str:
    """Why PyTorch's own layer norm is left in place; empty where the kernels win.

    On file for one H200, from 48 to 1024 channels, in all dtypes and into another: 2.5 to 34 times faster, either pass. Fewer
    channels have no measurement.
    """
    return dispatch_table.refusal("layer_norm", name(dtype, result), dtype, {"channels": channels})


def widest(dtype: str, result: str) -> int:
    """Vectors a lane can hold in the backward without spilling: what comes from above takes twice the registers in fp32."""
    return 6 if result == "float32" != dtype else 8


def unsupported(
    *, rows: int, channels: int, contiguous: bool, dtype: str, result: str, parameters: tuple[str, ...], arch: int
) -> str:
    """Why the kernels cannot take this call; empty when they can.

    Args:
        rows, channels: of the tensor seen as [rows, channels]; `contiguous` says whether its memory is that.
        dtype, result: of the input and of what is asked for. parameters: dtypes of weight and bias, as far as there are any.
    """
    reason = storage.unsupported(dtype=dtype, result=result, channels=channels, arch=arch)
    if reason:
        return reason
    if not rows * channels:
        return "empty input"
    if not contiguous:
        return "channels are not contiguous in memory"
    for parameter in parameters:
        if parameter != "float32":
            return f"parameters in {parameter}"
    most = LANES[-1] * widest(dtype, result) * storage.vector_width(dtype)
    if channels > most:
        return f"{channels} channels are more than {most}"
    return ""


@dataclass(frozen=True, slots=True)
class LayerNormGeometry:
    """`lanes` threads a row with `lane_vectors` vectors each; `vectors` a row has."""

    lanes: int
    lane_vectors: int
    vectors: int
    forward_blocks: int
    backward_blocks: int

    @property
    def width(self) -> int:
        """Columns of the backward's partial sums, in vectors: two statistics, room for every lane."""
        return 2 * self.lanes * self.lane_vectors


@lru_cache(maxsize=4096)
def geometry(rows: int, channels: int, dtype: str, result: str, sm_count: int) -> LayerNormGeometry:
    """As few idle lanes as possible; see the constants for the rest."""
    vectors = channels // storage.vector_width(dtype)
    possible = [
        (lanes * held - vectors, VECTORS.index(held), lanes, held)
        for lanes in LANES
        for held in VECTORS
        if held <= widest(dtype, result) and lanes * held >= vectors
    ]
    _, _, lanes, held = min(possible)
    in_a_round = threads(FORWARD, held) // lanes * rows_under_way(FORWARD, held)
    forward = -(-rows // in_a_round)
    backward = -(-rows // (threads(BACKWARD, held) // lanes * rows_under_way(BACKWARD, held)))
    wanted = FORWARD_ROUNDS if dtype == "float32" else -(-8 * FORWARD_WEIGHTS // (in_a_round * storage.itemsize(dtype)))
    rounds = max(1, min(wanted, forward // (sm_count * FORWARD_BLOCKS_PER_SM)))
    return LayerNormGeometry(
        lanes=lanes,
        lane_vectors=held,
        vectors=vectors,
        forward_blocks=-(-forward // rounds),
        backward_blocks=min(backward, sm_count),
    )


def threads(source: str, lane_vectors: int) -> int:
    """Threads of a block."""
    return THREADS if source == FORWARD else BACKWARD_THREADS[lane_vectors]


def rows_under_way(source: str, lane_vectors: int) -> int:
    """Rows that a lane has under way."""
    under_way = FORWARD_BYTES if source == FORWARD else BACKWARD_BYTES
    return min(MAX_ROWS, max(1, under_way // (16 * lane_vectors)))


def defines(source: str, dtype: str, result: str, lanes: int, lane_vectors: int) -> dict[str, int]:
    """Macros of one variant."""
    return {
        "STORAGE": storage.STORAGE[dtype],
        "OUT": storage.STORAGE[result],
        "LANES": lanes,
        "VECTORS": lane_vectors,
        "ROWS": rows_under_way(source, lane_vectors),
        "THREADS": threads(source, lane_vectors),
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at: ConvNeXt's in bf16, and the widest row
    of each width of input and result. fp16 differs from bf16 in its conversions alone.
    """
    return (
        *(defines(source, "bfloat16", "bfloat16", lanes, 3) for lanes in (4, 8, 16, 32)),
        defines(source, "bfloat16", "bfloat16", 32, 4),
        *(
            defines(source, *pair, 32, widest(*pair))
            for pair in (("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float32"))
        ),
    )


def bytes_moved(*, elements: int, dtype: str, result: str) -> tuple[int, int]:
    """Bytes the forward and the backward must move: x and y; x, dy and dx."""
    x, y = storage.itemsize(dtype), storage.itemsize(result)
    return elements * (x + y), elements * (2 * x + y)


# fp32 operations an element: sum, difference and square, normalise, scale; the backward makes the statistics again.
FORWARD_FLOPS, BACKWARD_FLOPS = 8, 18
