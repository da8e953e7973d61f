"""Statistics of a batch norm from the convolution before it: the merging kernel, who is paired with whom, and what falls back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with, planted
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from advisor.ops import catalog, dispatch, dynamo, match, moments
from advisor.ops.batchnorm_act import api as norm
from advisor.ops.batchnorm_act import cuda, spec
from advisor.ops.batchnorm_act.forward import layer
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_max_pool import api as max_pool
from advisor.ops.depthwise import spec as depthwise_spec
from advisor.ops.first_conv import api as first_conv
from advisor.ops.first_conv import spec as first_conv_spec
from advisor.ops.grouped import api as grouped
from advisor.ops.grouped import spec as grouped_spec
from advisor.ops.moments_cases import APART

pytestmark = pytest.mark.usefixtures("readable_graphs")

PRODUCERS = ("depthwise", "grouped", "first_conv", "conv3x3", "pointwise")
FAMILIES = ("batchnorm_max_pool", "batchnorm_act", "grouped")


def parts_of(values: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Moments [parts, 3, C] of values [M, C] cut into parts of these sizes."""
    parts = torch.zeros(len(sizes), 3, values.shape[1])
    for part, rows in zip(parts, values.double().split(sizes), strict=True):
        if len(rows):
            mean = rows.mean(0)
            part.copy_(torch.stack([torch.full_like(mean, len(rows)), mean, (rows - mean).square().sum(0)]))
    return parts


def merged(parts: torch.Tensor, momentum: float = 0.1) -> tuple[torch.Tensor, ...]:
    """saved [2, C] and the running mean and variance, from 0 and 1."""
    channels = parts.shape[2]
    saved, mean, var = torch.empty(2, channels), torch.zeros(channels), torch.ones(channels)
    running = mean.data_ptr(), var.data_ptr()
    cuda.merge_moments(parts, saved, running, running, Norm(mean, var, None, None, momentum, 1e-5))
    return saved, mean, var


@pytest.mark.parametrize(
    ("channels", "sizes"),
    [(8, [5]), (12, [7, 0, 1, 30]), (20, [2] * 700), (4, [0, 0, 3, 90])],
    ids=["one part", "uneven parts", "more parts than threads", "first parts empty"],
)
@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_parts_are_merged_as_chan_does(emulated, channels: int, sizes: list[int], offset: float) -> None:
    values = torch.randn(sum(sizes), channels, generator=torch.Generator().manual_seed(1)) + offset
    parts = parts_of(values, sizes)
    saved, mean, var = merged(parts)
    wide = values.double()
    want_var = wide.var(0, correction=0)
    # the parts' own means are fp32
    rtol = 1e-6 if not offset else 2e-5
    torch.testing.assert_close(saved[0].double(), wide.mean(0), rtol=rtol, atol=1e-7)
    torch.testing.assert_close(saved[1].double(), torch.rsqrt(want_var + 1e-5), rtol=rtol, atol=0.0)
    torch.testing.assert_close(mean.double(), 0.1 * wide.mean(0), rtol=rtol, atol=1e-7)
    torch.testing.assert_close(var.double(), 0.9 + 0.1 * wide.var(0), rtol=rtol, atol=0.0)
    assert all(map(torch.equal, (saved, mean, var), merged(parts)))


def test_what_is_not_finite_stays_in_its_channel(emulated) -> None:
    values = torch.randn(40, 8)
    values[3, 2] = float("nan")
    saved, mean, _ = merged(parts_of(values, [10, 10, 20]))
    assert saved.isnan().any(0).tolist() == [c == 2 for c in range(8)]
    assert mean.isnan().tolist() == [c == 2 for c in range(8)]


def test_a_part_left_out_would_be_seen(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(64, 8) + torch.arange(64).unsqueeze(1)
    parts = parts_of(values, [16] * 4)
    with planted(monkeypatch, "for (int block = ty;", "for (int block = ty + 1;"):
        cuda.merge_launch.cache_clear()
        saved, *_ = merged(parts)
    cuda.merge_launch.cache_clear()
    assert not torch.allclose(saved[0], values.mean(0), rtol=1e-3)


# What is changed in a kernel, and in which case of a norm behind a convolution the check must see it.
FAULTS = {
    "pixels outside the image are counted": (
        "const bool inside = p < images * strip && item.image + p / strip < batch && item.column + p % strip < out_width;\n      counted",
        "const bool inside = true;\n      counted",
        "grouped 3x3 of 32 s1+bn+relu",
    ),
    "the last row of a segment is not": (
        "if (!(counted >> (2 * i + k / 2) & 1u)) continue;",
        "if (!(counted >> (2 * i + k / 2) & 1u) || out_row + 1 == end) continue;",
        "grouped 3x3 of 32 s1+bn+relu",
    ),
    "the workspace stays as it was": ("leave_moments(moments, blockIdx.x,", "if (blockIdx.x) leave_moments(moments, blockIdx.x,", "grouped 3x3 of 8 s1+bn+relu"),
    "pixels beside the first image's are counted": (
        "if (ow + g + 8 * h < out_width) add(of, j, pairs[h]);", "add(of, j, pairs[h]);", "first conv k3 s2 to 16+bn+relu"
    ),
    "a warp's moments are left out": ("blockIdx.x * WARPS_M + warp_m, OUT", "blockIdx.x * WARPS_M, OUT", "first conv k3 s2 to 16+bn+relu"),
    "columns beside the image are counted": (
        "if (!(wanted >> v & 1u)) continue;\n#pragma unroll\n    for (int j = 0; j < CH; ++j) {\n      const float d",
        "#pragma unroll\n    for (int j = 0; j < CH; ++j) {\n      const float d",
        "depthwise k5 s1+bn+relu",
    ),
    "a thread's moments are left out": ("for (int ty = 0; ty < strips_per_pass", "for (int ty = 1; ty < strips_per_pass", "depthwise k5 s1+bn+relu"),
    "filled pixels of a tile are counted": (
        "row < height && column + e < width ? values[e] - shift[band][half] : 0.f", "values[e] - shift[band][half]", "3x3 64 to 64+bn+relu"
    ),
    "a warpgroup's moments are left out": ("blockIdx.x * 2 + group, OUT", "blockIdx.x * 2, OUT", "3x3 64 to 64+bn+relu"),
    "the other group's products count": ("if (lost && octet < octets) {", "if (false) {", "grouped 3x3 of 4 s1+bn+relu"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_producer_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, name = FAULTS[fault]
    emulated.use(sm_count=1)  # so that a block has more than one row
    family, case = next(
        (family, case)
        for family in (catalog.get(identifier) for identifier in PRODUCERS)
        for case in family.verification
        if case.name == name and case.shape[0] > 1
    )
    assert not passes_with(monkeypatch, family, case, before, after)


def test_every_producer_is_verified_with_a_norm_behind_it() -> None:
    assert {family.id for family in catalog.FAMILIES if family.produces} == set(PRODUCERS)
    for identifier in PRODUCERS:
        family = catalog.get(identifier)
        assert any("+bn+relu" in case.name for case in family.verification)
        leaving = {case.name for case in family.benchmark if "+bn+relu" in case.name}
        assert {name.removesuffix(APART) for name in leaving if name.endswith(APART)} == {
            name for name in leaving if not name.endswith(APART)
        }


def test_the_stored_values_are_counted(emulated) -> None:
    """Not the fp32 sums before they are rounded to bf16: a norm that reads its input sees these."""
    torch.manual_seed(0)
    x = (torch.randn(2, 6, 9, 16) * 0.01 + 1.0).bfloat16().permute(0, 3, 1, 2)
    weight = torch.randn(16, 8, 3, 3)
    y, parts = grouped.grouped_conv2d_moments(x, weight, 1, 2)
    assert parts is not None
    assert torch.equal(y, grouped.grouped_conv2d(x, weight, 1, 2))
    count, mean, m2 = parts.double().unbind(1)
    assert bool((count.sum(0) == y.numel() / 16).all())
    whole = (count * mean).sum(0) / count.sum(0)
    var = (m2 + count * (mean - whole).square()).sum(0) / count.sum(0)
    torch.testing.assert_close(whole, y.double().mean((0, 2, 3)), rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(var, y.double().var((0, 2, 3), correction=0), rtol=1e-4, atol=0.0)


class Block(nn.Module):
    """Grouped convolutions with norms behind them, in the forms that networks have."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form
        self.conv = nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False)
        self.bn = nn.BatchNorm2d(16, momentum=None if form == "cumulative" else 0.1)
        self.other = nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.conv(x)
        if self.form == "changed in place":
            y.mul_(2.0)
        if self.form == "residual":
            return F.relu(self.bn(y) + x)
        if self.form == "forked":
            z = F.relu(self.bn(y))
            return z * 2.0 + F.avg_pool2d(z, 3, 1, 1)
        if self.form == "max_pool":
            return F.max_pool2d(F.relu(self.bn(y)), 3, 2, 1)
        if self.form == "used elsewhere":
            return F.relu(self.bn(y)) + y
        if self.form == "two norms":
            return F.relu(self.bn(y)) + F.silu(self.other(y))
        return F.relu(self.bn(y))


def targets(form: str, families: tuple[str, ...] = FAMILIES) -> tuple[list[Any], Any]:
    """What the captured graph calls; the block's result, its input's gradient and running statistics, with every family's kernels forced on."""
    torch.manual_seed(0)
    block = Block(form)
    block.train()
    if form == "frozen":
        block.bn.eval()
    if form == "cumulative":
        block.bn.forward = layer(block.bn.forward, block.bn)
    x = torch.randn(2, 7, 6, 16).permute(0, 3, 1, 2).bfloat16().requires_grad_()
    reports = {family: match.MatchReport() for family in families}
    seen: list[Any] = []

    def backend(graph_module: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        forward = dynamo.backend(reports, mode=None)(graph_module, inputs)
        seen.extend(node for node in graph_module.graph.nodes if node.op == "call_function")
        return forward

    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.compile(block, backend=backend, dynamic=False)(x)
    (dx,) = torch.autograd.grad(y.float().square().sum(), x)
    assert not any("failed" in reason for report in reports.values() for reason in report.unmatched.values())
    return seen, (y.detach(), dx, block.bn.running_mean, block.bn.running_var)


@pytest.fixture
def _small_norms_take_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "HELD_BYTES", 0)


PAIRED = {
    "plain": norm.batchnorm_act,
    "residual": norm.batchnorm_act,
    "forked": norm.forked_batchnorm_act,
    "max_pool": max_pool.batchnorm_max_pool,
    "used elsewhere": norm.batchnorm_act,
    "cumulative": norm.batchnorm_act,
}


@pytest.mark.parametrize("form", PAIRED)
@pytest.mark.usefixtures("_small_norms_take_moments")
def test_a_norm_takes_the_moments_of_the_convolution_before_it(
    emulated, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    nodes, ours = targets(form)
    assert grouped.grouped_conv2d not in [node.target for node in nodes]
    (user,) = (node for node in nodes if node.target is PAIRED[form])
    parts = user.kwargs["moments"]
    assert parts.args[0].target is grouped.grouped_conv2d_moments
    assert emulated.launches["batchnorm_merge_moments"] == 1
    assert not emulated.launches["batchnorm_act_stats"]
    monkeypatch.setattr(moments, "pair", lambda *_: None)
    _, theirs = targets(form)
    assert emulated.launches["batchnorm_act_stats"] == 1
    for mine, other in zip(ours, theirs, strict=True):
        assert float((mine - other).norm() / other.norm()) < 2.0**-8


def test_a_stems_norm_takes_the_moments_of_the_first_convolution(emulated) -> None:
    torch.manual_seed(0)
    stem = nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
    ).train()
    plain = copy.deepcopy(stem)
    x = torch.randn(2, 16, 20, 3).permute(0, 3, 1, 2).bfloat16()
    reports = {family: match.MatchReport() for family in ("batchnorm_max_pool", "first_conv")}
    torch._dynamo.reset()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = torch.compile(stem, backend=dynamo.backend(reports, mode=None), dynamic=False)(x)
        want = plain(x)
    assert dict(emulated.launches) == {
        "first_conv_forward": 1,
        "batchnorm_merge_moments": 1,
        "batchnorm_max_pool_forward": 1,
    }
    assert float((y - want).detach().norm() / want.detach().norm()) < 0.01
    y.float().square().sum().backward()
    want.float().square().sum().backward()
    for mine, other in zip(stem.parameters(), plain.parameters(), strict=True):
        assert float((mine.grad - other.grad).norm() / other.grad.norm()) < 0.02


@pytest.mark.usefixtures("_small_norms_take_moments")
def test_two_norms_over_one_tensor_share_its_moments(emulated) -> None:
    nodes, _ = targets("two norms")
    one, other = (node.kwargs["moments"] for node in nodes if node.target is norm.batchnorm_act)
    assert one is other
    assert emulated.launches["grouped_forward"] == 2  # the second is the data gradient
    assert emulated.launches["batchnorm_merge_moments"] == 2


NOT_PAIRED = {
    "a frozen norm has no statistics to take": {"form": "frozen"},
    "another value is normalised than was made": {"form": "changed in place"},
    "the norm is PyTorch's": {"families": ("grouped",)},
    "the convolution is PyTorch's": {"families": ("batchnorm_act",)},
}


@pytest.mark.parametrize("why", NOT_PAIRED)
@pytest.mark.usefixtures("_small_norms_take_moments")
def test_without_both_sides_nothing_is_paired(emulated, why: str) -> None:
    nodes, _ = targets(**{"form": "plain", **NOT_PAIRED[why]})
    assert not any("moments" in node.kwargs for node in nodes)
    assert grouped.grouped_conv2d_moments not in [node.target for node in nodes]
    assert not emulated.launches["batchnorm_merge_moments"]


def test_a_norm_in_one_launch_needs_no_moments(emulated) -> None:
    nodes, _ = targets("plain")
    assert not any("moments" in node.kwargs for node in nodes)
    assert emulated.launches["batchnorm_act_held_forward"] == 1


@pytest.mark.usefixtures("_small_norms_take_moments")
def test_without_a_measurement_nothing_is_paired(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    for reason in ("", dispatch.UNMEASURED):
        monkeypatch.setattr(grouped_spec, "moments_win", lambda *_, reason=reason: reason)
        with only_what_wins():
            nodes, _ = targets("plain")
        assert any("moments" in node.kwargs for node in nodes) == (not reason)


def test_what_was_measured_to_win_is_paired() -> None:
    for group, stride in ((8, 1), (4, 1), (16, 1), (24, 1), (24, 2), (48, 1)):
        reason = grouped_spec.moments_win(group, stride)
        assert (not reason) == ((group, stride) == (8, 1))
        assert ("warpgroups leave no moments" in reason) == (group == 48)
    assert "cuDNN" in grouped_spec.moments_win(8, 2)  # PyTorch's forward leaves none
    assert not first_conv_spec.moments_win(7, 2, 64)
    assert first_conv_spec.moments_win(4, 4, 96) == dispatch.UNMEASURED
    for kernel, stride, reason in ((3, 1, ""), (5, 2, ""), (9, 1, "another kernel's forward leaves no moments")):
        call = depthwise_spec.call((2, 16, 8, 8), kernel, stride, (kernel // 2, kernel // 2), 1)
        assert depthwise_spec.moments_win(call, "bfloat16") == reason


@pytest.mark.usefixtures("_small_norms_take_moments")
def test_inductors_graphs_are_left_alone(emulated) -> None:
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    conv = graph.call_function(grouped.grouped_conv2d, (x, weight, 1, 2))
    conv.meta["example_value"] = torch.empty(2, 16, 7, 6, dtype=torch.bfloat16)
    weight.meta["example_value"] = torch.empty(16, 8, 3, 3)
    result = graph.call_function(norm.batchnorm_act, (conv, None, None, None, None, None, 0.1, 1e-5, "relu", 0.0))
    graph.output(result)
    module = fx.GraphModule({}, graph)
    finish = catalog.get("batchnorm_act").finish
    assert finish is not None
    for compiled in (True, False):
        finish(module, match.MatchReport(), compiled=compiled)
        assert ("moments" in result.kwargs) != compiled


def test_a_convolution_that_falls_back_leaves_none_and_the_norm_reads_its_input(emulated) -> None:
    x, weight = torch.randn(2, 16, 6, 7).bfloat16(), torch.randn(16, 8, 3, 3)  # not channels_last
    before = sum(grouped.fell_back.values())
    y, parts = grouped.grouped_conv2d_moments(x, weight, 1, 2)
    assert parts is None
    assert sum(grouped.fell_back.values()) == before + 1
    y, parts = grouped.grouped_conv2d_moments(x.contiguous(memory_format=torch.channels_last), weight, 2, 2)
    assert parts is None  # at stride 2 PyTorch's forward is the faster one
    image = torch.randn(1, 3, 8, 8).bfloat16()  # and neither is its weight
    assert first_conv.first_conv2d_moments(image, torch.randn(16, 3, 3, 3))[1] is None
    z = norm.batchnorm_act(y, None, torch.zeros(16), torch.ones(16), None, None, 0.1, 1e-5, "relu", moments=parts)
    torch.testing.assert_close(z, F.relu(F.batch_norm(y, None, None, training=True)), rtol=0.02, atol=0.02)


@pytest.mark.usefixtures("_small_norms_take_moments")
def test_a_checkpoint_makes_the_moments_again(emulated) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 7, 6, 16).permute(0, 3, 1, 2).bfloat16().requires_grad_()
    weight = torch.randn(16, 8, 3, 3, requires_grad=True)

    def body(x: torch.Tensor) -> torch.Tensor:
        y, parts = grouped.grouped_conv2d_moments(x, weight, 1, 2)
        return norm.batchnorm_act(y, None, None, None, None, None, 0.1, 1e-5, "relu", moments=parts)

    def gradients(y: torch.Tensor) -> list[torch.Tensor]:
        return list(torch.autograd.grad(y.float().square().sum(), (x, weight)))

    want = gradients(body(x))
    emulated.launches.clear()
    found = gradients(checkpoint(body, x, use_reentrant=False))
    assert emulated.launches["batchnorm_merge_moments"] == 2
    assert all(map(torch.equal, found, want))


def test_moments_that_nobody_differentiates_cost_no_gradient(emulated) -> None:
    x = torch.randn(2, 7, 6, 16).permute(0, 3, 1, 2).bfloat16().requires_grad_()
    y, parts = grouped.grouped_conv2d_moments(x, torch.randn(16, 8, 3, 3), 1, 2)
    assert parts is not None
    assert not parts.requires_grad
    assert torch.autograd.grad(y.float().sum(), x)[0].shape == x.shape
