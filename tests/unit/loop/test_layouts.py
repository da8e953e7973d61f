"""Where a model loses channels_last, seen in real forwards of nets as people write them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.loop import stop
from advisor.loop.attach import Attached, attach_training
from advisor.loop.layouts import LayoutWatch
from advisor.loop.session import Session
from advisor.profiling.inside.facts import model_facts


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    torch.set_num_threads(1)
    return


def seen(model: nn.Module, x: torch.Tensor) -> dict[str, str]:
    """Module path → what returned NCHW there, in one forward."""
    watch = LayoutWatch()
    names = {id(module): name for name, module in model.named_modules()}
    plain = nn.Module.__call__

    def call(module: nn.Module, *args: torch.Tensor) -> torch.Tensor:
        watch.enter(module, args)
        output = plain(module, *args)
        watch.leave(module, args, output)
        return output

    nn.Module.__call__ = call
    try:
        model(x)
    finally:
        nn.Module.__call__ = plain
    return {names[module]: what for module, what in watch.breaks}


class Stage(nn.Module):
    """Two convolutions with something between them, in the forward of a class of the user's own."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor], channels: int = 8) -> None:
        super().__init__()
        self.first = nn.Conv2d(8, 8, 3)
        self.second = nn.Conv2d(channels, 8, 3)
        self.between = between

    def forward(self, feature: torch.Tensor) -> torch.Tensor:
        return F.relu(self.second(self.between(F.relu(self.first(feature)))))


def nhwc(model: nn.Module) -> nn.Module:
    return model.to(memory_format=torch.channels_last)


class Contiguous(nn.Module):
    """As reflection padding and pixel shuffle work on a GPU: NCHW comes out."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous()


class InNhwc(nn.Module):
    """As a convolution of three dimensions with NHWC weights works on a GPU: NHWC comes out, whatever goes in."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.contiguous(memory_format=torch.channels_last_3d)


IMAGES = torch.randn(2, 8, 12, 12)


@pytest.mark.parametrize(
    ("between", "channels", "told"),
    [
        (lambda x: F.pad(x, (1, 1, 1, 1), mode="circular"), 8, "CopySlices"),
        (lambda x: F.fold(F.unfold(x, 2), (10, 10), 2), 8, "Col2Im"),
        (lambda x: F.grid_sample(x, torch.zeros(2, 9, 9, 2), align_corners=False), 8, "GridSampler2D"),
        (lambda x: F.instance_norm(x), 8, "View"),
        (lambda x: x.contiguous(), 8, "Clone"),
        (lambda x: (x.flatten(2) @ torch.eye(100)).view(2, 8, 10, 10), 8, "View"),
        (lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"), 8, None),  # it keeps NHWC
        (lambda x: F.max_pool2d(x, 2), 8, None),
        (lambda x: F.pad(x, (1, 1, 1, 1)), 8, None),
        (lambda x: torch.cat([x, x], 1), 16, None),
        (F.silu, 8, None),
    ],
)
def test_an_operator_between_two_convolutions_is_told_with_the_module_that_calls_it(between, channels, told) -> None:
    found = seen(nhwc(nn.Sequential(Stage(between, channels))), IMAGES)
    if told is None:
        assert found == {}
    else:
        assert list(found) == ["0"]
        assert told in found["0"]


@pytest.mark.parametrize(
    ("layer", "told"),
    [
        (nn.InstanceNorm2d(8, affine=True), "InstanceNorm2d"),
        (Contiguous(), "Contiguous"),
        (nn.BatchNorm2d(8), None),
        (nn.Dropout2d(0.1), None),
        (nn.Identity(), None),
    ],
)
def test_a_module_that_returns_nchw_is_told_itself(layer, told) -> None:
    net = nhwc(nn.Sequential(nn.Conv2d(8, 8, 3), layer, nn.ReLU(), nn.Conv2d(8, 8, 3)))
    assert seen(net, IMAGES) == ({"1": told} if told else {})


def test_in_three_dimensions_too() -> None:
    net = nn.Sequential(InNhwc(), nn.InstanceNorm3d(2), nn.LeakyReLU(), InNhwc())
    assert seen(net, torch.randn(1, 2, 8, 8, 8, requires_grad=True)) == {"1": "InstanceNorm3d"}


def test_a_skip_connection_that_was_broken_before_is_not_told_again() -> None:
    class Skip(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.InstanceNorm2d(8)
            self.deep, self.leave = nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(16, 8, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = F.leaky_relu(self.norm(self.enter(x)))
            return self.leave(torch.cat([self.deep(kept), kept], 1))

    assert seen(nhwc(Skip()), IMAGES) == {"norm": "InstanceNorm2d"}


def test_a_model_in_nchw_breaks_nothing() -> None:
    net = nn.Sequential(nn.Conv2d(8, 8, 3), nn.InstanceNorm2d(8), nn.ReflectionPad2d(1), nn.Conv2d(8, 8, 3))
    assert seen(net, IMAGES) == {}
    assert seen(nn.Sequential(Stage(F.instance_norm)), IMAGES) == {}


def test_a_forward_that_raised_leaves_nothing_behind() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("planted")

    watch = LayoutWatch()
    outer, inner = nn.Sequential(nn.ReLU()), nn.ReLU()
    watch.enter(outer, (IMAGES,))
    watch.enter(inner, (IMAGES,))  # raises: it never leaves
    watch.leave(outer, (IMAGES,), IMAGES)
    assert watch._stack() == []


class DoubleConv(nn.Module):
    """As segmentation nets have them: the norm's output is never NHWC, so no convolution but the first gets NHWC."""

    def __init__(self, ins: int, outs: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(ins, outs, 3, padding=1), nn.InstanceNorm2d(outs), nn.ReLU(),
            nn.Conv2d(outs, outs, 3, padding=1), nn.InstanceNorm2d(outs), nn.ReLU(),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x)


@pytest.mark.parametrize("in_nhwc", [True, False])
def test_the_facts_name_what_undoes_the_scripts_channels_last(tmp_path: Path, in_nhwc: bool) -> None:
    gc.collect()  # optimizers of earlier tests are waited for as long as they live
    training, watcher = attach_training(Session(mode="search", run_dir=str(tmp_path), script="x"))
    try:
        net = nn.Sequential(DoubleConv(3, 8), DoubleConv(8, 8))
        net = nhwc(net) if in_nhwc else net
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            net(torch.randn(2, 3, 8, 8)).mean().backward()
            optimizer.step()
        facts = model_facts(training, Attached.discovery, watcher)
    finally:
        watcher.detach()
        Attached.training = Attached.watcher = Attached.discovery = None
        stop.forget()
    assert (facts.channels_last, facts.weights_channels_last) == (False, in_nhwc)
    paths = {entry.module for entry in facts.layout_breaks}
    norms = {f"Sequential.{block}.body.{layer}" for block in (0, 1) for layer in (1, 4)}
    assert paths == (norms if in_nhwc else set())
    assert {entry.what for entry in facts.layout_breaks} <= {"InstanceNorm2d"}
