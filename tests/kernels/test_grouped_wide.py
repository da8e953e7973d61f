"""Wide groups on Hopper's products without a GPU: launch geometry, where they are taken, emulated kernels with faults planted in them."""

from __future__ import annotations

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, verify
from advisor.ops.conv3x3 import spec as conv3x3
from advisor.ops.conv3x3 import weight
from advisor.ops.grouped import api, cases, cuda, wide
from advisor.ops.grouped.conv import grouped_conv

FAMILY = catalog.get("grouped")
KERNELS = {"grouped_wide", "conv3x3_backward_weight", "conv3x3_backward_weight_sum"}


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


sizes = {
    "batch": st.integers(1, 300),
    "group": st.sampled_from(sorted({group for group, _ in wide.TAKEN})),
    "groups": st.integers(2, 40),
    "height": st.integers(2, 120),
    "width": st.integers(2, 120),
    "stride": st.integers(1, 2),
    "sm_count": st.integers(1, 200),
}


@given(**sizes, transposed=st.booleans())
def test_a_plan_covers_every_pixel_within_shared_memory(
    batch: int, group: int, groups: int, height: int, width: int, stride: int, sm_count: int, transposed: bool
) -> None:
    call = grouped_conv((batch, group * groups, height, width), groups, stride)
    plan = wide.plan(call, sm_count, transposed=transposed)
    rows = plan.columns // 8
    assert rows * plan.bands >= call.out_height > rows * (plan.bands - 1)
    assert 8 * plan.strips >= call.out_width > 8 * (plan.strips - 1)
    assert plan.tiles == batch * plan.bands * plan.strips
    slabs = groups // plan.beside
    assert slabs * plan.beside == groups
    assert plan.grid % slabs == 0
    assert 1 <= plan.grid // slabs <= plan.tiles
    assert plan.grid <= max(sm_count, slabs)
    pixels = (rows + wide.halo(stride)) * (8 + wide.halo(stride)) * wide.planes(stride, transposed=transposed)
    needed = 2 * plan.depth * (pixels * 128 + 8) + 4 * plan.columns * 128
    assert plan.depth >= 1
    assert needed <= plan.shared_bytes <= 227 * 1024


@given(**sizes)
def test_the_weights_jobs_are_the_groups(
    batch: int, group: int, groups: int, height: int, width: int, stride: int, sm_count: int
) -> None:
    call = grouped_conv((batch, group * groups, height, width), groups, stride)
    plan = conv3x3.weight_plan(wide.convolution(call), sm_count)
    assert (plan.jobs, plan.columns, plan.x_windowed, plan.stride) == (groups, 64, True, stride)
    assert plan.rows * plan.bands >= call.out_height > plan.rows * (plan.bands - 1)
    assert 8 * plan.wide * plan.strips >= call.out_width > 8 * plan.wide * (plan.strips - 1)
    assert plan.tiles == batch * plan.bands * plan.strips
    assert 1 <= plan.lines <= plan.tiles
    assert plan.lines * plan.jobs <= max(sm_count, plan.jobs)
    assert plan.rows % 2 == 0
    assert plan.stages >= 2
    assert plan.shared_bytes <= 227 * 1024


@pytest.mark.parametrize(
    ("call", "columns", "beside"),
    [
        (((256, 96, 56, 56), 2, 1), 112, 1),
        (((256, 432, 14, 14), 9, 1), 112, 1),
        (((256, 1008, 7, 7), 21, 1), 64, 1),
        (((256, 448, 28, 28), 8, 1), 112, 2),  # 112 bytes a group: every other one begins inside of a sector
        (((256, 56 * 9, 28, 28), 9, 1), 112, 1),
        (((256, 448, 56, 56), 8, 2), 112, 2),
    ],
)
def test_launches_are_those_that_were_measured(call: tuple, columns: int, beside: int) -> None:
    plan = wide.plan(grouped_conv(*call), 132, transposed=False)
    assert (plan.columns, plan.beside) == (columns, beside)


def trained(shape: tuple[int, ...], group: int, stride: int) -> None:
    """Forward and backward."""
    x, w = nhwc(*shape).bfloat16().requires_grad_(), torch.randn(shape[1], group, 3, 3, requires_grad=True)
    api.grouped_conv2d(x, w, stride, shape[1] // group).sum().backward()
    assert x.grad is not None
    assert w.grad is not None


@pytest.mark.parametrize("stride", [1, 2])
def test_taken_on_hopper_and_made_by_warps_elsewhere(emulated, monkeypatch: pytest.MonkeyPatch, stride: int) -> None:
    monkeypatch.setattr(wide, "sums_fit", lambda call: True)
    trained((1, 96, 4, 5), 48, stride)
    assert set(emulated.launches) == KERNELS
    emulated.launches.clear()
    emulated.use(arch=80)
    cuda.hopper_lacks.cache_clear()
    trained((1, 96, 4, 5), 48, stride)
    assert emulated.launches
    assert not KERNELS & set(emulated.launches)


def test_of_32_channels_the_weights_gradient_alone_is_taken(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wide, "sums_fit", lambda call: True)
    trained((1, 64, 4, 5), 32, 1)
    assert set(emulated.launches) == {"grouped_forward", "conv3x3_backward_weight", "conv3x3_backward_weight_sum"}


def test_one_row_has_no_odd_ones(emulated) -> None:
    trained((1, 96, 1, 5), 48, 2)
    assert not KERNELS & set(emulated.launches)


def test_sums_that_take_more_memory_than_the_inputs_gradient_are_not_left(emulated) -> None:
    assert wide.sums_fit(grouped_conv((256, 432, 14, 14), 9, 1))
    assert not wide.sums_fit(grouped_conv((1, 96, 4, 5), 2, 1))
    trained((1, 96, 4, 5), 48, 1)
    assert set(emulated.launches) == {"grouped_wide", "grouped_backward_weight", "grouped_backward_weight_sum"}


def test_where_warps_lose_to_cudnn_only_hopper_takes_them(emulated) -> None:
    x, w = nhwc(1, 128, 4, 4).bfloat16(), torch.randn(128, 64, 3, 3)
    with only_what_wins():
        api.grouped_conv2d(x, w, 1, 2)
        assert emulated.launches["grouped_wide"] == 1
        emulated.launches.clear()
        emulated.use(arch=80)
        cuda.hopper_lacks.cache_clear()
        before = api.fell_back[dispatch.UNMEASURED]
        y = api.grouped_conv2d(x, w, 1, 2)
    assert not emulated.launches
    assert api.fell_back[dispatch.UNMEASURED] == before + 1
    torch.testing.assert_close(y, F.conv2d(x, w.bfloat16(), None, 1, 1, 1, 2))


@pytest.mark.parametrize(("group", "stride"), [(48, 1), (56, 1), (56, 2)])
def test_a_groups_nan_is_its_own(emulated, monkeypatch: pytest.MonkeyPatch, group: int, stride: int) -> None:
    """Of 48 or 56 channels a product's 64 have the neighbour's beside them in memory."""
    monkeypatch.setattr(wide, "sums_fit", lambda call: True)
    x = nhwc(1, 2 * group, 6, 7).bfloat16()
    x[:, group:] = float("nan")
    x.requires_grad_()
    w = torch.randn(2 * group, group, 3, 3, requires_grad=True)
    y = api.grouped_conv2d(x, w, stride, 2)
    assert y[:, :group].isfinite().all()
    assert y[:, group:].isnan().all()
    dy = torch.ones_like(y)
    dy[:, group:] = float("nan")
    y.backward(dy)
    assert x.grad is not None
    assert w.grad is not None
    assert x.grad[:, :group].isfinite().all()
    assert w.grad[:group].isfinite().all()


def fewest_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a block has more tiles than are copied ahead."""
    monkeypatch.setattr(wide, "MAX_DEPTH", 1)
    monkeypatch.setattr(weight, "MAX_STAGES", 2)
    monkeypatch.setattr(wide, "sums_fit", lambda call: True)
    monkeypatch.setattr(wide, "COLUMNS", dict.fromkeys(wide.COLUMNS, (64,)))
    wide.plan.cache_clear()
    weight.plan.cache_clear()


def case_of(name: str, shape: tuple[int, ...]) -> cases.Case:
    return next(c for c in cases.VERIFICATION if c.name == name and c.shape == shape)


STRIDE_1, STRIDE_2 = ("grouped 3x3 of 48 s1", (3, 96, 9, 13)), ("grouped 3x3 of 48 s2", (2, 96, 10, 19))
BESIDE_1, BESIDE_2 = ("grouped 3x3 of 56 s1", (2, 112, 7, 6)), ("grouped 3x3 of 56 s2", (3, 112, 17, 8))
EVERY = (STRIDE_1, STRIDE_2, BESIDE_1, BESIDE_2)


@pytest.mark.long
@pytest.mark.parametrize("which", EVERY, ids=[name for name, _ in EVERY])
def test_one_tile_ahead_is_right_too(emulated, monkeypatch: pytest.MonkeyPatch, which: tuple) -> None:
    """What the faults below are planted in."""
    emulated.use(sm_count=1)
    fewest_stages(monkeypatch)
    found = verify.check(FAMILY, case_of(*which), "cpu")
    assert found["passed"], found["detail"]
    assert set(emulated.launches) == KERNELS


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "taps not turned": ("(TRANSPOSED ? 2 - tap : tap)", "tap", STRIDE_1),
    "rows of weights for columns": ("TRANSPOSED ? weight_in : weight_out", "weight_out", STRIDE_1),
    "a tile read before it is there": ("if (made == 0) wait(full + stage, i / 2 / DEPTH % 2);", "", STRIDE_1),
    "a tile of the turn before": ("i / 2 / DEPTH % 2", "0", STRIDE_1),
    "sums read before they are made": ("      products_wait<0>();\n      unsigned char* box", "      unsigned char* box", STRIDE_1),
    "a tile overwritten while other warps read it": (
        "      wait_for_part(1 + warpgroup, 128);  // the other warps' products are made, and the box that was stored from here is read\n",
        "", STRIDE_1,
    ),
    "a box overwritten before it is stored": ("if (thread == 0) stores_wait<1>();", "", STRIDE_2),
    "stored before all warps have staged": (
        "      order_with_hardware();\n      wait_for_part(1 + warpgroup, 128);\n", "      order_with_hardware();\n", STRIDE_1,
    ),
    "the last boxes": ("if (thread == 0) stores_wait<0>();", "", STRIDE_1),
    "the even plane's tap in the odd": ("(tap / 3 != 1) * 2 + (tap % 3 != 1)", "(tap % 3 != 1) * 2 + (tap / 3 != 1)", STRIDE_2),
    "an odd row's neighbours": ("tap == (TRANSPOSED ? 0 : 2)", "tap == 2", STRIDE_2),
    "the odd plane's first": ("(PLANES > 1 ? plane % 2 : HALO / 2)", "(PLANES > 1 ? 0 : HALO / 2)", STRIDE_2),
    "a class that nobody stores": ("classes.of[made]", "classes.of[0]", STRIDE_2),
    "sums of the class before": ("sets ? 0 : 1);", "1);", STRIDE_2),
    "the neighbour's weights": ("(BESIDE > 1 ? warpgroup : 0)", "0", BESIDE_1),
    "the neighbour's place": ("first_group + turn % BESIDE", "first_group", BESIDE_2),
    "a weight's tap in another plane": ("(tap_row != 1) * 2 + (p != 1)", "(p != 1) * 2 + (tap_row != 1)", STRIDE_2),
    "a weight's tap a pixel on": ("(tap_row == 2) * PITCH + (p == 2)", "(tap_row == 2) * PITCH", STRIDE_2),
    "another group's sums": ("(group * PLAIN + row) * weight_out", "row * weight_out", STRIDE_1),
    "another group's pixels": ("band * 64, group, column, row, image", "band * 64, 0, column, row, image", STRIDE_1),
}  # fmt: skip

# Of a kind with others.
LONG = {
    *("a tile of the turn before", "an odd row's neighbours", "a weight's tap a pixel on", "another group's pixels"),
    *("rows of weights for columns", "the odd plane's first", "stored before all warps have staged"),
}


@pytest.mark.parametrize("fault", [pytest.param(f, marks=[pytest.mark.long] if f in LONG else []) for f in FAULTS])
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, which = FAULTS[fault]
    emulated.use(sm_count=1)
    fewest_stages(monkeypatch)
    assert not passes_with(monkeypatch, FAMILY, case_of(*which), before, after)
