"""torch.compile's graphs, recorded in a training and compiled elsewhere: the same graphs, inputs and settings, so that caches know them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.transforms import capture
from advisor.transforms.ahead import graph_text, process
from advisor.transforms.ahead.recording import GRAPH, WHY_NOT, Recording


class Net(nn.Module):
    """Uses a weight before its input, as Dynamo meets them in another order when it traces a graph anew."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 8, 3, bias=True), nn.BatchNorm2d(8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.ones(3, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scaled = self.scale * x
        return self.head(F.gelu(self.norm(self.conv(scaled))).mean((2, 3)))


def recorded(tmp_path: Path, net: nn.Module, *, autocast: bool = True) -> list[tuple[Any, list[Any]]]:
    """What Inductor would have been given in one step of `net`; the graphs' files are in `tmp_path`."""
    seen: list[tuple[Any, list[Any]]] = []
    x = torch.randn(4, 3, 8, 8)
    undo = capture.set_mode([net], Recording("default", str(tmp_path)))
    keep = Recording.keep

    def also_here(self: Recording, graph: Any, inputs: Any) -> Any:
        seen.append((graph, list(inputs)))
        return keep(self, graph, inputs)

    Recording.keep = also_here
    try:
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = net(x).float().sum()
        loss.backward()
    finally:
        Recording.keep = keep
        undo.run()
        capture.release([net])
    return seen


def operations(graph: Any) -> list[str]:
    return [f"{node.op} {node.name} {node.target} {node.args}" for node in graph.graph.nodes if node.op != "output"]


def placeholders(graph: Any) -> list[str]:
    return [node.name for node in graph.graph.nodes if node.op == "placeholder"]


def test_what_is_compiled_elsewhere_is_what_was_recorded(tmp_path: Path) -> None:
    net = Net()
    plain = net(torch.ones(4, 3, 8, 8)).detach()
    net.norm.reset_running_stats()
    ((graph, inputs),) = recorded(tmp_path, net)
    assert not list(tmp_path.glob(WHY_NOT.format("*")))
    assert all(parameter.grad is not None for parameter in net.parameters())  # the step was made, in its usual way
    net.norm.reset_running_stats()
    assert torch.equal(net(torch.ones(4, 3, 8, 8)), plain)
    found: list[Any] = []

    def compiler(traced: Any, given: list[Any], config_patches: Any) -> None:
        found.append((traced, given, config_patches, torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))

    process.compile_recorded(tmp_path / GRAPH.format(0), compiler)
    ((traced, given, patches, autocast, dtype),) = found
    assert (patches, autocast, dtype) == (None, True, torch.bfloat16)
    assert placeholders(traced) == placeholders(graph)
    assert len(traced.graph.nodes) == len(graph.graph.nodes)
    for ours, theirs in zip(given, inputs, strict=True):
        assert (ours.shape, ours.stride(), ours.dtype, ours.requires_grad) == (
            theirs.shape,
            theirs.stride(),
            theirs.dtype,
            theirs.requires_grad,
        )
        assert isinstance(ours, nn.Parameter) == isinstance(theirs, nn.Parameter)
        assert getattr(ours, "_dynamo_static_input_type", None) == getattr(theirs, "_dynamo_static_input_type", None)


def test_inputs_in_another_order_are_put_back() -> None:
    def wanted(a: Any, b: Any) -> Any:
        return b * 2 + a

    def traced_anew(b: Any, a: Any) -> Any:
        return b * 2 + a

    graph, traced = torch.fx.symbolic_trace(wanted), torch.fx.symbolic_trace(traced_anew)
    a, b = torch.ones(1), torch.full((1,), 5.0)
    assert process.in_order_of(traced, [b, a], graph, [a, b]) == [a, b]
    assert placeholders(traced) == ["a", "b"]
    assert traced(a, b) == graph(a, b) == 11.0
    with pytest.raises(ValueError, match="takes 1 inputs"):
        process.in_order_of(torch.fx.symbolic_trace(lambda a: a + 1), [a], graph, [a, b])


def test_a_graph_that_cannot_be_written_is_told_and_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Recording, graph: Any, inputs: Any) -> None:
        raise TypeError("planted")

    monkeypatch.setattr(Recording, "recorded", broken)
    net = Net()
    recorded(tmp_path, net)
    assert not list(tmp_path.glob(GRAPH.format("*")))
    assert "planted" in (tmp_path / WHY_NOT.format(0)).read_text()
    assert net.conv.weight.grad is not None


SECOND = """
import sys, torch
sys.path[:0] = {paths!r}
from test_compiled_ahead import Net
from torch._dynamo.utils import counters
from advisor.transforms import capture
torch.set_num_threads(1)
net = Net()
capture.set_mode([net], "default")
with torch.autocast("cpu", torch.bfloat16):
    loss = net(torch.randn(4, 3, 8, 8)).float().sum()
loss.backward()
found = counters["inductor"]
print("hits", found["fxgraph_cache_hit"], "misses", found["fxgraph_cache_miss"])
"""


@pytest.mark.long
def test_the_trial_finds_forward_and_backward_in_inductors_cache(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        recorded(tmp_path, Net())
    finally:
        torch.set_num_threads(threads)
    here = Path(__file__).resolve()
    paths = [str(here.parents[3]), str(here.parent)]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")}
    beside = f"import sys; sys.path[:0] = {paths!r}; from advisor.transforms.ahead.process import main; sys.exit(main(sys.argv[1:]))"
    subprocess.run([sys.executable, "-c", beside, str(tmp_path / GRAPH.format(0))], env=environment, check=True)
    told = subprocess.run(
        [sys.executable, "-c", SECOND.format(paths=paths)],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
    )
    assert told.stdout.split() == ["hits", "2", "misses", "0"], told.stdout + told.stderr


def test_a_graph_is_written_and_read_as_it_is() -> None:
    def every_kind(x, y):
        wide = torch.cat([x, y], dim=1)[..., 1:3].to(torch.float16, memory_format=torch.contiguous_format)
        return torch.clamp(F.gelu(wide.float()), max=float("inf")) * 2.5 + torch.ops.aten.relu.default(x.sum())

    graph = torch.fx.symbolic_trace(every_kind)
    told = json.loads(json.dumps(graph_text.written(graph.graph)))
    again = graph_text.read(told)
    assert again.code == graph.code
    x, y = torch.randn(2, 2, 4), torch.randn(2, 2, 4)
    assert torch.equal(again(x, y), every_kind(x, y))


def own_operation(x: Any) -> Any:
    return x


@pytest.mark.parametrize("step", [own_operation, print, os.getenv, torch.nn.ReLU()])
def test_what_is_not_torchs_is_not_written(step: Any) -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    if isinstance(step, nn.Module):
        graph.call_module("step", (x,))
    else:
        graph.call_function(step, (x,))
    graph.output(x)
    with pytest.raises(TypeError):
        graph_text.written(graph)


@pytest.mark.parametrize(
    "path", ["os.system", "torch.os.system", "torch.os.__class__", "eval", "builtins.eval", "operator"]
)
def test_a_path_that_leads_elsewhere_is_not_followed(path: str) -> None:
    node = {"op": "call_function", "name": "a", "target": path, "args": {"tuple": []}, "kwargs": {"dict": {}}}
    with pytest.raises(TypeError):
        graph_text.read([node])
