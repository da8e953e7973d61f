"""Activation checkpoints in captured graphs compute what they do without the capture."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as plain
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from advisor.ops import dispatch, dynamo, match


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.conv = nn.BatchNorm2d(8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.conv(torch.relu(self.norm(x))), 0.5)


def _keep_convolutions() -> object:
    def policy(context: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        kept = op is torch.ops.aten.convolution.default
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Net(nn.Module):
    def __init__(self, how: dict) -> None:
        super().__init__()
        self.layers, self.how = nn.ModuleList(Layer() for _ in range(2)), how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, **self.how)
        return x


@pytest.fixture(autouse=True)
def _nothing_compiled() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize(
    "how",
    [{"use_reentrant": False}, {"use_reentrant": False, "context_fn": _keep_convolutions}],
    ids=["all", "selective"],
)
def test_outputs_gradients_and_buffers_are_those_of_the_plain_model(how: dict, monkeypatch) -> None:
    torch.manual_seed(0)
    model = Net(how)
    other = copy.deepcopy(model)
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    wide = x.detach().clone().requires_grad_()
    run = torch.compile(
        model.forward, backend=dynamo.backend({"batchnorm_act": match.MatchReport()}, mode=None), dynamic=False
    )
    run(x)  # captured
    model.load_state_dict(other.state_dict())
    made: list[object] = []
    frame = plain._CheckpointFrame
    monkeypatch.setattr(plain, "_CheckpointFrame", lambda *args, **kwargs: made.append(1) or frame(*args, **kwargs))
    for function, leaf in ((run, x), (other, wide)):
        torch.manual_seed(1)
        function(leaf).square().sum().backward()
    assert len(made) == 4  # checkpoints, both with the capture and without
    torch.testing.assert_close(x.grad, wide.grad)
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, msg=name)
    for (name, mine), theirs in zip(model.named_buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=name)


@pytest.mark.parametrize(
    ("how", "matched", "left"),
    [
        ({"use_reentrant": False}, {"layers.0.norm": "bn+relu", "layers.1.norm": "bn+relu"}, set()),
        ({"use_reentrant": True}, {"layers.0.norm": "bn+relu", "layers.1.norm": "bn+relu"}, set()),
        (
            {"use_reentrant": False, "context_fn": _keep_convolutions},
            {},
            {"in an activation checkpoint that chooses what it keeps"},
        ),
    ],
    ids=["all", "reentrant", "selective"],
)
def test_what_is_inside_is_matched_or_the_report_says_why(how: dict, matched: dict, left: set) -> None:
    report = match.MatchReport()
    model = Net(how)
    run = torch.compile(model.forward, backend=dynamo.backend({"batchnorm_act": report}, mode=None), dynamic=False)
    with dispatch.everything():
        run(torch.randn(2, 8, 4, 4, requires_grad=True))
    assert (report.matched, set(report.unmatched.values())) == (matched, left)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = Net({"use_reentrant": False}), nn.BatchNorm2d(8)

    def both(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(torch.relu(self.norm(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.both, x, use_reentrant=False)


def test_a_checkpoint_inside_another() -> None:
    torch.manual_seed(0)
    model = Nested()
    other = copy.deepcopy(model)
    x = torch.randn(2, 8, 4, 4, requires_grad=True)
    report = match.MatchReport()
    run = torch.compile(model.forward, backend=dynamo.backend({"batchnorm_act": report}, mode=None), dynamic=False)
    with dispatch.everything():
        run(x)  # captured
        model.load_state_dict(other.state_dict())
        for function in (run, other):
            torch.manual_seed(1)
            function(x).square().sum().backward()
    assert set(report.matched) == {"norm", "inner.layers.0.norm", "inner.layers.1.norm"}
    for mine, want in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad)
    for mine, want in zip(model.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(mine, want)
