"""Winograd's transforms, emulated, against fp64: magnitudes, tiles that hang over, what is not finite."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import dispatch, dynamo, match
from advisor.ops.winograd import api, cuda, spec

NHWC = torch.channels_last
BOUND = 3.5e-3  # relative L2: cuDNN's own in bf16 is 2.4e-3, of which storing the result is 1.7e-3


def _given(shape: tuple[int, ...], outputs: int, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x = (torch.randn(shape) * scale).bfloat16().contiguous(memory_format=NHWC)
    return x, torch.randn(outputs, shape[1], 3, 3) / (9 * shape[1]) ** 0.5


def _off(found: torch.Tensor, exact: torch.Tensor) -> float:
    return ((found.double() - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 1.0, 1e30])
def test_magnitudes_that_fp16_does_not_hold(emulated, scale: float) -> None:
    x, weight = _given((1, 192, 6, 5), 192, scale)
    call = spec.call(tuple(x.shape), 192)
    assert _off(cuda.forward(x, weight, call), F.conv2d(x.double(), weight.double(), padding=1)) < BOUND
    exact = torch.nn.grad.conv2d_input(x.shape, weight.double(), x.double(), padding=1)
    assert _off(cuda.backward_data(x, weight, call), exact) < BOUND
    small = weight / 1e4
    assert _off(cuda.forward(x, small, call), F.conv2d(x.double(), small.double(), padding=1)) < BOUND


def test_each_tile_and_each_output_has_its_own_scale(emulated) -> None:
    """A gradient whose images differ by a million, and filters that do: none is rounded by the scale of another."""
    x, weight = _given((2, 192, 8, 8), 192)
    x[1] *= 1e-6
    weight[::2] *= 1e-6
    found = cuda.forward(x, weight, spec.call(tuple(x.shape), 192))
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    for image in range(2):
        for first in range(2):
            assert _off(found[image, first::2], exact[image, first::2]) < BOUND


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
@pytest.mark.parametrize("where", ["pixel", "weight"])
def test_what_is_not_finite_stays_where_it_is(emulated, value: float, where: str) -> None:
    x, weight = _given((1, 192, 9, 6), 192)
    if where == "pixel":
        x[0, 5, 4, 4] = value  # of four tiles' windows
    else:
        weight[7, 3, 1, 1] = value
    exact = F.conv2d(x.double(), weight.double(), padding=1)
    found = cuda.forward(x, weight, spec.call(tuple(x.shape), 192))
    assert torch.equal(found.isfinite(), exact.isfinite())
    assert 0 < exact.isfinite().sum() < exact.numel()
    assert _off(found.nan_to_num(0, 0, 0), exact.nan_to_num(0, 0, 0)) < BOUND


def test_products_are_dispatched_each_by_itself(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _given((1, 192, 4, 4), 192)
    x, weight = x.requires_grad_(), weight.requires_grad_()
    monkeypatch.setattr(spec, "product_left", lambda product: "" if product.turned else "not faster")
    y = api.winograd(x, weight)
    assert not emulated.launches["winograd_input"]
    y.backward(torch.ones_like(y))
    assert emulated.launches["winograd_input"] == 2  # of the gradient, and of x for the weight's
    assert emulated.launches["winograd_output"] == emulated.launches["winograd_weight"] == 1
    expected = torch.autograd.grad(F.conv2d(x.double(), weight.double(), padding=1).sum(), (x, weight))
    assert _off(x.grad, expected[0].double()) < BOUND
    assert _off(weight.grad, expected[1].double()) < BOUND


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
def test_the_weights_gradient_is_as_near_as_bf16_stores(emulated, scale: float) -> None:
    """Images that differ by a million go into one sum, tiles hang over."""
    x, weight = _given((3, 192, 9, 6), 256)
    dy = (torch.randn(3, 256, 9, 6) * scale).bfloat16().contiguous(memory_format=NHWC)
    x[1] *= 1e-6
    dy[2] *= 1e-6
    for given in (weight, weight.contiguous(memory_format=NHWC)):
        _, found = cuda.backward(dy, x, given, spec.call(tuple(x.shape), 256))
        assert (found.dtype, found.stride()) == (given.dtype, given.stride())
        exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double(), padding=1)
        assert _off(found, exact) < 2e-3


@pytest.mark.parametrize("shape", [(2, 192, 6, 10), (1, 192, 11, 7)])
def test_without_padding(emulated, shape: tuple[int, ...]) -> None:
    """The input's gradient is padded by two, and has more tiles than the result; what is not finite stays where it is."""
    x, weight = _given(shape, 256)
    call = spec.call(shape, 256, 0)
    exact = F.conv2d(x.double(), weight.double())
    assert _off(cuda.forward(x, weight, call), exact) < BOUND
    dy = torch.randn(exact.shape).bfloat16().contiguous(memory_format=NHWC)
    dx, dweight = cuda.backward(dy, x, weight, call)
    assert _off(dx, torch.nn.grad.conv2d_input(shape, weight.double(), dy.double())) < BOUND
    assert _off(dweight, torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double())) < 2e-3
    x[0, 5, 4, 4] = float("inf")
    exact = F.conv2d(x.double(), weight.double())
    assert torch.equal(cuda.forward(x, weight, call).isfinite(), exact.isfinite())
    _, dweight = cuda.backward(dy, x, weight, call)
    exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double())
    assert torch.equal(dweight.isfinite(), exact.isfinite())


def test_images_in_parts_hold_less_memory_and_give_the_same(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = _given((5, 192, 8, 8), 256)
    dy = torch.randn(5, 256, 8, 8).bfloat16().contiguous(memory_format=NHWC)
    call = spec.call(tuple(x.shape), 256)
    assert spec.parts(call) == ((0, 5),)
    whole = cuda.forward(x, weight, call), *cuda.backward(dy, x, weight, call)
    each = 2 * spec.FREQUENCIES * 4 * (192 + 256)
    monkeypatch.setattr(spec, "WORKSPACE", 2 * each)
    spec.parts.cache_clear()
    try:
        assert spec.parts(call) == ((0, 2), (2, 4), (4, 5))
        y, dx, dweight = cuda.forward(x, weight, call), *cuda.backward(dy, x, weight, call)
    finally:
        monkeypatch.undo()
        spec.parts.cache_clear()
    assert torch.equal(y, whole[0])
    assert torch.equal(dx, whole[1])
    assert dweight.stride() == whole[2].stride()
    assert _off(dweight, whole[2].double()) < 1e-3  # other sums, and another scale


def test_a_torch_that_sums_fp16_in_fp16_makes_the_weights_gradient_itself(
    emulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, weight = _given((1, 192, 4, 4), 192)
    monkeypatch.setattr(cuda, "sums_in_fp32", lambda: False)
    with dispatch.everything():
        api.winograd(x.requires_grad_(), weight.requires_grad_()).sum().backward()
    assert not emulated.launches["winograd_weight"]
    assert weight.grad is not None


def test_what_is_not_finite_in_a_gradient_stays_where_it_is(emulated) -> None:
    x, weight = _given((1, 192, 9, 6), 192)
    dy = x.clone()
    dy[0, 5, 4, 2] = float("inf")  # no tap of it reaches beyond the image
    _, dweight = cuda.backward(dy, x, weight, spec.call(tuple(x.shape), 192))
    exact = torch.nn.grad.conv2d_weight(x.double(), weight.shape, dy.double(), padding=1)
    assert torch.equal(dweight.isfinite(), exact.isfinite())
    assert _off(dweight.nan_to_num(0, 0, 0), exact.nan_to_num(0, 0, 0)) < BOUND


def test_a_network_has_it_where_channels_are_many() -> None:
    wide, biased, narrow, unlike = (
        nn.Conv2d(512, out, 3, padding=1, bias=bias)
        for out, bias in ((512, False), (512, True), (64, False), (320, False))
    )
    net = nn.ModuleList((wide, biased, narrow, unlike)).to("meta", torch.bfloat16)
    reports = {"winograd": match.MatchReport()}

    def forward(x: torch.Tensor) -> list[torch.Tensor]:
        return [conv(x) for conv in net]

    torch.compile(forward, backend=dynamo.backend(reports, mode=None), dynamic=False)(
        torch.randn(128, 512, 28, 28, device="meta", dtype=torch.bfloat16)
    )
    assert list(reports["winograd"].matched.values()) == ["winograd 512 to 512"]
    assert sorted(reports["winograd"].unmatched.values()) == [
        "has a bias", f"winograd 512 to 320: {dispatch.UNMEASURED}"
    ]  # fmt: skip


def test_an_error_of_fp16_is_not_put_in_fp16s_place() -> None:
    assert spec.wins(spec.call((8, 512, 28, 28), 512), "float16") == dispatch.UNMEASURED
