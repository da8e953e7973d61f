"""Grouped convolution without a GPU: definition, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with
from emulation.supports import unsupported
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, match, sources, verify
from advisor.ops.grouped import api, cases, reference, spec, weight, whole
from advisor.ops.grouped.conv import grouped_conv

FAMILY = catalog.get("grouped")


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("groups", "stride"), [(2, 1), (1, 2), (3, 2)])
def test_the_definition_is_pytorchs_and_passes_gradcheck(groups: int, stride: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 6, 5, 4, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 6 // groups, 3, 3, dtype=torch.float64, requires_grad=True)

    def definition(*tensors: torch.Tensor) -> torch.Tensor:
        return reference.grouped_conv2d(*tensors, stride, groups)

    torch.testing.assert_close(definition(x, weight), F.conv2d(x, weight, None, stride, 1, 1, groups))
    assert torch.autograd.gradcheck(definition, (x, weight), fast_mode=True)


@given(
    batch=st.integers(1, 300),
    group=st.sampled_from(spec.GROUPS),
    octets=st.integers(1, 40),
    height=st.integers(1, 120),
    width=st.integers(1, 300),
    stride=st.integers(1, 2),
    sm_count=st.integers(1, 200),
    source=st.sampled_from(tuple(spec.KERNELS)),
)
def test_a_plan_covers_every_pixel_and_channel_within_shared_memory(
    batch: int, group: int, octets: int, height: int, width: int, stride: int, sm_count: int, source: str
) -> None:
    by_group = source in (spec.WHOLE_FORWARD, spec.WHOLE_BACKWARD_DATA)
    of_weight = source == spec.BACKWARD_WEIGHT
    assume(not by_group or source in (spec.forward_source(group, stride), spec.backward_data_source(group, stride)))
    channels = octets * max(group, spec.OCTET)
    call = grouped_conv((batch, channels, height, width), channels // group, stride)
    plan = spec.plan(source, call, sm_count)
    across, wide = plan.across, max(group, spec.OCTET)
    if by_group or of_weight:
        units = wide // spec.OCTET // plan.weight.outputs if plan.weight else 1
        assert plan.warps == plan.beside * across * units <= 16
        assert plan.grid[1] * plan.beside * wide >= channels > (plan.grid[1] - 1) * plan.beside * wide
        octets_loaded = plan.beside * wide // spec.OCTET
    else:
        octets_loaded = plan.warps
        assert plan.warps * spec.OCTET % max(group, spec.OCTET) == 0
        assert plan.grid[1] * plan.warps * spec.OCTET >= channels
    assert plan.strip * plan.strips >= call.out_width > plan.strip * (plan.strips - 1)
    assert plan.images * plan.strip <= across * plan.tiles * 16
    assert plan.segment_rows * plan.segments >= call.out_height > plan.segment_rows * (plan.segments - 1)
    assert plan.items == -(-batch // plan.images) * plan.strips * plan.segments
    assert 1 <= plan.grid[0] <= plan.items
    assert plan.stages >= 2
    assert plan.shared_bytes <= (96 * 1024 if by_group or of_weight else spec.SHARED_BYTES)
    assert plan.blocks * (plan.shared_bytes + 1024) <= 228 * 1024
    data = source in (spec.BACKWARD_DATA, spec.WHOLE_BACKWARD_DATA)
    fetched = plan.images * (plan.strip + 1 if data else stride * (plan.strip - 1) + 3)
    assert plan.threads * (plan.loads - 1) < fetched * octets_loaded <= plan.threads * plan.loads
    if of_weight:
        assert plan.threads * plan.dy_loads >= across * plan.tiles * 16 * octets_loaded


@pytest.mark.parametrize(
    ("group", "stride", "forward", "data"),
    [
        (8, 1, spec.FORWARD, spec.FORWARD),
        (16, 1, spec.WHOLE_FORWARD, spec.WHOLE_FORWARD),
        (24, 1, spec.WHOLE_FORWARD, spec.WHOLE_FORWARD),
        (32, 1, spec.FORWARD, spec.FORWARD),
        (8, 2, spec.FORWARD, spec.BACKWARD_DATA),
        (16, 2, spec.FORWARD, spec.WHOLE_BACKWARD_DATA),
        (24, 2, spec.WHOLE_FORWARD, spec.WHOLE_BACKWARD_DATA),
    ],
)
def test_warps_have_whole_groups_where_that_was_measured_to_win(
    group: int, stride: int, forward: str, data: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert spec.forward_source(group, stride) == forward
    assert spec.backward_data_source(group, stride) == data
    monkeypatch.setattr(spec, "WHOLE_GROUPS", 0)
    assert spec.forward_source(group, stride) == spec.FORWARD


@pytest.mark.parametrize(
    ("channels", "stride", "data", "beside"),
    [(72, 1, False, 3), (216, 1, False, 3), (48, 1, False, 2), (72, 2, True, 3), (576, 2, True, 6), (1512, 2, True, 6)],
)
def test_blocks_take_neighbouring_groups_and_few_warps_are_idle(
    channels: int, stride: int, data: bool, beside: int
) -> None:
    found = whole.cut(data=data, group=24, stride=stride, groups=channels // 24, columns=28, batch=256)
    assert found.shape.beside == beside


@pytest.mark.parametrize(
    ("channels", "group", "stride", "columns", "shape"),
    [
        (256, 8, 1, 28, weight.WeightShape(4, 8)),
        (32, 8, 1, 28, weight.WeightShape(4, 4)),  # 4 groups: half of a slab of 8 would be idle
        (512, 16, 1, 14, weight.WeightShape(4, 4, 2)),
        (1024, 32, 1, 7, weight.WeightShape(2, 2, 2)),
        (576, 24, 1, 14, weight.WeightShape(4, 2)),
        (216, 24, 1, 28, weight.WeightShape(4, 2)),  # one of 10 is idle
        (72, 24, 1, 56, weight.WeightShape(4, 1)),  # one of 4
        (72, 24, 2, 56, weight.WeightShape(4, 2)),
        (512, 64, 2, 14, weight.WeightShape(2, 1)),
    ],
)
def test_the_weights_blocks_are_those_that_were_measured(
    channels: int, group: int, stride: int, columns: int, shape: weight.WeightShape
) -> None:
    found = weight.cut(group=group, stride=stride, groups=channels // group, columns=columns, batch=256)
    assert found.shape == shape


def test_a_single_small_image_does_not_take_a_block_for_many() -> None:
    found = weight.cut(group=16, stride=1, groups=32, columns=7, batch=1)
    assert (found.shape.tiles, found.images, found.strip) == (1, 1, 7)


def test_the_kernel_adds_up_with_as_many_threads_as_it_is_launched_with() -> None:
    assert f"#define SUM_THREADS {weight.SUM_THREADS}\n" in sources.source(spec.BACKWARD_WEIGHT)


@pytest.mark.parametrize(("splits", "threads"), [(1, 1), (8, 1), (9, 2), (33, 8), (64, 8), (1000, 8)])
def test_threads_that_add_up_the_splits_of_a_value(splits: int, threads: int) -> None:
    assert weight.threads_a_place(splits) == threads


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"weight_dtype": "bfloat16"}, ""),
        ({"stride": (2, 2)}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float32"}, "dtype"),
        ({"weight_dtype": "float16"}, "weight dtype"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 12, 8, 8), "weight_shape": (12, 4, 3, 3), "groups": 3}, "no multiple"),
        ({"weight_shape": (128, 8, 3, 3)}, "64 channels in, 128 out"),
        ({"groups": 64, "weight_shape": (64, 1, 3, 3)}, "1 channels a group"),
        ({"shape": (2, 144, 8, 8), "weight_shape": (144, 72, 3, 3), "groups": 2}, "72 channels a group"),
        ({"weight_shape": (64, 8, 5, 5)}, "5 x 5 taps"),
        ({"stride": (2, 1)}, "stride"),
        ({"dilation": (2, 2)}, "dilation"),
        ({"padding": (0, 1)}, "padding"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
        ({"shape": (1, 64, 65536, 65536)}, "32-bit"),
        ({"shape": (64, 8, 8)}, "3-D"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "dtype": "bfloat16",
        "weight_shape": (64, 8, 3, 3),
        "weight_dtype": "float32",
        "stride": (1, 1),
        "padding": (1, 1),
        "dilation": (1, 1),
        "groups": 8,
        "arch": 90,
    }
    answer = unsupported(spec, **{**call, **change})
    assert reason in answer if reason else answer == ""


@pytest.mark.parametrize(
    ("group", "stride", "reason"),
    [
        *((group, stride, "") for group in (8, 16, 24, 32, 48, 56, 64) for stride in (1, 2)),
        (4, 1, ""),
        (4, 2, dispatch.UNMEASURED),
        *((40, stride, dispatch.UNMEASURED) for stride in (1, 2)),
    ],
)
def test_what_was_measured_to_win_is_dispatched(group: int, stride: int, reason: str) -> None:
    assert [spec.wins(dtype=dtype, group=group, stride=stride) for dtype in ("bfloat16", "float16")] == [reason] * 2
    assert spec.wins(dtype="float32", group=group, stride=stride) == dispatch.UNMEASURED


def test_a_call_that_does_not_win_runs_pytorchs_own(emulated) -> None:
    before = api.fell_back[dispatch.UNMEASURED]
    emulated.launches.clear()
    x, weight = nhwc(1, 80, 3, 3).bfloat16(), torch.randn(80, 40, 3, 3)
    with only_what_wins():
        y = api.grouped_conv2d(x, weight, 1, 2)
    torch.testing.assert_close(y, F.conv2d(x, weight.bfloat16(), None, 1, 1, 1, 2))
    assert not emulated.launches
    assert api.fell_back[dispatch.UNMEASURED] == before + 1


@pytest.mark.parametrize("function", [api.grouped_conv2d, torch.ops.advisor.grouped_conv2d], ids=["eager", "library"])
def test_pytorchs_forward_and_the_kernels_backward_where_each_is_faster(
    emulated, function: Callable[..., torch.Tensor]
) -> None:
    reason, name = spec.forward_wins(8, 2), spec.name(8, 2)
    ran, left = api.engaged[name], api.fell_back[reason]
    emulated.launches.clear()
    x, weight = nhwc(1, 16, 4, 5).bfloat16().requires_grad_(), torch.randn(16, 8, 3, 3, requires_grad=True)
    y = function(x, weight, 2, 2)
    assert torch.equal(y, F.conv2d(x, weight.bfloat16(), None, 2, 1, 1, 2))
    assert not emulated.launches
    assert (api.engaged[name], api.fell_back[reason]) == (ran, left + 1)
    y.sum().backward()
    assert set(emulated.launches) == {
        "grouped_backward_data",
        "grouped_backward_weight",
        "grouped_backward_weight_sum",
    }
    assert (api.engaged[name], api.fell_back[reason]) == (ran + 1, left + 1)


def test_the_kernels_forward_at_stride_2_where_it_is_asked_for(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    """What tuning measures beside PyTorch's."""
    monkeypatch.setattr(spec, "FORWARD_ALWAYS", 1)
    case = next(c for c in cases.VERIFICATION if c.name == "grouped 3x3 of 16 s2")
    emulated.launches.clear()
    found = verify.check(FAMILY, case, "cpu")
    assert found["passed"], found["detail"]
    assert emulated.launches["grouped_forward"]


def test_a_slab_is_as_measured_unless_it_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    groups = (4, 8, 16, 24, 32, 48, 64)
    assert {group: spec.warps_of(group) for group in groups} == {4: 4, 8: 8, 16: 4, 24: 3, 32: 4, 48: 6, 64: 8}
    for slab, warps in ((4, (4, 4, 4, 3, 4, 6, 8)), (8, (8, 8, 8, 6, 8, 6, 8))):
        monkeypatch.setattr(spec, "SLAB", slab)
        assert tuple(map(spec.warps_of, groups)) == warps


def test_under_autocast_neither_weight_nor_its_gradient_is_cast(emulated) -> None:
    x, weight = nhwc(2, 16, 6, 5).requires_grad_(), torch.randn(16, 8, 3, 3, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = api.grouped_conv2d(x, weight, 2, 2)
    assert y.dtype == torch.bfloat16
    dx, dweight = torch.autograd.grad(y.float().sum(), (x, weight))
    assert (dx.dtype, dweight.dtype) == (torch.float32, torch.float32)
    assert emulated.launches["grouped_backward_weight"] == 1


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "no way past the other group": ("if (!finite(v))", "if (false)", "grouped 3x3 of 4 s1"),
    "a column of the left neighbour": ("column >= 0 && column < width && mine", "column < width && mine", "grouped 3x3 of 8 s1"),
    "taps not turned": ("row = TRANSPOSED ? 2 - r : r", "row = r", "grouped 3x3 of 8 s1"),
    "odd rows lost": ("put(above, 2 * i - 1);", "", "grouped 3x3 of 8 s2"),
    "a row read before it is there": ("cp_async_wait<STAGES - 2>();", "", "grouped 3x3 of 8 s1"),
    "a whole group's row read before it is there": ("cp_async_wait<STAGES - 2>();", "", "grouped 3x3 of 16 s1"),
    "a row that other warps have not staged yet": ("if (h > begin + 1) put();", "", "grouped 3x3 of 24 s1"),
    "a product of the wrong depth": ("if (is_first) MMA_K8", "if (false) MMA_K8", "grouped 3x3 of 24 s1"),
    "a whole group's taps not turned": ("(turned ? 2 - r : r)", "r", "grouped 3x3 of 16 s1"),
    "a whole group's odd rows lost": ("if (i > begin && 2 * i - 1 < height)", "if (false)", "grouped 3x3 of 16 s2"),
    "stored before all warps have staged": (
        "      __syncthreads();\n#pragma unroll\n      for (int k = 0; k < STORES", "#pragma unroll\n      for (int k = 0; k < STORES",
        "grouped 3x3 of 24 s2",
    ),
    "a whole group's row that other warps wait for": ("__syncthreads();  // what was staged before is stored too", "", "grouped 3x3 of 24 s2"),
    "a row of dy that another row of x meets": ("move(g2, g1);\n      move(g1, g0);", "move(g1, g0);\n      move(g2, g1);", "grouped 3x3 of 16 s1"),
    "the other group's products in the weight": (
        "if (chunk >= CHUNKS || out % CG / GROUP != c / GROUP) return;",
        "if (chunk >= CHUNKS) return;",
        "grouped 3x3 of 4 s1",
    ),
}  # fmt: skip


# The same of the kernels whose warps have an octet each, which warps with whole groups show too.
LONG = {"taps not turned", "a row read before it is there", "odd rows lost", "a column of the left neighbour"}


@pytest.mark.parametrize(
    "fault", [pytest.param(fault, marks=[pytest.mark.long] if fault in LONG else []) for fault in FAULTS]
)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, name = FAULTS[fault]
    emulated.use(sm_count=1)  # so that a block has more than one row
    case = next(c for c in cases.VERIFICATION if c.name == name and c.shape[1] > 8)
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


# Of the weight's gradient: what is changed, in which case, on how many SMs: one, for blocks with several items; many, for many splits.
WEIGHT_FAULTS = {
    "the next item's rows too soon": ("if (fetched >= rows && coming < items)", "if (fetched + 2 >= rows && coming < items)", (2, 144, 5, 70), 1),
    "the item before once more": ("coming += gridDim.x;", "coming += fetched ? 0 : gridDim.x;", (3, 80, 5, 35), 1),
    "splits that nobody adds up": ("for (int p = 1; p < parts; ++p)", "for (int p = 2; p < parts; ++p)", (3, 80, 5, 35), 132),
    "no wait for the other threads that add up": ("  __syncthreads();\n  if ((int)threadIdx.x >= places", "  if ((int)threadIdx.x >= places", (3, 80, 5, 35), 132),
}  # fmt: skip


@pytest.mark.parametrize("fault", WEIGHT_FAULTS)
def test_a_fault_planted_in_the_weights_gradient_is_found(
    emulated, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    before, after, shape, sm_count = WEIGHT_FAULTS[fault]
    emulated.use(sm_count=sm_count)
    case = next(c for c in cases.VERIFICATION if c.shape == shape)
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


class Net(nn.Module):
    """Grouped convolutions as modules and as a function, beside ones that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 16, 1)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False)
        self.same = nn.Conv2d(16, 16, 3, padding="same", groups=4, bias=False)
        self.depth = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.biased = nn.Conv2d(16, 16, 3, padding=1, groups=2)
        self.wider = nn.Conv2d(16, 32, 3, padding=1, groups=2, bias=False)
        self.taps = nn.Parameter(torch.randn(32, 8, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.wider(self.biased(self.depth(self.same(self.grouped(self.expand(x))))))
        return F.conv2d(x, self.taps, None, 2, 1, 1, 4).mean((2, 3))


@pytest.mark.parametrize("compiled", [False, True])
def test_patterns_are_found_and_train_as_before(compiled: bool) -> None:
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    report = match.MatchReport()
    x = torch.randn(2, 3, 9, 8)

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        FAMILY.rewrite(graph_module, report, compiled=compiled)
        graph_module.recompile()
        return graph_module.forward

    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        run = torch.compile(model.forward, backend=backend, dynamic=False)
        ours, theirs = run(x), plain(x)
        ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    assert {path: name for path, name in report.matched.items() if path in ("grouped", "same")} == {
        "grouped": "grouped 3x3 of 8 s1",
        "same": "grouped 3x3 of 4 s1",
    }
    assert "grouped 3x3 of 8 s2" in report.matched.values()
    assert report.unmatched == {"biased": "has a bias", "wider": "16 channels in, 32 out"}
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad.dtype == other.grad.dtype
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.05
