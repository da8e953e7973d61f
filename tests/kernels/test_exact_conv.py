"""Exact fp32 convolutions on tensor cores: the kernels, emulated, against fp64."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from advisor.ops.exact_conv import cuda, spec


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
