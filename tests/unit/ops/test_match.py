"""The Dynamo backend and what rewrites share to read a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F

from advisor.ops import dispatch, dynamo, match
from advisor.ops.family import Family


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def rewritten(monkeypatch: pytest.MonkeyPatch, rewrite: Callable[..., None]) -> tuple[match.MatchReport, Any]:
    monkeypatch.setattr(Family, "rewrite", property(lambda self: rewrite))
    report = match.MatchReport()
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU()).train()
    return report, torch.compile(model, backend=dynamo.backend({"batchnorm_act": report}, mode=None))


def raises(graph_module: fx.GraphModule, report: match.MatchReport, **_: Any) -> None:
    relu = next(node for node in graph_module.graph.nodes if node.target in (F.relu, torch.relu))
    relu.replace_all_uses_with(relu.args[0])
    graph_module.graph.erase_node(relu)
    report.matched["2"] = "relu"
    raise KeyError("planted")


def dangles(graph_module: fx.GraphModule, report: match.MatchReport, **_: Any) -> None:
    nodes = list(graph_module.graph.nodes)
    nodes[-1].append(nodes[-2])  # used before it is made
    report.matched["2"] = "relu"


@pytest.mark.parametrize(
    ("fault", "said"), [(raises, "KeyError: 'planted'"), (dangles, "used before it has been defined")]
)
def test_a_rewrite_that_fails_leaves_the_graph_as_it_was(monkeypatch, fault, said) -> None:
    torch.manual_seed(0)
    report, run = rewritten(monkeypatch, fault)
    y = run(torch.randn(2, 3, 4, 4))
    assert (y >= 0).all()  # the activation is still there
    y.sum().backward()
    assert report.matched == {}
    assert said in report.unmatched["graph 1"]


def graph_of(function: Callable[..., Any], *inputs: torch.Tensor) -> list[fx.Node]:
    seen: list[fx.Node] = []

    def backend(graph_module: fx.GraphModule, _: Any) -> Callable[..., Any]:
        seen.extend(graph_module.graph.nodes)
        return graph_module.forward

    torch.compile(function, backend=backend, dynamic=False)(*inputs)
    return [node for node in seen if node.op.startswith("call")]


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (F.relu, ("relu", 0.0)),
        (torch.relu, ("relu", 0.0)),
        (lambda x: x.relu(), ("relu", 0.0)),
        (F.silu, ("silu", 0.0)),
        (lambda x: F.hardtanh(x, 0.0, 6.0), ("relu6", 0.0)),
        (lambda x: F.hardtanh(x), None),
        (lambda x: F.leaky_relu(x, 0.2), ("leaky_relu", 0.2)),
        (F.gelu, ("gelu", 0.0)),
        (lambda x: F.gelu(x, approximate="tanh"), ("gelu_tanh", 0.0)),
        (torch.sigmoid, None),
    ],
)
def test_activations_are_told(function: Callable[..., Any], expected: tuple[str, float] | None) -> None:
    (node,) = graph_of(lambda x: function(x), torch.randn(2, 3))
    assert match.activation(node) == expected


def test_an_addend_is_a_tensor_of_the_same_shape() -> None:
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    relu, add = graph_of(lambda x, y: F.relu(x) + y, x, y)
    assert match.addend(add, relu) is add.args[1]
    relu, add = graph_of(lambda x, y: y + F.relu(x), x, y)
    assert match.addend(add, relu) is add.args[0]
    relu, add = graph_of(lambda x, y: F.relu(x) + y, x, y[:1])
    assert match.addend(add, relu) is None
    for function in (lambda x, y: F.relu(x) + 1.0, lambda x, y: torch.add(F.relu(x), y, alpha=2)):
        relu, add = graph_of(function, x, y)
        assert match.addend(add, relu) is None


def test_shape_dtype_and_only_user_are_read_off_the_graph() -> None:
    nodes = graph_of(lambda x: (F.relu(x) * 2, torch.sigmoid(x)), torch.randn(2, 3).bfloat16())
    relu = next(node for node in nodes if match.activation(node))
    fake = match.value(relu)
    assert match.static_shape(fake) == (2, 3)
    assert match.dtype_name(fake) == "bfloat16"
    assert match.only_user(relu) in nodes
    assert match.only_user(relu.args[0]) is None  # two read x


def test_bound_gives_arguments_by_name() -> None:
    (node,) = graph_of(lambda x: F.max_pool2d(x, 3, stride=2), torch.randn(1, 2, 8, 8))
    found = match.bound(node, ("input", "kernel_size", "stride", "padding"), {"stride": None, "padding": 0})
    assert (found["kernel_size"], found["stride"], found["padding"]) == (3, 2, 0)


def test_replace_takes_dead_nodes_away_and_keeps_used_ones() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.relu, (x,))
    kept = graph.call_function(torch.sigmoid, (x,))
    last = graph.call_function(torch.add, (first, kept))
    last.meta["nn_module_stack"] = "here"
    graph.output((last, kept))
    with graph.inserting_before(last):
        new = graph.call_function(torch.mul, (x, x))
    match.replace(last, new, (first, kept))
    graph.lint()
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [torch.sigmoid, torch.mul]
    assert new.meta["nn_module_stack"] == "here"


def test_calls_are_told_apart_by_path() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(F.max_pool2d(x, 2), 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Sequential(nn.MaxPool2d(2), Twice())
            self.shared = nn.MaxPool2d(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.max_pool2d(self.shared(self.shared(self.stem(x))), 1)

    pools = graph_of(Net(), torch.randn(1, 2, 16, 16))
    names = [match.path(node) for node in pools]
    assert names[0] == "stem.0"
    assert [name.rpartition(".")[0] for name in names[1:-1]] == ["stem.1", "stem.1", "shared", "shared"]
    assert names[-1].endswith(
        f"(test_match.py:{Net.forward.__code__.co_firstlineno + 1})"
    )  # in no module below the captured one
    assert len(set(names)) == len(names) == 6


class Dropping(nn.Module):
    """Dropouts that drop nothing between a norm and its activation, and one that drops something behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.idle, self.never, self.some = (
            nn.BatchNorm2d(8),
            nn.Dropout(0.0),
            nn.Dropout2d(0.5),
            nn.Dropout(0.5),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.some(F.relu(self.never(self.idle(self.norm(x)))))


def test_dropouts_that_drop_nothing_do_not_stand_between() -> None:
    model, report = Dropping().train(), match.MatchReport()
    model.never.eval()
    x = torch.randn(2, 8, 4, 4)
    with dispatch.everything():
        run = torch.compile(model.forward, backend=dynamo.backend({"batchnorm_act": report}, mode=None), dynamic=False)
        torch.manual_seed(1)
        mine = run(x)
    torch.manual_seed(1)
    torch.testing.assert_close(mine, model(x))
    assert 0 < (mine == 0).sum() < mine.numel()
    assert report.matched == {"norm": "bn+relu"}
