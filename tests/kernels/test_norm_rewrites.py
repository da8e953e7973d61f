"""LayerNorm, GroupNorm and squeeze-and-excite in captured graphs: what is found, what is left alone, and that values stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.ops import catalog, dispatch, dynamo, match

pytestmark = pytest.mark.usefixtures("readable_graphs")


class LayerNorm2d(nn.LayerNorm):
    """torchvision's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.permute(0, 2, 3, 1)
        x = F.layer_norm(x, self.normalized_shape, self.weight, self.bias, self.eps)
        return x.permute(0, 3, 1, 2)


class ChannelsFirst(nn.Module):
    """ConvNeXt's own."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.weight, self.bias, self.eps = nn.Parameter(torch.rand(c)), nn.Parameter(torch.rand(c)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + self.eps)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


class Block(nn.Module):
    """ConvNeXt's: depthwise convolution, permute, LayerNorm, two linear layers, permute, layer scale, sum."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.dw, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.up, self.down, self.scale = nn.Linear(c, 4 * c), nn.Linear(4 * c, c), nn.Parameter(torch.ones(c, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.dw(x).permute(0, 2, 3, 1))
        return x + self.scale * self.down(F.gelu(self.up(y))).permute(0, 3, 1, 2)


class ConvNeXt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm, self.block = nn.Conv2d(3, 16, 4, 4), LayerNorm2d(16, eps=1e-6), Block(16)
        self.reduce_norm, self.reduce, self.by_hand = LayerNorm2d(16), nn.Conv2d(16, 24, 2, 2), ChannelsFirst(24)
        self.whole, self.odd = nn.LayerNorm((2, 24)), nn.LayerNorm(5)
        self.head = nn.Conv2d(24, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.reduce(self.reduce_norm(self.block(self.norm(self.stem(x)))))
        x = self.whole(self.by_hand(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        return self.odd(self.head(x).permute(0, 2, 3, 1))


class GroupNorms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.plain, self.silu = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.GroupNorm(2, 16)
        self.two, self.relu = nn.Conv2d(16, 16, 1), nn.GroupNorm(1, 16)
        self.instance, self.tracking = nn.InstanceNorm2d(16), nn.InstanceNorm2d(16, track_running_stats=True)
        self.gelu, self.narrow, self.last = nn.GroupNorm(8, 16), nn.Conv2d(16, 6, 1), nn.GroupNorm(3, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.conv(x)) * 2
        x = F.relu(self.relu(self.two(F.silu(self.silu(x)))), inplace=True)
        x = F.leaky_relu(self.instance(x)) + self.tracking(x)
        return self.last(self.narrow(F.gelu(self.gelu(x))))


class SqueezeExcitation(nn.Module):
    """torchvision's."""

    def __init__(self, c: int, s: int, activation: type[nn.Module], gate: type[nn.Module]) -> None:
        super().__init__()
        self.avgpool, self.fc1, self.fc2 = nn.AdaptiveAvgPool2d(1), nn.Conv2d(c, s, 1), nn.Conv2d(s, c, 1)
        self.activation, self.scale_activation = activation(), gate()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale_activation(self.fc2(self.activation(self.fc1(self.avgpool(x))))) * x


class SEModule(nn.Module):
    """timm's."""

    def __init__(self, c: int, s: int) -> None:
        super().__init__()
        self.fc1, self.act, self.fc2 = nn.Conv2d(c, s, 1), nn.ReLU(inplace=True), nn.Conv2d(s, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = x.mean((2, 3), keepdim=True)
        return x * self.fc2(self.act(self.fc1(s))).sigmoid()


class SELayer(nn.Module):
    """With linear layers, as it is often copied."""

    def __init__(self, c: int, s: int) -> None:
        super().__init__()
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Sequential(
            nn.Linear(c, s, bias=False), nn.ReLU(inplace=True), nn.Linear(s, c, bias=False), nn.Sigmoid()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, c, _, _ = x.size()
        y = self.fc(self.pool(x).view(b, c)).view(b, c, 1, 1)
        return x * y.expand_as(x)


class Indexed(SEModule):
    """Of a small net's hand-written kind: a pooling as large as the image, and dimensions put back by an index."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.fc2(self.act(self.fc1(F.avg_pool2d(x, x.size(2))))).sigmoid()
        return x * s.flatten(1)[:, :, None, None]


class Flattened(SELayer):
    """The mean of a row of pixels."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fc(x.flatten(2).mean(-1))[:, :, None, None]


class SquareOnly(SEModule):
    """A pooling that leaves out a row and a column."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.fc2(self.act(self.fc1(F.avg_pool2d(x, x.size(2) - 1)))).sigmoid()


class Elsewhere(SEModule):
    """Scales another tensor than it pools."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = (x + 1).mean((2, 3), keepdim=True)
        return x * self.fc2(self.act(self.fc1(s))).sigmoid()


class Shared(SEModule):
    """Its gate is used once more."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        s = self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()
        return x * s + s


class Excited(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3)
        self.vision = SqueezeExcitation(16, 4, nn.SiLU, nn.Sigmoid)
        self.hard = SqueezeExcitation(16, 6, nn.ReLU, nn.Hardsigmoid)
        self.timm, self.linear, self.elsewhere, self.shared = (
            SEModule(16, 5),
            SELayer(16, 8),
            Elsewhere(16, 4),
            Shared(16, 4),
        )
        self.indexed, self.flattened, self.square = Indexed(16, 8), Flattened(16, 8), SquareOnly(16, 8)
        self.odd = SqueezeExcitation(16, 4, nn.Hardswish, nn.Sigmoid)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.square(self.flattened(self.indexed(self.timm(self.hard(self.vision(self.conv(x)))))))
        x = self.odd(self.shared(self.elsewhere(self.linear(x))))
        return x * torch.sigmoid(x)


FOUND = {
    "layer_norm": (
        ConvNeXt,
        {
            "norm": "layernorm with its permutes",
            "block.norm": "layernorm",
            "reduce_norm": "layernorm with its permutes",
            "by_hand": "layernorm with its permutes",
        },
        {"whole": "more than the channels", "odd": "5 channels"},
    ),
    "group_norm": (
        GroupNorms,
        {
            "plain": "groupnorm4",
            "silu": "groupnorm2+silu",
            "relu": "groupnorm1+relu",
            "instance": "instancenorm+leaky_relu",
            "gelu": "groupnorm8",
        },
        {"tracking": "running statistics", "last": "6 channels"},
    ),
    "squeeze_excite": (
        Excited,
        {
            "vision": "se+silu+sigmoid",
            "hard": "se+relu+hardsigmoid",
            "timm": "se+relu+sigmoid",
            "linear": "se+relu+sigmoid",
            "indexed": "se+relu+sigmoid",
            "flattened": "se+relu+sigmoid",
        },
        {
            "square": "does not pool",
            "elsewhere": "does not pool",
            "shared": "something else uses",
            "odd": "activation hardswish",
        },
    ),
}


def capture(
    model: nn.Module, family: str, seen: list[torch.fx.GraphModule] | None = None, *, compiled: bool = False
) -> tuple[Callable[..., torch.Tensor], match.MatchReport]:
    """The model compiled with the family's rewrite, and the report; the graphs that ran are added to `seen`.

    With `compiled` graphs are rewritten as for Inductor, with torch.library's operations.
    """
    report = match.MatchReport()
    backend = dynamo.backend({family: report}, mode=None)

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        if compiled:
            catalog.get(family).rewrite(graph, report, compiled=True)
            graph.recompile()
            return graph.forward
        run = backend(graph, inputs)
        if seen is not None:
            seen.append(graph)
        return run

    return torch.compile(model.forward, backend=keep, dynamic=False), report


def trained(model: nn.Module, run, x: torch.Tensor) -> list[torch.Tensor]:
    y = run(x)
    model.zero_grad()
    y.float().square().mean().backward()
    return [y.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", FOUND)
def test_patterns_are_found_by_path_and_train_as_before(family: str) -> None:
    make, matched, unmatched = FOUND[family]
    torch.manual_seed(0)
    model = make().train().to(memory_format=torch.channels_last)
    run, report = capture(model, family)
    x = torch.randn(2, 3, 16, 16).to(memory_format=torch.channels_last)
    want = trained(model, model, x)
    before = dict(catalog.get(family).fell_back)
    with dispatch.everything():
        got = trained(model, run, x)
    assert report.matched == matched
    assert report.unmatched.keys() == unmatched.keys()
    for path, reason in unmatched.items():
        assert reason in report.unmatched[path]
    reason = "not on a CUDA device"
    assert catalog.get(family).fell_back[reason] == before.get(reason, 0) + len(matched)
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", FOUND)
def test_what_is_not_measured_is_left_alone(family: str, unmeasured: None) -> None:
    make, matched, _ = FOUND[family]
    torch.manual_seed(0)
    model = make().train()
    run, report = capture(model, family)
    run(torch.randn(2, 3, 16, 16))
    assert report.matched == {}
    assert {path for path, reason in report.unmatched.items() if reason == dispatch.UNMEASURED} == set(matched)


def stored(seen: list[torch.fx.GraphModule], name: str) -> list[torch.dtype]:
    """The dtypes that the calls of an operation were asked to store, in order."""
    return [
        next(a for a in node.args if isinstance(a, torch.dtype))
        for graph in seen
        for node in graph.graph.nodes
        if node.op == "call_function" and getattr(node.target, "__name__", "") == name
    ]


def test_a_norm_whose_users_cast_stores_what_they_take() -> None:
    """bf16 convolution → fp32 norm (as autocast has it on a GPU) → bf16 convolution, or a sum that stays fp32."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.inner, self.outer = nn.Conv2d(3, 16, 1), LayerNorm2d(16), LayerNorm2d(16)
            self.group, self.next = nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x)
            a = self.next(self.inner(x.float()))
            b = self.outer(a.float())
            c = self.next(F.silu(self.group(a.float())))
            return self.next(b) + b + c

    seen: list[torch.fx.GraphModule] = []
    torch.manual_seed(0)
    model = Model()
    x = torch.randn(2, 3, 4, 4)
    found = {}
    for family in ("layer_norm", "group_norm"):
        run, report = capture(model, family, seen)
        with torch.autocast("cpu", torch.bfloat16):
            want = model(x)
            with dispatch.everything():
                got = run(x)
        assert not report.unmatched
        torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
        found[family] = stored(seen, family)
        seen.clear()
        torch._dynamo.reset()
    assert found == {"layer_norm": [torch.bfloat16, torch.float32], "group_norm": [torch.bfloat16]}


@pytest.mark.parametrize("family", FOUND)
def test_operations_in_a_graph_for_inductor(emulated, family: str) -> None:
    """With the kernels emulated: operations, their autograd and their kernels, in a graph as Inductor gets it."""

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 1)
            self.norm = {
                "layer_norm": LayerNorm2d(8),
                "group_norm": nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()),
                "squeeze_excite": SqueezeExcitation(8, 3, nn.ReLU, nn.Sigmoid),
            }[family]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(self.conv(x))

    torch.manual_seed(0)
    model = Small().to(memory_format=torch.channels_last)
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    want = trained(model, model, x)
    run, report = capture(model, family, compiled=True)
    got = trained(model, run, x)
    assert report.matched
    assert set(emulated.launches) == {entry for entries in catalog.get(family).kernels.values() for entry in entries}
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
    torch._dynamo.reset()
    run, report = capture(model.to(memory_format=torch.contiguous_format), family, compiled=True)
    run(x.contiguous())  # NCHW: a compiled graph would copy
    assert not report.matched
    assert report.unmatched


def test_an_input_changed_in_place_is_left_alone() -> None:
    class Hazard(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.ln, self.gn, self.se = (
                nn.Conv2d(3, 8, 1),
                LayerNorm2d(8),
                nn.GroupNorm(2, 8),
                SEModule(8, 4),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.conv(x)
            a, b, c = self.ln(h), self.gn(h), self.se(h)
            h.add_(1.0)
            return a + b + c + h

    for family in FOUND:
        torch._dynamo.reset()
        run, report = capture(Hazard().train(), family)
        with dispatch.everything(), torch.no_grad():
            run(torch.randn(2, 3, 4, 4))
        assert report.matched == {}
        assert all("in place" in reason for reason in report.unmatched.values())
        assert report.unmatched
