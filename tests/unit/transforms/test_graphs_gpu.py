"""Trainings with the loops that published ones have, under CUDA graphs: what is replayed, and that they train as they did."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import published
import pytest
import torch
from published import Published
from torch._dynamo.utils import counters

from advisor.transforms import capture
from advisor.transforms.base import Transform, Undo
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.defer_sync import DeferSync
from advisor.transforms.fused_optimizer import FusedOptimizer
from advisor.transforms.single_device import SingleDevice

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

STEPS = 30
# Replays in so many steps, at least: forwards of graphed modules a step.
REPLAYS = {
    "temporal": 1,
    "flow": 1,
    "two_views": 4,
    "translation": 6,
    "diffusion": 1,
    "metric_learning": 1,
    "speedrun": 1,
}


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    with published.alone(), torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


def losses(training: Published, steps: int = STEPS) -> list[float]:
    torch.manual_seed(1)
    return [training.step().item() for _ in range(steps)]


def made(make: Callable[[torch.device], Published]) -> Published:
    torch.manual_seed(0)
    return make(torch.device("cuda"))


@pytest.mark.parametrize("passed_by", [False, True])
@pytest.mark.parametrize("make", published.TRAININGS, ids=lambda make: make.__name__)
def test_it_trains_as_it_did(make: Callable[[torch.device], Published], passed_by: bool) -> None:
    plain, other, graphed = (made(make) for _ in range(3))
    transform, single = CudaGraphs(), SingleDevice()
    assert transform.match(graphed.training, {}).applies
    if passed_by:
        if not single.match(graphed.training, {}).applies:
            pytest.skip("there is no wrapper")
        single.apply(graphed.training, {})
    undo = transform.apply(graphed.training, {})
    expected, again, found = losses(plain), losses(other), losses(graphed)
    noise = max(abs(a - b) for a, b in zip(expected, again, strict=True))
    apart = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    effect = transform.effect(graphed.training, None, None)
    print(
        f"{make.__name__}: {effect.detail}; losses {expected[0]:.4f} to {expected[-1]:.4f}, {apart:.2g} apart, noise {noise:.2g}"
    )
    assert apart <= 10 * noise + 2e-3 * max(map(abs, expected))
    assert effect.passed
    assert effect.numbers["replays"] >= REPLAYS[make.__name__] * (STEPS - 10)
    for key in ("mean", "grad_norm", "sum"):
        if key in plain.state and not isinstance(plain.state[key], torch.Tensor):
            assert graphed.state[key] == pytest.approx(plain.state[key], rel=2e-2)
    undo.run()


@pytest.mark.parametrize("make", published.TRAININGS, ids=lambda make: make.__name__)
def test_with_all_that_spares_the_host(make: Callable[[torch.device], Published]) -> None:
    """Graphs, no wrapper, fused optimizers, deferred reads: together, and each with an effect where it matches."""
    plain, other, fast = (made(make) for _ in range(3))
    training, undo = fast.training, Undo()
    transforms = (SingleDevice(), CudaGraphs(), FusedOptimizer(), DeferSync())
    on: list[Transform] = []

    def switch(*_: object) -> None:  # inside the step, as a search does it
        if not on:
            for transform in transforms:
                if transform.match(training, {}).applies:
                    undo.push(transform.apply(training, {}).run)
                    on.append(transform)

    hook = fast.optimizers[-1].register_step_pre_hook(switch)
    expected, again, found = losses(plain), losses(other), losses(fast)
    hook.remove()
    noise = max(abs(a - b) for a, b in zip(expected, again, strict=True))
    apart = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    for transform in on:
        effect = transform.effect(training, None, None)
        print(f"{make.__name__} {transform.id}: {effect.detail}")
        assert effect.passed, effect.detail
    print(f"{make.__name__}: {apart:.2g} apart, noise {noise:.2g}")
    assert apart <= 10 * noise + 1e-2 * max(map(abs, expected))
    undo.run()


@pytest.mark.parametrize("make", [published.diffusion, published.metric_learning], ids=lambda make: make.__name__)
def test_nhwc_inputs_under_a_wrapper_that_keeps_its_weights_layout(make: Callable[[torch.device], Published]) -> None:
    """Each gradient is brought to its parameter's strides in the graph: done once at the capture, it stayed what it was then."""
    plain, graphed = (made(make) for _ in range(2))
    graphs, layout, undo = CudaGraphs(), ChannelsLast(), Undo()
    for training in (plain.training, graphed.training):
        training.roots[0].args = (torch.randn(4, 3, 32, 32, device="cuda"),)
        undo.push(layout.apply(training, {}).run)
    undo.push(graphs.apply(graphed.training, {}).run)
    expected, found = losses(plain), losses(graphed)
    assert graphs.effect(graphed.training, None, None).passed
    apart = max(abs(a - b) for a, b in zip(expected, found, strict=True))
    print(f"{make.__name__}: {apart:.2g} apart")
    assert apart <= 5e-3 * max(map(abs, expected))
    undo.run()


def test_a_table_of_the_host_in_a_forward_that_dynamo_captures() -> None:
    """Beside kernels: the table stands in the graph, and the forward is captured by Dynamo once."""
    plain, graphed = (made(published.diffusion) for _ in range(2))
    undo, graphs = Undo(), CudaGraphs()
    nets = [next(iter(each.nets.values())).module for each in (plain, graphed)]
    undo.push(capture.set_family(nets, "bias_act").run)
    for each in (plain, graphed):
        losses(each, 1)
    counters.clear()
    undo.push(graphs.apply(graphed.training, {}).run)
    expected, found = losses(plain), losses(graphed)
    effect = graphs.effect(graphed.training, None, None)
    print(f"diffusion with kernels: {effect.detail}")
    assert effect.passed, effect.detail
    assert counters["stats"]["unique_graphs"] == 0
    assert max(abs(a - b) for a, b in zip(expected, found, strict=True)) < 1e-2
    undo.run()
