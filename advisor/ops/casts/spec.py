"""What the kernel that casts many tensors supports, where it wins, and how it is launched. Plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.ops import dispatch_table
from advisor.ops.storage import MIN_ARCH

CAST = "casts/cast_tensors.cu"
KERNELS = {CAST: ("cast_tensors",)}

STORAGE = {"float16": 1, "bfloat16": 2}
TENSORS = 128  # of a launch: their table is 3 KiB of a launch's 4 for arguments
MAX_ELEMENTS = 2**31 - 1  # of one tensor
# UNROLL loads of 16 bytes a thread are 64 KiB under way an SM. On an H200 all combinations of TUNABLE lie within 10 % of each other.
THREADS = 128
UNROLL = 2
TUNABLE = {"THREADS": (128, 256, 512), "UNROLL": (2, 4, 8)}
BEHIND = 2**31 - 1  # the first block of a tensor that is not there


def unsupported(*, half: str, other: str, elements: int, arch: int) -> str:
    """Why the kernel cannot cast between these dtypes, `half` the one of 16 bits; empty when it can.

    Args:
        elements: of the largest tensor.
    """
    if arch < MIN_ARCH:
        return f"sm_{arch} is older than sm_{MIN_ARCH}"
    if half not in STORAGE or other != "float32":
        return f"{half} and {other}"
    return "a tensor of 2^31 values or more" if elements > MAX_ELEMENTS else ""


def wins(tensors: int, elements: int, half: str, *, captured: bool) -> str:
    """Why torch's own multi-tensor copy is left in place; empty where the kernel is measured to be faster.

    Args:
        elements: of all tensors.
        half: the dtype of 16 bits, from or to which they go.
        captured: into a CUDA graph, which costs the host nothing when it is replayed.
    """
    return dispatch_table.refusal(
        "casts", CAPTURED if captured else WEIGHTS, half, {"mean_elements": elements / tensors}
    )


WEIGHTS, CAPTURED = "weights", "weights in a CUDA graph"


def launches(elements: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """[first, last) of the tensors that each launch takes."""
    return tuple((i, min(i + TENSORS, len(elements))) for i in range(0, len(elements), TENSORS))


def first_blocks(elements: Sequence[int]) -> tuple[int, ...]:
    """The first block of each tensor of one launch, and behind them the blocks of all."""
    chunk = THREADS * 4 * UNROLL
    found = [0]
    for count in elements:
        found.append(found[-1] + -(-count // chunk))
    return tuple(found)


def defines(*, half: str, widens: bool) -> dict[str, int]:
    """Macros of one variant; `widens`: to fp32."""
    return {
        "STORAGE": STORAGE[half],
        "WIDENS": int(widens),
        "TENSORS": TENSORS,
        "THREADS": THREADS,
        "UNROLL": UNROLL,
    }


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of every variant."""
    return tuple(defines(half=half, widens=widens) for half in ("bfloat16", "float16") for widens in (False, True))


def bytes_moved(elements: int) -> int:
    """Bytes that must be read and written for so many values."""
    return 6 * elements
