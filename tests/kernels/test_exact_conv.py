"""Exact fp32 convolutions on tensor cores: the kernels, emulated, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import dispatch, dynamo, match
from advisor.ops.exact_conv import cuda, linear, spec, tf32


@pytest.mark.parametrize(
    ("shape", "outputs", "taps", "stride", "padding", "dilation", "groups"),
    [
        ((2, 16, 9, 11), 24, (3, 3), 1, (1, 1), 1, 1),
        ((1, 3, 13, 12), 70, (7, 7), 2, (3, 3), 1, 1),
        ((2, 8, 6, 6), 130, (1, 1), 2, (0, 0), 1, 1),
        ((1, 16, 9, 9), 16, (3, 3), 1, (2, 2), 2, 2),
        ((1, 40, 5, 7), 8, (1, 5), 1, (0, 2), 1, 1),
    ],
)
@pytest.mark.parametrize("arch", [90, 80])  # Hopper's products, and everybody's
def test_three_directions(
    emulated,
    arch: int,
    shape: tuple[int, ...],
    outputs: int,
    taps: tuple[int, int],
    stride: int,
    padding: tuple[int, int],
    dilation: int,
    groups: int,
) -> None:
    emulated.use(sm_count=3, arch=arch)
    torch.manual_seed(0)
    x = torch.randn(shape) * 1e-20
    weight = torch.randn(outputs, shape[1] // groups, *taps) * 1e15
    call = spec.call(shape, tuple(weight.shape), stride, padding, dilation, groups)
    bias = torch.randn(outputs) * 1e-5
    exact_x, exact_w = x.double().requires_grad_(), weight.double().requires_grad_()
    exact = F.conv2d(exact_x, exact_w, bias.double(), stride, padding, dilation, groups)
    dy = torch.randn(exact.shape)
    exact_dx, exact_dw = torch.autograd.grad(exact, (exact_x, exact_w), dy.double())

    def near(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert ((found.double() - expected).norm() / expected.norm()).item() < 2e-7

    nhwc = torch.channels_last
    parts, dy_parts = cuda.split(x.contiguous(memory_format=nhwc)), cuda.split(dy.contiguous(memory_format=nhwc))
    near(cuda.forward(parts, cuda.split_weight(weight, groups, gradient=False), bias, x, call), exact)
    near(cuda.backward_data(dy_parts, cuda.split_weight(weight, groups, gradient=True), x, call), exact_dx)
    near(cuda.backward_weight(dy_parts, parts, weight, call), exact_dw)


@pytest.mark.parametrize(("arch", "compiles", "dispatched"), [(90, True, True), (90, False, False), (80, True, False)])
def test_nothing_is_dispatched_but_what_was_measured(
    emulated, monkeypatch: pytest.MonkeyPatch, arch: int, compiles: bool, dispatched: bool
) -> None:
    emulated.use(sm_count=3, arch=arch)
    monkeypatch.setattr(cuda.nvrtc, "refused", lambda name: "" if compiles else "an older compiler")
    assert (cuda.unmeasured(0) == "") is dispatched


def _linear(shape: tuple[int, ...], outputs: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    drawn = torch.randn(shape), torch.randn(outputs, shape[-1]), torch.randn(outputs)
    return tuple(t.requires_grad_() for t in drawn)


def test_a_linear_layer_of_any_dimensions(emulated) -> None:
    given = _linear((2, 3, 24), 40)
    exact = [t.detach().double().requires_grad_() for t in given]
    expected = F.linear(*exact)
    with dispatch.everything():
        found = linear.exact_linear(*given)
        dy = torch.randn(found.shape)
        gradients = torch.autograd.grad(found, given, dy)
    assert emulated.launches["exact_conv_hopper"] == 2
    assert emulated.launches["exact_conv_hopper_weight"] == 1
    for mine, theirs in zip(
        (found, *gradients), (expected, *torch.autograd.grad(expected, exact, dy.double())), strict=True
    ):
        assert mine.shape == theirs.shape
        assert ((mine.double() - theirs).norm() / theirs.norm()).item() < 4e-7


def test_a_linear_layer_in_half_precision_is_left_alone(emulated) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert linear.exact_linear(*_linear((4, 24), 40)).dtype == torch.bfloat16
    assert not emulated.launches


def test_linear_layers_of_a_network_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8, bias=False)).to("meta")
    reports = {"exact_conv": match.MatchReport()}
    with dispatch.everything():
        torch.compile(net, backend=dynamo.backend(reports, mode=None), dynamic=False)(torch.randn(6, 24, device="meta"))
    assert list(reports["exact_conv"].matched.values()) == [spec.LINEAR] * 2
    reports = {"exact_conv": match.MatchReport()}
    torch._dynamo.reset()
    torch.compile(net, backend=dynamo.backend(reports, mode=None), dynamic=False)(torch.randn(6, 24, device="meta"))
    assert all(dispatch.UNMEASURED in reason for reason in reports["exact_conv"].unmatched.values())
    assert len(reports["exact_conv"].unmatched) == 2
    monkeypatch.setattr(tf32, "products_allowed", lambda: True)
    torch._dynamo.reset()
    torch.compile(net, backend=dynamo.backend(reports, mode=None), dynamic=False)(torch.randn(6, 24, device="meta"))
    assert set(reports["exact_conv"].unmatched.values()) == {tf32.ALLOWED}
