"""What kernels of one pass over a tensor take of it, as data, and the one checker of it. Plain arithmetic; needs neither torch nor CuPy.

Convolutions have theirs in convolution_support.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from advisor.ops.storage import MIN_ARCH, STORAGE, vector_width

Shape = tuple[int, ...]


def few_vectors(shape: Shape, width: int) -> str:
    """Why its vectors of `width` values cannot be counted in 32 bits; empty when they can."""
    return "2^31 vectors or more" if math.prod(shape) // width >= 2**31 else ""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSupport:
    """What a family's kernels take. Checked in this order: architecture, dtype, dimensions, values at all, layout, vectors, limit.

    Attributes:
        dimensions: that a tensor has; None for two or more.
        channels: which of them has the channels.
        layout: how it has to lie, in words.
        empty: whether one without values is taken.
        vectors: whether channels have to be whole vectors of 16 bytes.
        limit: of a shape and the values of a vector, why it is too large.
    """

    dimensions: int | None = 4
    channels: int = 1
    layout: str = "channels_last"
    empty: bool = False
    vectors: bool = True
    limit: Callable[[Shape, int], str] = few_vectors

    def refusal(self, *, shape: Shape, channels_last: bool, dtype: str, arch: int) -> str:
        """Why the kernels cannot take this tensor; empty when they can.

        Args:
            channels_last: whether it lies as `layout` says.
            arch: 90 for sm_90.
        """
        if arch < MIN_ARCH:
            return f"sm_{arch} is older than sm_{MIN_ARCH}"
        if dtype not in STORAGE:
            return f"dtype {dtype}"
        if len(shape) < 2 if self.dimensions is None else len(shape) != self.dimensions:
            return f"{len(shape)}-D input"
        if not self.empty and not math.prod(shape):
            return "an empty tensor"
        if not channels_last:
            return f"input is not {self.layout}"
        width = vector_width(dtype)
        if self.vectors and shape[self.channels] % width:
            return f"{shape[self.channels]} channels are no multiple of {width}"
        return self.limit(shape, width)
