"""What the kernels for pooling volumes support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

from advisor.ops import dispatch_table
from advisor.ops.storage import STORAGE
from advisor.ops.tensor_support import TensorSupport

MAX_FORWARD = "volume_pooling/max_pool3d_forward.cu"
MAX_BACKWARD = "volume_pooling/max_pool3d_backward.cu"
AVG = "volume_pooling/avg_pool3d.cu"
KERNELS = {
    MAX_FORWARD: ("max_pool3d_forward",),
    MAX_BACKWARD: ("max_pool3d_backward",),
    AVG: ("avg_pool3d_forward", "avg_pool3d_backward"),
}
OPERATIONS = ("max_pool3d", "avg_pool3d")

THREADS = 256
TUNABLE = {"THREADS": (128, 256)}
MAX_TAPS = 64  # unrolled when a kernel is compiled; a position is a byte

Triple = tuple[int, int, int]


class VolumeWindow(NamedTuple):
    """A pooling window: kernel, stride and padding as (along d, along h, along w)."""

    kernel: Triple
    stride: Triple
    padding: Triple = (0, 0, 0)

    def output(self, size: tuple[int, ...]) -> Triple:
        """Output size of a volume (d, h, w), by PyTorch's rule without ceil_mode."""
        d, h, w = (
            (n + 2 * p - k) // s + 1 for n, k, s, p in zip(size, self.kernel, self.stride, self.padding, strict=True)
        )
        return d, h, w

    @property
    def label(self) -> str:
        """`k3s2p1`, `k1x2x2s1x2x2`."""

        def triple(values: Triple) -> str:
            return str(values[0]) if len(set(values)) == 1 else "x".join(map(str, values))

        padded = f"p{triple(self.padding)}" if any(self.padding) else ""
        return f"k{triple(self.kernel)}s{triple(self.stride)}{padded}"


@lru_cache(maxsize=4096)
def window(kernel: Triple, stride: Triple, padding: Triple = (0, 0, 0)) -> VolumeWindow:
    """The window with these arguments, one object for equal ones."""
    return VolumeWindow(kernel=kernel, stride=stride, padding=padding)


TENSORS = TensorSupport(dimensions=5, layout="channels_last_3d")


def unsupported(
    operation: str, *, shape: tuple[int, ...], window: VolumeWindow, channels_last: bool, dtype: str, arch: int
) -> str:
    """Why these kernels cannot take this call; empty when they can. `shape` is [N, C, D, H, W]."""
    reason = TENSORS.refusal(shape=shape, channels_last=channels_last, dtype=dtype, arch=arch)
    if reason:
        return reason
    if math.prod(window.kernel) > MAX_TAPS:
        return f"a window of {math.prod(window.kernel)} elements is more than {MAX_TAPS}"
    if any(2 * p > k for k, p in zip(window.kernel, window.padding, strict=True)):
        return "padding is more than half the window"
    if operation == "avg_pool3d" and any(window.padding):
        return "average pooling with padding"
    return "the window is larger than the volume" if min(window.output(shape[2:])) < 1 else ""


def wins(operation: str, *, dtype: str) -> str:
    """Why PyTorch's own operations are left in place; empty where the kernels win."""
    return dispatch_table.refusal("volume_pooling", operation, dtype)


def defines(source: str, window: VolumeWindow, dtype: str, *, indices: bool = True) -> dict[str, int]:
    """Macros of one variant."""
    found = {"STORAGE": STORAGE[dtype], "THREADS": THREADS}
    for axis, kernel, stride in zip("DHW", window.kernel, window.stride, strict=True):
        found |= {f"K{axis}": kernel, f"S{axis}": stride}
    return {**found, "INDICES": int(indices)} if source == MAX_FORWARD else found


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros of the variants that are compiled ahead, and whose registers are looked at."""
    usual, halving = VolumeWindow((3, 3, 3), (2, 2, 2), (1, 1, 1)), VolumeWindow((2, 2, 2), (2, 2, 2))
    return (
        defines(source, usual, "bfloat16"),
        defines(source, halving, "bfloat16"),
        defines(source, usual, "float32"),
        defines(source, VolumeWindow((4, 4, 4), (1, 1, 1)), "bfloat16"),
    )


def blocks(vectors: int) -> int:
    """Blocks of one launch, for so many vectors to write."""
    return -(-vectors // THREADS)


def bytes_moved(operation: str, *, inputs: int, outputs: int, itemsize: int) -> tuple[int, int]:
    """Bytes the forward and the backward must move, with a byte an output for the maximum's position."""
    index = outputs if operation == "max_pool3d" else 0
    moved = (inputs + outputs) * itemsize + index
    return moved, moved
