"""Padding with an image's own values without a GPU: what is supported, emulated kernels, operations, graph matching; and pooling of volumes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from emulation.planted import passes_with
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match
from advisor.ops.padding import api, spec
from advisor.ops.volume_pooling import api as volumes
from advisor.ops.volume_pooling import reference as volume_reference
from advisor.ops.volume_pooling import spec as volume_spec

FAMILY = catalog.get("padding")


def nhwc(*shape: int) -> torch.Tensor:
    n, c, h, w = shape
    return torch.randn(n, h, w, c).permute(0, 3, 1, 2).requires_grad_()


@pytest.mark.parametrize("mode", spec.MODES)
def test_every_element_is_the_copy_that_pytorch_makes_and_gathers_its_copies(emulated, mode: str) -> None:
    for amounts in ((0, 0, 0, 0), (1, 0, 2, 1), (3, 3, 2, 2), (0, 3, 0, 2)):
        x = nhwc(2, 8, 3, 4)
        with dispatch.everything():
            y = api.pad2d(x, amounts, mode)
        want = F.pad(x.detach(), amounts, mode)
        assert torch.equal(y, want)
        dy = torch.randn(y.shape, dtype=torch.float64)
        wide = x.detach().double().requires_grad_()
        (expected,) = torch.autograd.grad(F.pad(wide, amounts, mode), wide, dy)
        (dx,) = torch.autograd.grad(y, x, dy.float())
        torch.testing.assert_close(dx.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"mode": "constant"}, "mode constant"),
        ({"amounts": (1, 1)}, "padding by (1, 1)"),
        ({"amounts": (-1, 0, 0, 0)}, "padding by"),
        ({"amounts": (8, 0, 0, 0)}, "wider than the image"),
        ({"amounts": (8, 0, 0, 0), "mode": "circular"}, ""),
        ({"amounts": (9, 0, 0, 0), "mode": "circular"}, "wider than the image"),
        ({"amounts": (99, 0, 0, 0), "mode": "replicate"}, ""),
        ({"channels_last": False}, "channels_last"),
        ({"shape": (2, 12, 8, 8)}, "no multiple of 8"),
    ],
)
def test_it_says_why_not(change: dict[str, Any], reason: str) -> None:
    call: dict[str, Any] = {"shape": (2, 16, 8, 8), "amounts": (1, 1, 1, 1), "mode": "reflect"}
    found = spec.unsupported(**{**call, "channels_last": True, "dtype": "bfloat16", "arch": 90, **change})
    assert reason in found if reason else not found


def test_the_operation_obeys_torch_library(emulated) -> None:
    torch.library.opcheck(
        api.pad2d_op,
        (nhwc(2, 8, 3, 4), [1, 2, 0, 1], "reflect"),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static"),
    )


def test_second_derivatives_of_padding(emulated) -> None:
    def penalty(pad: Callable[..., torch.Tensor]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        x = nhwc(1, 8, 3, 4)
        (dx,) = torch.autograd.grad(pad(x, (1, 1, 1, 1), "reflect").pow(3).sum(), x, create_graph=True)
        return [dx, *torch.autograd.grad(dx.square().sum(), x)]

    with dispatch.everything():
        for mine, want in zip(penalty(api.pad2d), penalty(F.pad), strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


class Generator(nn.Module):
    """A residual block of an image-to-image network."""

    def __init__(self) -> None:
        super().__init__()
        self.pad, self.conv, self.zeros = nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3), nn.ZeroPad2d(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            x + self.conv(self.pad(x)) + F.pad(self.conv(self.zeros(x))[:, :3], (0, 0, 0, 0), "replicate").mean(1, True)
        )


@pytest.mark.usefixtures("readable_graphs")
def test_padding_is_found_and_a_constant_is_none_of_its(emulated) -> None:
    torch.manual_seed(0)
    model = Generator().to(memory_format=torch.channels_last).train()
    plain, x = copy.deepcopy(model), nhwc(2, 8, 5, 6)
    reports = {"padding": match.MatchReport()}

    def put_in(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)

    torch._dynamo.reset()
    with dispatch.everything():
        got = torch.compile(model, backend=put_in, dynamic=False)(x)
    assert reports["padding"].matched == {"pad": "reflect"}
    assert list(reports["padding"].unmatched.values()) == ["3 channels are no multiple of 4"]
    torch.testing.assert_close(got, plain(x))


PLANTED = {
    "a mirrored copy": ("i >= 1 && i <= before", "i >= 2 && i <= before"),
    "the copies behind": ("take(mirrored)", "take(mirrored - 1)"),
    "the element that is copied": ("at < 0 ? -at :", "at < 0 ? -at - 1 :"),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_fault_planted_in_a_kernel_is_found(emulated, monkeypatch, fault: str) -> None:
    assert not passes_with(monkeypatch, FAMILY, FAMILY.verification[0], *PLANTED[fault])


VOLUME_FAULTS = {
    "a position": ("(kd * KH + kh) * KW + kw : 256", "(kd * KH + kh) * KW + kw + 1 : 256"),
    "the window behind": ("a < BACK_D", "a < BACK_D - 1"),
    "padding counts no less": ("h < 0 || h >= height", "h < -1 || h >= height"),
}


@pytest.mark.parametrize("fault", VOLUME_FAULTS)
def test_a_fault_planted_in_the_pooling_of_volumes_is_found(emulated, monkeypatch, fault: str) -> None:
    family = catalog.get("volume_pooling")
    assert not passes_with(monkeypatch, family, family.verification[0], *VOLUME_FAULTS[fault])


def test_second_derivatives_of_pooling_volumes(emulated) -> None:
    x = torch.randn(1, 4, 5, 4, 8).permute(0, 4, 1, 2, 3).requires_grad_()
    for ours, plain, window in (
        (volumes.max_pool3d, volume_reference.max_pool3d, ((2, 2, 2), (1, 2, 2), (0, 1, 0))),
        (volumes.avg_pool3d, volume_reference.avg_pool3d, ((2, 2, 2), (1, 2, 2))),
    ):
        found = []
        for function in (ours, plain):
            with dispatch.everything():
                (dx,) = torch.autograd.grad(function(x, *window).pow(3).sum(), x, create_graph=True)
            found.append([dx, *torch.autograd.grad(dx.square().sum(), x)])
        for mine, want in zip(*found, strict=True):
            torch.testing.assert_close(mine, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({}, ""),
        ({"shape": (2, 8, 4, 4)}, "4-D"),
        ({"channels_last": False}, "channels_last_3d"),
        ({"window": volume_spec.window((5, 5, 5), (1, 1, 1))}, "125 elements"),
        ({"window": volume_spec.window((3, 3, 3), (2, 2, 2), (2, 1, 1))}, "half the window"),
        ({"window": volume_spec.window((9, 1, 1), (1, 1, 1))}, "larger than the volume"),
        ({"operation": "avg_pool3d"}, "average pooling with padding"),
    ],
)
def test_pooling_of_volumes_says_why_not(change: dict[str, Any], reason: str) -> None:
    window = volume_spec.window((3, 3, 3), (2, 2, 2), (1, 1, 1))
    call = {"operation": "max_pool3d", "shape": (2, 8, 4, 5, 6), "window": window, "channels_last": True, **change}
    found = volume_spec.unsupported(call.pop("operation"), dtype="bfloat16", arch=90, **call)
    assert reason in found if reason else not found
