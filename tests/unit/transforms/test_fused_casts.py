"""One cast of all weights: where it applies, what it leaves as it was, and what shows that it is there."""

from __future__ import annotations

import pytest
import torch
from loops import ConvNet, Loop, assert_equal, check_undo_is_exact, make_loop, twins, values
from torch import nn

from advisor.core.profile import KernelRow
from advisor.ops import dispatch, weight_casts
from advisor.transforms import capture
from advisor.transforms.autocast import AutocastBf16
from advisor.transforms.forward import GRAPH, ForwardStack
from advisor.transforms.fused_casts import FusedCasts

WEIGHTS = 7  # of ConvNet's convolutions and head, biases included


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    dispatch.clear()
    yield
    torch._dynamo.reset()
    dispatch.clear()


def half(loop: Loop) -> Loop:
    AutocastBf16().apply(loop.training, {"cpu": "always"})
    return loop


def on_gpu(loop: Loop) -> Loop:
    loop.training.device = torch.device("cuda")
    return loop


def test_training_under_the_autocast_layer_is_bit_equal() -> None:
    loop, plain = map(half, twins())
    transform = FusedCasts()
    undo = transform.apply(loop.training, {})
    assert transform.effect(loop.training, None, None).passed is False
    assert loop.run(3) == plain.run(3)
    assert_equal(values(loop), values(plain))
    found = transform.effect(loop.training, None, None)
    assert found.passed
    assert found.detail == f"{WEIGHTS} weights cast together"
    assert transform.sites(loop.training)[0][0] == "conv1 [8, 3, 3, 3]: cast to bfloat16"
    with torch.no_grad():  # evaluation is not captured
        ran = dict(weight_casts.engaged)
        assert torch.equal(loop.model.eval()(torch.ones(1, 3, 8, 8)), plain.model.eval()(torch.ones(1, 3, 8, 8)))
        assert weight_casts.engaged == ran
    undo.run()
    assert capture.current(loop.model) is None


def test_undo_is_exact() -> None:
    loop, twin = map(half, twins())
    check_undo_is_exact(FusedCasts(), loop, twin)


def test_it_matches_under_autocast_only() -> None:
    loop = make_loop(steps=1)
    assert "CUDA GPU" in FusedCasts().match(loop.training, {}).reason
    assert "casts none" in FusedCasts().match(on_gpu(loop).training, {}).reason
    assert FusedCasts().match(half(loop).training, {}).sites == ("ConvNet",)


def test_it_matches_the_scripts_own_autocast() -> None:
    loop = on_gpu(make_loop(steps=1))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loop.training.roots[0].output = loop.model(torch.randn(2, 3, 8, 8))
    assert FusedCasts().match(loop.training, {}).applies


def test_a_replayed_graph_hides_its_casts_and_is_tried() -> None:
    loop = on_gpu(make_loop(steps=1))
    ForwardStack.of(loop.model).set(GRAPH, lambda inner, module: inner)
    try:
        assert FusedCasts().match(loop.training, {}).applies
    finally:
        ForwardStack.of(loop.model).clear(GRAPH)


class Shard(torch.Tensor):
    """As FSDP's parameters are: no plain tensor."""


class Bare(ConvNet):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = self.conv2 = self.conv3 = nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean((2, 3)).repeat(1, 6)[:, :16])


def test_where_it_would_lose_or_find_nothing_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = half(on_gpu(make_loop(steps=1)))
    undo = capture.set_mode([loop.model], "default")
    assert "torch.compile" in FusedCasts().match(loop.training, {}).reason
    undo.run()

    few = half(on_gpu(make_loop(model=Bare, steps=1)))
    assert "one weight at most" in FusedCasts().match(few.training, {}).reason
    sharded = half(on_gpu(make_loop(steps=1)))
    sharded.model.head.weight = nn.Parameter(sharded.model.head.weight.detach().as_subclass(Shard))
    assert "sharded" in FusedCasts().match(sharded.training, {}).reason
    monkeypatch.setattr(nn.parallel.DistributedDataParallel, "__init__", lambda self: nn.Module.__init__(self))
    ddp = nn.parallel.DistributedDataParallel()
    ddp.module = loop.model
    for root in (ddp, nn.Sequential(ddp)):
        loop.training.roots[0].module = root
        assert "DistributedDataParallel" in FusedCasts().match(loop.training, {}).reason
        FusedCasts().apply(loop.training, {})
        assert capture.current(root) is None


def test_effect_needs_fewer_casts_in_the_trace(profile) -> None:
    loop = half(make_loop())
    transform = FusedCasts()
    transform.apply(loop.training, {})
    loop.run(1)
    single = KernelRow(name="cast", kind="copy", op="aten::_to_copy", phase="forward", calls=9.0, time_us=9.0)
    other = KernelRow(name="cast", kind="copy", op="aten::_to_copy", phase="optimizer", calls=9.0, time_us=9.0)
    together = KernelRow(name="multi", kind="copy", op="aten::_foreach_copy_", phase="forward", calls=1.0, time_us=2.0)
    found = transform.effect(loop.training, profile(single, other), profile(together, other))
    assert found.passed
    assert found.numbers["casts_before"] == 9.0
    assert found.numbers["casts_after"] == 0.0
    assert transform.effect(loop.training, profile(single), profile(single)).passed is False


def test_without_autocast_the_effect_is_missing() -> None:
    loop = make_loop()
    FusedCasts().apply(loop.training, {})
    loop.run(1)
    found = FusedCasts().effect(loop.training, None, None)
    assert found.passed is False
    assert "no weight is cast" in found.detail
