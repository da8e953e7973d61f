"""What is captured is traced once, whatever observes the script's first steps."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.utils import counters
from torch.nn.modules.module import register_module_forward_hook
from torch.utils.hooks import RemovableHandle

from advisor.loop import attach
from advisor.loop.session import Session
from advisor.loop.training import RootModule, StepEvent, Training
from advisor.ops import dynamo
from advisor.transforms import capture
from advisor.transforms.forward import AUTOCAST, INPUT_LAYOUT, ForwardStack
from advisor.transforms.targets import targets


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.bn(self.conv(x))).mean((2, 3)))


@pytest.fixture
def attached(tmp_path: Path) -> Iterator[Training]:
    gc.collect()
    torch._dynamo.reset()
    counters.clear()
    training, watcher = attach.attach_training(Session(mode="search", run_dir=str(tmp_path), script="train.py"))
    yield training
    watcher.detach()
    training.optimizers.clear()
    training.roots.clear()
    attach.Attached.training = attach.Attached.watcher = attach.Attached.discovery = None


def train(steps: int) -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(net(torch.randn(4, 3, 8, 8)), torch.randint(4, (4,))).backward()
        optimizer.step()


def captured_from(training: Training, step: int) -> list[bool]:
    """Captures are on from this boundary; whether a close look was under way at each."""
    looking: list[bool] = []

    def on_step(event: StepEvent) -> None:
        assert attach.Attached.discovery is not None
        looking.append(attach.Attached.discovery.looking)
        if len(looking) == step:
            capture.set_family(targets(training), "batchnorm_act")

    training.on_step.append(on_step)
    return looking


@pytest.mark.parametrize("step", [1, 5])
def test_a_forward_is_traced_once(attached: Training, step: int) -> None:
    looking = captured_from(attached, step)
    train(8)
    assert looking[:2] == [True, True]
    assert looking[-1] is False
    assert counters["stats"]["unique_graphs"] == 1


def test_a_close_look_goes_on_behind_a_captured_call(attached: Training) -> None:
    captured_from(attached, 1)
    plain = torch.nn.Module._wrapped_call_impl
    calls: list[bool] = []
    attached.on_step.insert(0, lambda event: calls.append(torch.nn.Module.__call__ is not plain))
    train(4)
    assert calls == [True, True, True, False]  # at each boundary of the look its hook is there again
    assert torch.nn.Module.__call__ is plain


def test_looks_hidden_twice_come_back_when_the_outer_call_ends(attached: Training) -> None:
    discovery = attach.Attached.discovery
    assert discovery is not None
    discovery.look()
    ours, plain = torch.nn.Module.__call__, torch.nn.Module._wrapped_call_impl
    with discovery.out_of_sight():
        with discovery.out_of_sight():
            assert torch.nn.Module.__call__ is plain
        assert torch.nn.Module.__call__ is plain
    assert torch.nn.Module.__call__ is ours
    with discovery.out_of_sight():
        discovery.stop_looking()
    assert torch.nn.Module.__call__ is plain


def stepped(net: nn.Module, n: int = 4) -> None:
    net(torch.randn(n, 3, 8, 8)).sum().backward()


def test_a_graph_is_captured_once_for_all_sets_and_rewritten_once_for_each() -> None:
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    undos = [capture.set_family([net], family) for family in ("pooling", "bias_act")]
    stepped(net)
    both = capture.current(net)
    undos.pop().run()
    stepped(net)
    undos.append(capture.set_family([net], "bias_act"))
    stepped(net)
    stepped(net)
    assert capture.current(net) is both
    assert both is not None
    assert both.graphs == 1
    assert counters["stats"]["unique_graphs"] == 1
    stepped(net, 6)  # another size is another graph, for each set when it comes to it
    assert both.graphs == 2
    undos.pop().run()
    stepped(net, 6)
    assert counters["stats"]["unique_graphs"] == 2
    undos.pop().run()


def test_places_of_several_roots_are_told_apart() -> None:
    torch._dynamo.reset()
    nets = Net(), Net()
    training = Training(device=torch.device("cpu"))
    training.roots.extend(RootModule(module=net, name=name) for net, name in zip(nets, ("Net", "Net#2"), strict=True))
    undo = capture.set_family(nets, "batchnorm_act")
    for net in nets:
        stepped(net)
    assert capture.report(training, "batchnorm_act").matched == {"Net.bn": "bn+relu", "Net#2.bn": "bn+relu"}
    del training.roots[1]
    assert capture.report(training, "batchnorm_act").matched == {"bn": "bn+relu"}
    assert not capture.report(training, "pooling").matched  # not in force
    undo.run()


def test_places_are_called_the_same_inside_a_closure() -> None:
    """As under channels_last and autocast, whose layers lie below the capture."""
    torch._dynamo.reset()
    net = Net()

    def nested(inner: Callable[..., torch.Tensor], module: nn.Module) -> Callable[..., torch.Tensor]:
        def forward(*args: torch.Tensor) -> torch.Tensor:
            return inner(*args)

        return forward

    stack = ForwardStack.of(net)
    for layer in (INPUT_LAYOUT, AUTOCAST):
        stack.set(layer, nested)
    undo = capture.set_family([net], "batchnorm_act")
    stepped(net)
    found = capture.current(net)
    assert found is not None
    assert found.reports["batchnorm_act"].matched == {"bn": "bn+relu"}
    undo.run()
    for layer in (AUTOCAST, INPUT_LAYOUT):
        stack.clear(layer)


def test_in_evaluation_and_without_gradients_nothing_is_captured() -> None:
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    undo = capture.set_family([net], "pooling")
    with torch.no_grad():
        net(torch.randn(2, 3, 8, 8))
    net.eval()(torch.randn(2, 3, 8, 8))
    assert counters["stats"]["unique_graphs"] == 0
    undo.run()


def test_a_forward_that_fails_fails_as_it_was_and_is_captured_the_next_time() -> None:
    torch._dynamo.reset()
    net = Net()
    undo = capture.set_family([net], "pooling")
    with pytest.raises(RuntimeError, match="channels"):
        net(torch.randn(2, 5, 8, 8))
    stepped(net)
    undo.run()


def test_what_is_released_goes_and_what_is_in_force_stays() -> None:
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    undos, layers = [], []
    for family in ("pooling", "bias_act"):
        undos.append(capture.set_family([net], family))
        stepped(net)
        layers.append(weakref.ref(capture.current(net)))
    capture.release([net])
    gc.collect()
    assert [layer() for layer in layers] == [None, capture.current(net)]
    undos.pop().run()
    capture.release([net])
    gc.collect()
    assert layers[1]() is None
    stepped(net)
    assert counters["stats"]["unique_graphs"] == 1  # the capture was in force all the while
    undos.pop().run()
    capture.release([net])
    undos.append(capture.set_family([net], "pooling"))
    stepped(net)
    assert counters["stats"]["unique_graphs"] == 2
    undos.pop().run()


def test_a_module_goes_with_all_that_was_captured_of_it() -> None:
    torch._dynamo.reset()
    net = Net()
    for families in ({"pooling"}, {"pooling", "bias_act"}):
        capture.install(net, frozenset(families), None)  # an undo would hold it
        stepped(net)
    gone = weakref.ref(net)
    del net
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("first", [0, 1])
def test_the_recompile_limit_is_raised_while_anything_is_captured(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture, "limits", [])  # other tests leave captured models to the garbage collector
    with torch._dynamo.config.patch(recompile_limit=8):
        undos = [capture.set_mode([nn.Linear(2, 2)], "default"), capture.set_family([nn.Linear(2, 2)], "pooling")]
        raised = torch._dynamo.config.recompile_limit
        assert raised > 8
        undos[first].run()
        assert torch._dynamo.config.recompile_limit == raised
        undos[1 - first].run()
        assert torch._dynamo.config.recompile_limit == 8


def hooked(layer: nn.Module, kind: str) -> tuple[list[str], RemovableHandle]:
    """What a hook of this kind has seen, which doubles what it can."""
    seen: list[str] = []

    def double(value: Any) -> Any:
        seen.append(kind)
        return tuple(t * 2 for t in value) if isinstance(value, tuple) else value * 2

    registered: dict[str, Callable[[], RemovableHandle]] = {
        "forward": lambda: layer.register_forward_hook(lambda module, x, y: double(y)),
        "forward, with keywords": lambda: layer.register_forward_hook(
            lambda module, x, keywords, y: double(y), with_kwargs=True, always_call=True
        ),
        "before": lambda: layer.register_forward_pre_hook(lambda module, x: double(x)),
        "backward": lambda: layer.register_full_backward_hook(lambda module, dx, dy: double(dx)),
        "before backward": lambda: layer.register_full_backward_pre_hook(lambda module, dy: double(dy)),
        "everywhere": lambda: register_module_forward_hook(lambda module, x, y: double(y) if module is layer else None),
    }
    return seen, registered[kind]()


def gradients(net: nn.Module) -> list[torch.Tensor]:
    net.zero_grad()
    net(torch.linspace(-1.0, 1.0, 4 * 3 * 8 * 8).view(4, 3, 8, 8)).square().sum().backward()
    return [p.grad for p in net.parameters()]


def as_plain(net: nn.Module, plain: nn.Module) -> None:
    for ours, theirs in zip(gradients(net), gradients(plain), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


KINDS = ["forward", "forward, with keywords", "before", "backward", "before backward", "everywhere"]


@pytest.mark.parametrize("kind", KINDS)
def test_hooks_that_come_after_the_capture_run_and_go_again(kind: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    plain = copy.deepcopy(net)
    undo = capture.set_family([net], "batchnorm_act")
    as_plain(net, plain)
    hooks = [hooked(n.bn, kind) for n in (net, plain)]
    as_plain(net, plain)
    as_plain(net, plain)
    assert [len(seen) for seen, _ in hooks] == [2, 2]
    for _, hook in hooks:
        hook.remove()
    as_plain(net, plain)
    assert [len(seen) for seen, _ in hooks] == [2, 2]
    assert counters["stats"]["unique_graphs"] == 1  # the first serves again
    undo.run()


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_hook_that_removes_itself_the_forward_is_captured_anew(kind: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    plain = copy.deepcopy(net)
    undo = capture.set_family([net], "pooling")
    hooks = [hooked(n.bn, kind) for n in (net, plain)]
    as_plain(net, plain)
    graphs = counters["stats"]["unique_graphs"]
    for _, hook in hooks:
        hook.remove()
    for _ in range(3):
        as_plain(net, plain)
    assert [len(seen) for seen, _ in hooks] == [1, 1]
    assert counters["stats"]["unique_graphs"] == graphs + 1
    undo.run()


@pytest.mark.parametrize("first", [False, True])
def test_hooks_of_a_layer_that_came_later_run(first: bool) -> None:
    """`first`: it has one when it is captured."""
    torch._dynamo.reset()
    counters.clear()
    net = Net()
    undo = capture.set_family([net], "pooling")
    stepped(net)
    net.fc = nn.Linear(8, 5)
    seen = [hooked(net.fc, "forward")[0]] if first else []
    stepped(net)
    assert counters["stats"]["unique_graphs"] == 2
    seen.append(hooked(net.fc, "forward")[0])
    stepped(net)
    assert [len(calls) for calls in seen] == ([2, 1] if first else [1])
    undo.run()


def test_hooks_run_where_inductor_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dynamo, "backend", lambda reports, *, mode: lambda graph, inputs: graph.forward)
    torch._dynamo.reset()
    net = Net()
    undo = capture.set_mode([net], "default")
    stepped(net)
    seen, _ = hooked(net.bn, "forward")
    stepped(net)
    assert seen
    undo.run()


def test_a_flag_of_numpys_does_not_end_the_graph() -> None:
    """Nor is it lost when captures go, in whatever order."""

    class Flagged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.odd = nn.Conv2d(3, 8, 3), np.mod(3, 2) == 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.conv(x)
            return y[:, :, 1:] if self.odd else y

    torch._dynamo.reset()
    model, x = Flagged().train(), torch.randn(2, 3, 5, 5)
    first, second = capture.set_family([model], "bias_act"), capture.set_family([model], "pooling")
    counters.clear()
    assert model(x).shape == (2, 8, 2, 3)
    assert counters["stats"]["unique_graphs"] == 1
    first.run()
    assert model.odd is True  # the other capture is on
    second.run()
    assert type(model.odd) is np.bool_
