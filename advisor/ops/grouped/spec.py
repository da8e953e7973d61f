"""What the grouped convolution kernels support, where they win, and how they are launched. Plain arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any

from advisor.core import architectures
from advisor.ops import dispatch_table, occupancy, shared_memory
from advisor.ops.convolution_support import Sizes, Support, padded_by_one
from advisor.ops.dispatch import with_moments
from advisor.ops.grouped import weight, whole, wide
from advisor.ops.grouped.conv import GroupedConv, grouped_conv

FORWARD = "grouped/grouped_forward.cu"
BACKWARD_DATA = "grouped/grouped_backward_data.cu"
BACKWARD_WEIGHT = "grouped/grouped_backward_weight.cu"
WHOLE_FORWARD = "grouped/grouped_whole_forward.cu"
WHOLE_BACKWARD_DATA = "grouped/grouped_whole_backward_data.cu"
KERNELS = {
    FORWARD: ("grouped_forward",),
    BACKWARD_DATA: ("grouped_backward_data",),
    BACKWARD_WEIGHT: ("grouped_backward_weight", "grouped_backward_weight_sum"),
    WHOLE_FORWARD: ("grouped_whole_forward",),
    WHOLE_BACKWARD_DATA: ("grouped_whole_backward_data",),
    wide.CONVOLUTION: ("grouped_wide",),
}

STORAGE = {"float16": 1, "bfloat16": 2}
WEIGHT_STORAGE = {"float32": 0, **STORAGE}
OCTET = whole.OCTET
GROUPS = (4, *range(8, 65, 8))  # channels a group
SHARED_BYTES = shared_memory.WITHOUT_ASKING
SM_SHARED_BYTES, BLOCK_SHARED_BYTES, MAX_BLOCKS = whole.SM_BYTES, whole.RESERVED_BYTES, whole.MAX_BLOCKS
MAX_OFFSET = 2**31 - 1  # of 16-byte vectors from a block's first image
MAX_SEGMENTS = 8
HALO_ROWS = 2  # rows that a segment reads beyond its own
SLAB = 0  # octets that a block covers at most, in whole groups: 4 are 64 bytes of a pixel; 0: as measured, below
MAX_TILES = 7  # of 16 pixels a warp: 112 are 2 rows of 56, 4 of 28, 8 of 14, 16 of 7
MAX_STAGES = 4  # rows in the ring
TILES = (1, 2, 4, 7)
FORWARD_ALWAYS = 0  # 1: the kernel's forward even where `forward_wins` gives it to PyTorch
WHOLE_GROUPS = 1  # 0: warps with an octet each, also where a warp can have a whole group
WIDE_GROUPS = 1  # 0: the kernels of warps also where a group fills the products of Hopper's warpgroups
TUNABLE = {
    "SLAB": (0, 4, 8),
    "MAX_TILES": (4, 7),
    "FORWARD_ALWAYS": (0, 1),
    "WHOLE_GROUPS": (0, 1),
    "WIDE_GROUPS": (0, 1),
}

# Measured on an H200 in bf16. A slab of 8 octets, whole 128-byte lines: forward and backward in 0.75 and 0.82 of the time of 4
# with 8 channels a group (256x28x28). Slower with 4 channels (1.25 and 1.05), 32 (1.24 and 1.20), and in the backward with 16 at
# stride 2 (1.10).
_SLABS = {8: 8}
_SLAB = 4

# Where cuDNN's forward is the faster one all the same: in 0.95, 0.75 and 0.74 of the kernel's time (with 8 channels that was at
# a slab of 4). The backward, twice as long and 1.5 to 2.0 times faster than cuDNN's, stays the kernels'.
_FORWARD_SLOWER = frozenset({(8, 2), (16, 2), (32, 2)})


def name(group: int, stride: int) -> str:
    """`grouped 3x3 of 8 s2`: 8 channels a group."""
    return f"grouped 3x3 of {group} s{stride}"


def wins(*, dtype: str, group: int, stride: int) -> str:
    """Why PyTorch's own operation is left in place; empty where the kernels win, both passes together."""
    return dispatch_table.refusal("grouped", name(group, stride), dtype)


def wins_elsewhere(group: int, stride: int) -> str:
    """Why PyTorch's own operation is left in place without Hopper's products; empty where those of warps win too."""
    return dispatch_table.elsewhere("grouped", name(group, stride))


def forward_wins(group: int, stride: int) -> str:
    """Why the forward is PyTorch's own where the backward is the kernels'; empty where both are the kernels'."""
    if (group, stride) in _FORWARD_SLOWER and not FORWARD_ALWAYS:
        return f"forward of {group} channels a group at stride {stride}: cuDNN's is faster"
    return ""


def leaves_moments(group: int, stride: int) -> str:
    """Why the forward leaves no moments of its result; empty where it can."""
    if has_wide_groups(group, stride):
        return f"{group} channels a group at stride {stride}: products of warpgroups leave no moments"
    if forward_source(group, stride) == WHOLE_FORWARD:
        return f"{group} channels a group at stride {stride}: warps with whole groups leave no moments"
    return forward_wins(group, stride)


def moments_win(group: int, stride: int) -> str:
    """Why the batch norm behind the convolution reads its result for its statistics itself; empty where it need not."""
    return leaves_moments(group, stride) or dispatch_table.refusal("grouped", with_moments(name(group, stride)))


def _channels(sizes: Sizes) -> str:
    c, outputs, inputs = sizes.shape[1], *sizes.weight_shape[:2]
    if outputs != c:
        return f"{c} channels in, {outputs} out"
    if sizes.groups < 1 or c % sizes.groups or inputs != c // sizes.groups:
        return f"{sizes.groups} groups of {inputs} channels"
    return "" if inputs in GROUPS else f"{inputs} channels a group"


def _limit(sizes: Sizes, _dtype: str, _arch: int) -> str:
    _, c, h, w = sizes.shape
    return "a block's images are beyond 32-bit offsets" if max(TILES) * 16 * h * w * (c // OCTET) > MAX_OFFSET else ""


SUPPORTS = Support(
    channels=_channels,
    taps=lambda rows, columns: rows == columns == 3,
    strides=(1, 2),
    padding=padded_by_one,
    vectors=lambda sizes: (
        "" if sizes.shape[1] % OCTET == 0 else f"{sizes.shape[1]} channels are no multiple of {OCTET}"
    ),
    limit=_limit,
)


# ---- which kernels


def has_wide_groups(group: int, stride: int) -> bool:
    """Whether the products of warpgroups (wide.py) make such convolutions, where the GPU has them."""
    return bool(WIDE_GROUPS) and (group, stride) in wide.TAKEN


def is_wide(call: GroupedConv) -> bool:
    """As `has_wide_groups`, of one: with stride 2 there have to be odd rows and columns."""
    return has_wide_groups(call.group, call.stride) and min(call.height, call.width) >= call.stride


def has_wide_weight(group: int, stride: int) -> bool:
    """As `has_wide_groups`, of the weight's gradient."""
    return bool(WIDE_GROUPS) and (group, stride) in wide.WEIGHT_TAKEN


def is_wide_weight(call: GroupedConv) -> bool:
    """As `is_wide`, of the weight's gradient; and what its blocks leave takes no more memory than the input's gradient."""
    taken = has_wide_weight(call.group, call.stride) and min(call.height, call.width) >= call.stride
    return taken and wide.sums_fit(call)


def forward_source(group: int, stride: int) -> str:
    """The source of the forward and, with stride 1, of the gradient of the input, by warps."""
    return WHOLE_FORWARD if WHOLE_GROUPS and (group, stride) in whole.FORWARD else FORWARD


def backward_data_source(group: int, stride: int) -> str:
    """The source of the gradient of the input, by warps."""
    if stride == 1:
        return forward_source(group, stride)
    return WHOLE_BACKWARD_DATA if WHOLE_GROUPS and (group, stride) in whole.BACKWARD_DATA else BACKWARD_DATA


# ---- what is compiled, and how it is launched


@dataclass(frozen=True, slots=True)
class GroupedPlan:
    """One launch.

    A block takes `warps` octets of channels and `tiles` * 16 pixels of a row: `strip` columns of `images` images. An item is
    `segment_rows` rows of them. `loads`: pixels of a fetched row in units of 32. `blocks` run on an SM at once; it caps a
    thread's registers. grid: (blocks over items, slabs of octets).
    Where warps have whole groups a block takes `beside` of them, slabs are of that, `across` warps share the pixels of a row
    in runs of `tiles` * 16, and `loads` is in vectors of a thread. For the gradient of the weight `weight` says what a warp has of a
    group, and `dy_loads` vectors a thread fetches of a row of dy.
    """

    warps: int
    tiles: int
    stages: int
    loads: int
    blocks: int
    shared_bytes: int
    images: int
    strip: int
    strips: int
    segments: int
    segment_rows: int
    items: int
    grid: tuple[int, int]
    beside: int = 0
    across: int = 1
    weight: weight.WeightShape | None = None
    dy_loads: int = 0

    @property
    def threads(self) -> int:
        """Of a block."""
        return 32 * self.warps


def _octets(group: int) -> int:
    """Octets of a group; groups of four channels make one octet in pairs."""
    return -(-group // OCTET)


def warps_of(group: int) -> int:
    """Octets a block covers: a slab of them or a little less, in whole groups, and one group at least."""
    slab = SLAB or _SLABS.get(group, _SLAB)
    return _octets(group) * max(1, slab // _octets(group))


def _steps(group: int) -> int:
    return -(-3 * _octets(group) // 2)


def _registers(source: str, group: int, stride: int, tiles: int, loads: int) -> int:
    """A thread's registers: sums, weights, places of its vectors, and what addresses and fragments take."""
    taps, slots = 3 * 2 * _steps(group), 3 if stride == 1 else 2
    places = tiles + 2 * loads + -(-tiles // 2) + (16 if stride == 2 else 0)
    if source == FORWARD:
        return 4 * slots * tiles + taps + places + (52 if group >= OCTET else 64)
    return 16 * tiles + taps + places + 64


def _units(source: str, warps: int, tiles: int, strip: int, images: int, stride: int) -> tuple[int, int, int]:
    """Fetched pixels of a row, 16-byte units of a stage, and units beside the ring."""
    pixel = warps | 1
    if source == BACKWARD_DATA:
        pixels = images * (strip + 1)
        return pixels, pixels * pixel, 2 * tiles * 16 * pixel
    pixels = images * (stride * (strip - 1) + 3)
    return pixels, pixels * pixel, tiles * 16 * pixel


@lru_cache(maxsize=4096)
def _shape(source: str, group: int, stride: int, columns: int, batch: int) -> tuple[int, int, int, int, int, int, int]:
    """tiles, stages, strip, images, loads, blocks an SM, shared bytes: most pixels for the products, rows in flight."""
    warps = warps_of(group)
    best: tuple[float, tuple[int, int, int, int, int, int, int]] | None = None
    most = MAX_TILES if source != BACKWARD_DATA else min(MAX_TILES, 4)  # two rows of two parities of sums each
    for tiles in (t for t in TILES if t <= most):
        strips = -(-columns // (16 * tiles))
        strip = -(-columns // strips)
        for images in range(min(16 * tiles // strip, batch), 0, -1):
            pixels, stage, rest = _units(source, warps, tiles, strip, images, stride)
            stages = min(MAX_STAGES, (SHARED_BYTES // 16 - rest) // stage)
            if stages < 2:
                continue
            nbytes = 16 * (stages * stage + rest)
            loads = -(-pixels // 32)
            at_once = occupancy.warps_at_once(_registers(source, group, stride, tiles, loads)) // warps
            blocks = max(1, min(SM_SHARED_BYTES // (nbytes + BLOCK_SHARED_BYTES), at_once, MAX_BLOCKS))
            used = columns / strips * images / (16 * tiles)
            score = used * tiles / (tiles + 0.5) * (1.0 if stages > 2 else 0.8)
            if best is None or score > best[0]:
                best = score, (tiles, stages, strip, images, loads, blocks, nbytes)
    if best is None:  # one tile of one image always fits
        raise ValueError(f"no launch for {source}, {group} channels a group, {columns} columns")
    return best[1]


def _segments(call: GroupedConv, columns: int, at_once: int) -> tuple[int, int, int, int]:
    """Segments of the result's rows, rows of one, items in all, of `columns` items of all rows, and blocks that share them, `at_once` at
    most: least work for the last to end."""
    best: tuple[int, tuple[int, int, int, int]] | None = None
    for wanted in range(1, min(MAX_SEGMENTS, call.out_height) + 1):
        segment_rows = -(-call.out_height // wanted)
        segments = -(-call.out_height // segment_rows)
        items = columns * segments
        passes = -(-items // at_once)
        cost = passes * (segment_rows * call.stride + HALO_ROWS)
        if best is None or cost < best[0]:
            best = cost, (segments, segment_rows, items, -(-items // passes))
    assert best is not None  # out_height is at least 1
    return best[1]


def _whole_plan(source: str, call: GroupedConv, sm_count: int) -> GroupedPlan:
    cut = whole.cut(
        data=source == WHOLE_BACKWARD_DATA,
        group=call.group,
        stride=call.stride,
        groups=call.channels // call.group,
        columns=call.out_width,
        batch=call.batch,
    )
    shape = cut.shape
    slabs = -(-call.channels // (call.group * shape.beside))
    return _plan_of(call, cut, shape.beside * shape.across, slabs, sm_count, across=shape.across)


def _weight_plan(call: GroupedConv, sm_count: int) -> GroupedPlan:
    wide = max(call.group, OCTET)
    groups = call.channels // wide
    cut = weight.cut(group=wide, stride=call.stride, groups=groups, columns=call.out_width, batch=call.batch)
    slabs, warps = -(-groups // cut.shape.beside), cut.shape.warps(wide // OCTET)
    return _plan_of(call, cut, warps, slabs, sm_count, weight=cut.shape, dy_loads=cut.dy_loads)


def _plan_of(
    call: GroupedConv, cut: whole.WholeCut | weight.WeightCut, warps: int, slabs: int, sm_count: int, **more: Any
) -> GroupedPlan:
    """Where a block has a slab of whole groups; `more` fields of the plan."""
    at_once = max(1, sm_count * cut.blocks // slabs)
    segments, segment_rows, items, sharing = _segments(call, -(-call.batch // cut.images) * cut.strips, at_once)
    return GroupedPlan(
        warps=warps,
        tiles=cut.shape.tiles,
        stages=cut.stages,
        loads=cut.loads,
        blocks=cut.blocks,
        shared_bytes=cut.shared_bytes,
        images=cut.images,
        strip=cut.strip,
        strips=cut.strips,
        segments=segments,
        segment_rows=segment_rows,
        items=items,
        grid=(sharing, slabs),
        beside=cut.shape.beside,
        **more,
    )


@lru_cache(maxsize=4096)
def plan(source: str, call: GroupedConv, sm_count: int) -> GroupedPlan:
    """How `source` is launched for this call: as many blocks as run at once, all with equally many items."""
    if source in (WHOLE_FORWARD, WHOLE_BACKWARD_DATA):
        return _whole_plan(source, call, sm_count)
    if source == BACKWARD_WEIGHT:
        return _weight_plan(call, sm_count)
    warps = warps_of(call.group)
    tiles, stages, strip, images, loads, blocks, nbytes = _shape(
        source, call.group, call.stride, call.out_width, call.batch
    )
    slabs = -(-(call.channels // OCTET) // warps)
    strips = -(-call.out_width // strip)
    at_once = max(1, sm_count * blocks // slabs)
    segments, segment_rows, items, sharing = _segments(call, -(-call.batch // images) * strips, at_once)
    return GroupedPlan(
        warps=warps,
        tiles=tiles,
        stages=stages,
        loads=loads,
        blocks=blocks,
        shared_bytes=nbytes,
        images=images,
        strip=strip,
        strips=strips,
        segments=segments,
        segment_rows=segment_rows,
        items=items,
        grid=(sharing, slabs),
    )


def defines(
    call: GroupedConv, plan: GroupedPlan, dtype: str, weight_dtype: str, *, transposed: bool, moments: bool = False
) -> dict[str, int]:
    """Macros of every source. `moments`, of FORWARD alone, leaves the result's."""
    found = {
        "GROUP": call.group,
        "CG": max(call.group, OCTET),
        "STRIDE": call.stride,
        "WARPS": plan.warps,
        "TILES": plan.tiles,
        "STAGES": plan.stages,
        "LOADS": plan.loads,
        "MIN_BLOCKS": plan.blocks,
        "TRANSPOSED": int(transposed),
        "STORAGE": STORAGE[dtype],
        "WEIGHT_STORAGE": WEIGHT_STORAGE[weight_dtype],
    }
    if plan.beside:
        found |= {"BESIDE": plan.beside, "ACROSS": plan.across}
    if plan.weight:
        found |= {"OUTPUTS": plan.weight.outputs, "DY_LOADS": plan.dy_loads}
    return {**found, "MOMENTS": 1} if moments else found


def partial_values(call: GroupedConv, plan: GroupedPlan) -> int:
    """Values of fragments that the blocks of one split leave of the weight's gradient."""
    assert plan.weight is not None
    units = call.channels // OCTET // plan.weight.outputs
    return units * plan.weight.sums(_octets(call.group)) * 4 * 32


# Layers of ResNeXt-50 32x4d and RegNetY-3.2GF at 224 x 224: (channels a group, C, stride, side of the input).
TRAINED = (
    (4, 128, 1, 56),
    (8, 256, 2, 56),
    (8, 256, 1, 28),
    (16, 512, 2, 28),
    (16, 512, 1, 14),
    (32, 1024, 2, 14),
    (32, 1024, 1, 7),
    (24, 72, 2, 112),
    (24, 72, 1, 56),
    (24, 216, 2, 56),
    (24, 216, 1, 28),
    (24, 576, 2, 28),
    (24, 576, 1, 14),
    (24, 1512, 2, 14),
    (24, 1512, 1, 7),
)
_OTHERS = ((64, 256, 1, 14), (64, 256, 2, 28), (48, 192, 1, 28), (4, 128, 2, 56))
_SMS = architectures.MEASURED.sms  # geometry differs little between devices; the macros do not depend on it


def variants(source: str) -> tuple[dict[str, int], ...]:
    """Macros to compile `source` with ahead: what the trained networks' layers ask for, and the widest groups."""
    found: dict[tuple[tuple[str, int], ...], None] = {}
    if source == wide.CONVOLUTION:
        return _wide_variants()
    for group, channels, stride, side in (*TRAINED, *_OTHERS):
        used = {backward_data_source(group, stride), BACKWARD_WEIGHT}
        if not forward_wins(group, stride):
            used.add(forward_source(group, stride))
        if source not in used:
            continue
        sized = grouped_conv((256, channels, side, side), channels // group, stride)
        planned = plan(source, sized, _SMS)
        turns: tuple[bool, ...] = (False,)
        if source in (BACKWARD_DATA, WHOLE_BACKWARD_DATA):
            turns = (True,)
        elif source in (FORWARD, WHOLE_FORWARD) and stride == 1:
            turns = (False, True)
        for dtype, weight_dtype in (("bfloat16", "float32"), ("float16", "float16")):
            if dtype == "float16" and (group, source) not in ((8, source), (16, WHOLE_FORWARD)):
                continue  # fp16 differs from bf16 in conversions only
            for transposed in turns:
                found[tuple(defines(sized, planned, dtype, weight_dtype, transposed=transposed).items())] = None
            if source == FORWARD and not leaves_moments(group, stride):
                macros = defines(sized, planned, dtype, weight_dtype, transposed=False, moments=True)
                found[tuple(macros.items())] = None
    return tuple(dict(macros) for macros in found)


def _wide_variants() -> tuple[dict[str, int], ...]:
    """All widths of a tile, both strides and directions, one group a block and two."""
    found: dict[tuple[tuple[str, int], ...], None] = {}
    for group, side, dtype in (
        (48, 56, "bfloat16"),
        (48, 14, "float16"),
        (56, 28, "bfloat16"),
        (64, 32, "bfloat16"),
        (64, 7, "bfloat16"),
    ):
        for stride, transposed in product((1, 2), (False, True)):
            sized = grouped_conv((256, 4 * group, side, side), 4, stride)
            planned = wide.plan(sized, _SMS, transposed=transposed)
            weights = WEIGHT_STORAGE["float32" if dtype == "bfloat16" else dtype]
            found[tuple(wide.defines(sized, planned, STORAGE[dtype], weights, transposed=transposed).items())] = None
    return tuple(dict(macros) for macros in found)


def bytes_moved(call: GroupedConv, itemsize: int) -> tuple[int, int]:
    """Bytes of forward and backward: x in and y out; dy in and dx out, and once more dy and x in for the weight gradient.

    The weights are left out. The goals of the project are stated against these four tensor passes.
    """
    x = call.batch * call.channels * call.height * call.width * itemsize
    y = call.batch * call.channels * call.out_height * call.out_width * itemsize
    return x + y, 2 * (x + y)


def flops(call: GroupedConv) -> tuple[int, int]:
    """Operations of forward and backward: two a tap, channel of the group and output, and twice that."""
    forward = 2 * 9 * call.group * call.batch * call.channels * call.out_height * call.out_width
    return forward, 2 * forward
