"""Pooling without a GPU: definition, windows, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from emulation.planted import passes_with
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, nvrtc
from advisor.ops.pooling import api, cases, cuda, reference, spec
from advisor.ops.pooling.spec import K2S2, K3S1, K3S2, PoolWindow

FAMILY = catalog.get("pooling")
ODD = PoolWindow(kernel=(3, 2), stride=(2, 3), padding=(1, 1), dilation=(2, 1), ceil_mode=True)
SPARSE = PoolWindow(kernel=(2, 2), stride=(3, 3))
NO_DILATION = PoolWindow(kernel=(3, 2), stride=(2, 3), padding=(1, 1), ceil_mode=True)


def nhwc(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    n, c, h, w = shape
    values = torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).permute(0, 3, 1, 2)


def pair() -> st.SearchStrategy[tuple[int, int]]:
    return st.tuples(st.integers(1, 4), st.integers(1, 4))


@st.composite
def windows(draw: st.DrawFn) -> PoolWindow:
    kernel = draw(pair())
    return PoolWindow(
        kernel=kernel,
        stride=draw(pair()),
        padding=(draw(st.integers(0, kernel[0] // 2)), draw(st.integers(0, kernel[1] // 2))),
        dilation=draw(st.tuples(st.integers(1, 2), st.integers(1, 2))),
        ceil_mode=draw(st.booleans()),
    )


@given(windows(), st.integers(1, 20), st.integers(1, 20))
def test_output_size_is_pytorchs(window: PoolWindow, height: int, width: int) -> None:
    assume(spec.unsupported_window(window, height=height, width=width) == "")
    x = torch.empty(1, 1, height, width, device="meta")
    assert window.output(height, width) == tuple(F.max_pool2d(x, *window.arguments).shape[2:])


@pytest.mark.parametrize("window", [K3S2, K2S2, K3S1, ODD, SPARSE], ids=lambda w: w.label)
def test_the_definition_of_max_pooling_is_pytorchs(window: PoolWindow) -> None:
    x = nhwc(2, 3, 9, 11).round()  # many equal values
    x[0, 0, 2, 3] = x[0, 0, 2, 4] = x[1, 1, 0, 0] = torch.nan
    x[0, 1], x[0, 2, 4] = -torch.inf, torch.inf
    mine, plain = x.double().requires_grad_(), x.double().requires_grad_()
    ours, theirs = reference.max_pool2d(mine, *window.arguments), F.max_pool2d(plain, *window.arguments)
    torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=0, atol=0)
    dy = torch.randn(ours.shape, dtype=torch.float64)
    ours.backward(dy)
    theirs.backward(dy)
    torch.testing.assert_close(mine.grad, plain.grad)


@pytest.mark.parametrize("divisor", [None, 5])
@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("window", [K3S2, K3S1, NO_DILATION, SPARSE], ids=lambda w: w.label)
def test_the_definition_of_average_pooling_is_pytorchs(window: PoolWindow, include: bool, divisor: int | None) -> None:
    x = nhwc(2, 3, 9, 11).double()
    call = (window.kernel, window.stride, window.padding, window.ceil_mode, include, divisor)
    torch.testing.assert_close(reference.avg_pool2d(x, *call), F.avg_pool2d(x, *call))


def test_references_pass_gradcheck() -> None:
    x = nhwc(1, 2, 5, 6).double().requires_grad_()
    assert torch.autograd.gradcheck(lambda t: reference.max_pool2d(t, *ODD.arguments), x)
    assert torch.autograd.gradcheck(lambda t: reference.avg_pool2d(t, (3, 2), (2, 3), (1, 1), True, False), x)
    assert torch.autograd.gradcheck(reference.global_avg_pool2d, x)
    bias = torch.tensor([0.3, -0.4], dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda t, b: reference.bias_relu_max_pool2d(t, b, *ODD.arguments), (x, bias))


@given(windows(), st.integers(1, 60), st.integers(1, 60), st.integers(1, 300))
def test_launches_cover_all_work_once(window: PoolWindow, height: int, width: int, vectors: int) -> None:
    assume(spec.unsupported_window(window, height=height, width=width) == "")
    out_height, out_width = window.output(height, width)
    forward = spec.forward_geometry(window, vectors, out_height, out_width)
    backward = spec.backward_geometry(window, vectors, height, width)
    rows, columns = spec.groups(window, height, width)
    strip, group = spec.forward_strip(window), spec.backward_group(window)
    for shape, across, down in ((forward, -(-out_width // strip), out_height), (backward, -(-columns // group), rows)):
        tile, wide, high = shape.block
        assert 1 <= tile * wide * high <= spec.THREADS
        assert tile <= spec.MAX_CHANNEL_TILE
        assert high <= 64
        for tiles, each, whole in (
            (shape.channel_tiles, tile, vectors),
            (shape.column_tiles, wide, across),
            (shape.row_tiles, high, down),
        ):
            assert (tiles - 1) * each < whole <= tiles * each
    # The groups begin at or before the first element and end at or behind the last.
    for count, size, pad, stride in zip((rows, columns), (height, width), window.padding, window.stride, strict=True):
        first = pad // stride * stride - pad
        assert first <= 0
        assert first + count * stride >= size
        assert first + (count - 1) * stride < size


@given(st.integers(1, 600), st.integers(1, 50_000))
def test_the_global_mean_covers_all_pixels_once(vectors: int, pixels: int) -> None:
    shape = spec.global_geometry(3, vectors, pixels)
    assert shape.columns.splits == 1  # a column is summed in one block
    tile, rows, _ = shape.block
    assert 1 <= tile * rows <= spec.THREADS
    assert (shape.channel_tiles - 1) * tile < vectors <= shape.channel_tiles * tile
    assert (shape.pixel_tiles - 1) * rows * spec.GLOBAL_PIXELS < pixels <= shape.pixel_tiles * rows * spec.GLOBAL_PIXELS


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"arch": 75}, "older"),
        ({"dtype": "float64"}, "dtype"),
        ({"shape": (2, 64, 8)}, "3-D"),
        ({"shape": (0, 64, 8, 8)}, "empty"),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 60, 8, 8)}, "no multiple of 8"),
        ({"shape": (65536, 8, 1, 1)}, "images"),
        ({"shape": (1, 8, 2**16, 2**16)}, "2\\^31"),
    ],
)
def test_unsupported_tensors_are_named(change: dict, reason: str) -> None:
    call = {"shape": (2, 64, 8, 8), "channels_last": True, "dtype": "bfloat16", "arch": 90}
    answer = spec.TENSORS.refusal(**{**call, **change})
    assert reason.replace("\\", "") in answer if reason else answer == ""


@pytest.mark.parametrize(
    ("window", "reason"),
    [
        (K3S2, ""),
        (ODD, ""),
        (PoolWindow(kernel=(8, 8), stride=(2, 2)), "64 elements"),
        (PoolWindow(kernel=(5, 5), stride=(5, 1)), "stride 5"),
        (PoolWindow(kernel=(3, 3), stride=(1, 1), padding=(2, 1)), "half the window"),
        (PoolWindow(kernel=(7, 7), stride=(1, 1), dilation=(3, 1)), "larger than the image"),
    ],
)
def test_unsupported_windows_are_named(window: PoolWindow, reason: str) -> None:
    answer = spec.unsupported_window(window, height=14, width=14)
    assert reason in answer if reason else answer == ""


def test_nothing_is_dispatched_without_a_measurement(monkeypatch: pytest.MonkeyPatch, unmeasured: None) -> None:
    monkeypatch.setattr(nvrtc, "on_device", lambda tensor: "")
    monkeypatch.setattr(nvrtc, "arch", lambda device: 90)
    dispatch.clear()
    assert api.max_pool2d(nhwc(1, 8, 4, 4), *K2S2.arguments).shape == (1, 8, 2, 2)
    assert api.avg_pool2d(nhwc(1, 8, 4, 4), *K2S2.arguments[:3]).shape == (1, 8, 2, 2)
    assert api.global_avg_pool2d(nhwc(1, 8, 4, 4)).shape == (1, 8, 1, 1)
    assert api.bias_relu_max_pool2d(nhwc(1, 8, 4, 4), torch.ones(8), *K2S2.arguments).shape == (1, 8, 2, 2)
    assert FAMILY.fell_back == {dispatch.UNMEASURED: 4}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_values_and_positions_are_pytorchs_bit_for_bit(emulated, dtype: torch.dtype) -> None:
    """Equal values, zeros of both signs, minus infinity, one NaN and several."""
    x = nhwc(2, 24, 13, 11, dtype=dtype).round()
    x[0, 0, 0, 0] = -0.0
    x[0, 0, 0, 1] = 0.0
    x[0, 1] = -torch.inf
    x[1, 2, 5, 5] = x[1, 2, 5, 6] = x[1, 3, 12, 10] = torch.nan
    x[0, 4, 7, 7] = torch.inf
    y, index = cuda.max_pool_forward(x, K3S2, indices=True)
    want, flat = F.max_pool2d(x, *K3S2.arguments, return_indices=True)
    assert index.dtype == torch.uint8  # one byte an output, where PyTorch keeps eight
    torch.testing.assert_close(y, want, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(api.flat_indices(index, tuple(x.shape), K3S2), flat)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_behind_a_bias_and_relu_values_are_those_of_pooling_what_was_written(emulated, dtype: torch.dtype) -> None:
    """As pooling of the rounded activation gives them; and no position, nor gradient, where that is zero, but where it is NaN."""
    x, bias = nhwc(2, 24, 13, 11, dtype=dtype), torch.linspace(-3.0, 0.5, 24)
    x[0, 1], x[0, 4, 7, 7] = -torch.inf, torch.inf
    x[1, 2, 5, 5] = x[1, 3, 12, 10] = torch.nan
    y, index = cuda.bias_max_pool_forward(x, bias, K3S2)
    activation = F.relu((x.float() + bias.view(1, -1, 1, 1)).to(dtype))
    torch.testing.assert_close(y, F.max_pool2d(activation, *K3S2.arguments), rtol=0, atol=0, equal_nan=True)
    assert torch.equal(index == api.DEAD, y == 0)
    dy = nhwc(*y.shape, dtype=dtype)
    dx, dbias = cuda.bias_max_pool_backward(dy, index, tuple(x.shape), K3S2)
    alive = dy * (y != 0)
    assert torch.equal(dx, cuda.max_pool_backward(alive, index, tuple(x.shape), K3S2))
    torch.testing.assert_close(dbias, alive.float().sum((0, 2, 3)), rtol=1e-5, atol=1e-5)
    again = cuda.bias_max_pool_backward(dy, index, tuple(x.shape), K3S2)
    assert all(torch.equal(a, b) for a, b in zip((dx, dbias), again, strict=True))


@given(windows(), st.integers(1, 20), st.integers(1, 20))
def test_a_window_is_counted_once_for_the_bias(window: PoolWindow, height: int, width: int) -> None:
    """Each begins in one of the groups that the backward walks over, which begin with the first."""
    assume(spec.unsupported_window(window, height=height, width=width) == "" and not spec.unsupported_bias(window))
    assert all(p // s == 0 for p, s in zip(window.padding, window.stride, strict=True))
    groups = spec.groups(window, height, width)
    assert all(out <= count for out, count in zip(window.output(height, width), groups, strict=True))
    assert spec.backward_group(window) == 1


@pytest.mark.parametrize(
    "window", [K3S1, PoolWindow(kernel=(5, 5), stride=(2, 2), padding=(2, 2))], ids=lambda w: w.label
)
def test_windows_that_share_their_beginning_are_left_to_relu_and_pooling(emulated, window: PoolWindow) -> None:
    x, bias = nhwc(1, 8, 9, 9), torch.linspace(-1.0, 1.0, 8)
    with dispatch.everything():
        y = api.bias_relu_max_pool2d(x, bias, *window.arguments)
    torch.testing.assert_close(y, reference.bias_relu_max_pool2d(x, bias, *window.arguments))
    assert not emulated.launches


def test_no_positions_are_written_where_no_gradient_is_wanted(emulated) -> None:
    x = nhwc(1, 8, 5, 5)
    y, index = cuda.max_pool_forward(x, K2S2, indices=False)
    assert index.numel() == 0
    assert torch.equal(y, F.max_pool2d(x, 2))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (lambda x: api.max_pool2d(x, *K3S2.arguments), lambda x: F.max_pool2d(x, *K3S2.arguments)),
        (lambda x: api.avg_pool2d(x, (3, 3), (2, 2), (1, 1), False, False), lambda x: F.avg_pool2d(x, 3, 2, 1, False, False)),
        (api.global_avg_pool2d, lambda x: x.mean((2, 3), keepdim=True)),
        (
            lambda x: api.bias_relu_max_pool2d(x, x.mean((0, 2, 3)) - 1.0, *K3S2.arguments),
            lambda x: F.max_pool2d(F.relu(x + (x.mean((0, 2, 3)) - 1.0).view(1, -1, 1, 1)), *K3S2.arguments),
        ),
    ],
    ids=["max", "avg", "global", "bias"],
)  # fmt: skip
def test_second_derivatives(emulated, ours, theirs) -> None:
    found = []
    with dispatch.everything():
        for function in (ours, theirs):
            x = nhwc(2, 24, 13, 11).requires_grad_()
            (g,) = torch.autograd.grad(function(x).pow(3).sum(), x, create_graph=True)
            found.append(torch.autograd.grad(g.square().sum(), x)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


def test_operations_of_the_library(emulated) -> None:
    x = nhwc(2, 24, 13, 11).requires_grad_()
    window = [list(v) for v in K3S2.arguments[:4]]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    for operation, arguments in (
        (torch.ops.advisor.max_pool2d.default, (x, *window, False)),
        (torch.ops.advisor.avg_pool2d.default, (x, *window[:3], False, False, None)),
        (torch.ops.advisor.global_avg_pool2d.default, (x,)),
    ):
        torch.library.opcheck(operation, arguments, test_utils=tests)
    with dispatch.everything():
        for library, function in (
            (torch.ops.advisor.max_pool2d(x, *window, False)[0], api.max_pool2d(x, *K3S2.arguments)),
            (
                torch.ops.advisor.avg_pool2d(x, *window[:3], False, False, None),
                api.avg_pool2d(x, *K3S2.arguments[:3], False, False),
            ),
            (torch.ops.advisor.global_avg_pool2d(x), api.global_avg_pool2d(x)),
        ):
            assert torch.equal(library, function)
            mine, other = (torch.autograd.grad(y.square().sum(), x)[0] for y in (library, function))
            assert torch.equal(mine, other)


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "a tap too few": ("base + k < KH && used(column)", "base + k < KH - 1 && used(column)", "max_pool k3s2"),
    "equal values": ("greater(v.w[i], e.value.w[i])", "~greater(e.value.w[i], v.w[i])", "max_pool k3s2"),
    "past the edge": ("w >= 0 && w < width)\n        v[k]", "w >= 0 && w <= width)\n        v[k]", "max_pool k3s1"),
    "a window left out": ("oh < 0 || oh >= out_height", "oh <= 0 || oh >= out_height", "max_pool k3s2"),
    "another's position": ("position == kh * KW + kw", "position == kh * KH + kw", "max_pool k3x2s2x3d2x1ceil"),
    "zero taken for alive": ("if (f[j] <= 0.f)", "if (f[j] < -1.f)", "bias+relu+max_pool k3s2"),
    "zero counted for the bias": (
        "position_of(chosen, c) != 255",
        "position_of(chosen, c) != 254",
        "bias+relu+max_pool k3s2",
    ),
    "blocks left out": ("from < gridDim.y ?", "from < 1 ?", "bias+relu+max_pool k3s2"),
    "padding counted": ("DIVISOR == 0 || top > 0", "true || top > 0", "avg_pool k3s2 inside"),
    "not divided": ("g[c] *= scale", "g[c] *= 1.f", "avg_pool k3s2 inside"),
    "no barrier": ("threadIdx.x] = sum[j];\n  __syncthreads();", "threadIdx.x] = sum[j];", "global_avg_pool"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, name = FAULTS[fault]
    case = next(c for c in cases.VERIFICATION if c.name == name and c.dtype == "bfloat16" and c.shape[2] > 1)
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


@pytest.mark.parametrize("step", ["LOADS * parts", "2 * LOADS * parts"])
def test_more_blocks_than_the_last_one_reads_at_once(emulated, monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    emulated.use(sm_count=40)
    case = cases.bias_max_case((40, 264, 2, 2), K2S2, "bfloat16")
    passed = passes_with(monkeypatch, FAMILY, case, "b += LOADS * parts", f"b += {step}")
    assert passed == (step == "LOADS * parts")


class Styles(nn.Module):
    """Pooling as people write it, and some that must be left alone."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.transition = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2)
        self.same, self.halved, self.uneven = (nn.AdaptiveAvgPool2d(n) for n in (4, 2, 3))
        self.last, self.indexed = nn.AdaptiveAvgPool2d((1, 1)), nn.MaxPool2d(2, return_indices=True)
        self.largest, self.where = nn.AdaptiveMaxPool2d(1), nn.AdaptiveMaxPool2d(2, return_indices=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = self.stem(x)
        a = F.max_pool2d(x, kernel_size=3, stride=1, padding=1) + torch.max_pool2d(x, 3, 1, 1)
        b = self.same(self.transition(a)) + F.avg_pool2d(x, 2, stride=2, ceil_mode=True)
        c = (
            self.last(b).flatten(1)
            + b.mean((2, 3))
            + torch.mean(b, dim=[-1, -2])
            + b.mean((2, 3), keepdim=True)[:, :, 0, 0]
        )
        large = F.avg_pool2d(F.pad(x, (1, 1, 1, 1)), 10)  # more pixels than a window may have, and all there are
        adaptive = self.largest(b) + self.where(b)[0]
        return self.halved(b), self.uneven(b), c, self.indexed(b)[0], b.mean(1), x.mean((2, 3)), large, adaptive


NO_KERNEL = "no kernel for adaptive max-pooling"
LEFT_ALONE = {
    "uneven": "windows of unequal size",
    "indexed": "return_indices=True",
    "largest": NO_KERNEL,
    "where": NO_KERNEL,
}
FOUND = [
    "avg_pool k2s2", "avg_pool k2s2", "avg_pool k2s2ceil", *["global_avg_pool"] * 6, "identity",
    "max_pool k3s1", "max_pool k3s1", "max_pool k3s2",
]  # fmt: skip


def _capture(model: nn.Module) -> tuple[match.MatchReport, object]:
    report = match.MatchReport()
    return report, torch.compile(model.forward, backend=dynamo.backend({FAMILY.id: report}, mode=None), dynamic=False)


def test_calls_are_found_in_every_style() -> None:
    model = Styles()
    report, run = _capture(model)
    x = nhwc(2, 16, 16, 16)
    with dispatch.everything():
        got = run(x)
    assert sorted(report.matched.values()) == FOUND
    assert report.unmatched == LEFT_ALONE
    for mine, plain in zip(got, model(x), strict=True):
        torch.testing.assert_close(mine, plain)


class Biased(nn.Module):
    """Convolutions, ReLU and max-pooling as people write them, and some where something else stands between or looks on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(inplace=True), nn.MaxPool2d(2, 2))
        self.called, self.seen, self.leaky = (nn.Conv2d(16, 16, 3, padding=1) for _ in range(3))
        self.plain, self.close = nn.Conv2d(16, 16, 3, padding=1, bias=False), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        a = F.max_pool2d(F.relu(self.called(x)), 3, 2, 1)
        seen = torch.relu(self.seen(x))
        b = F.max_pool2d(seen, 2) + seen[:, :, ::2, ::2]
        c = F.max_pool2d(F.leaky_relu(self.leaky(x), 0.1), 2)
        return (
            a
            + b
            + c
            + F.max_pool2d(F.relu(self.plain(x)), 2)
            + F.max_pool2d(F.relu(self.close(x)), 3, 1, 1)[:, :, ::2, ::2]
        )


def test_a_convolutions_bias_and_relu_become_part_of_the_pooling(emulated) -> None:
    torch.manual_seed(0)
    model = Biased().to(memory_format=torch.channels_last)
    plain = Biased().double()
    plain.load_state_dict(model.state_dict())
    report, run = _capture(model)
    x = nhwc(2, 8, 16, 16)
    with dispatch.everything():
        run(x).square().sum().backward()
    plain(x.double()).square().sum().backward()
    assert sorted(report.matched.values()) == [
        "bias+relu+max_pool k2s2", "bias+relu+max_pool k3s2", *["max_pool k2s2"] * 3, "max_pool k3s1",
    ]  # fmt: skip
    assert emulated.launches["bias_max_pool_backward"] == 2
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-3, atol=1e-4, msg=name)


def test_two_calls_of_one_module_are_both_reported() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pool = nn.MaxPool2d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.pool(self.pool(x))

    report, run = _capture(Twice())
    with dispatch.everything():
        run(nhwc(1, 8, 8, 8))
    assert len(report.matched) == 2
    assert all(path.startswith("pool.") for path in report.matched)


def test_calls_are_left_alone_without_a_measurement(unmeasured: None) -> None:
    report, run = _capture(Styles())
    run(nhwc(2, 16, 16, 16))
    assert list(report.matched.values()) == ["identity"]
    assert set(report.unmatched.values()) == {dispatch.UNMEASURED, *LEFT_ALONE.values()}


def _same(x: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(x, (4, 4))


def _added_to(x: torch.Tensor) -> torch.Tensor:
    return _same(x).add_(1.0) + x


def _added_to_as_tokens(x: torch.Tensor) -> torch.Tensor:
    tokens = _same(x).flatten(2)
    tokens += 1.0
    return tokens.view_as(x) + x


def _input_changed_as_tokens(x: torch.Tensor) -> torch.Tensor:
    constant = x.detach() + 1.0  # which needs no gradient: of what needs one PyTorch's pooling has kept the input
    y = _same(constant)
    constant.flatten(2).mul_(2.0)
    return y * x


def _added_to_in_another_graph(x: torch.Tensor) -> torch.Tensor:
    y = _same(x)
    torch._dynamo.graph_break()
    y += 1.0
    return y + x


def _both_given_back(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((_same(x).flatten(2), x.flatten(2)))


def _without_gradients(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y = _same(x)
    return y * x


def _transposed(x: torch.Tensor) -> torch.Tensor:
    return _same(x.transpose(2, 3)).permute(0, 2, 3, 1).reshape(x.shape).mul(x)


def _classified(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(F.linear(_same(x).flatten(1), torch.ones(4, x[0].numel())), 0.0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_added_to, "its input or output is changed in place"),
        (_added_to_as_tokens, "its input or output is changed in place"),
        (_input_changed_as_tokens, "its input or output is changed in place"),
        (_added_to_in_another_graph, "its input or output leaves the graph"),
        (_without_gradients, "it or its input runs without gradients"),
        (_transposed, "its input has other strides"),
        (_both_given_back, ""),
        (_classified, ""),
    ],
)
def test_a_pooling_to_the_same_size_goes_where_no_copy_is_needed(function: Callable, reason: str) -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return function(x * 2.0)

    report, run = _capture(Net())
    found = []
    for forward in (run, Net()):
        x = nhwc(2, 8, 4, 4).requires_grad_()
        y = forward(x)
        y.square().sum().backward()
        found.append((y, x.grad))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    assert (list(report.unmatched.values()), list(report.matched.values())) == (
        ([reason], []) if reason else ([], ["identity"])
    )


def test_a_pooling_that_is_given_back_is_the_callers_own() -> None:
    class Net(nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return _same(x), x + 1.0

    report, run = _capture(Net())
    x = nhwc(2, 8, 4, 4)
    run(x)[0].zero_()
    assert torch.equal(x, nhwc(2, 8, 4, 4))
    assert list(report.unmatched.values()) == ["its input or output leaves the graph"]


def test_a_captured_model_trains_on_the_kernels_as_the_plain_one(emulated) -> None:
    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(8, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = F.max_pool2d(self.conv(x), 3, 2, 1)
            return F.avg_pool2d(x, 3, 2, 1, count_include_pad=False).mean((2, 3))

    torch.manual_seed(0)
    model = Small().to(memory_format=torch.channels_last)
    plain = Small().double()
    plain.load_state_dict(model.state_dict())
    x = nhwc(2, 8, 12, 12)
    with dispatch.everything():
        _, run = _capture(model)
        run(x).square().sum().backward()
    plain(x.double()).square().sum().backward()
    assert emulated.launches == dict.fromkeys(
        ("max_pool_forward", "max_pool_backward", "avg_pool_forward", "avg_pool_backward",
         "global_avg_pool_forward", "global_avg_pool_backward"), 1
    )  # fmt: skip
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), other.grad, rtol=1e-4, atol=1e-5)
