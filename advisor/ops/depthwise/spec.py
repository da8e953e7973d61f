"""What the depthwise kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from advisor.core import architectures
from advisor.ops import dispatch_table, shared_memory
from advisor.ops.convolution_support import Sizes, Support, told
from advisor.ops.depthwise import bands
from advisor.ops.dispatch import with_moments

FORWARD = "depthwise/depthwise_forward.cu"
BACKWARD_DATA = "depthwise/depthwise_backward_data.cu"
BACKWARD_WEIGHT = "depthwise/depthwise_backward_weight.cu"
BAND = "depthwise/depthwise_band.cu"
BAND_WEIGHT = "depthwise/depthwise_band_weight.cu"
STRIPS = "depthwise/depthwise_strips.cu"
BACKWARD = "depthwise/depthwise_backward.cu"
WEIGHT_SUM = "depthwise/depthwise_weight_sum.cu"
KERNELS = {
    STRIPS: ("depthwise_strips",),
    BACKWARD: ("depthwise_backward",),
    BAND: ("depthwise_band",),
    BAND_WEIGHT: ("depthwise_band_weight",),
    FORWARD: ("depthwise_forward",),
    BACKWARD_DATA: ("depthwise_backward_data",),
    BACKWARD_WEIGHT: ("depthwise_backward_weight",),
    WEIGHT_SUM: ("depthwise_backward_weight_sum",),
}

STORAGE = {"float32": 0, "float16": 1, "bfloat16": 2}
TAPS = (3, 5, 7, 9, 11, 13, 15)
CHANNELS = 2  # a thread's: 4 bytes of fp16 or bf16, so that a warp reads 128 bytes of one pixel
THREADS = 128  # a multiple of 4 warps, one for each of an SM's schedulers
SUM_COLUMNS = 32  # of partial sums that a block of the last pass adds up; written into the source as well
SUM_THREADS = 512  # of such a block
SHARED_BYTES = shared_memory.WITHOUT_ASKING
MAX_TILE = 64  # channel vectors a block covers: 256 bytes of a pixel in half precision
SECTOR = 32  # bytes that DRAM and L2 move at least
MAX_SEGMENTS = 8
DILATIONS = (2, 4, 6, 12, 18, 24, 36)  # that networks have: of those 12 is on file
MAX_PASSES = 16  # items that a thread of the ring kernels takes one after the other, at most
ITEM_ROWS = 2  # what starting and ending a strip costs, in rows of its work: index arithmetic, first loads, last stores
REGISTERS = 65536  # of an SM
BAND_TAPS = 7  # whose windows of 8 outputs are at most 16 pixels
BAND_TILE = 16  # channels of a block of the tensor-core kernels: a 32-byte sector of a pixel
BAND_CHANNELS = 4  # of a warp of theirs, where they divide the call's; else 2
BAND_COPIED = 2  # a thread copies this many times a warp's channels at once: fewer instructions, more bank conflicts
# Output columns beyond which a thread of BAND copies one warp's channels at once (bf16, batch 256, on an H200 in one run, forward and data
# gradient: 0.132 and 0.129 against 0.143 and 0.147 ms at 96 x 56 x 56; 0.078 against 0.074 at 192 x 28 x 28, 0.048 against 0.043
# at 384 x 14 x 14).
BAND_WIDE = 28
BAND_STAGES = 4  # steps that they copy ahead: of a row in BAND_WEIGHT, of bands.ROWS rows in BAND
ALIGNMENT = 16  # bytes: what a thread copies at once, at most
TUNABLE = {"BAND_TILE": (16, 32), "BAND_CHANNELS": (2, 4), "BAND_WIDE": (7, 28, 56)}
# Elements of one image's row of pixels must fit 32-bit byte offsets with room for a window.
MAX_WINDOW_BYTES = 2**31 - 1


class DepthwiseConv(NamedTuple):
    """One depthwise convolution: sizes of input and output, k x k taps."""

    batch: int
    channels: int
    height: int
    width: int
    out_height: int
    out_width: int
    kernel: int
    stride: int
    padding: tuple[int, int]
    dilation: int

    def transposed(self) -> DepthwiseConv:
        """With stride 1: the convolution with flipped taps that gives the data gradient, from dy to dx."""
        span = self.dilation * (self.kernel - 1)
        return self._replace(
            height=self.out_height,
            width=self.out_width,
            out_height=self.height,
            out_width=self.width,
            padding=(span - self.padding[0], span - self.padding[1]),
        )


@lru_cache(maxsize=4096)
def call(shape: tuple[int, ...], kernel: int, stride: int, padding: tuple[int, int], dilation: int) -> DepthwiseConv:
    """The call on an input of `shape` [N, C, H, W]."""
    n, c, h, w = shape
    span = dilation * (kernel - 1) + 1
    return DepthwiseConv(
        n,
        c,
        h,
        w,
        (h + 2 * padding[0] - span) // stride + 1,
        (w + 2 * padding[1] - span) // stride + 1,
        kernel,
        stride,
        padding,
        dilation,
    )


def name(kernel: int, stride: int, dilation: int = 1, *, bias: bool = False) -> str:
    """`depthwise k5 s2`."""
    return f"depthwise k{kernel} s{stride}" + (f" d{dilation}" if dilation > 1 else "") + (" bias" if bias else "")


def wins(
    *, channels: int, kernel: int, stride: int, dilation: int, image: int, bias: bool = False, dtype: str = ""
) -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels win.

    On an H200 forward and backward together are faster than cuDNN's at every case measured without dilation, in each dtype: 3 and 5
    taps, and at stride 1 7 and, in bf16, 9. Of channel counts that are no multiple of 8 only 3 taps at stride 1 are on file, and of dilated ones
    12 pixels: in 0.08 and 0.36 of the time. 24 pixels on an image of 16 take 1.2: but for the middle one, taps are outside.

    Args:
        image: the smaller side of the input's image.
        dtype: empty for any.
    """
    sizes = {"beyond_image": dilation - image} if dilation > 1 else {}
    return dispatch_table.refusal(
        "depthwise", kind(kernel, stride, dilation, bias=bias, channels=channels), dtype, sizes
    )


def kind(kernel: int, stride: int, dilation: int = 1, *, bias: bool = False, channels: int = 8) -> str:
    """`depthwise k3 s1 bias, odd`: odd are channel counts that are no multiple of 8."""
    return name(kernel, stride, dilation, bias=bias) + (", odd" if channels % 8 else "")


def moments_win(call: DepthwiseConv, dtype: str) -> str:
    """Why the batch norm behind the convolution reads its result for its statistics itself; empty where it need not."""
    if not ringed(call, dtype, "forward"):
        return "another kernel's forward leaves no moments"
    return dispatch_table.refusal("depthwise", with_moments(kind(call.kernel, call.stride)), dtype)


def _channels(sizes: Sizes) -> str:
    c = sizes.shape[1]
    if sizes.groups == c and sizes.weight_shape[:2] == (c, 1):
        return ""
    return "not depthwise: " + (
        f"{sizes.groups} groups of {c} channels" if sizes.groups != c else "several outputs a channel"
    )


def _spacing(sizes: Sizes) -> str:
    dilation, padding = sizes.dilation, sizes.padding
    if dilation[0] != dilation[1]:
        return told("dilation", dilation)
    if dilation[0] > 1 and sizes.stride[0] > 1:
        return "stride and dilation at once"
    outside = min(padding) < 0 or max(padding) > dilation[0] * (sizes.weight_shape[-1] - 1)
    return f"{told('padding', padding)} is wider than the taps" if outside else ""


def _limit(sizes: Sizes, dtype: str, arch: int) -> str:
    kernel, dilation = sizes.weight_shape[-1], sizes.dilation[0]
    sized = call(sizes.shape, kernel, sizes.stride[0], sizes.padding, dilation)
    if sized.out_height < 1 or sized.out_width < 1:
        return "empty output"
    if architectures.of(arch).roomy and (sized.kernel, sized.stride, dtype == "float32") in _SPILLED_ON_ROOMY:
        return f"{sized.kernel} x {sized.kernel} taps in {dtype} have too few registers on sm_{arch}"
    if sized.channels * dilation * 4 * (2 * kernel + 16) > MAX_WINDOW_BYTES:
        return "a window of pixels is beyond 32-bit offsets"
    return ""


SUPPORTS = Support(
    channels=_channels,
    square=True,
    taps=lambda rows, columns: columns in TAPS,
    strides=(1, 2),
    dilates=True,
    padding=_spacing,
    vectors=lambda sizes: (
        "" if sizes.shape[1] % CHANNELS == 0 else f"{sizes.shape[1]} channels are no multiple of {CHANNELS}"
    ),
    storage=STORAGE,
    weight=STORAGE,
    limit=_limit,
)


# ---- what is compiled


@dataclass(frozen=True, slots=True)
class Config:
    """What a kernel is compiled with for one call. A thread owns CHANNELS channels and `strip` pixels of a row.

    `blocks` of `threads` threads run on an SM at once: it caps a thread's registers at 65536 / (threads * blocks).
    """

    strip: int
    blocks: int
    threads: int = THREADS
    depth: int = 1  # rows in flight before the one that is worked on
    keep_taps: bool = False  # in registers; else they are read from shared memory once a row
    tap_rows: int = 0  # weight gradient: rows of taps that a thread has sums for


# As many blocks an SM as leave registers enough that nothing is spilled on sm_80 and sm_90 (ptxas 13.0 and 13.5; bf16, fp16, fp32).
# By (k, stride, fp32 storage); where there are two, the width of the row decides.
_FORWARD: dict[tuple[int, int, bool], tuple[Config, ...]] = {
    (3, 1, False): (Config(7, 4, depth=2, keep_taps=True), Config(4, 4, depth=2, keep_taps=True)),
    (3, 2, False): (Config(7, 2, keep_taps=True), Config(4, 4, keep_taps=True)),
    (5, 1, False): (Config(7, 3), Config(4, 4)),
    (5, 2, False): (Config(7, 2), Config(4, 3)),
    (7, 1, False): (Config(7, 2), Config(4, 3)),
    (7, 2, False): (Config(7, 2), Config(4, 3)),
    (9, 1, False): (Config(4, 2),),
    (9, 2, False): (Config(4, 2),),
    (11, 1, False): (Config(4, 2),),
    (11, 2, False): (Config(4, 2),),
    (13, 1, False): (Config(4, 2),),
    (13, 2, False): (Config(2, 2),),
    (15, 1, False): (Config(2, 2),),
    (15, 2, False): (Config(2, 2),),
    (3, 1, True): (Config(4, 4, depth=2, keep_taps=True),),
    (3, 2, True): (Config(4, 3, keep_taps=True),),
    (5, 1, True): (Config(4, 4),),
    (5, 2, True): (Config(4, 3),),
    (7, 1, True): (Config(4, 3),),
    (7, 2, True): (Config(4, 2),),
    (9, 1, True): (Config(4, 2),),
    (9, 2, True): (Config(4, 2),),
    (11, 1, True): (Config(4, 2),),
    (11, 2, True): (Config(2, 2),),
    (13, 1, True): (Config(2, 2),),
    (13, 2, True): (Config(2, 2),),
    (15, 1, True): (Config(2, 2),),
    (15, 2, True): (Config(2, 2),),
}
# In their place on sm_100, where they would spill 8 to 530 bytes: a block less an SM or a shorter strip. Not measured.
_ROOMY_FORWARD: dict[tuple[int, int, bool], tuple[Config, ...]] = {
    (5, 1, False): (Config(7, 3), Config(4, 3)),
    (7, 1, False): (Config(7, 2), Config(4, 2)),
    (7, 2, False): (Config(4, 2),),
    (9, 2, False): (Config(2, 2),),
    (11, 1, False): (Config(2, 2),),
    (11, 2, False): (Config(2, 2),),
    (13, 1, False): (Config(2, 2),),
    (5, 1, True): (Config(4, 3),),
    (5, 2, True): (Config(4, 2),),
    (7, 1, True): (Config(4, 2),),
    (7, 2, True): (Config(2, 2),),
    (9, 2, True): (Config(2, 2),),
    (11, 1, True): (Config(2, 2),),
}
_SPILLED_ON_ROOMY = frozenset({(15, 2, False), (11, 2, True), (13, 2, True), (15, 1, True), (15, 2, True)})
_DATA: dict[tuple[int, bool], tuple[Config, ...]] = {
    (3, False): (Config(4, 4, depth=2),),
    (5, False): (Config(4, 3),),
    (7, False): (Config(2, 2),),
    (9, False): (Config(2, 2),),
    (11, False): (Config(1, 2),),
    (13, False): (Config(1, 2),),
    (15, False): (Config(1, 2),),
    (3, True): (Config(4, 4),),
    (5, True): (Config(4, 2),),
    (7, True): (Config(2, 2),),
    (9, True): (Config(2, 2),),
    (11, True): (Config(1, 2),),
    (13, True): (Config(1, 2),),
    (15, True): (Config(1, 2),),
}
_WEIGHT: dict[tuple[int, int, bool], tuple[Config, ...]] = {
    (3, 1, False): (Config(7, 3, tap_rows=3), Config(4, 4, tap_rows=3)),
    (3, 2, False): (Config(7, 3, tap_rows=3), Config(4, 4, tap_rows=3)),
    (5, 1, False): (Config(7, 2, tap_rows=5), Config(4, 3, tap_rows=5)),
    (5, 2, False): (Config(4, 2, tap_rows=5),),
    (7, 1, False): (Config(4, 2, tap_rows=7),),
    (7, 2, False): (Config(4, 2, tap_rows=4),),
    (9, 1, False): (Config(4, 2, tap_rows=5),),
    (9, 2, False): (Config(4, 2, tap_rows=4),),
    (11, 1, False): (Config(4, 2, tap_rows=4),),
    (11, 2, False): (Config(4, 2, tap_rows=2),),
    (13, 1, False): (Config(4, 2, tap_rows=3),),
    (13, 2, False): (Config(4, 2, tap_rows=2),),
    (15, 1, False): (Config(4, 2, tap_rows=3),),
    (15, 2, False): (Config(4, 2, tap_rows=2),),
    (3, 1, True): (Config(4, 3, tap_rows=3),),
    (3, 2, True): (Config(4, 3, tap_rows=3),),
    (5, 1, True): (Config(4, 2, tap_rows=5),),
    (5, 2, True): (Config(4, 2, tap_rows=5),),
    (7, 1, True): (Config(4, 2, tap_rows=4),),
    (7, 2, True): (Config(4, 2, tap_rows=2),),
    (9, 1, True): (Config(4, 2, tap_rows=3),),
    (9, 2, True): (Config(4, 2, tap_rows=2),),
    (11, 1, True): (Config(4, 2, tap_rows=3),),
    (11, 2, True): (Config(4, 2, tap_rows=2),),
    (13, 1, True): (Config(4, 2, tap_rows=2),),
    (13, 2, True): (Config(2, 2, tap_rows=2),),
    (15, 1, True): (Config(4, 2, tap_rows=2),),
    (15, 2, True): (Config(2, 2, tap_rows=2),),
}


def _choose(configs: tuple[Config, ...], width: int) -> Config:
    """The strip that covers a row with the least work: as many pixels as it has, and two more for its ends."""
    return min(configs, key=lambda c: (-(-width // c.strip) * (c.strip + 2), -c.strip))


def forward_configs(kernel: int, stride: int, dtype: str, arch: int) -> tuple[Config, ...]:
    """For FORWARD: there are two where the width of the row decides."""
    key = kernel, stride, dtype == "float32"
    return _ROOMY_FORWARD.get(key, _FORWARD[key]) if architectures.of(arch).roomy else _FORWARD[key]


def forward_config(call: DepthwiseConv, dtype: str, arch: int) -> Config:
    """For the forward, and with `call.transposed()` for the data gradient of stride 1."""
    return _choose(forward_configs(call.kernel, call.stride, dtype, arch), -(-call.out_width // call.dilation))


def data_config(call: DepthwiseConv, dtype: str) -> Config:
    """For the data gradient of stride 2."""
    return _choose(_DATA[call.kernel, dtype == "float32"], call.width // 2 + 1)


def weight_config(call: DepthwiseConv, dtype: str) -> Config:
    """For the weight gradient."""
    return _choose(_WEIGHT[call.kernel, call.stride, dtype == "float32"], -(-call.out_width // call.dilation))


def _tile_limit(kernel: int) -> int:
    """Channel vectors whose taps fit in shared memory beside nothing else."""
    row = -(-kernel * CHANNELS // 4) * 4
    words = kernel * row + (4 if kernel * row // 4 % 2 == 0 else 0)
    return min(MAX_TILE, SHARED_BYTES // (4 * words))


def _base_defines(call: DepthwiseConv, config: Config, dtype: str, weight_dtype: str) -> dict[str, int]:
    return {
        "K": call.kernel,
        "CH": CHANNELS,
        "STRIP": config.strip,
        "THREADS": config.threads,
        "MIN_BLOCKS": config.blocks,
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": STORAGE[weight_dtype],
    }


def forward_defines(
    call: DepthwiseConv, config: Config, dtype: str, weight_dtype: str, *, flip: bool
) -> dict[str, int]:
    """Macros of FORWARD."""
    return {
        **_base_defines(call, config, dtype, weight_dtype),
        "STRIDE": call.stride,
        "DEPTH": config.depth,
        "KEEP_TAPS": int(config.keep_taps),
        "MAX_TILE": _tile_limit(call.kernel),
        "FLIP": int(flip),
    }


def data_defines(call: DepthwiseConv, config: Config, dtype: str, weight_dtype: str) -> dict[str, int]:
    """Macros of BACKWARD_DATA."""
    return {
        **_base_defines(call, config, dtype, weight_dtype),
        "DEPTH": config.depth,
        "MAX_TILE": _tile_limit(call.kernel),
    }


def weight_defines(call: DepthwiseConv, config: Config, dtype: str, weight_dtype: str) -> dict[str, int]:
    """Macros of BACKWARD_WEIGHT."""
    return {
        **_base_defines(call, config, dtype, weight_dtype),
        "STRIDE": call.stride,
        "TAP_ROWS": config.tap_rows,
    }


# ---- the tensor-core kernels


def bandable(call: DepthwiseConv, dtype: str) -> bool:
    """Whether the tensor-core kernels can take this call: 16-bit storage, 7 taps at stride 1, offsets in images of 31 bits."""
    pixels = max(call.height * call.width, call.out_height * call.out_width)
    return (
        dtype != "float32"
        and (call.kernel, call.stride, call.dilation) == (BAND_TAPS, 1, 1)
        and bands.STRIPS * pixels * call.channels * 2 < 2**31
    )


def banded(call: DepthwiseConv, dtype: str, kind: str) -> bool:
    """Whether the tensor-core kernels take the "forward", "data" or "weight" pass of this call; else the fp32 FMA kernels do.

    The one place that chooses between them, by what an H200 measured (bf16, batch 256, docs/notes/kernels/convolutions-depthwise.md): 7 taps at stride 1, the
    weight gradient everywhere (0.139 against 0.329 ms at 96 x 56 x 56) and the other two on rows wider than 7 (of the kernel of one row
    a step, each from one run: this one takes 0.75 there and 0.84 at 384 x 14 x 14, the ring 1.24 and 0.98).
    """
    return bandable(call, dtype) and (kind == "weight" or call.out_width > 7)


@dataclass(frozen=True, slots=True)
class RowBand:
    """What a tensor-core kernel is compiled with and launched on for one call."""

    layout: bands.BandLayout
    block: bands.Block


# Registers a thread needs so that nothing is spilled on sm_80 and sm_90 (ptxas 13.0), by channels of a warp.
_BAND_REGISTERS = {2: 128, 4: 255}


def band(call: DepthwiseConv, *, weight: bool) -> RowBand:
    """For BAND_WEIGHT, or for BAND."""
    cut = bands.layout(
        batch=call.batch, width=call.width, out_width=call.out_width, kernel=call.kernel, pad=call.padding[1]
    )
    group = BAND_CHANNELS if call.channels % BAND_CHANNELS == 0 else 2
    copied = 1 if not weight and call.out_width > BAND_WIDE else BAND_COPIED
    copy = next(size for size in (16, 8, 4) if size <= 2 * group * copied and 2 * call.channels % size == 0)
    copy = max(copy, 2 * group)
    for most, fewest in ((BAND_TILE, 3), (24, 3), (16, 3), (16, 2), (8, 2)):
        tile = bands.tile(call.channels, copy // 2, min(most, BAND_TILE))
        for stages in range(BAND_STAGES, fewest - 1, -1):
            block = bands.Block(tile, group, copy, stages, 1)
            used = bands.shared(cut, block, weight=weight)
            threads = _BAND_REGISTERS[group] * block.threads
            resident = min(REGISTERS // threads, bands.SM_SHARED_BYTES // (used + shared_memory.OF_THE_SYSTEM), 16)
            if used <= bands.SHARED_BYTES and resident > 0:
                return RowBand(cut, replace(block, blocks=resident))
    raise AssertionError(f"no block for {call}")  # 8 channels always fit: tests go over all layouts


def sources(call: DepthwiseConv, dtype: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The kernels that forward and backward run."""
    forward = STRIPS if ringed(call, dtype, "forward") else BAND if banded(call, dtype, "forward") else FORWARD
    if ringed(call, dtype, "backward"):
        return (forward,), (BACKWARD, WEIGHT_SUM)
    data = BAND if banded(call, dtype, "data") else BACKWARD_DATA
    if call.stride == 1 and data != BAND:
        data = STRIPS if ringed(call, dtype, "data") else FORWARD
    weight = BAND_WEIGHT if banded(call, dtype, "weight") else BACKWARD_WEIGHT
    return (forward,), (data, weight, WEIGHT_SUM)


def band_defines(
    call: DepthwiseConv, plan: RowBand, dtype: str, weight_dtype: str, *, bias: bool, flip: bool = False
) -> dict[str, int]:
    """Macros of BAND; of BAND_WEIGHT without FLIP."""
    return {
        "K": call.kernel,
        "CH": plan.block.channels,
        "TILE": plan.block.tile,
        "COPY": plan.block.copy,
        "STRIPS": plan.layout.strips,
        "PIXELS": plan.layout.pixels,
        "WINDOW": plan.layout.window,
        "PIECE": plan.layout.piece,
        "STAGES": plan.block.stages,
        "MIN_BLOCKS": plan.block.blocks,
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": STORAGE[weight_dtype],
        "BIAS": int(bias),
        "FLIP": int(flip),
    }


def band_geometry(call: DepthwiseConv, plan: RowBand, sm_count: int) -> bands.BandGeometry:
    """Of BAND and BAND_WEIGHT, whose work is counted in rows of the result or of dy."""
    return bands.geometry(
        plan.layout,
        plan.block,
        batch=call.batch,
        channels=call.channels,
        rows=call.out_height,
        halo=call.kernel - 1,
        most_segments=MAX_SEGMENTS,
        sm_count=sm_count,
    )


def sum_defines(call: DepthwiseConv, weight_dtype: str) -> dict[str, int]:
    """Macros of WEIGHT_SUM."""
    return {"K": call.kernel, "THREADS": SUM_THREADS, "WEIGHT_STORAGE": STORAGE[weight_dtype]}


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros to compile `source` with in the test for spills: all strides and strips of k 3, 5 and 7, the largest k, each storage."""
    if source in (BAND, BAND_WEIGHT):
        return _band_variants(source)
    if source in (STRIPS, BACKWARD):
        return _ring_variants(source)
    if source == WEIGHT_SUM:
        return tuple(sum_defines(call((1, 2, 16, 16), k, 1, (0, 0), 1), "float32") for k in TAPS)
    found = []
    for kernel in (3, 5, 7, 15):
        for stride in (1, 2):
            for dtype, weight_dtype in (("bfloat16", "float32"), ("float32", "float32"), ("float16", "float16")):
                if (dtype == "float16" or kernel == 15) and (stride, kernel) != (1, 15 if dtype == "bfloat16" else 3):
                    continue  # fp16 differs from bf16 in conversions only
                sized = call((1, 64, 64, 64), kernel, stride, (kernel // 2, kernel // 2), 1)
                wide = dtype == "float32"
                if source == FORWARD and not (
                    architectures.of(arch).roomy and (kernel, stride, wide) in _SPILLED_ON_ROOMY
                ):
                    found += [
                        forward_defines(sized, config, dtype, weight_dtype, flip=False)
                        for config in forward_configs(kernel, stride, dtype, arch)
                    ]
                elif source == BACKWARD_DATA and stride == 2:
                    found += [data_defines(sized, config, dtype, weight_dtype) for config in _DATA[kernel, wide]]
                elif source == BACKWARD_WEIGHT:
                    found += [
                        weight_defines(sized, config, dtype, weight_dtype) for config in _WEIGHT[kernel, stride, wide]
                    ]
    return tuple(found)


def _ring_variants(source: str) -> tuple[dict[str, int], ...]:
    """Each strip in bf16 and fp32, fp16 once; the calls of networks' channel counts."""
    backward = source == BACKWARD
    found = []
    for (kernel, stride, wide), rings in (BACKWARD_RINGS if backward else STRIP_RINGS).items():
        sized = call((64, 192, 56, 56), kernel, stride, (kernel // 2, kernel // 2), 1)
        for dtype in ("float32",) if wide else ("bfloat16", "float16") if (kernel, stride) == (3, 1) else ("bfloat16",):
            for ring in rings:
                fitted = fit(ring, sized, dtype, backward=backward)
                bias = kernel == 7
                found.append(ring_defines(sized, fitted, dtype, "float32", backward=backward, bias=bias))
                if not backward:
                    found.append(ring_defines(sized, fitted, dtype, "float32", backward=False, bias=bias, moments=True))
    return tuple(found)


def _band_variants(source: str) -> tuple[dict[str, int], ...]:
    """Of the tensor-core kernels, for the calls that they take: each cut of rows that networks have, fp16 once."""
    found = []
    for channels in (58, 96, 72):
        for side, dtype in ((112, "bfloat16"), (56, "bfloat16"), (14, "bfloat16"), (7, "bfloat16"), (28, "float16")):
            sized = call((64, channels, side, side), BAND_TAPS, 1, (BAND_TAPS // 2,) * 2, 1)
            for kind in ("weight",) if source == BAND_WEIGHT else ("forward", "data"):
                if banded(sized, dtype, kind):
                    plan, bias = band(sized, weight=kind == "weight"), kind != "data"
                    found.append(band_defines(sized, plan, dtype, "float32", bias=bias, flip=kind == "data"))
    return tuple({tuple(sorted(each.items())): each for each in found}.values())


# ---- how it is launched


@dataclass(frozen=True, slots=True)
class DepthwiseGeometry:
    """Launch geometry.

    An item is a strip of `strip` columns and `segment_rows` rows of one image (of one of its dilated lattices). A block takes
    `tile` channel vectors and threads // tile items at a time; grid is (blocks over items, channel tiles, groups of tap rows).
    """

    grid: tuple[int, int, int]
    items: int
    vectors: int
    tile: int
    strips: int
    segments: int
    segment_rows: int


def tile_of(vectors: int, threads: int, most: int, vector_bytes: int) -> int:
    """Channel vectors a block covers: those that leave few threads idle and whose bytes fill the sectors that they touch.

    A tile of one vector leaves no thread idle, and moves 32 bytes for each 4: on an H200 such tiles cost up to four times.
    """

    def worth(tile: int) -> float:
        busy = (threads // tile * tile / threads) * (vectors / (-(-vectors // tile) * tile))
        piece = tile * vector_bytes
        return busy * piece / (piece + SECTOR + (SECTOR if piece % SECTOR and tile < vectors else 0))

    return max(range(1, min(vectors, threads, most) + 1), key=lambda tile: (round(worth(tile), 3), tile))


def _geometry(
    call: DepthwiseConv,
    config: Config,
    rows: int,
    columns: int,
    lattices: int,
    halo: int,
    groups: int,
    most: int,
    sm_count: int,
) -> DepthwiseGeometry:
    """As many blocks as run at once, all with equally many items; images are cut into segments of rows where that evens it out.

    Args:
        rows, columns: of one lattice, as the kernel walks over them. lattices: in one image.
        halo: rows that a segment reads beyond its own.
    """
    vectors = call.channels // CHANNELS
    tile = tile_of(vectors, config.threads, most, 2 * CHANNELS)
    tiles = -(-vectors // tile)
    per_pass = config.threads // tile
    at_once = max(1, sm_count * config.blocks // (tiles * groups))
    strips = -(-columns // config.strip)
    best: tuple[float, int, int, int, int] | None = None
    for wanted in range(1, min(MAX_SEGMENTS, rows) + 1):
        segment_rows = -(-rows // wanted)
        segments = -(-rows // segment_rows)
        items = call.batch * lattices * strips * segments
        passes = -(-items // (per_pass * at_once))
        cost = passes * (segment_rows + (halo if segments > 1 else 0) + ITEM_ROWS)
        if best is None or cost < best[0]:
            best = (cost, passes, items, segments, segment_rows)
    assert best is not None  # rows is at least 1
    _, passes, items, segments, segment_rows = best
    return DepthwiseGeometry(
        grid=(-(-items // (per_pass * passes)), tiles, groups),
        items=items,
        vectors=vectors,
        tile=tile,
        strips=strips,
        segments=segments,
        segment_rows=segment_rows,
    )


def forward_geometry(call: DepthwiseConv, config: Config, sm_count: int) -> DepthwiseGeometry:
    """Of FORWARD."""
    rows, columns = (-(-size // call.dilation) for size in (call.out_height, call.out_width))
    halo = -(-call.kernel // call.stride) - 1
    return _geometry(call, config, rows, columns, call.dilation**2, halo, 1, _tile_limit(call.kernel), sm_count)


def data_geometry(call: DepthwiseConv, config: Config, sm_count: int) -> DepthwiseGeometry:
    """Of BACKWARD_DATA: rows and columns of dx in pairs that the padded image's even rows and columns begin."""
    rows, columns = (
        (size - 1 + pad) // 2 - pad // 2 + 1 for size, pad in zip((call.height, call.width), call.padding, strict=True)
    )
    return _geometry(call, config, rows, columns, 1, call.kernel // 2, 1, _tile_limit(call.kernel), sm_count)


def weight_geometry(call: DepthwiseConv, config: Config, sm_count: int) -> DepthwiseGeometry:
    """Of BACKWARD_WEIGHT."""
    rows, columns = (-(-size // call.dilation) for size in (call.out_height, call.out_width))
    groups = -(-call.kernel // config.tap_rows)
    halo = -(-config.tap_rows // call.stride) - 1
    return _geometry(call, config, rows, columns, call.dilation**2, halo, groups, MAX_TILE, sm_count)


# ---- the kernels whose pixels come through a ring in shared memory


@dataclass(frozen=True, slots=True)
class Ring:
    """What STRIPS or BACKWARD is compiled with: a thread owns `channels` channels and `strip` pixels (of dy) of a row.

    `depth` steps of a thread's pixels lie in shared memory, one of them being worked on. `blocks` of `threads` threads run on an
    SM at once. A block covers at most `tile` channels.
    """

    strip: int
    channels: int
    depth: int
    blocks: int
    threads: int = THREADS
    keep_taps: bool = True  # in registers; BACKWARD can read them from shared memory a row at a time
    tile: int = 128
    fixed: bool = False  # compiled for one number of channels: 5 to 9 % fewer instructions, and a variant for each
    least: int = 1  # columns of a row, from which on it is taken


# By (k, stride, fp32 storage): the first whose channels divide the call's and whose rows are wide enough. An H200 chose among those
# of docs/notes/kernels/convolutions-depthwise.md (bf16, batch 256); as many blocks an SM as leave registers enough that nothing is spilled on sm_80 and sm_90.
STRIP_RINGS: dict[tuple[int, int, bool], tuple[Ring, ...]] = {
    (3, 1, False): (Ring(4, 4, 4, 2, threads=192, tile=160, least=8), Ring(7, 2, 4, 4)),
    (3, 2, False): (Ring(2, 4, 3, 4), Ring(4, 2, 3, 4)),
    (5, 1, False): (Ring(14, 2, 3, 2, fixed=True, least=8), Ring(7, 2, 4, 3, fixed=True)),
    (5, 2, False): (Ring(4, 2, 3, 3, tile=72, fixed=True),),
    (7, 1, False): (Ring(7, 2, 4, 2, tile=64, fixed=True),),
    (3, 1, True): (Ring(4, 2, 4, 4),),
    (3, 2, True): (Ring(4, 2, 2, 4),),
    (5, 1, True): (Ring(4, 2, 3, 3, fixed=True),),
    (5, 2, True): (Ring(2, 2, 2, 3, fixed=True),),
    (7, 1, True): (Ring(4, 2, 3, 2, tile=64, fixed=True),),
}
# Not k3 s2 in fp32: two kernels take 0.89 ms there for 96 x 112 x 112, one 0.96.
BACKWARD_RINGS: dict[tuple[int, int, bool], tuple[Ring, ...]] = {
    (3, 1, False): (Ring(4, 4, 4, 2, tile=64, least=15), Ring(7, 2, 3, 3, tile=64)),
    (3, 2, False): (Ring(7, 2, 2, 2, tile=64, least=28), Ring(2, 4, 3, 3, tile=64), Ring(4, 2, 3, 3, tile=64)),
    (5, 1, False): (Ring(4, 2, 4, 2, tile=64, fixed=True),),
    (5, 2, False): (Ring(2, 2, 4, 2, tile=72, fixed=True),),
    (3, 1, True): (Ring(4, 2, 3, 3, tile=64),),
    (5, 1, True): (Ring(4, 2, 2, 2, keep_taps=False, tile=64, fixed=True),),
    (5, 2, True): (Ring(2, 2, 2, 2, keep_taps=False, tile=64, fixed=True),),
}


def ringed(call: DepthwiseConv, dtype: str, kind: str) -> bool:
    """Whether STRIPS takes the "forward" (or, with stride 1, the data gradient alone), or BACKWARD all gradients of this call."""
    table = BACKWARD_RINGS if kind == "backward" else STRIP_RINGS
    return (
        (call.kernel, call.stride, dtype == "float32") in table
        and call.dilation == 1
        and not (kind != "backward" and banded(call, dtype, kind))
    )


def strips_ring(call: DepthwiseConv, dtype: str) -> Ring:
    """For STRIPS."""
    return _ring(STRIP_RINGS[call.kernel, call.stride, dtype == "float32"], call.out_width, call, dtype, backward=False)


def backward_ring(call: DepthwiseConv, dtype: str) -> Ring:
    """For BACKWARD."""
    columns = -(-call.width // call.stride)
    return _ring(BACKWARD_RINGS[call.kernel, call.stride, dtype == "float32"], columns, call, dtype, backward=True)


def _ring(rings: tuple[Ring, ...], columns: int, call: DepthwiseConv, dtype: str, *, backward: bool) -> Ring:
    """The first that suits the call, as deep as shared memory allows."""
    suited = (r for r in rings if columns >= r.least and call.channels % r.channels == 0)
    return fit(next(suited, rings[-1]), call, dtype, backward=backward)


def fit(ring: Ring, call: DepthwiseConv, dtype: str, *, backward: bool) -> Ring:
    """`ring`, no deeper than shared memory allows."""
    while ring.depth > 2 and ring_bytes(ring, call, dtype, backward=backward) > SHARED_BYTES:
        ring = replace(ring, depth=ring.depth - 1)
    return ring


def ring_bytes(ring: Ring, call: DepthwiseConv, dtype: str, *, backward: bool) -> int:
    """Shared memory of a block."""
    k, s = call.kernel, call.stride
    of_step = s * (s * (ring.strip - 1) + k)
    if backward:
        of_step = ring.strip + -(-k // s) - 1 + s * s * ring.strip
    size = ring.channels * (4 if dtype == "float32" else 2)
    return ring.depth * of_step * ring.threads * size + ring.tile // ring.channels * 4 * _tap_words(k, ring.channels)


def _tap_words(kernel: int, channels: int) -> int:
    """Words in shared memory of a channel vector's taps (depthwise.cuh)."""
    row = -(-kernel * channels // 4) * 4
    return kernel * row + (4 if kernel * row // 4 % 2 == 0 else 0)


def ring_defines(
    call: DepthwiseConv,
    ring: Ring,
    dtype: str,
    weight_dtype: str,
    *,
    backward: bool,
    bias: bool,
    flip: bool = False,
    moments: bool = False,
) -> dict[str, int]:
    """Macros of BACKWARD or of STRIPS, which with `moments` leaves those of its result."""
    own = {"UP": call.stride, "PHASE": call.padding[1] % call.stride, "KEEP_TAPS": int(ring.keep_taps)}
    if not backward:
        own = {"STRIDE": call.stride, "FLIP": int(flip), **({"MOMENTS": 1} if moments else {})}
    return {
        "K": call.kernel,
        "CH": ring.channels,
        "STRIP": ring.strip,
        "DEPTH": ring.depth,
        "THREADS": ring.threads,
        "MIN_BLOCKS": ring.blocks,
        "MAX_TILE": ring.tile // ring.channels,
        "PIXEL": call.channels * (4 if dtype == "float32" else 2) if ring.fixed else 0,
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": STORAGE[weight_dtype],
        "BIAS": int(bias),
        **own,
    }


def ring_geometry(call: DepthwiseConv, ring: Ring, dtype: str, sm_count: int, *, backward: bool) -> DepthwiseGeometry:
    """Of STRIPS or BACKWARD: the passes of a block over items and the rows of an item that are done first.

    An SM is taken to move a constant number of rows a second while all its blocks are resident, and three quarters of that with
    fewer; a block's start (its taps) and end (its sums) count as rows.
    """
    vectors = call.channels // ring.channels
    size = ring.channels * (4 if dtype == "float32" else 2)
    tile = tile_of(vectors, ring.threads, ring.tile // ring.channels, size)
    per_pass, tiles = ring.threads // tile, -(-vectors // tile)
    if backward:
        rows = (call.height - 1 + call.padding[0]) // call.stride + 1 - call.padding[0] // call.stride
        strips = -(-call.width // (call.stride * ring.strip))
        block_rows, halo = 2 + call.kernel**2 / ring.strip, -(-call.kernel // call.stride) - 1
    else:
        rows, strips = call.out_height, -(-call.out_width // ring.strip)
        block_rows, halo = 1 + call.kernel**2 / 16, -(-call.kernel // call.stride) - 1

    def cost(passes: int, segments: int, segment_rows: int) -> float:
        blocks = tiles * -(-call.batch * strips * segments // (per_pass * passes))
        waves, left = divmod(-(-blocks // sm_count), ring.blocks)
        time = waves * ring.blocks + (max(left, 0.75 * ring.blocks) if left else 0)
        return time * (block_rows + passes * (segment_rows + (halo if segments > 1 else 0) + ITEM_ROWS))

    cuts = {-(-rows // -(-rows // wanted)): -(-rows // wanted) for wanted in range(1, min(MAX_SEGMENTS, rows) + 1)}
    found = [
        (cost(p, segments, high), p, segments, high)
        for p in range(1, MAX_PASSES + 1)
        for segments, high in cuts.items()
    ]
    _, passes, segments, segment_rows = min(found)
    items = call.batch * strips * segments
    return DepthwiseGeometry(
        grid=(-(-items // (per_pass * passes)), tiles, 1),
        items=items,
        vectors=vectors,
        tile=tile,
        strips=strips,
        segments=segments,
        segment_rows=segment_rows,
    )


def bytes_moved(call: DepthwiseConv, itemsize: int) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; dy in and dx out, and once more dy and x in for the weight gradient.

    The weights, at most 225 values a channel, are left out. A single kernel for both gradients could save one reading of dy;
    the goals of the project are stated against four tensor passes.
    """
    x = call.batch * call.channels * call.height * call.width * itemsize
    y = call.batch * call.channels * call.out_height * call.out_width * itemsize
    return x + y, 2 * (x + y)


def flops(call: DepthwiseConv) -> tuple[int, int]:
    """Operations of forward and backward: two a tap and output, and twice that."""
    forward = 2 * call.batch * call.channels * call.out_height * call.out_width * call.kernel**2
    return forward, 2 * forward
