"""What convolution by Fourier transforms supports, where it wins, and how large its transforms are. Plain arithmetic."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from advisor.ops import dispatch_table
from advisor.ops.convolution_support import Sizes, Support, padded_within_taps, whole_channels

TURN = "fft_conv/fft_conv_turn.cu"
REPAIR = "fft_conv/fft_conv_repair.cu"
KERNELS = {TURN: ("fft_conv_turn",), REPAIR: ("fft_conv_repair",)}
FORWARD, DATA, WEIGHT = 0, 1, 2  # PRODUCT of REPAIR
BLOCKS_AN_SM = 8  # of REPAIR
TILE, THREADS = 32, 256  # of both
TAPS = 11  # the least, of either side
MAX_LINES = 65535  # tiles of TURN along the second side of its grid
FACTORS = (2, 3, 5, 7)  # of sizes for which cuFFT has fast transforms
TUNABLE: dict[str, tuple[int, ...]] = {}


class FftConv(NamedTuple):
    """A convolution of [batch, inputs, height, width] to `outputs` channels."""

    batch: int
    inputs: int
    outputs: int
    height: int
    width: int
    taps_h: int
    taps_w: int
    pad_h: int
    pad_w: int

    @property
    def out_height(self) -> int:
        """Rows of the result."""
        return self.height + 2 * self.pad_h - self.taps_h + 1

    @property
    def out_width(self) -> int:
        """Columns of the result."""
        return self.width + 2 * self.pad_w - self.taps_w + 1

    @property
    def sizes(self) -> tuple[int, int]:
        """Of the transforms: an image and its padding on one side, on which what is beyond the other side comes down.

        So much serves all three products: what wraps around falls on results that nobody wants. And no less than the taps.
        """
        return (
            fast(max(self.height + self.pad_h, self.taps_h, self.out_height)),
            fast(max(self.width + self.pad_w, self.taps_w, self.out_width)),
        )

    @property
    def frequencies(self) -> int:
        """Of a real image."""
        rows, columns = self.sizes
        return rows * (columns // 2 + 1)


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], weight_shape: tuple[int, ...], padding: tuple[int, int]) -> FftConv:
    """The convolution of an input of `shape` [N, I, H, W] by a weight [O, I, R, S]."""
    n, inputs, h, w = shape
    return FftConv(n, inputs, weight_shape[0], h, w, weight_shape[2], weight_shape[3], *padding)


@lru_cache(maxsize=1024)
def fast(size: int) -> int:
    """The least even size from here on whose factors cuFFT is fast at."""
    while True:
        rest = size
        for factor in FACTORS:
            while rest % factor == 0:
                rest //= factor
        if rest == 1 and size % 2 == 0:
            return size
        size += 1


# ---- where it wins

KIND = "fft conv"


def name(taps: tuple[int, int]) -> str:
    """`fft conv k31x31`."""
    return f"{KIND} k{taps[0]}x{taps[1]}"


def wins(call: FftConv, dtype: str) -> str:
    """Why PyTorch's own operation is left in place; empty where transforms are measured to win."""
    return dispatch_table.refusal("fft_conv", KIND, dtype)


# ---- what is supported


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    sized = call(sizes.shape, sizes.weight_shape, sizes.padding)
    if sized.out_height < 1 or sized.out_width < 1:
        return "empty output"
    planes = max(sized.batch * sized.inputs, sized.batch * sized.outputs, sized.inputs * sized.outputs)
    return "more frequencies or planes than a grid has" if max(sized.frequencies, planes) > TILE * MAX_LINES else ""


SUPPORTS = Support(
    channels=whole_channels,
    taps=lambda rows, columns: min(rows, columns) >= TAPS,
    strides=(1,),
    padding=padded_within_taps,
    storage=("float32",),
    limit=_limit,
)


# (batch, channels in and out, side, taps).
TRAINED = ((32, 64, 64, 15), (32, 64, 64, 11), (32, 64, 64, 31), (32, 64, 64, 21))


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros: of REPAIR which product it is of."""
    return tuple({"PRODUCT": product} for product in (FORWARD, DATA, WEIGHT)) if source == REPAIR else ({},)


def bytes_moved(call: FftConv) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; x and dy in, dx out; weights once, and their gradient."""
    x = 4 * call.batch * call.inputs * call.height * call.width
    y = 4 * call.batch * call.outputs * call.out_height * call.out_width
    weight = 4 * call.inputs * call.outputs * call.taps_h * call.taps_w
    return x + y + weight, 2 * x + y + 2 * weight


def flops(call: FftConv) -> tuple[int, int]:
    """Operations of forward and backward as transforms need them: a complex product of a frequency takes 8."""
    products = 8 * call.frequencies * call.batch * call.inputs * call.outputs
    return products, 2 * products
