"""What the padding kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from advisor.ops import dispatch_table
from advisor.ops.pooling.spec import TENSORS
from advisor.ops.storage import STORAGE, vector_width

FORWARD = "padding/pad_forward.cu"
BACKWARD = "padding/pad_backward.cu"
KERNELS = {FORWARD: ("pad_forward",), BACKWARD: ("pad_backward",)}

MODES = {"reflect": 0, "replicate": 1, "circular": 2}
THREADS = 256  # of upsampling's geometry, which these launches share
ROWS = 4  # rows that a thread has under way
TUNABLE = {"ROWS": (2, 4, 8)}

Amounts = tuple[int, int, int, int]  # left, right, top, bottom


def unsupported(
    *, shape: tuple[int, ...], amounts: tuple[int, ...], mode: str, channels_last: bool, dtype: str, arch: int
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, H, W]."""
    reason = TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    if mode not in MODES:
        return f"mode {mode}"
    if len(amounts) != 4 or min(amounts) < 0:
        return f"padding by {amounts}"
    _, c, h, w = shape
    left, right, top, bottom = amounts
    # As aten has it: it raises there, and is to do so.
    for size, widest in ((w, max(left, right)), (h, max(top, bottom))):
        if mode != "replicate" and widest > size - (mode == "reflect"):
            return "padding is wider than the image"
    if (h + top + bottom) * (w + left + right) * c // vector_width(dtype) >= 2**31:
        return "an image of 2^31 vectors or more"
    return ""


def wins(mode: str, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win."""
    return dispatch_table.refusal("padding", mode, dtype)


def defines(dtype: str, mode: str) -> dict[str, int]:
    """Macros of one variant, the same for both sources."""
    return {"STORAGE": STORAGE[dtype], "THREADS": THREADS, "MODE": MODES[mode], "ROWS": ROWS}


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at."""
    return (*(defines("bfloat16", mode) for mode in MODES), defines("float32", "reflect"))


def bytes_moved(*, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward and the backward must move, of as many elements."""
    return (inputs + outputs) * itemsize, (inputs + outputs) * itemsize
