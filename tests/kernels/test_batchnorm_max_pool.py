"""BatchNorm+activation+max-pool without a GPU: definition, geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

import pytest
import torch
from emulation.planted import passes_with
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, nvrtc, verify
from advisor.ops.batchnorm_act import spec as batchnorm_act
from advisor.ops.batchnorm_act.norm import Norm
from advisor.ops.batchnorm_max_pool import api, cases, cuda, reference, spec
from advisor.ops.pooling import spec as pooling
from advisor.ops.pooling.spec import K2S2, K3S1, K3S2, PoolWindow

FAMILY = catalog.get("batchnorm_max_pool")
LAUNCHED = (
    "batchnorm_act_stats", "batchnorm_max_pool_forward", "batchnorm_act_backward_reduce", "batchnorm_max_pool_backward"
)  # fmt: skip


def nhwc(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n, c, h, w = shape
    values = torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(0, 3, 1, 2)


def test_the_definition_passes_gradcheck() -> None:
    x, weight, bias = nhwc(2, 2, 4, 4).double(), torch.tensor([0.7, -1.2]).double(), torch.zeros(2).double()

    def f(*leaves: torch.Tensor) -> torch.Tensor:
        buffers = torch.zeros(2).double(), torch.ones(2).double()
        return reference.batchnorm_max_pool(
            leaves[0], *buffers, *leaves[1:], 0.1, 1e-5, "leaky_relu", 0.1, *K3S2.arguments
        )

    assert torch.autograd.gradcheck(f, [t.requires_grad_() for t in (x, weight, bias)])


@given(
    st.sampled_from([K3S2, K2S2, K3S1]),
    st.tuples(st.integers(1, 40), st.integers(1, 60), st.integers(2, 70), st.integers(2, 70)),
    st.integers(1, 200),
    st.booleans(),
)
def test_launches_cover_all_work_in_one_wave(window: PoolWindow, shape, sm_count: int, backward: bool) -> None:
    n, vectors, h, w = shape
    found = spec.geometry(window, (n, vectors * 8, h, w), "bfloat16", sm_count, backward=backward)
    rows, columns = pooling.groups(window, h, w) if backward else window.output(h, w)
    tile, across, down = found.block
    tiles, blocks, _ = found.grid
    assert tile * across * down <= spec.THREADS
    assert tile <= spec.MAX_CHANNEL_TILE
    assert (tiles - 1) * tile < vectors <= tiles * tile
    assert (found.column_tiles - 1) * across < columns <= found.column_tiles * across
    assert (found.row_tiles - 1) * down < rows <= found.row_tiles * down
    assert 1 <= blocks <= n * found.row_tiles * found.column_tiles
    threads = spec.BACKWARD_THREADS_PER_SM if backward else spec.FORWARD_THREADS_PER_SM
    assert blocks * tiles <= max(tiles, sm_count * threads // spec.THREADS)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"activation": "silu"}, "not monotone"),
        ({"activation": "leaky_relu", "slope": -0.1}, "negative slope"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"window": PoolWindow(kernel=(9, 9), stride=(2, 2))}, "81 elements"),
        ({"channels_last": False}, "channels_last"),
        ({"arch": 75}, "older"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 64, 8, 8),
        "window": K3S2,
        "channels_last": True,
        "dtype": "bfloat16",
        "activation": "relu",
        "slope": 0.0,
        "arch": 90,
    }
    answer = spec.unsupported(**{**call, **change})
    assert reason in answer if reason else answer == ""


def test_it_moves_half_the_bytes_of_its_parts() -> None:
    """ResNet's stem in bf16: 2.26 GB against 4.42 for the norm and the pooling by themselves."""
    elements, outputs = 256 * 64 * 112 * 112, 256 * 64 * 56 * 56
    together = sum(spec.bytes_moved(inputs=elements, outputs=outputs, itemsize=2))
    apart = sum(
        batchnorm_act.bytes_moved(elements=elements, itemsize=2, activation="relu", residual=False, forked=False)
    ) + sum(pooling.bytes_max(inputs=elements, outputs=outputs, itemsize=2))
    assert together == pytest.approx(2.26e9, rel=0.01)
    assert apart == pytest.approx(4.42e9, rel=0.01)


def test_nothing_is_dispatched_without_a_measurement(monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> None:
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    dispatch.clear()
    channels = [f(8) for f in (torch.zeros, torch.ones, torch.ones, torch.zeros)]
    y = api.batchnorm_max_pool(nhwc(2, 8, 4, 4), *channels, 0.1, 1e-5, "relu", 0.0, *K2S2.arguments)
    assert y.shape == (2, 8, 2, 2)
    assert FAMILY.fell_back == {dispatch.UNMEASURED: 1}


@pytest.mark.parametrize("sm_count", [1, 132])
def test_every_number_of_blocks_gives_the_same_result(emulated, sm_count: int) -> None:
    emulated.use(sm_count=sm_count)
    case = next(c for c in cases.VERIFICATION if c.dtype == "bfloat16")
    row = verify.check(FAMILY, case, "cpu")
    assert row["passed"], row["detail"]


def _channels(weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
    c = len(weight)
    return torch.zeros(c), torch.ones(c), weight, torch.linspace(-1.0, 1.0, c)


def test_the_output_is_bit_for_bit_that_of_pooling_the_written_activation(emulated) -> None:
    x = nhwc(3, 24, 13, 11, dtype=torch.bfloat16)
    weight = torch.linspace(-1.5, 1.5, 24)
    mean, var, weight, bias = _channels(weight)
    y, saved, _, chosen = cuda.forward(x, Norm(mean, var, weight, bias, 0.1, 1e-5, "relu"), K3S2)
    per = [t.view(1, -1, 1, 1) for t in (saved[0], saved[1] * weight, bias)]
    written = ((x.float() - per[0]) * per[1] + per[2]).relu().to(x.dtype)
    assert torch.equal(y, F.max_pool2d(written, *K3S2.arguments))
    again = ((chosen.float() - per[0]) * per[1] + per[2]).relu().to(x.dtype)
    assert torch.equal(y, again)


def test_with_a_weight_of_zero_the_first_element_of_a_window_counts(emulated) -> None:
    x = nhwc(3, 24, 13, 11, dtype=torch.bfloat16)
    weight = torch.ones(24)
    weight[::5] = 0.0
    mean, var, weight, bias = _channels(weight)
    y, _, index, chosen = cuda.forward(x, Norm(mean, var, weight, bias, 0.1, 1e-5, "relu"), K3S2)
    first = F.max_pool2d(torch.zeros(x.shape), *K3S2.arguments, return_indices=True)[1]
    assert torch.equal(api.flat_indices(index, tuple(x.shape), K3S2)[:, ::5], first[:, ::5])
    assert torch.equal(chosen[:, ::5], x.flatten(2).gather(2, first.flatten(2)).view(y.shape)[:, ::5])
    assert torch.equal(y[:, 0], bias[0].relu().to(y.dtype).expand_as(y[:, 0]))


def test_the_operation_of_the_library(emulated) -> None:
    arguments = list(cases.VERIFICATION[0].inputs(torch.Generator().manual_seed(1), 3))
    listed = [list(a) if isinstance(a, tuple) else a for a in arguments]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.advisor.batchnorm_max_pool.default, listed, test_utils=tests)
    y, statistics, _, _ = torch.ops.advisor.batchnorm_max_pool(*listed)
    assert torch.equal(arguments[1], torch.zeros_like(arguments[1]))  # no side effects
    with dispatch.everything():
        plain = api.batchnorm_max_pool(*arguments)
    assert torch.equal(y, plain)
    assert torch.equal(statistics[2:], torch.stack(arguments[1:3]))
    leaves = [arguments[i] for i in (0, 3, 4)]
    for mine, other in zip(torch.autograd.grad(y.sum(), leaves), torch.autograd.grad(plain.sum(), leaves), strict=True):
        assert torch.equal(mine, other)


FAULTS = {
    "sign not turned back": ("b.value.w[i] ^= turn.w[i]", "b.value.w[i] ^= 0u"),
    "negative weights forgotten": ("if (scale < 0.f) turn", "if (false) turn"),
    "padding chosen": ("outside.w[i] = LOWEST ^ turn.w[i]", "outside.w[i] = LOWEST"),
    "mean over the outputs": ("coefficient[c] * share", "coefficient[c] * 1.f"),
    "slope at the output alone": ("through(sum[i][j][c], d * scale + offset, slope)", "sum[i][j][c]"),
    "no barrier": ("__syncthreads();\n  if (vector >= vectors) return;", "if (vector >= vectors) return;"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after = FAULTS[fault]
    case = next(c for c in cases.VERIFICATION if c.dtype == "bfloat16")
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


class Stems(nn.Module):
    """A stem as modules, one as functions, and two that must be left to their parts."""

    def __init__(self) -> None:
        super().__init__()
        self.bn1, self.relu, self.pool = nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.bn2, self.bn3, self.bn4 = (nn.BatchNorm2d(16) for _ in range(3))
        self.silu, self.pool3, self.pool4 = nn.SiLU(), nn.MaxPool2d(2), nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.relu(self.bn1(x)))
        x = F.max_pool2d(F.leaky_relu(self.bn2(x), 0.2), 2)
        skip = F.relu(self.bn3(x))  # a UNet's: pooled, and concatenated later
        y = self.pool3(skip)
        return F.interpolate(self.pool4(self.silu(self.bn4(y))), size=skip.shape[2:]) + skip


def _capture(model: nn.Module, mode: str | None = None) -> tuple[match.MatchReport, object]:
    report = match.MatchReport()
    return report, torch.compile(model.forward, backend=dynamo.backend({FAMILY.id: report}, mode=mode), dynamic=False)


def test_stems_are_found() -> None:
    torch.manual_seed(0)
    model, plain = Stems(), Stems()
    report, run = _capture(model)
    x = nhwc(2, 16, 32, 32)
    with dispatch.everything():
        got = run(x.clone())
    assert report.matched.pop("pool") == "bn+relu+max_pool"
    assert list(report.matched.values()) == ["bn+leaky_relu+max_pool"]
    assert report.unmatched == {
        "pool3": "what is pooled is used elsewhere too",
        "pool4": "activation silu is not monotone",
    }
    torch.testing.assert_close(got, plain(x.clone()))
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine, other, msg=name)


def test_stems_are_left_alone_without_a_measurement(unmeasured: None) -> None:
    report, run = _capture(Stems())
    run(nhwc(2, 16, 32, 32))
    assert not report.matched
    assert dispatch.UNMEASURED in report.unmatched.values()


def test_a_captured_model_trains_on_the_kernels_as_the_plain_one(emulated) -> None:
    class Stem(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn, self.pool = nn.Conv2d(8, 24, 1, bias=False), nn.BatchNorm2d(24), nn.MaxPool2d(3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(F.relu(self.bn(self.conv(x))))

    torch.manual_seed(0)
    model, plain = Stem().to(memory_format=torch.channels_last), Stem().double()
    plain.load_state_dict(model.state_dict())
    x = nhwc(2, 8, 13, 11)
    with dispatch.everything():
        report, run = _capture(model)
        run(x).square().sum().backward()
    plain(x.double()).square().sum().backward()
    assert report.matched == {"pool": "bn+relu+max_pool"}
    assert emulated.launches == dict.fromkeys(LAUNCHED, 1)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, msg=name, rtol=1e-3, atol=1e-4)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)


def test_a_compiled_graph_trains_on_the_library_operations(emulated) -> None:
    """The rewrite for Inductor, up to Inductor: AOTAutograd traces the operations and their gradients."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.compilers import nop

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bn, self.pool = nn.BatchNorm2d(24), nn.MaxPool2d(3, 2, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.pool(F.relu(self.bn(x)))
            y = torch.cat([x, F.interpolate(F.max_pool2d(x, 2), size=x.shape[2:], mode="bilinear")], 1)
            return F.avg_pool2d(y, 3, 2, 1).mean((2, 3))

    families = [catalog.get(name) for name in ("batchnorm_max_pool", "pooling", "upsample")]
    reports = {family.id: match.MatchReport() for family in families}

    def backend(graph_module, inputs):
        for family in families:
            family.rewrite(graph_module, reports[family.id], compiled=True)
        graph_module.recompile()
        return aot_autograd(fw_compiler=nop)(graph_module, inputs)

    model, plain = Net(), Net().double()
    x = nhwc(3, 24, 13, 11).requires_grad_()
    wide = x.detach().double().requires_grad_()
    with dispatch.everything():
        torch.compile(model.forward, backend=backend, dynamic=False)(x).square().sum().backward()
    plain(wide).square().sum().backward()
    assert [len(report.matched) for report in reports.values()] == [1, 3, 1]
    assert set(LAUNCHED) < set(emulated.launches)
    assert emulated.launches["upsample_backward"] == emulated.launches["max_pool_backward"] == 1
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-3, atol=1e-5)
    for (name, mine), other in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), other.double(), msg=name, rtol=1e-5, atol=1e-6)
