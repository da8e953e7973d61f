"""1 x 1 convolution with its moments, without a GPU: definition, launch geometry, emulated kernel, graph matching."""

from __future__ import annotations

import math

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import planted
from emulation.supports import unsupported
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, shared_memory
from advisor.ops.batchnorm_act import api as batchnorm_act
from advisor.ops.family import Producer
from advisor.ops.pointwise import api, cuda, reference, spec

FAMILY = catalog.get("pointwise")
NOISE = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


def nhwc(*shape: int, mean: float = 0.0, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return (torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)) + mean).permute(0, 3, 1, 2)


def weights(out: int, channels: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(out, channels, 1, 1, generator=torch.Generator().manual_seed(seed)) / channels**0.5


def merged(parts: torch.Tensor) -> torch.Tensor:
    """[3, C] of all parts, in fp64."""
    count, mean, m2 = parts.double().unbind(1)
    all_mean = (count * mean).sum(0) / count.sum(0)
    return torch.stack((count.sum(0), all_mean, (m2 + count * (mean - all_mean).square()).sum(0)))


def hold(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, parts: torch.Tensor) -> None:
    """The kernel's result is the product rounded once, and its moments are those of that result."""
    exact = reference.pointwise_conv2d(x.double(), weight.double())
    size = exact.abs().amax()
    assert bool(((y.double() - exact).abs() <= NOISE[x.dtype] * exact.abs() + 1e-5 * size).all())
    assert y.is_contiguous(memory_format=torch.channels_last)
    expected = reference.moments(y.double())[0]
    assert torch.equal(merged(parts)[0], expected[0])
    torch.testing.assert_close(merged(parts)[1:], expected[1:], rtol=1e-5, atol=1e-5 * float(size))


def test_the_definition_is_pytorchs_and_passes_gradcheck() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(6, 3, 1, 1, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(reference.pointwise_conv2d(x, weight), F.conv2d(x, weight))
    assert torch.autograd.gradcheck(reference.pointwise_conv2d, (x, weight), fast_mode=True)


@given(
    rows=st.one_of(st.integers(1, 5000), st.integers(1, spec.MAX_ROWS)),
    in_octets=st.integers(1, spec.MAX_IN_CHANNELS // spec.OCTET),
    out_octets=st.integers(1, 400),
    sm_count=st.integers(1, 200),
    arch=st.sampled_from((80, 86, 90, 100, 120)),
)
def test_a_plan_covers_every_row_and_channel_within_what_a_block_may_have(
    rows: int, in_octets: int, out_octets: int, sm_count: int, arch: int
) -> None:
    plan = spec.plan(rows, in_octets * spec.OCTET, out_octets * spec.OCTET, sm_count, arch)
    room = shared_memory.of_a_block(arch)
    assert plan.steps * plan.chunks * spec.STEP >= in_octets * spec.OCTET
    assert plan.steps * (plan.chunks - 1) * spec.STEP < in_octets * spec.OCTET
    assert plan.grid[1] * plan.columns >= out_octets * spec.OCTET > (plan.grid[1] - 1) * plan.columns
    tiles = -(-rows // plan.rows)
    assert 1 <= plan.grid[0] <= tiles
    assert plan.stages >= 2
    assert plan.shared_bytes <= room
    assert plan.blocks * (plan.shared_bytes + shared_memory.OF_THE_SYSTEM) <= room + shared_memory.OF_THE_SYSTEM
    assert plan.blocks * plan.threads * spec.REGISTERS[plan.tiles, plan.groups] <= spec.SM_REGISTERS
    assert plan.grid[0] * plan.grid[1] <= max(sm_count * plan.blocks, plan.grid[1])
    assert plan.threads <= 1024


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float32", "weight_dtype": "float32"}, "dtype float32"),
        ({"weight_dtype": "float16"}, "weight dtype"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 12, 8, 8), "weight_shape": (64, 12, 1, 1)}, "12 channels are no multiple"),
        ({"weight_shape": (20, 64, 1, 1)}, "20 channels are no multiple"),
        ({"weight_shape": (64, 32, 1, 1), "groups": 2}, "2 groups"),
        ({"weight_shape": (64, 64, 3, 3)}, "3 x 3 taps"),
        ({"stride": (2, 2)}, "stride"),
        ({"padding": (1, 0)}, "padding"),
        ({"shape": (2, 1024, 8, 8), "weight_shape": (64, 1024, 1, 1)}, "1024 channels in"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
        ({"shape": (1, 64, 65536, 65536)}, "32 bits"),
        ({"shape": (64, 8, 8)}, "3-D"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "channels_last": True,
        "dtype": "bfloat16",
        "weight_shape": (128, 64, 1, 1),
        "weight_dtype": "bfloat16",
        "stride": (1, 1),
        "padding": (0, 0),
        "dilation": (1, 1),
        "groups": 1,
        "arch": 90,
    }
    answer = unsupported(spec, **{**call, **change})
    assert reason in answer if reason else answer == ""


@pytest.mark.parametrize(
    ("channels", "side", "reason"),
    [
        *(((c, out), side, "") for c, out, side in ((64, 256, 56), (256, 64, 56), (128, 512, 28), (16, 96, 112))),
        ((112, 672), 14, ""),
        ((80, 480), 14, "80 channels in, 480 out: cuDNN is faster where arithmetic bounds"),
        ((40, 120), 28, ""),
        ((240, 80), 14, "one launch reads the tensor once"),
        ((160, 960), 7, "12544 pixels: too few to gain"),
        ((512, 128), 28, "512 channels in: cuDNN is as fast"),
        ((256, 1024), 14, "256 channels in, 1024 out: cuDNN is faster where arithmetic bounds"),
    ],
)
def test_what_was_measured_to_win_is_dispatched(channels: tuple[int, int], side: int, reason: str) -> None:
    call = {"rows": 256 * side * side, "in_channels": channels[0], "out_channels": channels[1]}
    assert [spec.wins(dtype=dtype, **call) for dtype in ("bfloat16", "float16")] == [reason] * 2
    assert spec.wins(dtype="float32", **call) == dispatch.UNMEASURED


@pytest.mark.parametrize(
    ("channels", "expected"),
    [
        ((64, 256), (1, 8, 4, 4, 1)),  # all columns in one block, whose 8 warps stand side by side
        ((24, 72), (2, 3, 4, 2, 1)),
        ((256, 64), (4, 2, 2, 8, 2)),  # long chunks rather than large tiles, so that two blocks share an SM
        ((128, 512), (1, 8, 4, 8, 1)),
    ],
)
def test_a_plan_is_as_was_measured_to_be_fast(channels: tuple[int, int], expected: tuple[int, ...]) -> None:
    plan = spec.plan(256 * 28 * 28, *channels, 132, 90)
    assert (plan.warps_m, plan.warps_n, plan.tiles, plan.steps, plan.chunks) == expected
    assert (plan.groups, plan.stages, plan.blocks) == (1, 2, 2)


@pytest.mark.parametrize(
    ("shape", "out", "dtype"),
    [
        ((3, 24, 9, 11), 72, torch.float16),  # channels that fill neither a step nor a block's columns
        ((1, 136, 13, 11), 272, torch.bfloat16),  # chunks, and blocks beside each other
    ],
)
def test_the_moments_are_those_of_the_rounded_result(
    emulated, shape: tuple[int, ...], out: int, dtype: torch.dtype
) -> None:
    """Far from zero, where a sum of squares would cancel."""
    x, weight = nhwc(*shape, mean=10.0).to(dtype), weights(out, shape[1]).to(dtype)
    y, parts = api.pointwise_conv2d_moments(x, weight)
    assert parts is not None
    hold(x, weight, y, parts)
    again = api.pointwise_conv2d_moments(x, weight)
    assert torch.equal(y, again[0])
    assert torch.equal(parts, again[1])
    assert torch.equal(y, api.pointwise_conv2d(x, weight))


@pytest.mark.parametrize(("tiles", "groups", "stages"), [(4, 1, 2), (2, 2, 3), (1, 1, 4), (4, 2, 2)])
def test_every_way_to_cut_the_product_gives_it(emulated, tiles: int, groups: int, stages: int) -> None:
    x, weight = nhwc(1, 72, 17, 19, mean=1.0).bfloat16(), weights(104, 72).bfloat16()
    rows = 17 * 19
    plan = spec.arranged(
        rows=rows, out_channels=104, sm_count=1, arch=90, warps_m=2, warps_n=2,
        tiles=tiles, groups=groups, steps=3, chunks=2, stages=stages,
    )  # fmt: skip
    assert plan is not None
    launch = cuda.launch_of(plan, rows, 72, 104, x.dtype, 0, moments=True)
    y, parts = cuda.run(launch, x, weight, moments=True)
    hold(x, weight, y, parts)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_in_its_pixel_and_reaches_the_statistics(emulated, value: float) -> None:
    x, weight = nhwc(1, 24, 7, 9).bfloat16(), weights(40, 24).bfloat16()
    x[0, 5, 0, 0] = value  # the first row, whose values the moments are about
    x[0, 7, 4, 3] = value
    y, parts = api.pointwise_conv2d_moments(x, weight)
    expected = F.conv2d(x.double(), weight.double())
    assert torch.equal(y.isfinite(), expected.isfinite())
    assert torch.equal(y.isnan(), expected.isnan())
    assert not merged(parts)[2].isfinite().any()


def test_under_autocast_it_is_computed_and_differentiated_as_pytorchs(emulated) -> None:
    x, weight = nhwc(2, 16, 6, 5).requires_grad_(), weights(24, 16).requires_grad_()
    above = nhwc(2, 24, 6, 5, seed=2).bfloat16()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [f(x, weight) for f in (api.pointwise_conv2d, F.conv2d)]
    assert [y.dtype for y in found] == [torch.bfloat16] * 2
    assert emulated.launches["pointwise_forward"] == 1
    ours, theirs = (torch.autograd.grad(y, (x, weight), above) for y in found)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.dtype == torch.float32
        assert torch.equal(mine, other)


def test_a_weight_that_vectors_cannot_read_is_copied(emulated) -> None:
    x, flat = nhwc(2, 16, 6, 5).bfloat16(), torch.randn(24 * 16 + 1).bfloat16()
    weight = flat[1:].view(24, 16, 1, 1)
    y = api.pointwise_conv2d(x, weight)
    assert emulated.launches["pointwise_forward"] == 1
    torch.testing.assert_close(y, F.conv2d(x, weight), rtol=0.02, atol=0.02)


@pytest.mark.parametrize("reason", ["input is not channels_last and aligned", dispatch.UNMEASURED])
def test_a_call_that_the_kernel_does_not_take_runs_pytorchs_and_leaves_no_moments(
    emulated, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    x, weight = nhwc(2, 16, 6, 5).bfloat16(), weights(24, 16)
    before = api.fell_back[reason]
    if reason == dispatch.UNMEASURED:
        monkeypatch.setattr(spec, "wins", lambda **call: reason)
    else:
        x = x.contiguous()
    with only_what_wins():
        y, parts = api.pointwise_conv2d_moments(x, weight)
    assert parts is None
    assert not emulated.launches
    assert api.fell_back[reason] == before + 1
    assert torch.equal(y, F.conv2d(x, weight.bfloat16()))


# What is changed in the kernel, and a shape at which it shows.
FAULTS = {
    "columns in memory's order": ("return p % 8 / 2 * 8 + p / 8 * 2 + p % 2;", "return p;"),
    "a row behind the end counted": ("row >= rows - begin", "row > rows - begin"),
    "read before it is there": ("cp_async_wait<STAGES - 2>();", ""),
    "moments of what is not rounded": ("widen(v, f);", "for (int j = 0; j < 8; ++j) f[j] = d[m][4 * n + j / 2][2 * half + j % 2];"),
    "warps joined as if of one mean": ("delta * delta * (all * part / (all + part))", "0.0"),
    "chunks behind the channels": ("at + u < in_units", "true"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from emulation.compiler import EmulationError

    x, weight = nhwc(1, 200, 13, 11, mean=0.5).bfloat16(), weights(40, 200).bfloat16()
    with planted(monkeypatch, *FAULTS[fault]), pytest.raises((AssertionError, EmulationError)):
        hold(x, weight, *api.pointwise_conv2d_moments(x, weight))


class Net(nn.Module):
    """1 x 1 convolutions before batch norms, and ones that are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, bias=False)
        self.expand = nn.Conv2d(16, 32, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(32)
        self.biased = nn.Conv2d(32, 16, 1)
        self.bn2 = nn.BatchNorm2d(16)
        self.strided = nn.Conv2d(16, 16, 1, stride=2, bias=False)
        self.bn3 = nn.BatchNorm2d(16)
        self.bare = nn.Conv2d(16, 16, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.expand(self.stem(x))))
        return self.bare(self.bn3(self.strided(self.bn2(self.biased(x))))).mean((2, 3))


@pytest.mark.parametrize("with_norms", [True, False])
def test_convolutions_before_norms_of_ours_are_found_and_train_as_before(
    monkeypatch: pytest.MonkeyPatch, with_norms: bool
) -> None:
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    names = ("pointwise", "batchnorm_act") if with_norms else ("pointwise",)
    reports = {name: match.MatchReport() for name in names}
    asked: list[object] = []
    monkeypatch.setattr(batchnorm_act.spec, "takes_moments", lambda nbytes, residual: "")  # however small
    monkeypatch.setattr(spec, "unsupported_gradient", lambda **call: "not looked at here")
    leaving = api.pointwise_conv2d_moments
    monkeypatch.setattr(
        "advisor.ops.pointwise.rewrite.PRODUCES",
        {api.pointwise_conv2d: Producer(lambda *given: asked.append(given) or leaving(*given), lambda node: "")},
    )
    x = torch.randn(2, 3, 9, 8)
    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        ours = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)(x)
        theirs = plain(x)
    ours.float().square().sum().backward()
    theirs.float().square().sum().backward()
    report = reports["pointwise"]
    assert report.matched == ({"expand": "1x1 16->32"} if with_norms else {})
    assert len(asked) == with_norms
    alone = "no batch norm of ours behind it"
    expected = {"biased": "has a bias", "strided": "stride 2 x 2", "bare": alone}
    assert report.unmatched == (expected if with_norms else {**expected, "expand": alone})
    torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.05)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert float((mine.grad - other.grad).norm() / (other.grad.norm() + 1e-3)) < 0.1


def test_before_a_norm_of_one_launch_it_stays_pytorchs() -> None:
    reports = {name: match.MatchReport() for name in ("pointwise", "batchnorm_act")}
    net = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32))
    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(net.train().forward, backend=dynamo.backend(reports, mode=None))(nhwc(2, 16, 4, 4))
    assert "one launch reads the tensor once" in reports["pointwise"].unmatched["0"]


def test_its_weights_are_cast_with_all_others() -> None:
    reports = {name: match.MatchReport() for name in ("pointwise", "batchnorm_act", "weight_casts")}
    net = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32))
    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16), pytest.MonkeyPatch.context() as patch:
        patch.setattr(batchnorm_act.spec, "takes_moments", lambda nbytes, residual: "")
        torch.compile(net.train().forward, backend=dynamo.backend(reports, mode=None))(nhwc(2, 16, 4, 4))
    assert len(reports["pointwise"].matched) == 1
    assert reports["weight_casts"].matched == {"0 [32, 16, 1, 1]": "cast to bfloat16"}


def test_inductors_graphs_are_left_alone() -> None:
    report = match.MatchReport()

    def backend(graph_module: torch.fx.GraphModule, inputs: object) -> object:
        with dispatch.everything():
            catalog.get("batchnorm_act").rewrite(graph_module, match.MatchReport(), compiled=False)
            FAMILY.rewrite(graph_module, report, compiled=True)
        assert any(node.target is F.conv2d for node in graph_module.graph.nodes)
        return graph_module.forward

    torch._dynamo.reset()
    net = nn.Sequential(nn.Conv2d(16, 32, 1, bias=False), nn.BatchNorm2d(32)).bfloat16()
    net[1].float()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(batchnorm_act.spec, "takes_moments", lambda nbytes, residual: "")
        torch.compile(net.train().forward, backend=backend)(nhwc(2, 16, 4, 4).bfloat16())
    assert report.unmatched == {"0": "left to Inductor, whose batch norms take no moments"}
