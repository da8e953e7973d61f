"""Functions that lose NHWC have stand-ins that keep it while channels_last is on: the same values and gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.loop.training import RootModule, Training
from advisor.ops import concatenation
from advisor.transforms import keeping_nhwc
from advisor.transforms.channels_last import ChannelsLast


def nhwc(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64).contiguous(memory_format=torch.channels_last).requires_grad_()


def lies_nhwc(x: torch.Tensor) -> bool:
    return x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()


@pytest.mark.parametrize(("name", "shape"), [("pixel_shuffle", (2, 18, 4, 5)), ("pixel_unshuffle", (2, 4, 6, 9))])
def test_stand_ins_give_the_same_values_in_nhwc(name: str, shape: tuple[int, ...]) -> None:
    x = nhwc(*shape)
    ours, plain = getattr(keeping_nhwc, name)(x, 3), getattr(torch, name)(x.detach().contiguous(), 3)
    assert torch.equal(ours, plain)
    assert lies_nhwc(ours)
    assert torch.autograd.gradcheck(lambda x: getattr(keeping_nhwc, name)(x, 3), (x,))
    flat = x.detach().contiguous()
    assert not lies_nhwc(getattr(keeping_nhwc, name)(flat, 3))  # what is NCHW stays so


def test_they_raise_what_torch_raises() -> None:
    with pytest.raises(RuntimeError, match="divisible"):
        keeping_nhwc.pixel_shuffle(nhwc(1, 7, 2, 2), 2)


class SuperResolution(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up, self.last = nn.Conv2d(3, 32, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(8, 3, 3)
        self.seen: list[bool] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.conv(x))
        self.seen.append(lies_nhwc(y))
        return self.last(y)


def test_channels_last_puts_them_in_place_and_takes_them_back() -> None:
    plain_function = F.pixel_shuffle
    torch.manual_seed(0)
    model = SuperResolution().train()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 6, 6)
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = ChannelsLast().apply(training, {})
    torch.testing.assert_close(model(x), plain(x))
    assert model.seen == [True]
    undo.run()
    assert F.pixel_shuffle is plain_function


def test_dynamo_traces_them_in_one_graph() -> None:
    graphs = []

    def count(graph: torch.fx.GraphModule, inputs: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    model, x = SuperResolution().train(), torch.randn(2, 3, 6, 6)
    model.forward = lambda x: model.last(model.up(model.conv(x)))
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = ChannelsLast().apply(training, {})
    torch.compile(model, backend=count, dynamic=False)(x)
    undo.run()
    assert len(graphs) == 1


def test_of_mixed_layouts_a_concatenation_takes_that_of_most_values() -> None:
    large, small = nhwc(2, 6, 4, 4), torch.randn(2, 2, 4, 4, dtype=torch.float64, requires_grad=True)
    both = concatenation.cat([small, large], 1)
    assert lies_nhwc(both)
    assert torch.equal(both, torch.cat([small, large], 1))
    assert torch.autograd.gradcheck(lambda *given: concatenation.cat(given, 1), (small, large))
    assert not lies_nhwc(concatenation.cat([torch.randn(2, 9, 4, 4), large.float()], 1))
    assert lies_nhwc(concatenation.cat([large, large], 1))


class Signals(nn.Module):
    """A ResNet of signals in small: dilated, strided, padded "same", and causal as TCNs are."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv1d(2, 8, 5, 2, 2, bias=False), nn.BatchNorm1d(8)
        self.conv, self.bn2 = nn.Conv1d(8, 8, 3, padding="same", bias=False), nn.BatchNorm1d(8)
        self.causal = nn.utils.parametrizations.weight_norm(nn.Conv1d(8, 8, 3, padding=4, dilation=2))
        self.grouped, self.head = nn.Conv1d(8, 8, 1, groups=2), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool1d(F.relu(self.bn(self.stem(x))), 2)
        x = F.relu(self.bn2(self.conv(x)) + x)
        x = F.relu(self.causal(x)[:, :, :-4])
        return self.head(self.grouped(x).mean(2))


def test_signals_are_images_of_one_row_and_train_as_before() -> None:
    torch.manual_seed(0)
    model = Signals().train()
    plain, x = copy.deepcopy(model), torch.randn(4, 2, 32)
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    transform = ChannelsLast()
    match = transform.match(training, {})
    assert match.sites == ("Net.stem", "Net.conv", "Net.causal", "Net.grouped")
    own = F.conv1d
    undo = transform.apply(training, {})
    for net in (model, plain):
        net(x).square().sum().backward()
    for mine, want in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-4, atol=1e-5)
    found = transform.effect(training, None, None)
    assert found.passed, found.detail
    undo.run()
    assert F.conv1d is own


@pytest.mark.parametrize("padding", [0, 2, "same", "valid"])
def test_a_convolution_of_signals_gives_the_same_values_in_nlc(padding: int | str) -> None:
    x = torch.randn(2, 4, 9, dtype=torch.float64, requires_grad=True)
    w, b = (torch.randn(size, dtype=torch.float64, requires_grad=True) for size in ((6, 4, 3), (6,)))
    y = keeping_nhwc.conv1d(x, w, b, 1, padding, 2)
    torch.testing.assert_close(y, torch.conv1d(x, w, b, 1, padding, 2))
    assert y.stride(1) == 1
    assert torch.autograd.gradcheck(lambda *given: keeping_nhwc.conv1d(*given, 1, padding, 2), (x, w, b))
    assert keeping_nhwc.conv1d(x[0], w).dim() == 2
