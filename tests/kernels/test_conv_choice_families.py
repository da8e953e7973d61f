"""The bundled kernels as ways that a convolution's products can be chosen to be made, emulated."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from advisor.core.environment import Environment
from advisor.core.findings import Semantics
from advisor.transforms.choosing import ways
from advisor.transforms.choosing.chooser import Chooser
from advisor.transforms.choosing.clock import Clock
from advisor.transforms.choosing.families import BUNDLED
from advisor.transforms.choosing.numbers import DATA, FORWARD, WEIGHT, Numbers
from advisor.transforms.choosing.store import Store

# Family: input, weight, stride, padding, dilation, groups.
CALLS = {
    "conv3x3": ((1, 64, 5, 4), (64, 64, 3, 3), 1, 1, 1, 1),
    "grouped": ((1, 16, 6, 5), (16, 4, 3, 3), 2, 1, 1, 4),
    "depthwise": ((1, 16, 6, 5), (16, 1, 3, 3), 1, 1, 1, 16),
    "large_depthwise": ((1, 4, 9, 8), (4, 1, 13, 13), 1, 6, 1, 4),
    "strided_pointwise": ((1, 64, 6, 4), (64, 64, 1, 1), 2, 0, 1, 1),
    "exact_conv": ((1, 16, 6, 5), (24, 16, 3, 3), 1, 1, 1, 1),
    "winograd": ((1, 192, 5, 4), (192, 192, 3, 3), 1, 1, 1, 1),
}
IN_FP32 = {"exact_conv"}


class Favours(Clock):
    """The bundled kernels take half of what everything else takes."""

    def row_us(self, search, work):
        counted = dict(self.emulated.launches)
        work()
        return 50.0 if dict(self.emulated.launches) != counted else 100.0


@pytest.mark.parametrize("family", CALLS)
def test_a_familys_products_are_candidates_and_right(
    emulated, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str
) -> None:
    assert set(CALLS) == set(BUNDLED)
    shape, weight_shape, stride, padding, dilation, groups = CALLS[family]
    torch.manual_seed(0)
    layout = ways.FORMATS[BUNDLED[family].layout]
    dtype = torch.float32 if family in IN_FP32 else torch.bfloat16
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    x = torch.randn(shape).to(dtype).contiguous(memory_format=layout).requires_grad_()
    weight = torch.randn(weight_shape).to(dtype).requires_grad_()
    bias = torch.randn(weight_shape[0]).to(dtype).requires_grad_()

    def products() -> list[torch.Tensor]:
        y = F.conv2d(x, weight, bias, stride, padding, dilation, groups)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, weight, bias))]

    plain = products()
    clock = Favours(torch.device("cpu"))
    clock.emulated = emulated
    chooser = Chooser(
        torch.device("cpu"), Environment(), Store(tmp_path / "choices.json"), clock, allowed=BUNDLED[family].semantics
    )
    chooser.start()
    try:
        mine = products()
    finally:
        chooser.stop()
    for found, theirs in zip(mine, plain, strict=True):
        assert (found.shape, found.dtype) == (theirs.shape, theirs.dtype)
        assert float((found.double() - theirs.double()).norm() / theirs.double().norm()) < 0.02
    name = f"{family} kernels"
    expected = {direction: 1 for direction in (FORWARD, DATA, WEIGHT) if direction in BUNDLED[family].products}
    assert {direction: calls for (direction, way), calls in chooser.ran.items() if way == name} == expected


def test_winograd_is_no_way_where_its_error_is_not_allowed(emulated) -> None:
    x = torch.zeros(1, 192, 4, 4, dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)
    weight = torch.zeros(192, 192, 3, 3, dtype=torch.bfloat16)
    numbers = Numbers((1, 1), (1, 1), (1, 1), 1)
    named = {
        allowed: {way.family for way in ways.candidates(FORWARD, (x, weight), numbers, cudnn=True, allowed=allowed)}
        for allowed in (Semantics.REASSOCIATED, Semantics.PRECISION)
    }
    assert named[Semantics.PRECISION] - named[Semantics.REASSOCIATED] == {"winograd"}
