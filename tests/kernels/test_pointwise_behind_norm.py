"""1 x 1 convolutions behind batch norms, without a GPU: launch geometry, emulated kernel, gradients, graph matching."""

from __future__ import annotations

import math

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import planted
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from advisor.ops import dispatch, dynamo, match, shared_memory
from advisor.ops.batchnorm_act import cuda as batchnorm_cuda
from advisor.ops.batchnorm_act import reference as batchnorm_reference
from advisor.ops.batchnorm_act import spec as batchnorm_spec
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.pointwise import api, cuda, spec

STATISTICS = (0.1, 1e-5)


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
    plan = spec.plan(rows, in_octets * spec.OCTET, out_octets * spec.OCTET, sm_count, arch, gradient=True)
    room = shared_memory.of_a_block(arch)
    assert plan.steps * plan.chunks * spec.STEP >= in_octets * spec.OCTET
    assert plan.grid[1] * plan.columns >= out_octets * spec.OCTET > (plan.grid[1] - 1) * plan.columns
    assert 1 <= plan.grid[0] <= -(-rows // plan.rows)
    assert plan.shared_bytes <= room
    assert plan.blocks * (plan.shared_bytes + shared_memory.OF_THE_SYSTEM) <= room + shared_memory.OF_THE_SYSTEM
    assert plan.blocks * plan.threads * spec.GRADIENT_REGISTERS <= spec.SM_REGISTERS
    assert plan.tiles <= (1 if in_octets * spec.OCTET <= spec.ONE_TILE_CHANNELS else spec.MAX_GRADIENT_TILES)
    assert plan.groups == 1
    # Behind the products the sums of all warps lie where the weights and the ring were.
    weights = spec.STEP * plan.steps * plan.chunks * (plan.columns // spec.OCTET | 1)
    ring = plan.stages * plan.rows * (2 * plan.steps | 1)
    assert 8 * plan.warps_m * plan.columns <= 16 * (weights + ring)


@pytest.mark.parametrize(
    ("channels", "side", "activation", "residual", "reason"),
    [
        *(((c, out), side, "relu", True, "") for c, out, side in ((256, 64, 56), (512, 128, 28))),
        ((216, 216), 28, "relu", True, "216 channels out of 216: cuDNN is faster"),
        ((64, 256), 56, "relu", False, ""),
        ((72, 24), 56, "relu", False, "72 channels: the norm's own launch is as fast"),
        ((1024, 256), 14, "relu", True, "256 channels out of 1024: cuDNN is faster"),
        ((128, 512), 28, "relu", False, "512 channels out of 128: cuDNN is faster"),
        ((256, 64), 14, "relu", True, "one launch reads the tensor once"),
        ((64, 256), 56, "silu", False, dispatch.UNMEASURED),
    ],
)
def test_what_was_measured_to_win_is_dispatched(
    channels: tuple[int, int], side: int, activation: str, residual: bool, reason: str
) -> None:
    call = {"rows": 256 * side * side, "channels": channels[0], "out_channels": channels[1]}
    call |= {"activation": activation, "residual": residual, "forked": residual}
    for forked in (residual, None):  # in the graph, and in a call
        found = spec.gradient_wins(dtype="bfloat16", **{**call, "forked": forked})
        assert found.startswith(reason) if reason else found == ""
    assert spec.gradient_wins(dtype="float32", **call) == dispatch.UNMEASURED


def test_one_gradient_without_activation_is_left_apart() -> None:
    call = {"rows": 256 * 56 * 56, "channels": 24, "out_channels": 72, "dtype": "bfloat16", "activation": "none"}
    assert spec.gradient_wins(residual=False, forked=True, **call) == ""
    assert spec.gradient_wins(residual=False, forked=False, **call) == dispatch.UNMEASURED
    assert spec.gradient_wins(residual=True, forked=False, **call) == dispatch.UNMEASURED


@pytest.mark.parametrize("residual", [False, True])
def test_what_the_graph_holds_runs_on_the_kernels(emulated, monkeypatch: pytest.MonkeyPatch, residual: bool) -> None:
    """As it is dispatched, where the tensor is large enough."""
    monkeypatch.setattr(batchnorm_spec, "takes_moments", lambda nbytes, residual: "")
    given = tensors((2, 16, 6, 5), 24, torch.bfloat16, residual=residual)
    with only_what_wins():
        y, z = ours(given, "relu")
    (z.float().square().sum() + y.float().sum() * residual).backward()
    assert emulated.launches["pointwise_norm_gradient"] == 1


@pytest.mark.parametrize(
    ("channels", "activation", "residual", "reason"),
    [
        *((shape, "relu", True, "") for shape in ((256, 64), (256, 128), (512, 128))),
        ((128, 64), "relu", True, dispatch.UNMEASURED),
        ((256, 64), "relu", False, dispatch.UNMEASURED),
        ((256, 64), "none", True, dispatch.UNMEASURED),
    ],
)
def test_the_one_pass_forward_is_dispatched_where_it_was_measured(
    channels: tuple[int, int], activation: str, residual: bool, reason: str
) -> None:
    call = {"channels": channels[0], "out_channels": channels[1], "activation": activation, "residual": residual}
    assert spec.norm_forward_wins(dtype="bfloat16", **call) == reason
    assert spec.norm_forward_wins(dtype="float32", **call) == dispatch.UNMEASURED


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"channels": 1024}, "1024 channels"),
        ({"out_channels": 256}, "256 channels out"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"channels": 512, "out_channels": 128, "arch": 80}, "do not fit a block"),
    ],
)
def test_what_the_one_pass_forward_cannot_take_is_said(change: dict, reason: str) -> None:
    found = spec.unsupported_norm_forward(
        **{"dtype": "bfloat16", "channels": 256, "out_channels": 64, "arch": 90, **change}
    )
    assert reason in found if reason else found == ""


def tensors(shape: tuple[int, ...], out: int, dtype: torch.dtype, *, residual: bool) -> list[torch.Tensor | None]:
    """x, residual, weight, bias, the convolution's weight; leaves."""
    n, c, h, w = shape
    generator = torch.Generator().manual_seed(7)

    def nhwc() -> torch.Tensor:
        return (torch.randn(n, h, w, c, generator=generator) + 0.5).permute(0, 3, 1, 2).to(dtype).requires_grad_()

    return [
        nhwc(),
        nhwc() if residual else None,
        (torch.rand(c, generator=generator) + 0.5).requires_grad_(),
        torch.randn(c, generator=generator).requires_grad_(),
        (torch.randn(out, c, 1, 1, generator=generator) / c**0.5).to(dtype).requires_grad_(),
    ]


def ours(given: list[torch.Tensor | None], activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, bias, conv = given
    statistics = torch.zeros(x.shape[1]), torch.ones(x.shape[1])
    y, z, _ = api.batchnorm_act_pointwise(
        x, residual, *statistics, weight, bias, *STATISTICS, activation, 0.01, conv_weight=conv
    )
    return y, z


def exact(given: list[torch.Tensor | None], activation: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, residual, weight, bias, conv = given
    statistics = torch.zeros(x.shape[1], dtype=x.dtype), torch.ones(x.shape[1], dtype=x.dtype)
    y = batchnorm_reference.batchnorm_act(x, residual, *statistics, weight, bias, *STATISTICS, activation, 0.01)
    return y, F.conv2d(y, conv)


def gradients(function, given, activation: str, above) -> list[torch.Tensor]:
    leaves = [t for t in given if t is not None]
    results = function(given, activation)
    used = [(r, a) for r, a in zip(results, above, strict=True) if a is not None]
    return list(torch.autograd.grad([r for r, _ in used], leaves, [a for _, a in used], allow_unused=True))


def hold(shape: tuple[int, ...], out: int, activation: str, *, residual: bool, which: str = "yz") -> None:
    given = tensors(shape, out, torch.bfloat16, residual=residual)
    n, c, h, w = shape
    generator = torch.Generator().manual_seed(8)
    dy, dz = ((torch.randn(n, h, w, k, generator=generator)).permute(0, 3, 1, 2).bfloat16() for k in (c, out))
    above = (dy if "y" in which else None, dz if "z" in which else None)
    found = gradients(ours, given, activation, above)
    wide = [None if t is None else t.detach().double().requires_grad_() for t in given]
    reference = gradients(exact, wide, activation, [None if a is None else a.double() for a in above])
    for mine, right in zip(found, reference, strict=True):
        assert (mine is None) == (right is None)
        if right is not None:
            assert mine.isfinite().all()
            assert float((mine.double() - right).norm() / right.norm()) < 0.01


@pytest.mark.parametrize("which", ["yz", "z", "y"])
def test_gradients_come_from_both_results_or_from_one(emulated, which: str) -> None:
    hold((2, 24, 5, 7), 40, "relu", residual=True, which=which)
    assert emulated.launches["pointwise_norm_gradient"] == ("z" in which)
    assert emulated.launches["batchnorm_gradient_sums"] == ("z" in which)


def test_the_norms_result_is_let_go_before_its_gradient_is_made(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors((2, 24, 5, 7), 40, torch.bfloat16, residual=True)
    y, z = ours(given, "relu")
    alive = StorageWeakRef(y.untyped_storage())
    seen: list[bool] = []
    norm_gradient = cuda.norm_gradient
    monkeypatch.setattr(cuda, "norm_gradient", lambda *of: seen.append(alive.expired()) or norm_gradient(*of))
    loss = z.float().square().sum()
    del y, z
    loss.backward(retain_graph=True)
    loss.backward()
    assert seen == [False, True]  # a graph that is kept keeps it


def test_a_gradient_that_is_not_channels_last_is_copied(emulated) -> None:
    given = tensors((2, 16, 6, 5), 24, torch.bfloat16, residual=True)
    y, z = ours(given, "relu")
    (y.float().sum((2, 3)).square().sum() + z.permute(0, 2, 3, 1).float().square().sum()).backward()
    assert given[0].grad.isfinite().all()
    assert emulated.launches["pointwise_norm_gradient"] == 1


@pytest.mark.parametrize(("tiles", "warps", "stages"), [(1, (2, 2), 2), (2, (1, 4), 3), (2, (4, 1), 2), (1, (8, 1), 2)])
def test_every_way_to_cut_the_product_gives_it(emulated, tiles: int, warps: tuple[int, int], stages: int) -> None:
    """Against the launch that is dispatched, whose gradients are held to fp64 elsewhere."""
    x, _, weight, bias, conv = tensors((1, 104, 17, 19), 72, torch.bfloat16, residual=False)
    dz = torch.randn(1, 17, 19, 72).permute(0, 3, 1, 2).bfloat16()
    dy = torch.randn(1, 17, 19, 104).permute(0, 3, 1, 2).bfloat16()
    norm = torch.stack((torch.zeros(104), torch.ones(104))), weight.detach(), bias.detach()
    plan = spec.arranged(
        rows=323, out_channels=104, sm_count=1, arch=90, warps_m=warps[0], warps_n=warps[1],
        tiles=tiles, groups=1, steps=3, chunks=2, stages=stages, gradient=True,
    )  # fmt: skip
    assert plan is not None
    launch = cuda.gradient_launch_of(plan, 323, 104, 72, x.dtype, 0, "relu", False, True)
    mask = torch.empty(0, dtype=torch.uint8)
    x, conv = x.detach(), conv.detach()
    g, sums = cuda.run_gradient(launch, dz, conv, dy, x, mask, norm, 0.0)
    other, sums_of_other = cuda.norm_gradient(dz, conv, dy, x, mask, norm, "relu", 0.0, False)
    torch.testing.assert_close(g, other, rtol=0.02, atol=0.02)
    torch.testing.assert_close(sums.sum(0), sums_of_other.sum(0), rtol=1e-3, atol=1e-2)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_through(emulated, value: float) -> None:
    given = tensors((1, 16, 5, 7), 24, torch.bfloat16, residual=True)
    y, z = ours(given, "none")
    dz = torch.ones_like(z)
    dz[0, 3, 2, 1] = value
    found = torch.autograd.grad((y, z), [t for t in given if t is not None], (torch.ones_like(y), dz))
    assert not found[0].isfinite().any()  # dx, by the sums
    assert not found[1][0, :, 2, 1].isfinite().any()  # the residual's, at that pixel
    assert found[1].isfinite().sum() == found[1].numel() - 16


def both_ways(shape: tuple[int, ...], out: int, activation: str, *, residual: bool):
    """y, mask, z and its moments: of the one pass, and of the two with the convolution of what is stored in fp64."""
    x, second, weight, bias, conv = (
        None if t is None else t.detach() for t in tensors(shape, out, torch.bfloat16, residual=residual)
    )
    norm = Norm(torch.zeros(shape[1]), torch.ones(shape[1]), weight, bias, *STATISTICS, activation)
    y, saved, mask = batchnorm_cuda.forward(x, second, norm, way=batchnorm_spec.TWO)
    z = F.conv2d(y.double(), conv.double())
    mine = cuda.norm_forward(x, second, (saved[:2].contiguous(), weight, bias), conv, activation, 0.01, moments=True)
    return mine, (y, mask, z)


@pytest.mark.parametrize(
    ("shape", "out", "activation", "residual"),
    [
        ((1, 128, 13, 11), 40, "relu", True),
        ((3, 256, 7, 9), 64, "none", True),
        ((2, 256, 5, 7), 128, "hardswish", False),
        ((1, 512, 3, 11), 128, "relu", True),
    ],
)
def test_one_pass_makes_what_two_make(
    emulated, shape: tuple[int, ...], out: int, activation: str, residual: bool
) -> None:
    (y, mask, z, parts), (expected, bits, exact_z) = both_ways(shape, out, activation, residual=residual)
    assert torch.equal(y, expected)
    assert (mask is None) is (bits is None) is (activation == "none" or not residual)
    assert mask is None or torch.equal(mask, bits)
    assert bool(((z.double() - exact_z).abs() <= 2.0**-8 * exact_z.abs() + 1e-5 * exact_z.abs().amax()).all())
    count, mean, m2 = parts.double().unbind(1)
    stored = z.double().permute(1, 0, 2, 3).flatten(1)
    assert torch.equal(count.sum(0), torch.full((out,), float(stored.shape[1]), dtype=torch.float64))
    found = (count * mean).sum(0) / count.sum(0)
    torch.testing.assert_close(found, stored.mean(1), rtol=1e-5, atol=1e-5)
    spread = (m2 + count * (mean - found).square()).sum(0)
    torch.testing.assert_close(spread, stored.var(1, correction=0) * stored.shape[1], rtol=1e-4, atol=1e-4)


FORWARD_FAULTS = {
    "a row behind the end": ("if (row < rows - tile * BM) {", "if (row <= rows - tile * BM) {"),
    "weights not there yet": ("if (tile == blockIdx.x) cp_async_wait<0>();", ""),
    "one buffer": ("which ^= 1;", ""),
    "no barrier": ("__syncthreads();  // the other buffer is free", "// the other buffer is free"),
    "the tile before": ("ask(tile + gridDim.x);", "ask(tile);"),
    "columns in memory's order": ("return p % 8 / 2 * 8 + p / 8 * 2 + p % 2;", "return p;"),
    "another shift": ("s += sums[2 * w * BN + column];", "s = sums[2 * w * BN + column];"),
    "rows counted twice": ("++count;", "count += 2;"),
    "the residual forgotten": ("s += r[j];", ""),
}  # fmt: skip


@pytest.mark.parametrize("fault", FORWARD_FAULTS)
def test_a_fault_planted_in_the_forward_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from emulation.compiler import EmulationError

    emulated.use(sm_count=2)
    with planted(monkeypatch, *FORWARD_FAULTS[fault]), pytest.raises((AssertionError, EmulationError)):
        test_one_pass_makes_what_two_make(emulated, (3, 128, 13, 11), 40, "relu", True)


def test_its_blocks_cover_all_rows_within_what_one_may_have() -> None:
    for channels in spec.NORM_FORWARD_CHANNELS:
        for out in range(8, spec.NORM_FORWARD_MOST + 1, 8):
            warps_m, warps_n = spec.norm_forward_warps(channels, out)
            units = channels // spec.OCTET
            assert spec.NORM_FORWARD_THREADS % units == 0
            assert 16 * warps_m * units % spec.NORM_FORWARD_THREADS == 0
            assert 32 * warps_m * warps_n <= spec.NORM_FORWARD_THREADS
            assert 32 * warps_n >= out
            nbytes = spec.norm_forward_shared_bytes(channels, out)
            reason = spec.unsupported_norm_forward(dtype="bfloat16", channels=channels, out_channels=out, arch=90)
            assert (reason == "") == (nbytes <= shared_memory.of_a_block(90))
            assert (
                4 * (2 * warps_m * 32 * warps_n + warps_m * warps_n) <= nbytes - 4 * 32 * warps_n
            )  # sums, not the shift
            for rows in (1, 31, 64, 65, 802816):
                assert 1 <= spec.norm_forward_blocks(rows, channels, out, 132) <= min(132, -(-rows // (16 * warps_m)))


# What is changed in the kernels, and how it shows.
FAULTS = {
    "columns in memory's order": ("return p % 8 / 2 * 8 + p / 8 * 2 + p % 2;", "return p;"),
    "a row behind the end": ("row >= rows - begin) continue;\n        const i64 at", "row > rows - begin) continue;\n        const i64 at"),
    "read before it is there": ("cp_async_wait<STAGES - 2>();", ""),
    "weights behind the channels": ("const bool inside = column < channels && o < out_units * 8;", "const bool inside = true;"),
    "the mask forgotten": ("(bits[m][half] >> j) & 1u ? f[j] : 0.f", "f[j]"),
    "the other gradient forgotten": ("f[j] += other[j];", ";"),
    "sums of x itself": ("away[j] -= mean[j];", ""),
    "a warp's sums left out": ("w < WARPS_M; ++w) all", "w < 1; ++w) all"),
    "parts left out": ("block < blocks; block += UNROLL * ROWS", "block < 1; block += UNROLL * ROWS"),
    "another count": ("inverse = 1.0 / (double)rows", "inverse = 1.0 / (double)(rows + 9)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernels_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    from emulation.compiler import EmulationError

    with planted(monkeypatch, *FAULTS[fault]), pytest.raises((AssertionError, EmulationError)):
        hold((1, 40, 13, 11), 200, "relu", residual=True)


def test_without_a_fault_the_same_is_right(emulated) -> None:
    hold((1, 40, 13, 11), 200, "relu", residual=True)


def test_second_derivatives_are_pytorchs(emulated) -> None:
    given = tensors((2, 16, 6, 5), 24, torch.bfloat16, residual=True)
    wide = [t.detach().double().requires_grad_() for t in given]

    def penalty(function, leaves) -> tuple[torch.Tensor, ...]:
        y, z = function(leaves, "relu")
        loss = y.to(wide[0].dtype).square().sum() + z.to(wide[0].dtype).square().sum()
        (gradient,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        return torch.autograd.grad(gradient.to(wide[0].dtype).square().sum(), leaves[2:])

    for mine, right in zip(penalty(ours, given), penalty(exact, wide), strict=True):
        assert float((mine.double() - right).norm() / right.norm()) < 0.05  # bf16


@pytest.mark.parametrize("reason", ["input is not channels_last", dispatch.UNMEASURED])
def test_a_call_that_the_kernel_does_not_take_runs_the_two_apart(
    emulated, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    given = tensors((2, 16, 6, 5), 24, torch.bfloat16, residual=False)
    if reason == dispatch.UNMEASURED:
        monkeypatch.setattr(spec, "gradient_wins", lambda **call: reason)
    else:
        given[0] = given[0].detach().contiguous().requires_grad_()
    before = api.fell_back[reason]
    with only_what_wins():
        y, z = ours(given, "relu")
    assert api.fell_back[reason] == before + 1
    torch.autograd.grad((y, z), [t for t in given if t is not None], (torch.ones_like(y), torch.ones_like(z)))
    assert "pointwise_norm_gradient" not in emulated.launches


class Block(nn.Module):
    """A bottleneck, as in ResNets."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, channels, 1, bias=False), nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        return F.relu(self.bn3(self.conv3(out)) + x)


class Net(nn.Module):
    """Bottlenecks, and convolutions that are left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, bias=False)
        self.blocks = nn.Sequential(Block(16, 8), Block(16, 8))
        self.strided, self.bn1 = nn.Conv2d(16, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16)
        self.biased, self.bn2 = nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16)
        self.bn3 = nn.BatchNorm2d(16)
        self.later = nn.Conv2d(16, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.bn1(self.strided(self.blocks(self.stem(x))))
        x = self.bn3(self.bn2(self.biased(x)))
        other = x.sigmoid()  # between the norm and the convolution
        return self.later(x).mean((2, 3)) + other.mean()


def captured(model: nn.Module, x: torch.Tensor, names=("pointwise", "batchnorm_act")):
    reports = {name: match.MatchReport() for name in names}
    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", dtype=torch.bfloat16):
        result = torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)(x)
    return result, reports["pointwise"].matched


def test_norms_and_the_convolutions_behind_them_are_found_and_train_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of the convolutions leaves moments for the norm behind itself."""
    monkeypatch.setattr(batchnorm_spec, "takes_moments", lambda nbytes, residual: "")  # however small
    torch.manual_seed(0)
    model, plain = Net().train(), Net().train()
    plain.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 9, 8)
    api.fell_back.clear()
    found, matched = captured(model, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = plain(x)
    behind = {path: what for path, what in matched.items() if "bn" in what}
    assert behind == {
        "blocks.0.conv3": "1x1 8->16, bn+relu+1x1 8->16",
        "blocks.1.conv1": "1x1 16->8, bn+add+relu+1x1 16->8",
        "blocks.1.conv3": "1x1 8->16, bn+relu+1x1 8->16",
    }
    assert sum(api.fell_back.values()) >= 3  # there is no GPU: each ran as the two apart
    found.float().square().sum().backward()
    expected.float().square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert float((mine.grad - other.grad).norm() / (other.grad.norm() + 1e-3)) < 0.1
    for mine, other in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, rtol=0.05, atol=0.05)


def test_what_is_not_dispatched_stays_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spec, "unsupported_gradient", lambda **call: "not here")
    _, matched = captured(Net().train(), torch.randn(2, 3, 9, 8))
    assert not [what for what in matched.values() if "bn" in what]


def test_without_norms_of_ours_nothing_is_found() -> None:
    _, matched = captured(Net().train(), torch.randn(2, 3, 9, 8), names=("pointwise",))
    assert not matched


class Changed(nn.Module):
    """The convolution's result is changed in place: the two as one operation would give it out with its moments."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn, self.conv = nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(F.relu(self.bn(self.stem(x)))).mul_(2.0)


def test_a_result_that_is_changed_in_place_is_left_alone() -> None:
    _, matched = captured(Changed().train(), torch.randn(2, 3, 9, 8))
    assert not matched
