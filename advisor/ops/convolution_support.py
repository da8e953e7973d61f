"""What a family of convolutions supports, as data, and the one checker of it. Plain arithmetic; needs neither torch nor CuPy."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import NamedTuple

from advisor.ops import sources
from advisor.ops.storage import MIN_ARCH, STORAGE

HALF = ("float16", "bfloat16")
Pair = tuple[int, int]


class Sizes(NamedTuple):
    """A convolution of an input of `shape` [N, I, H, W] by a weight [O, I / groups, R, S]; pairs are of rows and columns."""

    shape: tuple[int, ...]
    weight_shape: tuple[int, ...]
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


Says = Callable[[Sizes], str]  # why not; empty for nothing against it


def told(what: str, pair: Pair) -> str:
    """`stride 2 x 1`."""
    return f"{what} {pair[0]} x {pair[1]}"


def whole_channels(sizes: Sizes) -> str:
    """Why a convolution does not take all channels of its input to each of its result."""
    inputs = sizes.weight_shape[1]
    return "" if sizes.groups == 1 and inputs == sizes.shape[1] else f"{sizes.groups} groups of {inputs} channels"


def no_padding(sizes: Sizes) -> str:
    """Why a convolution is not one without padding."""
    return told("padding", sizes.padding) if any(sizes.padding) else ""


def padded_by_one(sizes: Sizes) -> str:
    """Why a convolution is not one padded by a pixel on each side."""
    return "" if sizes.padding == (1, 1) else told("padding", sizes.padding)


def padded_within_taps(sizes: Sizes) -> str:
    """Why a convolution has results of padding alone."""
    outside = any(pad >= taps for pad, taps in zip(sizes.padding, sizes.weight_shape[2:], strict=True))
    return told("padding", sizes.padding) if outside else ""


@dataclass(frozen=True, eq=False, slots=True, kw_only=True)
class Support:
    """What a family's kernels take. Checked in this order, as far as a family says anything of it.

    Attributes:
        source: one whose instructions not every architecture has; empty: every one from MIN_ARCH on will do.
        channels: of the groups and channels.
        taps: whether these rows and columns of taps are taken; `square`: none but squares.
        strides: the same along rows and columns.
        dilates: whether taps may lie apart.
        padding: of the padding (and what a family asks of it beside the dilation).
        vectors: of the channels, as they lie in vectors.
        compute: dtypes of what is multiplied, where that is not the input's.
        storage: dtypes of the input.
        weight: dtypes of the weight; None: the input's, or fp32.
        limit: of the sizes, the input's dtype and the architecture.
    """

    source: str = ""
    channels: Says | None = None
    taps: Callable[[int, int], bool] | None = None
    square: bool = False
    strides: Collection[int] = ()
    dilates: bool = False
    padding: Says | None = None
    vectors: Says | None = None
    compute: Collection[str] = ()
    storage: Collection[str] = HALF
    weight: Collection[str] | None = None
    limit: Callable[[Sizes, str, int], str]

    def another(self, sizes: Sizes) -> str:
        """Why a convolution is none that these kernels know, whatever it is run on; empty when it is one."""
        if len(sizes.shape) != 4:
            return f"{len(sizes.shape)}-D input"
        if self.channels is not None and (reason := self.channels(sizes)):
            return reason
        rows, columns = sizes.weight_shape[2:]
        if self.square and rows != columns:
            return f"{rows} x {columns} taps are not square"
        if self.taps is not None and not self.taps(rows, columns):
            return f"{rows} x {columns} taps"
        if self.strides and (sizes.stride[0] != sizes.stride[1] or sizes.stride[0] not in self.strides):
            return told("stride", sizes.stride)
        if not self.dilates and sizes.dilation != (1, 1):
            return told("dilation", sizes.dilation)
        of_padding = self.padding(sizes) if self.padding is not None else ""
        return of_padding or (self.vectors(sizes) if self.vectors is not None else "")

    def unsupported(
        self, sizes: Sizes, *, dtype: str, weight_dtype: str, arch: int, channels_last: bool = True, compute: str = ""
    ) -> str:
        """Why the kernels cannot take this call; empty when they can.

        Args:
            dtype: of the input; `weight_dtype` of the weight, and `compute` of what is multiplied, where autocast may say so.
            arch: 90 for sm_90.
            channels_last: the input lies as the kernels read it.
        """
        if self.source and (lacks := sources.lacks(self.source, arch)):
            return lacks
        if arch < MIN_ARCH:
            return f"sm_{arch} is older than sm_{MIN_ARCH}"
        reason = self.another(sizes)
        if reason:
            return reason
        if self.compute and compute not in self.compute:
            return f"computed in {compute}"
        if dtype not in self.storage:
            return f"dtype {dtype}"
        if weight_dtype not in (self.weight or (dtype, "float32")):
            return f"weight dtype {weight_dtype}"
        if not channels_last:
            return "input is not channels_last"
        return "empty input" if 0 in sizes.shape else self.limit(sizes, dtype, arch)


ANY_STORAGE = tuple(STORAGE)
