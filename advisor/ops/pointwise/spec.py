"""What the 1 x 1 convolution kernel supports, where it wins, and how it is launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from advisor.core import architectures
from advisor.ops import dispatch_table, shared_memory
from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.convolution_support import Sizes, Support, no_padding, whole_channels
from advisor.ops.dispatch import UNMEASURED, with_moments

FORWARD = "pointwise/pointwise_forward.cu"
NORM_GRADIENT = "pointwise/pointwise_norm_gradient.cu"
NORM_FORWARD = "pointwise/pointwise_norm_forward.cu"
KERNELS = {
    FORWARD: ("pointwise_forward",),
    NORM_GRADIENT: ("pointwise_norm_gradient",),
    NORM_FORWARD: ("pointwise_norm_forward",),
}

STORAGE = {"float16": 1, "bfloat16": 2}
OCTET = 8  # channels in 16 bytes
STEP = 16  # channels of x that one product of the tensor cores takes
GROUP = 32  # channels of y that four of them make: 16 bytes a lane
MAX_ROWS = 2**31 - 1 - 4096  # and a tile beyond them, in 32 bits
MAX_IN_CHANNELS = 512  # more leave a block of few columns, and x would be read many times
SM_REGISTERS = 65536
# A thread's registers without spilling, by (tiles, groups): what ptxas 13 needs for sm_80 to sm_100.
REGISTERS = {(1, 1): 80, (2, 1): 80, (4, 1): 128, (1, 2): 128, (2, 2): 128, (4, 2): 255}
GRADIENT_REGISTERS = 128  # of NORM_GRADIENT, with one or two tiles

WARPS = 8  # of a block, about
MAX_GROUPS = 8  # of 32 columns a block
WEIGHT_BYTES = 90 * 1024  # of a block's weights
MAX_STEPS = 8  # of a chunk
STAGES = 2  # chunks in the ring
MAX_TILES = 4  # of 16 rows a warp
# Of NORM_GRADIENT, which holds two more tensors of a tile in registers: one where memory bounds it, which is 3 to 6 % faster up to
# so many channels taken in, and two, for which the weights are read half as often, beyond.
MAX_GRADIENT_TILES = 2
# Of NORM_FORWARD: threads of a block, the channels that they can share out among them, and the most out, whose weights a block holds.
NORM_FORWARD_THREADS, NORM_FORWARD_CHANNELS, NORM_FORWARD_MOST = 512, (128, 256, 512), 128
ONE_TILE_CHANNELS = 128
BLOCKS = 2  # that an SM should hold at least
MAX_BLOCKS = 4
TUNABLE = {"MAX_TILES": (2, 4), "STAGES": (2, 4), "MAX_STEPS": (4, 8), "WARPS": (4, 8)}

# Of a result of up to so many bytes a norm in one launch finds in L2 what it reads twice.
IN_L2_BYTES = 56 << 20


def name(in_channels: int, out_channels: int) -> str:
    """`1x1 64->256`."""
    return f"1x1 {in_channels}->{out_channels}"


def wins(*, dtype: str, rows: int, in_channels: int, out_channels: int) -> str:
    """Why PyTorch's own convolution and the batch norm's pass over its result are left in place; empty where the kernel wins.

    `rows` are pixels, of all images.
    """
    sizes: dict[str, float] = {"rows": rows, "in_channels": in_channels}
    kind, nbytes = with_moments("1x1"), 2 * rows * out_channels
    unused = batchnorm_act.takes_moments(nbytes, False)
    if reason := dispatch_table.refusal("pointwise", kind, dtype, sizes) or unused:
        return reason
    sizes |= {"out_channels": out_channels, **_intensity(in_channels, out_channels, in_l2=nbytes <= IN_L2_BYTES)}
    return dispatch_table.refusal("pointwise", kind, dtype, sizes)


def _intensity(in_channels: int, out_channels: int, *, in_l2: bool) -> dict[str, float]:
    """Products a value that is read or written, and by how much L2 has less of what comes than of what goes."""
    found = in_channels * out_channels / (in_channels + out_channels)
    return {"narrowed_in_l2": in_channels / out_channels, "intensity_in_l2": found} if in_l2 else {"intensity": found}


def behind_norm(activation: str, residual: bool, channels: int, out_channels: int) -> str:
    """`bn+add+relu+1x1 256->64`."""
    return f"{batchnorm_act.name(activation, residual)}+{name(channels, out_channels)}"


def gradient_wins(
    *, activation: str, residual: bool, forked: bool | None, dtype: str, rows: int, channels: int, out_channels: int
) -> str:
    """Why the gradient of a convolution behind a norm and that norm's sums are left to two launches; empty where one wins.

    `forked`: whether the norm's result has a gradient from elsewhere too; None in a call, by which time the graph has been asked.
    """
    sizes = {
        "channels": channels,
        "out_channels": out_channels,
        "intensity": channels * out_channels / (channels + out_channels),
        "odd_channels": channels % 16,
    }
    asked = [behind_kind(activation, residual, of) for of in ((False, True) if forked is None else (forked,))]
    reasons = [dispatch_table.refusal("pointwise", kind, dtype, sizes) for kind in asked]
    if all(reasons):
        return next((reason for reason in reasons if reason != UNMEASURED), UNMEASURED)
    reason = batchnorm_act.takes_moments(2 * rows * channels, residual)  # for the backward as for the forward
    return reason or batchnorm_act.wins(activation=activation, residual=residual, dtype=dtype)


def behind_kind(activation: str, residual: bool, forked: bool) -> str:
    """`bn+add+relu+1x1 forked`."""
    return f"{batchnorm_act.name(activation, residual)}+1x1" + (" forked" if forked else "")


def norm_forward_wins(*, activation: str, residual: bool, dtype: str, channels: int, out_channels: int) -> str:
    """Why the norm's second pass and the convolution behind it are left to two launches; empty where one wins."""
    if dtype not in STORAGE or activation != "relu" or not residual or channels < 256:
        return UNMEASURED
    return ""


def unsupported_norm_forward(*, dtype: str, channels: int, out_channels: int, arch: int) -> str:
    """Why NORM_FORWARD cannot take a convolution of `channels` into `out_channels` behind a norm; empty when it can."""
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if channels not in NORM_FORWARD_CHANNELS:
        return f"{channels} channels"
    if out_channels % OCTET or out_channels > NORM_FORWARD_MOST:
        return f"{out_channels} channels out"
    room = shared_memory.of_a_block(arch)
    return "" if norm_forward_shared_bytes(channels, out_channels) <= room else "the weights do not fit a block"


def unsupported_gradient(*, rows: int, dtype: str, channels: int, out_channels: int) -> str:
    """Why NORM_GRADIENT cannot take a convolution of `channels` into `out_channels`; empty when it can."""
    if dtype not in STORAGE:
        return f"dtype {dtype}"
    if channels % OCTET or out_channels % OCTET:
        return f"{channels} or {out_channels} channels are no multiple of {OCTET}"
    if out_channels > MAX_IN_CHANNELS:
        return f"{out_channels} channels out, more than {MAX_IN_CHANNELS}"
    return "more pixels than 32 bits count" if rows > MAX_ROWS else ""


def _vectors(sizes: Sizes) -> str:
    for channels in (sizes.shape[1], sizes.weight_shape[0]):
        if channels % OCTET or not channels:
            return f"{channels} channels are no multiple of {OCTET}"
    return ""


def _inputs(sizes: Sizes) -> str:
    too_many = f"{sizes.shape[1]} channels in, more than {MAX_IN_CHANNELS}" if sizes.shape[1] > MAX_IN_CHANNELS else ""
    return _vectors(sizes) or too_many


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    n, _, h, w = sizes.shape
    return "more pixels than 32 bits count" if n * h * w > MAX_ROWS else ""


# Any 1 x 1 convolution of whole vectors of channels; those whose forward the kernel makes have not too many.
ONE_TAP = Support(
    channels=whole_channels,
    taps=lambda rows, columns: rows == columns == 1,
    strides=(1,),
    dilates=True,
    padding=no_padding,
    vectors=_vectors,
    limit=_limit,
)
SUPPORTS = replace(ONE_TAP, vectors=_inputs)


# ---- what is compiled, and how it is launched


@dataclass(frozen=True, slots=True)
class PointwisePlan:
    """One launch: `warps_m` x `warps_n` warps, each `tiles` * 16 rows by `groups` * 32 columns.

    A chunk of x is `steps` * 16 channels, of which `chunks` are all; `stages` of them are in the ring. `blocks` run on an SM at
    once; it caps a thread's registers. grid: (blocks over rows, blocks over columns).
    """

    warps_m: int
    warps_n: int
    tiles: int
    groups: int
    steps: int
    chunks: int
    stages: int
    blocks: int
    shared_bytes: int
    grid: tuple[int, int]

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps_m * self.warps_n

    @property
    def rows(self) -> int:
        """Of a tile."""
        return 16 * self.warps_m * self.tiles

    @property
    def columns(self) -> int:
        """Of a block."""
        return GROUP * self.warps_n * self.groups


def shared_bytes(warps_m: int, warps_n: int, tiles: int, groups: int, steps: int, chunks: int, stages: int) -> int:
    """Of a block: the weights of its columns, the ring, and one row of y for each row of warps."""
    columns, rows, units = GROUP * warps_n * groups, 16 * warps_m * tiles, 2 * steps
    return 16 * (columns * (chunks * units | 1) + stages * rows * (units | 1)) + 4 * warps_m * columns


def gradient_shared_bytes(warps_m: int, warps_n: int, tiles: int, steps: int, chunks: int, stages: int) -> int:
    """Of a block of NORM_GRADIENT: the weights of its columns, the ring, and three constants a column."""
    columns, rows, units = GROUP * warps_n, 16 * warps_m * tiles, 2 * steps
    weights = STEP * steps * chunks * (columns // OCTET | 1)
    return 16 * (weights + stages * rows * (units | 1)) + 4 * 3 * columns


def arranged(
    *,
    rows: int,
    out_channels: int,
    sm_count: int,
    arch: int,
    warps_m: int,
    warps_n: int,
    tiles: int,
    groups: int,
    steps: int,
    chunks: int,
    stages: int,
    gradient: bool = False,
) -> PointwisePlan | None:
    """The plan with these numbers: as many blocks as run at once, all with equally many tiles. None where no block fits.

    `gradient`: of NORM_GRADIENT, whose `out_channels` are those that it makes.
    """
    if gradient:
        nbytes = gradient_shared_bytes(warps_m, warps_n, tiles, steps, chunks, stages)
        registers = GRADIENT_REGISTERS
    else:
        nbytes = shared_bytes(warps_m, warps_n, tiles, groups, steps, chunks, stages)
        registers = REGISTERS[tiles, groups]
    room = shared_memory.of_a_block(arch)
    if nbytes > room:
        return None
    at_once = SM_REGISTERS // (32 * warps_m * warps_n * registers)
    blocks = min(shared_memory.of_an_sm(arch) // (nbytes + shared_memory.OF_THE_SYSTEM), at_once, MAX_BLOCKS)
    if blocks < 1:
        return None
    slabs = -(-out_channels // (GROUP * warps_n * groups))
    items = -(-rows // (16 * warps_m * tiles))
    passes = -(-items // max(1, sm_count * blocks // slabs))
    grid = -(-items // passes), slabs
    return PointwisePlan(warps_m, warps_n, tiles, groups, steps, chunks, stages, blocks, nbytes, grid)


def _split(total: int, most: int) -> int:
    """The size of equal parts of `total`, none larger than `most`."""
    return -(-total // -(-total // most))


@lru_cache(maxsize=4096)
def plan(
    rows: int, in_channels: int, out_channels: int, sm_count: int, arch: int, *, gradient: bool = False
) -> PointwisePlan:
    """How the convolution of `rows` pixels is launched; or NORM_GRADIENT, with the channels that it takes in and makes.

    Long chunks, then large tiles, as far as BLOCKS blocks share an SM; where not even the smallest do, what fits one. On an H200
    that is within a few per cent of the fastest of 15 ways tried for each of 20 shapes. 64 columns a warp were faster at 64 -> 256
    alone, and deeper rings nowhere.
    """
    all_steps, all_groups = -(-in_channels // STEP), -(-out_channels // GROUP)
    bound = min(WEIGHT_BYTES, shared_memory.of_a_block(arch) // 2)
    most = max(1, min(MAX_GROUPS, bound // (2 * GROUP * STEP * all_steps)))
    warps_n = _split(all_groups, most)
    alone = None
    most_tiles = MAX_TILES
    if gradient:
        most_tiles = 1 if in_channels <= ONE_TILE_CHANNELS else MAX_GRADIENT_TILES
    for most_steps in dict.fromkeys((MAX_STEPS, min(4, MAX_STEPS), 2, 1)):
        steps = _split(all_steps, most_steps)
        for tiles in (t for t in (4, 2, 1) if t <= most_tiles):
            found = arranged(
                rows=rows,
                out_channels=out_channels,
                sm_count=sm_count,
                arch=arch,
                warps_m=max(1, WARPS // warps_n),
                warps_n=warps_n,
                tiles=tiles,
                groups=1,
                steps=steps,
                chunks=-(-all_steps // steps),
                stages=STAGES,
                gradient=gradient,
            )
            if found is not None and found.blocks >= BLOCKS:
                return found
            alone = alone or found
    if alone is None:
        raise ValueError(f"no launch for {name(in_channels, out_channels)} on sm_{arch}")
    return alone


def defines(plan: PointwisePlan, dtype: str, *, moments: bool) -> dict[str, int]:
    """Macros of one variant. `moments` leaves the result's."""
    return {
        "STORAGE": STORAGE[dtype],
        "MOMENTS": int(moments),
        "WARPS_M": plan.warps_m,
        "WARPS_N": plan.warps_n,
        "TILES": plan.tiles,
        "GROUPS": plan.groups,
        "STEPS": plan.steps,
        "CHUNKS": plan.chunks,
        "STAGES": plan.stages,
        "MIN_BLOCKS": plan.blocks,
    }


def norm_forward_warps(channels: int, out_channels: int) -> tuple[int, int]:
    """Warps of a block of NORM_FORWARD that multiply: over each other, 16 rows each, and side by side, 32 columns each."""
    return (4 if channels <= 256 else 2), -(-out_channels // GROUP)


def norm_forward_shared_bytes(channels: int, out_channels: int) -> int:
    """Of a block of NORM_FORWARD: the weights, two tiles of rows, and one row."""
    warps_m, warps_n = norm_forward_warps(channels, out_channels)
    pitch = channels // OCTET | 1
    return 16 * pitch * (GROUP * warps_n + 2 * 16 * warps_m) + 4 * GROUP * warps_n


def norm_forward_blocks(rows: int, channels: int, out_channels: int, sm_count: int) -> int:
    """Blocks of NORM_FORWARD: one an SM, all with equally many tiles."""
    tiles = -(-rows // (16 * norm_forward_warps(channels, out_channels)[0]))
    return -(-tiles // -(-tiles // sm_count))


def norm_forward_defines(
    channels: int, out_channels: int, dtype: str, activation: str, residual: bool, *, moments: bool
) -> dict[str, int]:
    """Macros of one variant of NORM_FORWARD."""
    warps_m, warps_n = norm_forward_warps(channels, out_channels)
    return {
        "STORAGE": STORAGE[dtype],
        "MOMENTS": int(moments),
        "ACT": batchnorm_act.ACTIVATIONS[activation],
        "RESIDUAL": int(residual),
        "WARPS_M": warps_m,
        "WARPS_N": warps_n,
        "UNITS": channels // OCTET,
        "THREADS": NORM_FORWARD_THREADS,
    }


def gradient_defines(
    plan: PointwisePlan, dtype: str, activation: str, residual: bool, *, forked: bool
) -> dict[str, int]:
    """Macros of one variant of NORM_GRADIENT behind a norm with this activation and residual. `forked`: with a second gradient."""
    found = defines(plan, dtype, moments=False)
    for unused in ("MOMENTS", "GROUPS"):
        del found[unused]
    return {**found, "ACT": batchnorm_act.ACTIVATIONS[activation], "RESIDUAL": int(residual), "FORK": int(forked)}


# 1 x 1 convolutions before batch norms of ResNet-50, ResNeXt-50, MobileNets and EfficientNet-B0 at 224 x 224: (channels in, out, side).
TRAINED = (
    (64, 64, 56),
    (64, 128, 56),
    (64, 256, 56),
    (256, 64, 56),
    (256, 128, 56),
    (128, 512, 28),
    (512, 128, 28),
    (256, 1024, 14),
    (32, 16, 112),
    (16, 64, 112),
    (16, 96, 112),
    (64, 24, 56),
    (24, 72, 56),
    (72, 40, 28),
    (40, 120, 28),
    (40, 240, 28),
    (240, 80, 14),
    (80, 480, 14),
    (112, 672, 14),
    (160, 960, 7),
)


@dataclass(frozen=True, slots=True)
class BehindNorm:
    """A 1 x 1 convolution behind a batch norm: `channels` of the norm, at `side` x `side`, into `out_channels`."""

    channels: int
    out_channels: int
    side: int
    activation: str = "relu"
    residual: bool = True
    forked: bool = True


# 1 x 1 convolutions behind batch norms, likewise: those that open a bottleneck, and those that close it or open an inverted one.
BEHIND_NORMS = (
    *(BehindNorm(*shape) for shape in ((256, 64, 56), (512, 128, 28), (1024, 256, 14), (2048, 512, 7))),
    *(BehindNorm(*shape) for shape in ((256, 128, 56), (256, 256, 56), (512, 256, 28), (1024, 512, 14))),
    *(BehindNorm(*shape, residual=False, forked=False) for shape in ((64, 256, 56), (128, 512, 28), (256, 1024, 14))),
    *(BehindNorm(*shape, residual=False, forked=False) for shape in ((128, 256, 56), (256, 512, 28))),
    *(BehindNorm(*shape, "none", False) for shape in ((24, 72, 56), (24, 144, 56))),
    *(BehindNorm(*shape, "relu", False, False) for shape in ((72, 24, 56), (64, 24, 56), (16, 16, 112))),
    *(BehindNorm(*shape) for shape in ((72, 72, 56), (72, 216, 56), (216, 216, 28))),
)


def variants(source: str, arch: int = architectures.MEASURED.sm) -> tuple[dict[str, int], ...]:
    """Macros to compile `source` with ahead: what the trained networks' layers ask for."""
    sms = architectures.of(arch).sms
    found: dict[tuple[tuple[str, int], ...], None] = {}
    if source == NORM_FORWARD:
        for dtype, moments in (("bfloat16", False), ("bfloat16", True), ("float16", True)):
            for behind in BEHIND_NORMS:
                shape = behind.channels, behind.out_channels
                if not unsupported_norm_forward(dtype=dtype, channels=shape[0], out_channels=shape[1], arch=arch):
                    variant = behind.activation, behind.residual
                    found[tuple(norm_forward_defines(*shape, dtype, *variant, moments=moments).items())] = None
        return tuple(dict(macros) for macros in found)
    if source == NORM_GRADIENT:
        for dtype in ("bfloat16", "float16"):
            for behind in BEHIND_NORMS if dtype == "bfloat16" else BEHIND_NORMS[:1]:
                rows = 256 * behind.side**2
                planned = plan(rows, behind.out_channels, behind.channels, sms, arch, gradient=True)
                macros = gradient_defines(planned, dtype, behind.activation, behind.residual, forked=behind.forked)
                found[tuple(macros.items())] = None
        return tuple(dict(macros) for macros in found)
    for dtype in ("bfloat16", "float16"):
        for in_channels, out_channels, side in TRAINED if dtype == "bfloat16" else TRAINED[1:2]:
            planned = plan(256 * side * side, in_channels, out_channels, sms, arch)
            found[tuple(defines(planned, dtype, moments=True).items())] = None
    return tuple(dict(macros) for macros in found)


def bytes_moved(rows: int, in_channels: int, out_channels: int) -> int:
    """Bytes of the forward: x in and y out, 16 bits a value. The weights are left out."""
    return 2 * rows * (in_channels + out_channels)


def behind_norm_bytes_moved(
    rows: int, channels: int, out_channels: int, activation: str, residual: bool, *, forked: bool
) -> tuple[int, int]:
    """Bytes that a norm and the convolution behind it must move: forward, and the backward as it is launched.

    The forward reads x twice, for the statistics and to normalise, and need not read what it makes. The backward reads dz, x and
    the gradient from elsewhere and writes g; makes dx of g and x; and the weights' gradient of dz and y.
    """
    elements = rows * channels
    forward, _ = batchnorm_act.bytes_moved(
        elements=elements, itemsize=2, activation=activation, residual=residual, forked=forked
    )
    mask = elements // 8 if residual and activation != "none" else 0
    backward = 2 * elements * (6 + forked) + mask + 4 * rows * out_channels
    return forward + 2 * rows * out_channels, backward


def flops(rows: int, in_channels: int, out_channels: int) -> int:
    """Operations of the forward; the backward has twice as many."""
    return 2 * rows * in_channels * out_channels
