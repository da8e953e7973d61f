"""First convolution without a GPU: definition, launch geometry, what is supported, emulated kernels, graph matching."""

from __future__ import annotations

import pytest
import torch
from emulation.device import only_what_wins
from emulation.planted import passes_with, planted
from emulation.supports import unsupported
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match, verify
from advisor.ops.first_conv import api, cases, reference, spec

FAMILY = catalog.get("first_conv")


def nhwc(*shape: int, seed: int = 0) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c, generator=torch.Generator().manual_seed(seed)).permute(0, 3, 1, 2)


@pytest.mark.parametrize(("kernel", "stride"), [(3, 1), (4, 4), (3, 2)])
def test_the_definition_is_pytorchs_and_passes_gradcheck(kernel: int, stride: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 3, 6, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(2, 3, kernel, kernel, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, dtype=torch.float64, requires_grad=True)
    padding = (kernel // 2, 1)

    def definition(*tensors: torch.Tensor) -> torch.Tensor:
        return reference.first_conv2d(*tensors, stride, padding)

    torch.testing.assert_close(definition(x, weight, bias), F.conv2d(x, weight, bias, stride, padding))
    torch.testing.assert_close(definition(x, weight, None), F.conv2d(x, weight, None, stride, padding))
    assert torch.autograd.gradcheck(definition, (x, weight, bias))


@given(
    batch=st.integers(1, 300),
    height=st.integers(1, 300),
    width=st.integers(1, 3000),
    channels=st.sampled_from(range(8, spec.MAX_CHANNELS + 1, 8)),
    kernel=st.sampled_from(spec.TAPS),
    stride=st.sampled_from(spec.STRIDES),
    pad=st.integers(0, 6),
    bias=st.booleans(),
    sm_count=st.integers(1, 200),
)
def test_launches_cover_every_pixel_channel_and_tap(
    batch: int, height: int, width: int, channels: int, kernel: int, stride: int, pad: int, bias: bool, sm_count: int
) -> None:
    pad = min(pad, kernel - 1)
    height, width = max(height, kernel), max(width, kernel)
    call = spec.call((batch, 3, height, width), channels, kernel, stride, (pad, pad), bias)
    forward = spec.forward_defines(call, "bfloat16", "bfloat16", "float32", raw=False)
    weight = spec.weight_defines(call, "bfloat16", "bfloat16", "float32", raw=False)
    assert channels <= forward["WARPS_N"] * forward["NT"] * 8 < channels + 32
    assert channels <= 16 * weight["V"] * weight["CHUNKS"] < channels + 64
    assert weight["WARPS_K"] * weight["KT"] * 8 >= 3 * kernel**2 + bias
    for defines, warps in ((forward, forward["WARPS_N"]), (weight, weight["WARPS_K"])):
        shape = spec.geometry(call, defines, sm_count)
        assert defines["COLS"] % 16 == 0
        assert (shape.strips - 1) * defines["COLS"] < call.out_width <= shape.strips * defines["COLS"]
        assert (shape.bands - 1) * defines["ROWS"] < call.out_height <= shape.bands * defines["ROWS"]
        assert 1 <= shape.grid <= shape.tiles == batch * shape.strips * shape.bands
        assert defines["THREADS"] % (32 * warps) == 0
        assert 32 <= defines["THREADS"] <= 1024
        rows = (defines["ROWS"] - 1) * stride + kernel
        assert 2 * 2 * (rows * spec.pitch(call, defines["COLS"]) + 8) + 4 * 96 <= 48 * 1024


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"dtype": "float32"}, ""),
        ({"arch": 75}, "older"),
        ({"arch": 100}, ""),
        ({"compute": "float32"}, "computed in float32"),
        ({"dtype": "float64"}, "dtype"),
        ({"weight_dtype": "float64"}, "weight dtype"),
        ({"weight_shape": (64, 4, 7, 7), "shape": (2, 4, 32, 32)}, "not 3 channels"),
        ({"weight_shape": (63, 1, 7, 7), "groups": 3}, "not 3 channels"),
        ({"weight_shape": (64, 3, 7, 5)}, "not square"),
        ({"weight_shape": (64, 3, 16, 16)}, "16 x 16 taps"),
        ({"weight_shape": (60, 3, 7, 7)}, "no multiple"),
        ({"weight_shape": (128, 3, 7, 7)}, "more than"),
        ({"stride": (5, 5)}, "stride"),
        ({"stride": (2, 1)}, "stride"),
        ({"dilation": (2, 2)}, "dilation"),
        ({"padding": (7, 0)}, "as wide"),
        ({"padding": (0, 0), "shape": (2, 3, 6, 32)}, "empty output"),
        ({"shape": (0, 3, 32, 32)}, "empty input"),
        ({"shape": (1, 3, 40000, 40000)}, "32-bit"),
    ],
)
def test_unsupported_says_why(change: dict, reason: str) -> None:
    call = {
        "shape": (2, 3, 32, 32),
        "dtype": "bfloat16",
        "compute": "bfloat16",
        "weight_shape": (64, 3, 7, 7),
        "weight_dtype": "float32",
        "stride": (2, 2),
        "padding": (3, 3),
        "dilation": (1, 1),
        "groups": 1,
        "arch": 90,
    }
    answer = unsupported(spec, **{**call, **change})
    assert reason in answer if reason else answer == ""


def test_nothing_is_dispatched_before_it_is_measured(emulated, unmeasured: None) -> None:
    before = sum(api.fell_back.values())
    emulated.launches.clear()
    x, weight = nhwc(1, 3, 5, 5).bfloat16(), torch.randn(8, 3, 3, 3).bfloat16()
    with only_what_wins():
        y = api.first_conv2d(x, weight, None, 1, (1, 1))
    torch.testing.assert_close(y, F.conv2d(x, weight, None, 1, 1))
    assert not emulated.launches
    assert sum(api.fell_back.values()) == before + 1


def gradients(y: torch.Tensor, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(y.float().square().sum(), leaves)


@pytest.mark.parametrize("channels_last", [False, True])
def test_an_fp32_image_under_autocast_is_read_as_it_lies(emulated, channels_last: bool) -> None:
    x = torch.randn(2, 3, 12, 16, generator=torch.Generator().manual_seed(1))
    x = x.to(memory_format=torch.channels_last) if channels_last else x
    weight, bias = nhwc(16, 3, 3, 3).contiguous(memory_format=torch.channels_last), torch.randn(16)
    leaves = weight.requires_grad_(), bias.requires_grad_()
    emulated.launches.clear()
    with torch.autocast("cpu", torch.bfloat16):
        ours = api.first_conv2d(x, weight, bias, 2, (1, 1))
    assert emulated.launches["first_conv_forward"] == 1
    theirs = F.conv2d(x.bfloat16(), weight.bfloat16(), bias.bfloat16(), 2, 1)
    assert ours.dtype == torch.bfloat16
    assert ours.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    sent = torch.randn_like(theirs)  # not of the outputs, whose own roundings differ
    for mine, other in zip(*(torch.autograd.grad(y, leaves, sent) for y in (ours, theirs)), strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=0.2)
        assert mine.stride() == other.stride()


def test_a_network_in_nchw_is_left_alone(emulated) -> None:
    x, weight = torch.randn(1, 3, 8, 8).bfloat16(), torch.randn(8, 3, 3, 3).bfloat16()
    assert api.unsupported(x, weight, None, 1, (1, 1), x.dtype) == "neither input nor weight is channels_last"
    assert api.unsupported(x, weight.to(memory_format=torch.channels_last), None, 1, (1, 1), x.dtype) == ""


def test_an_image_that_needs_a_gradient_gets_pytorchs(emulated) -> None:
    x, weight = nhwc(1, 3, 6, 6).bfloat16().requires_grad_(), nhwc(8, 3, 3, 3).bfloat16()
    before = api.fell_back["the input needs a gradient"]
    api.first_conv2d(x, weight, None, 1, (1, 1)).sum().backward()
    assert api.fell_back["the input needs a gradient"] == before + 1
    assert x.grad is not None
    again = x.detach().clone().requires_grad_()
    torch.ops.advisor.first_conv2d(again, weight, None, 1, [1, 1], torch.bfloat16).sum().backward()
    torch.testing.assert_close(again.grad, x.grad)


# What is changed in a kernel, and in which case the check must see it.
FAULTS = {
    "no bias": ("bias && i < OUT ?", "false ?", 4),
    "a strip too narrow": ("at < image.width * 3", "at < image.width * 3 - 8", 0),
    "a column too far": ("column >= 0 && column < image.width", "column >= 0 && column < image.width - 1", 4),
    "pixels beyond the row": (
        "m < ROWS * ROW_TILES && oh < out_height && ow + p < out_width",
        "m < ROWS * ROW_TILES",
        0,
    ),
    "no ones for the bias": ("b[j][h] = operands(1.f, 1.f);", "", 4),
    "a warp's pixels lost": ("w < WARPS_M; ++w", "w < 1; ++w", 2),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    before, after, number = FAULTS[fault]
    assert not passes_with(monkeypatch, FAMILY, cases.VERIFICATION[number], before, after)


def finite_alike(value: float, stride: int, height: int, width: int) -> bool:
    """Whether `value` in each column of an image reaches the same results and gradients as in PyTorch's own."""
    weight = nhwc(8, 3, 3, 3).bfloat16().requires_grad_()
    for column in range(width):
        x = nhwc(1, 3, height, width).bfloat16()
        x[0, column % 3, 2, column] = value
        ours = api.first_conv2d(x, weight, None, stride, (1, 1))
        theirs = F.conv2d(x.float(), weight.float(), None, stride, 1)
        dy = torch.ones_like(ours)
        pairs = [
            (ours, theirs),
            (*torch.autograd.grad(ours, weight, dy), *torch.autograd.grad(theirs, weight, dy.float())),
        ]
        if not all(torch.equal(torch.isfinite(mine), torch.isfinite(other)) for mine, other in pairs):
            return False
    return True


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize(("stride", "size"), [(2, (5, 8)), (1, (4, 5)), (3, (5, 6))])
def test_what_is_not_finite_comes_out_where_it_is_used(
    emulated, value: float, stride: int, size: tuple[int, int]
) -> None:
    assert finite_alike(value, stride, *size)


# Values that are multiplied by zero: beside a window, and under the end of a row.
@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("return *(const unsigned int*)at & bits;", "return *(const unsigned int*)at;"),
        ("b[j][h] &= inside[h];", ""),
    ],
)
def test_a_factor_of_zero_is_not_enough(emulated, monkeypatch: pytest.MonkeyPatch, before: str, after: str) -> None:
    with planted(monkeypatch, before, after):
        assert not finite_alike(float("inf"), 2, 5, 8)


class Net(nn.Module):
    """Convolutions of an image, as a module and as a function, beside ones that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 7, 2, padding=3, bias=False)
        self.patches = nn.Conv2d(3, 8, 16, 16)
        self.grouped = nn.Conv2d(24, 8, 3, groups=8)
        self.taps = nn.Parameter(torch.randn(8, 3, 3, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        both = torch.cat([self.stem(x)[..., :7, :7], F.conv2d(x, self.taps, None, 2, "valid")], 1)
        return self.grouped(both).mean((2, 3)) + self.patches(x).mean((2, 3))


def test_patterns_are_found_and_train_as_before() -> None:
    torch.manual_seed(0)
    model, plain = (Net().train().bfloat16() for _ in range(2))
    plain.load_state_dict(model.state_dict())
    report = match.MatchReport()
    x = torch.randn(2, 3, 16, 16).bfloat16()
    with dispatch.everything():
        run = torch.compile(model.forward, backend=dynamo.backend({"first_conv": report}, mode=None), dynamic=False)
        ours, theirs = run(x), plain(x)
        ours.square().sum().backward()
    theirs.square().sum().backward()
    assert report.matched.pop("stem") == "first conv k7 s2 to 16"
    assert list(report.matched.values()) == ["first conv k3 s2 to 8"]
    assert report.unmatched == {"patches": "16 x 16 taps"}
    torch.testing.assert_close(ours, theirs)
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, other.grad)


def test_an_image_with_a_gradient_is_not_taken() -> None:
    torch._dynamo.reset()
    conv, report = nn.Conv2d(3, 8, 3).bfloat16(), match.MatchReport()
    x = torch.randn(1, 3, 8, 8).bfloat16().requires_grad_()
    with dispatch.everything():
        torch.compile(conv.forward, backend=dynamo.backend({"first_conv": report}, mode=None), dynamic=False)(x)
    assert list(report.unmatched.values()) == ["the input needs a gradient"]
    assert not report.matched


def test_fewer_sums_of_sm_100_are_right(emulated) -> None:
    emulated.use(arch=100)
    case = next(c for c in cases.VERIFICATION if c.label == "first conv k7 s2 to 64 bfloat16 2x3x32x40")
    row = verify.check(FAMILY, case, "cpu")
    assert row["passed"], row["detail"]
