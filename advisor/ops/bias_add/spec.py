"""What the bias (+ add) kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from functools import lru_cache

from advisor.ops import channel_tiles, dispatch_table
from advisor.ops.channel_tiles import TileGeometry
from advisor.ops.storage import STORAGE, vector_width
from advisor.ops.tensor_support import TensorSupport

FORWARD = "bias_add/bias_add_forward.cu"
BACKWARD = "bias_add/bias_add_backward.cu"
KERNELS = {FORWARD: ("bias_add_forward",), BACKWARD: ("bias_add_backward",)}

# As the passes of bias_act, which were measured: sums by one block an SM of many rows, flat passes by short blocks.
THREADS, UNROLL = 512, 4
FLAT_THREADS, FLAT_UNROLL = 128, 1
MAX_TILE = channel_tiles.WIDEST_PIECE
TUNABLE = {"UNROLL": (2, 4, 8), "FLAT_UNROLL": (1, 2, 4)}


def name(*, residual: bool) -> str:
    """`bias`, `bias+add`."""
    return "bias+add" if residual else "bias"


def wins(*, residual: bool, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win."""
    return dispatch_table.refusal("bias_add", name(residual=residual), dtype)


TENSORS = TensorSupport()


def defines(source: str, dtype: str, *, residual: bool = False) -> dict[str, int]:
    """Macros of one variant."""
    found = {"STORAGE": STORAGE[dtype]}
    if source == FORWARD:
        return {**found, "RESIDUAL": int(residual), "THREADS": FLAT_THREADS, "UNROLL": FLAT_UNROLL}
    return {**found, "THREADS": THREADS, "MAX_TILE": MAX_TILE, "BLOCKS": 1, "UNROLL": UNROLL}


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant."""
    return tuple(
        defines(source, dtype, residual=residual)
        for dtype in STORAGE
        for residual in ((False, True) if source == FORWARD else (False,))
    )


@lru_cache(maxsize=4096)
def geometry(rows: int, channels: int, dtype: str, sm_count: int) -> TileGeometry:
    """Launch geometry of the sums."""
    vectors = channels // vector_width(dtype)
    return channel_tiles.geometry(
        rows, vectors, threads=THREADS, unroll=UNROLL, blocks=sm_count, tile=channel_tiles.piece(vectors)
    )


def bytes_moved(*, elements: int, itemsize: int, residual: bool) -> tuple[int, int]:
    """Bytes that the forward and the backward must move."""
    return elements * itemsize * (3 if residual else 2), elements * itemsize
