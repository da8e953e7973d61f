"""One cast of all weights: bit-equal to autocast's own casts, and left to autocast wherever it could not be."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.autograd.profiler import profile
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from advisor.ops import dispatch, dynamo, match, weight_casts


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch._dynamo.reset()
    dispatch.clear()
    yield
    torch._dynamo.reset()
    dispatch.clear()


class Net(nn.Module):
    """A residual block, a depthwise and a transposed convolution, norms that stay fp32, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn1, self.bn2 = nn.BatchNorm2d(8), nn.BatchNorm2d(8)
        self.conv = nn.Conv2d(8, 8, 3, padding=1)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn1(self.stem(x)))
        x = x + F.relu(self.bn2(self.conv(x)))
        return self.head(self.norm(self.up(self.depthwise(x)).mean((2, 3))))


WEIGHTS_OF_NET = 9


def capture(net: nn.Module, report: match.MatchReport | None = None, mode: str | None = None) -> Callable:
    reports = {weight_casts.ID: match.MatchReport() if report is None else report}
    return torch.compile(net.forward, backend=dynamo.backend(reports, mode=mode), dynamic=False)


def train(
    net: nn.Module,
    forward: Callable,
    *,
    dtype: torch.dtype = torch.bfloat16,
    steps: int = 3,
    backwards: int = 1,
) -> list[torch.Tensor]:
    """Losses, gradients and parameters of some steps under autocast."""
    optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    generator = torch.Generator().manual_seed(3)
    found = []
    for _ in range(steps):
        optimizer.zero_grad()
        for _ in range(backwards):
            x = torch.randn(4, 3, 8, 8, generator=generator).contiguous(memory_format=torch.channels_last)
            with torch.autocast("cpu", dtype=dtype):
                loss = F.cross_entropy(forward(x), torch.arange(4))
            loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in net.parameters() if p.grad is not None)]
        optimizer.step()
    return [*found, *(p.detach().clone() for p in net.parameters())]


def twins(make: Callable[[], nn.Module] = Net) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    net = make().to(memory_format=torch.channels_last)
    return net, copy.deepcopy(net)


def same(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> None:
    assert len(ours) == len(plain)
    for a, b in zip(ours, plain, strict=True):
        assert torch.equal(a, b)
        assert (a.dtype, a.stride()) == (b.dtype, b.stride())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_training_is_bit_equal(dtype: torch.dtype) -> None:
    net, plain = twins()
    report = match.MatchReport()
    same(train(net, capture(net, report), dtype=dtype), train(plain, plain, dtype=dtype))
    assert len(report.matched) == WEIGHTS_OF_NET
    assert not report.unmatched
    assert weight_casts.engaged == {f"{WEIGHTS_OF_NET} weights": 3}


def test_all_are_cast_at_once_and_so_are_their_gradients() -> None:
    net, plain = twins()
    captured = capture(net)
    train(net, captured, steps=1)
    with profile() as ours:
        train(net, captured, steps=1)
    with profile() as autocast:
        train(plain, plain, steps=1)
    here, there = (Counter(event.name for event in found.function_events) for found in (ours, autocast))
    assert here["aten::_foreach_copy_"] == 2
    assert there["aten::_foreach_copy_"] == 0
    assert there["aten::_to_copy"] - here["aten::_to_copy"] == 2 * WEIGHTS_OF_NET


def test_large_models_are_cast_in_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_casts, "GROUP_ELEMENTS", 600)
    net, plain = twins()
    same(train(net, capture(net)), train(plain, plain))
    assert sum(weight_casts.engaged.values()) == 3 * 3  # 216, 584 + 8 + 8, 72 + ... in each of three steps


def test_gradients_accumulate_and_hooks_see_them() -> None:
    net, plain = twins()
    seen: list[list[torch.Tensor]] = [[], []]
    for module, list_ in zip((net, plain), seen, strict=True):
        module.conv.weight.register_hook(lambda g, list_=list_: list_.append(g.clone()))
        module.head.weight.register_post_accumulate_grad_hook(lambda p, list_=list_: list_.append(p.grad.clone()))
    same(train(net, capture(net), backwards=2), train(plain, plain, backwards=2))
    assert len(seen[0]) == 12
    same(
        sorted(seen[0], key=lambda t: (t.numel(), float(t.sum()))),
        sorted(seen[1], key=lambda t: (t.numel(), float(t.sum()))),
    )


def test_copies_keep_the_strides() -> None:
    weight = torch.randn(8, 4, 3, 3).to(memory_format=torch.channels_last).requires_grad_()
    vector = torch.randn(5, requires_grad=True)
    copies = weight_casts.cast_weights(torch.bfloat16, weight, vector)
    assert [c.stride() for c in copies] == [weight.stride(), vector.stride()]
    assert all(torch.equal(c, w.bfloat16()) for c, w in zip(copies, (weight, vector), strict=True))
    copies[0].backward(torch.ones(8, 4, 3, 3, dtype=torch.bfloat16))  # a gradient of other strides
    assert weight.grad is not None
    assert weight.grad.dtype == torch.float32
    assert vector.grad is None


class Branch(Net):
    """Two layers whose result the loss does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen = self.depthwise(self.stem(x))
        return self.head(self.conv(self.other(x)).mean((2, 3)))


def test_what_the_loss_does_not_see_has_no_gradient() -> None:
    net, plain = twins(Branch)
    same(train(net, capture(net)), train(plain, plain))
    assert net.stem.weight.grad is None
    assert plain.stem.weight.grad is None
    assert net.other.weight.grad is not None


class Shared(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.conv(F.relu(self.conv(x))).mean((2, 3)))


class Standardised(Net):
    """Computes with a weight in fp32 beside using it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.conv2d(self.stem(x), self.conv.weight - self.conv.weight.mean(), self.conv.bias, padding=1)
        return self.head(x.mean((2, 3))) + self.conv(x).mean()


class Frozen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.conv.requires_grad_(False)


class InFp32(Net):
    """Leaves autocast for a layer."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with torch.autocast("cpu", enabled=False):
            x = self.conv(x.float())
        return self.head(x.mean((2, 3)))


class Swapped(Net):
    """Writes into a weight in the middle of its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        with torch.no_grad():
            self.conv.weight.mul_(0.5)
        return self.head(self.conv(x).mean((2, 3)))


class Watched(Net):
    """Begins with layers that it runs without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Conv2d(3, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            shift = self.depthwise(self.other(x)).mean()
        return self.head(self.conv(self.stem(x)).mean((2, 3))) + shift


class Inferred(Watched):
    """Begins with layers in inference mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            shift = self.depthwise(self.other(x)).mean()
        return self.head(self.conv(self.stem(x)).mean((2, 3))) + shift.clone()


class Checkpointed(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda y: F.relu(self.conv(y)), self.stem(x), use_reentrant=False)
        return self.head(x.mean((2, 3)))


class Broken(Net):
    """Two graphs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        torch._dynamo.graph_break()
        return self.head(self.conv(x).mean((2, 3)))


@pytest.mark.parametrize(
    ("make", "weights", "refused"),
    [
        (Shared, 3, {"2 operations use it": 4}),
        (Standardised, 3, {"is computed in the graph": 1, "3 operations use it": 1, "2 operations use it": 2}),
        (Frozen, WEIGHTS_OF_NET - 2, {"needs no gradient, and autocast keeps no cast of it": 2}),
        (InFp32, 3, {}),
        (Swapped, 4, {"2 operations use it": 1}),
        (Watched, 9, {}),
        (Inferred, 9, {}),
        (Checkpointed, 3, {}),
        (Broken, 5, {}),
    ],
)
def test_any_other_use_of_a_weight_is_left_to_autocast(make, weights: int, refused: dict[str, int]) -> None:
    net, plain = twins(make)
    report = match.MatchReport()
    same(train(net, capture(net, report)), train(plain, plain))
    assert len(report.matched) == weights, report
    assert Counter(report.unmatched.values()) == refused


def differ(ours: list[torch.Tensor], plain: list[torch.Tensor]) -> bool:
    return len(ours) != len(plain) or not all(torch.equal(a, b) for a, b in zip(ours, plain, strict=True))


def test_a_cast_from_before_a_write_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_casts, "refused", lambda weight, found: "")  # planted
    net, plain = twins(Swapped)
    assert differ(train(net, capture(net)), train(plain, plain))


def test_a_cast_without_gradients_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(dtype: torch.dtype, *weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return weight_casts.casts.cast(dtype, *weights)

    monkeypatch.setattr(weight_casts, "cast_weights", planted)
    net, _ = twins(Watched)
    with pytest.raises(RuntimeError, match="does not require grad"):
        train(net, capture(net), steps=1)


def test_second_derivatives_are_autocasts() -> None:
    def penalty(net: nn.Module, forward: Callable) -> list[torch.Tensor]:
        x = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = forward(x).square().sum()
        weights = [net.stem.weight, net.conv.weight, net.head.weight]
        first = torch.autograd.grad(loss, weights, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return [*first, *(w.grad for w in weights)]

    net, plain = twins(Broken)
    same([t.detach() for t in penalty(net, capture(net))], [t.detach() for t in penalty(plain, plain)])
    assert weight_casts.engaged


def test_under_transforms_it_is_a_plain_cast() -> None:
    weight = torch.randn(3, 4)

    def total(w: torch.Tensor) -> torch.Tensor:
        return weight_casts.cast_weights(torch.bfloat16, w)[0].float().square().sum()

    found = torch.func.vmap(torch.func.grad(total))(weight.expand(2, 3, 4))
    assert torch.equal(found[0], (2 * weight.bfloat16()).float())
    assert set(weight_casts.fell_back) == {"inside a torch.func transform"}
    _, tangent = torch.func.jvp(total, (weight,), (torch.ones(3, 4),))
    assert tangent.isfinite()
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(weight, torch.ones(3, 4))
        assert torch.autograd.forward_ad.unpack_dual(total(dual)).tangent is not None
    assert "forward-mode differentiation" in weight_casts.fell_back


def test_inductor_is_given_the_graph_as_it_is() -> None:
    net, _ = twins()
    report = match.MatchReport()
    graphs = []

    def backend(graph_module, inputs):
        weight_casts.rewrite(graph_module, report, compiled=True)
        graphs.append([node.target for node in graph_module.graph.nodes])
        return graph_module.forward

    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.compile(net.forward, backend=backend, dynamic=False)(torch.randn(2, 3, 8, 8))
    assert weight_casts.cast_weights not in graphs[0]
    assert report.unmatched == {"graph": "Inductor fuses casts itself"}


def test_without_autocast_nothing_is_cast() -> None:
    net, _ = twins()
    report = match.MatchReport()
    capture(net, report)(torch.randn(2, 3, 8, 8))
    assert not report.matched
    assert not report.unmatched
    assert not weight_casts.engaged
