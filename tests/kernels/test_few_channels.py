"""Convolutions of a few channels: found in graphs of images and volumes, computed with eight channels, the same numbers."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.planted import passes_with
from torch import nn

from advisor.ops import catalog, dispatch, dynamo, match
from advisor.ops.few_channels import api, cuda, reference

FAMILY = catalog.get("few_channels")


@pytest.mark.parametrize("nhwc", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [(5, 7), (3, 5, 4)])
def test_channels_are_padded_with_zeros_in_one_pass(emulated, size: tuple[int, ...], dtype, nhwc: bool) -> None:
    x = torch.randn(2, 3, *size).to(dtype)
    form = torch.channels_last if len(size) == 2 else torch.channels_last_3d
    y = cuda.pad_channels(x.contiguous(memory_format=form) if nhwc else x, torch.bfloat16)
    assert y.shape == (2, 8, *size)
    assert y.is_contiguous(memory_format=form)
    assert torch.equal(y[:, :3], x.to(torch.bfloat16))
    assert not y[:, 3:].any()


class Volumes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.next = nn.Conv3d(1, 8, 3, (1, 2, 2), 1), nn.Conv3d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.next(self.stem(x))


@pytest.mark.usefixtures("readable_graphs")
def test_a_stem_of_volumes_is_found_and_trains_as_before(emulated) -> None:
    torch.manual_seed(0)
    model = Volumes().to(memory_format=torch.channels_last_3d).train()
    plain, x = copy.deepcopy(model).double(), torch.randn(2, 1, 3, 6, 6)
    reports = {"few_channels": match.MatchReport()}

    def put_in(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)

    torch._dynamo.reset()
    with dispatch.everything(), torch.autocast("cpu", torch.bfloat16):
        dispatch.clear()
        torch.compile(model, backend=put_in, dynamic=False)(x).float().square().mean().backward()
    assert reports["few_channels"].matched == {"stem": "volumes of 1 channels k3x3x3"}
    assert FAMILY.engaged == {"1 of 8 channels": 1}
    plain(x.double()).square().mean().backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad.double(), want.grad, rtol=5e-2, atol=5e-3)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.randn(2, 3, 6, 6)[:, :, ::2]}, "input has gaps"),
        ({"x": torch.randn(2, 3, 6, 6, requires_grad=True)}, "the input needs a gradient"),
        ({"x": torch.randn(2, 8, 6, 6), "weight": torch.randn(4, 8, 3, 3)}, "8 channels"),
        ({"autocast": False}, "computed in float32"),
    ],
)
def test_others_run_pytorchs_own(emulated, change: dict[str, Any], reason: str) -> None:
    given = {"x": torch.randn(2, 3, 6, 6), "weight": torch.randn(4, 3, 3, 3), "autocast": True, **change}
    dispatch.clear()
    arguments = given["x"], given["weight"], None, (1, 1), (1, 1), (1, 1)
    with dispatch.everything(), torch.autocast("cpu", torch.bfloat16, enabled=given["autocast"]):
        found = api.few_channels_conv(*arguments)
        want = reference.convolution(*arguments)
    assert FAMILY.fell_back == {reason: 1}
    torch.testing.assert_close(found, want)


PLANTED = {
    "the last channel": ("c < C ? widened", "c < C - 1 ? widened"),
    "the sample of a pixel": ("(i64)n * C * pixels", "(i64)n * pixels"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_in_the_kernel_is_found(emulated, monkeypatch, fault: str) -> None:
    case = next(c for c in FAMILY.verification if c.shape == (2, 3, 4, 7, 6))
    plain = case.inputs

    def planes(generator: torch.Generator, n: int) -> Any:
        x, *rest = plain(generator, n)
        return x.contiguous(), *rest

    case = dataclasses.replace(case, inputs=planes)
    assert not passes_with(monkeypatch, FAMILY, case, *PLANTED[fault])
