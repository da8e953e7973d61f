"""The stack of layers around a root module's forward."""

from __future__ import annotations

import copy
import gc
import inspect
import io
import pickle
import pickletools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from advisor.transforms import forward
from advisor.transforms.forward import AUTOCAST, CAPTURE, GRAPH, INPUT_LAYOUT, ForwardStack, KeptLayers


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return x * self.weight * scale


class SelfCopying(Net):
    def __deepcopy__(self, memo):
        new = type(self).__new__(type(self))
        memo[id(self)] = new
        new.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return new


class SelfPickling(Net):
    def __getstate__(self):
        return {"everything": self.__dict__}

    def __setstate__(self, state):
        self.__dict__.update(state["everything"])


def own_forward(x):
    return x + 100


def layer(tag: str, log: list[str]):
    def wrap(inner, module):
        log.append(f"wrap {tag}")

        def forward(*args, **kwargs):
            log.append(tag)
            return inner(*args, **kwargs) + 1

        return forward

    return wrap


def test_ranks_nest_and_the_module_is_as_before_at_the_end() -> None:
    gc.collect()  # models of other tests, left with their layers on
    net, log = Net(), []
    before = dict(net.__dict__)
    stack = ForwardStack.of(net)
    assert ForwardStack.of(net) is stack
    stack.set(GRAPH, layer("graph", log))
    stack.set(INPUT_LAYOUT, layer("layout", log))
    stack.set(CAPTURE, layer("capture", log))
    log.clear()
    assert torch.equal(net(torch.ones(3), scale=2.0), torch.full((3,), 5.0))
    assert log == ["graph", "capture", "layout"]
    stack.clear(CAPTURE)
    log.clear()
    net(torch.ones(3))
    assert log == ["graph", "layout"]
    stack.clear(GRAPH)
    stack.clear(INPUT_LAYOUT)
    stack.clear(INPUT_LAYOUT)
    assert net.__dict__ == before
    assert list(net.__dict__) == list(before)
    assert nn.Module._replicate_for_data_parallel is forward.replicate


@pytest.mark.parametrize("cleared", [False, True])
def test_a_module_that_goes_with_its_layers_leaves_nothing_behind(cleared: bool) -> None:
    net, log = Net(), []
    ForwardStack.of(net).set(GRAPH, layer("graph", log))
    net(torch.ones(3))
    gone = weakref.ref(net)
    if cleared:
        ForwardStack.of(net).clear(GRAPH)
        ForwardStack.let_go([net])
    del net
    gc.collect()
    assert gone() is None
    assert nn.Module._replicate_for_data_parallel is forward.replicate


def test_switching_off_and_on_composes_nothing_again() -> None:
    net, log = Net(), []
    stack = ForwardStack.of(net)
    capture, cast = layer("capture", log), layer("cast", log)
    stack.set(CAPTURE, capture)
    first = stack.composed_below(GRAPH)
    stack.set(AUTOCAST, cast)
    assert stack.composed_below(GRAPH) is not first
    both = stack.composed_below(GRAPH)
    stack.clear(AUTOCAST)
    assert stack.composed_below(GRAPH) is first
    stack.clear(CAPTURE)
    stack.set(CAPTURE, capture)
    assert stack.composed_below(GRAPH) is first
    stack.set(AUTOCAST, cast)
    assert stack.composed_below(GRAPH) is both
    assert log.count("wrap capture") == 2
    assert log.count("wrap cast") == 1
    assert stack.get(AUTOCAST) is cast
    assert stack.composed_below(INPUT_LAYOUT) == net.__class__.forward.__get__(net)


def test_calls_can_pass_by_the_outer_layers_for_a_while() -> None:
    net, log, other = Net(), [], Net()
    stack = ForwardStack.of(net)
    stack.set(CAPTURE, layer("capture", log))
    stack.set(INPUT_LAYOUT, layer("layout", log))
    log.clear()

    def fails_inside() -> None:
        with ForwardStack.without([net, other], CAPTURE):
            net(torch.ones(3))
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fails_inside()
    assert log == ["layout"]
    net(torch.ones(3))
    assert log == ["layout", "capture", "layout"]
    stack.clear(CAPTURE)
    stack.clear(INPUT_LAYOUT)


def test_forget_frees_what_a_layer_made() -> None:
    net = Net()
    stack = ForwardStack.of(net)
    made: list[weakref.ref] = []

    def wrap(inner, module):
        def forward(*args):
            return inner(*args)

        made.append(weakref.ref(forward))
        return forward

    stack.set(GRAPH, wrap)
    stack.clear(GRAPH)
    gc.collect()
    assert made[0]() is not None
    stack.forget(wrap)
    gc.collect()
    assert made[0]() is None


def test_a_layer_that_raises_changes_nothing() -> None:
    net = Net()
    before = dict(net.__dict__)

    def broken(inner, module):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError):
        ForwardStack.of(net).set(CAPTURE, broken)
    assert net.__dict__ == before
    assert ForwardStack.of(net).get(CAPTURE) is None


@pytest.mark.parametrize("cls", [Net, SelfCopying])
def test_a_copy_has_a_plain_forward_on_its_own_parameters(cls) -> None:
    net, log = cls(), []
    ForwardStack.of(net).set(CAPTURE, layer("capture", log))
    for _ in range(2):
        twin = copy.deepcopy(net)
        with torch.no_grad():
            twin.weight.fill_(7.0)
        log.clear()
        assert torch.equal(twin(torch.ones(3)), torch.full((3,), 7.0))
        assert log == []
        assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))
        if cls is Net:
            assert "forward" not in twin.__dict__
            assert not {"__reduce_ex__", "__prepare_scriptable__"} & set(twin.__dict__)
        assert torch.equal(copy.deepcopy(twin)(torch.ones(3)), torch.full((3,), 7.0))
    shallow = copy.copy(net)
    assert torch.equal(shallow(torch.ones(3)), torch.ones(3))


@pytest.mark.parametrize("cls", [Net, SelfCopying])
def test_pickles_are_those_of_the_plain_module(cls) -> None:
    net = cls()
    plain = pickle.dumps(net)
    ForwardStack.of(net).set(CAPTURE, layer("capture", []))
    layered = pickle.dumps(net)
    assert layered == plain
    buffer = io.BytesIO()
    torch.save(net, buffer)
    assert b"advisor" not in buffer.getvalue()
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert "forward" not in loaded.__dict__
    assert torch.equal(loaded(torch.ones(3)), torch.ones(3))
    outer = nn.Sequential(net)
    assert b"advisor" not in pickle.dumps(outer)
    assert "advisor" not in {arg for op, arg, _ in pickletools.genops(pickle.dumps(outer)) if isinstance(arg, str)}


def test_a_module_with_its_own_state_format_still_pickles() -> None:
    net = SelfPickling()
    ForwardStack.of(net).set(CAPTURE, layer("capture", []))
    data = pickle.dumps(net)
    assert b"advisor" not in data
    assert torch.equal(pickle.loads(data)(torch.ones(3)), torch.ones(3))


def test_a_users_own_instance_forward_is_innermost_and_put_back() -> None:
    net = Net()
    net.forward = own_forward
    before = dict(net.__dict__)
    stack = ForwardStack.of(net)
    stack.set(CAPTURE, layer("capture", []))
    assert torch.equal(net(torch.zeros(1)), torch.full((1,), 101.0))
    assert copy.deepcopy(net).__dict__["forward"] is own_forward
    assert pickle.loads(pickle.dumps(net)).__dict__["forward"] is own_forward
    stack.clear(CAPTURE)
    assert net.__dict__ == before
    assert net.forward is own_forward


def test_a_forward_set_by_the_script_meanwhile_is_left_alone() -> None:
    net = Net()
    stack = ForwardStack.of(net)
    stack.set(CAPTURE, layer("capture", []))
    ours = net.forward
    net.forward = lambda x: ours(x) * 10
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 20.0))
    stack.clear(CAPTURE)
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 10.0))


def test_hooks_state_dict_and_signature_stay() -> None:
    net, seen = Net(), []
    net.register_forward_pre_hook(lambda m, a: seen.append("pre"))
    net.register_forward_hook(lambda m, a, out: seen.append("post"))
    keys, parameters = list(net.state_dict()), list(net.parameters())
    ForwardStack.of(net).set(CAPTURE, layer("capture", []))
    net(torch.ones(3)).sum().backward()
    assert seen == ["pre", "post"]
    assert list(net.state_dict()) == keys
    assert next(iter(net.parameters())) is parameters[0]
    assert net.weight.grad is not None
    assert list(inspect.signature(net.forward).parameters) == ["x", "scale"]


def test_data_parallel_on_one_device_and_replicas() -> None:
    net, log = Net(), []
    ForwardStack.of(net).set(CAPTURE, layer("capture", log))
    assert torch.equal(nn.DataParallel(net)(torch.ones(3)), torch.full((3,), 2.0))
    replica = net._replicate_for_data_parallel()
    replica.weight = torch.full((3,), 9.0)
    log.clear()
    assert torch.equal(replica(torch.ones(3)), torch.full((3,), 9.0))
    assert log == []
    assert torch.equal(net(torch.ones(3)), torch.full((3,), 2.0))


class Convolution(nn.Module):
    """What a user might script: the source of its forward is in a file."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return torch.relu(self.conv(x)) * scale


def captured(inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """As a kernel family's capture: no tracer may see it."""
    return torch.compile(inner, backend="eager")


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize(
    "made_of",
    [
        lambda net, x: torch.jit.script(net),
        lambda net, x: torch.jit.script(nn.Sequential(net)),
        lambda net, x: torch.jit.trace(net, x),
        lambda net, x: torch.export.export(net, (x,)).module(),
        lambda net, x: torch.export.export(net, (x,), strict=True).module(),
        lambda net, x: torch.fx.symbolic_trace(net),
        lambda net, x: torch.compile(net, backend="eager", fullgraph=True),
    ],
    ids=["script", "script a parent", "trace", "export", "strict export", "fx", "compile"],
)
def test_what_the_user_makes_of_the_module_is_what_the_plain_module_gives(made_of: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    net, x = Convolution(), torch.randn(1, 1, 3, 3)
    want = net(x)
    stack = ForwardStack.of(net)
    stack.set(CAPTURE, captured)
    assert torch.equal(made_of(net, x)(x), want)
    assert torch.equal(net(x), want)
    stack.clear(CAPTURE)
    assert not {"forward", "__reduce_ex__", "__prepare_scriptable__"} & set(net.__dict__)


def test_what_is_exported_has_no_layer_in_it() -> None:
    net, x = Convolution(), torch.randn(1, 1, 3, 3)
    ForwardStack.of(net).set(CAPTURE, layer("capture", []))
    assert not torch.equal(net(x), Convolution.forward(net, x))
    assert torch.equal(torch.export.export(net, (x,)).module()(x), Convolution.forward(net, x))
    assert torch.equal(torch.jit.trace(net, x, check_trace=False)(x), Convolution.forward(net, x))


class Scaled:
    def __init__(self, factor: float) -> None:
        self.factor, self.wrapped = factor, 0

    def __call__(self, inner: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
        self.wrapped += 1
        return lambda *args: inner(*args) * self.factor


def test_layers_are_kept_by_module_and_settings_until_they_are_released() -> None:
    freed: list[float] = []
    layers = KeptLayers(GRAPH, Scaled, lambda layer: freed.append(layer.factor))
    net, other = Net(), Net()
    stack, x = ForwardStack.of(net), torch.ones(3)
    assert layers.current(net) is None
    for factor in (2.0, 3.0, 2.0):
        stack.set(GRAPH, layers.of(net, factor))
        assert layers.current(net) is layers.of(net, factor)
        assert torch.equal(net(x), x * factor)
    assert layers.of(net, 2.0).wrapped == 1  # found again
    assert layers.of(other, 2.0) is not layers.of(net, 2.0)
    dropped = layers.of(net, 3.0)
    layers.release([net])
    assert freed == [3.0]
    assert layers.of(net, 3.0) is not dropped
    stack.set(GRAPH, layers.of(net, 3.0))
    assert layers.of(net, 3.0).wrapped == 1  # composed anew
    stack.clear(GRAPH)
    assert layers.current(net) is None
    layers.release([net])
    assert sorted(freed) == [2.0, 3.0, 3.0]
