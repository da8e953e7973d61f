"""A batch norm whose result is used twice: its two handles, the gradients that come for each, and the graphs that get them."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from emulation.planted import passes_with
from torch import fx, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from advisor.ops import catalog, dispatch, dispatch_table, dynamo, match
from advisor.ops.batchnorm_act import api, cases, spec
from advisor.ops.batchnorm_act.rewrite import finish, rewrite

FAMILY = catalog.get("batchnorm_act")

FAULTS = {
    "the second gradient left out": (spec.TWO, "g[j] += other[j];", ";"),
    "the first gradient twice": (spec.TWO, "widen(above.part[1], other)", "widen(above.part[0], other)"),
    "dresidual not masked": (spec.TWO, "store(dresidual + first + u * step, narrow(g));", "store(dresidual + first + u * step, vx[u]);"),
    "dresidual of the neighbour": (spec.TWO, "dresidual + first + u * step", "dresidual + first + (u ^ 1) * step"),
    "dresidual left out": (spec.TWO, "store(dresidual + first + u * step, narrow(g));", ""),
    "one launch: the second gradient left out": (spec.CLUSTER, "g[j] += other[j];", ";"),
    "one launch: dresidual without the second": (spec.CLUSTER, "vdy[u] = narrow(g);", ""),
    "whole grid: the second gradient left out": (spec.GRID, "g[j] += other[j];", ";"),
    "whole grid: dresidual without the second": (spec.GRID, "held = narrow(g);", ""),
    "whole grid: the neighbour's gradient": (spec.GRID, "load_last(dy2 + at + u * step)", "load_last(dy2 + (at ^ 1) + u * step)"),
    "one launch: the neighbour's gradient": (spec.CLUSTER, "load_last(dy2 + at + u * step)", "load_last(dy2 + (at ^ 1) + u * step)"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_planted_in_the_kernels_is_found(emulated, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    way, before, after = FAULTS[fault]
    case = cases.case_of((3, 72, 9, 7), "bfloat16", "relu", True, way=way, forked=True)
    assert not passes_with(monkeypatch, FAMILY, case, before, after)


def arguments(activation: str = "relu", residual: bool = True, dtype: str = "float32") -> tuple[Any, ...]:
    generator = torch.Generator().manual_seed(3)
    return cases.inputs_of(generator, 2, shape=(2, 8, 3, 5), dtype=dtype, activation=activation, residual=residual)


def leaves(inputs: tuple[Any, ...]) -> list[torch.Tensor]:
    return [t for t in inputs if isinstance(t, torch.Tensor) and t.requires_grad]


def above(dtype: torch.dtype = torch.float32, seed: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(2, 3, 5, 8, generator=generator).to(dtype).permute(0, 3, 1, 2) for _ in range(2)]


def test_both_handles_are_one_memory_and_no_views(emulated) -> None:
    one, other = api.forked_batchnorm_act(*arguments())
    assert one is not other
    assert one.data_ptr() == other.data_ptr()
    assert not one._is_view()
    assert not other._is_view()
    assert one.is_contiguous(memory_format=torch.channels_last)
    assert other.is_contiguous(memory_format=torch.channels_last)


def test_a_change_in_place_of_one_handle_is_seen_by_who_saved_the_other(emulated) -> None:
    one, other = api.forked_batchnorm_act(*arguments())
    square = one.square()
    other.add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        square.sum().backward()


@pytest.mark.parametrize(
    ("activation", "residual", "way"),
    [
        pytest.param("relu", True, spec.TWO, marks=pytest.mark.long),
        ("none", True, spec.CLUSTER),
        ("relu", False, spec.TWO),
        pytest.param("silu", False, spec.CLUSTER, marks=pytest.mark.long),
        ("relu", True, spec.GRID),
        ("silu", False, spec.GRID),
    ],
)
def test_two_gradients_do_what_their_sum_does(emulated, activation: str, residual: bool, way: str) -> None:
    inputs, dy = arguments(activation, residual), above()
    both = api.forked_batchnorm_act(*inputs, way=way)
    mine = torch.autograd.grad(both, leaves(inputs), dy)
    plain = api.batchnorm_act(*inputs, way=way)
    for got, want in zip(mine, torch.autograd.grad(plain, leaves(inputs), dy[0] + dy[1]), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


class _Copies(TorchDispatchMode):
    """Counts copies of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += function in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("place", [0, 1])
def test_a_slice_of_a_gradient_is_added_without_a_copy(emulated, place: int) -> None:
    """As a UNet's skip has it: one gradient is whole, the other a slice of a concatenation's."""
    inputs, dy = arguments(residual=False), above()
    whole = torch.cat([dy[place].neg(), dy[place], dy[place]], 1).contiguous(memory_format=torch.channels_last)
    want = torch.autograd.grad(api.forked_batchnorm_act(*inputs), leaves(inputs), dy)
    dy[place] = whole.narrow(1, 8, 8)
    both = api.forked_batchnorm_act(*inputs)
    with _Copies() as copies:
        got = torch.autograd.grad(both, leaves(inputs), dy)
    assert not copies.seen
    for mine, other in zip(got, want, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_a_handle_that_is_not_used_costs_nothing(emulated, used: int) -> None:
    inputs, (dy, _) = arguments(), above()
    plain = torch.autograd.grad(api.batchnorm_act(*inputs), leaves(inputs), dy)
    handle = api.forked_batchnorm_act(*inputs)[used]
    before = Counter(emulated.launches)
    for got, want in zip(torch.autograd.grad(handle, leaves(inputs), dy), plain, strict=True):
        assert torch.equal(got, want)
    assert emulated.launches - before == {"batchnorm_act_held_backward": 1}


def test_without_an_activation_the_residuals_gradient_is_the_one_from_above(emulated) -> None:
    inputs, (dy, _) = arguments("none"), above()
    for way in spec.WAYS:
        y = api.batchnorm_act(*inputs, way=way)
        dx, dresidual, *_ = torch.autograd.grad(y, leaves(inputs), dy)
        assert dresidual.data_ptr() == dy.data_ptr()
        assert dx.data_ptr() != dy.data_ptr()
    y = torch.ops.advisor.batchnorm_act(*inputs)[0]
    assert torch.equal(torch.autograd.grad(y, inputs[1], dy)[0], dy)


@pytest.mark.parametrize("place", [0, 1])
def test_gradients_in_another_layout_or_type(emulated, place: int) -> None:
    inputs, dy = arguments(dtype="bfloat16"), above(torch.bfloat16)
    want = torch.autograd.grad(api.batchnorm_act(*inputs), leaves(inputs), dy[0] + dy[1])  # as autograd has it
    dy[place] = dy[place].contiguous().float()

    class Cast(torch.autograd.Function):
        """Hands back what comes from above as it is: NCHW, fp32."""

        @staticmethod
        def forward(ctx: Any, y: torch.Tensor, at: int) -> torch.Tensor:
            ctx.at = at
            return y.float()

        @staticmethod
        def backward(ctx: Any, *_: torch.Tensor) -> Any:
            return dy[ctx.at], None

    both = [Cast.apply(y, at) for at, y in enumerate(api.forked_batchnorm_act(*inputs))]
    got = torch.autograd.grad(both[0].sum() + both[1].sum(), leaves(inputs))
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize(("activation", "residual"), [("relu", True), ("silu", False)])
def test_second_derivatives(emulated, activation: str, residual: bool) -> None:
    inputs, dy = arguments(activation, residual), above()

    def penalty(function: Callable[..., Any]) -> tuple[torch.Tensor, ...]:
        first = torch.autograd.grad(function(*inputs), leaves(inputs), dy, create_graph=True)
        second = sum(g.square().sum() for g in first)
        return torch.autograd.grad(second, leaves(inputs), allow_unused=True, materialize_grads=True)

    plain = penalty(lambda *given: (y := api.batchnorm_act(*given), y))
    for got, want in zip(penalty(api.forked_batchnorm_act), plain, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_under_activation_checkpointing(emulated) -> None:
    inputs = arguments()
    x, residual, *rest = inputs

    def block(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        one, other = api.forked_batchnorm_act(x, residual, *rest)
        return torch.sin(one) * torch.cos(other)

    plain = torch.autograd.grad(block(x, residual).sum(), leaves(inputs))
    again = torch.autograd.grad(checkpoint(block, x, residual, use_reentrant=False).sum(), leaves(inputs))
    assert all(map(torch.equal, plain, again))


def test_where_the_kernels_do_not_run_the_result_is_one_tensor() -> None:
    one, other = api.forked_batchnorm_act(*arguments())
    assert one is other
    assert one.grad_fn is not None


class Bottleneck(nn.Module):
    def __init__(self, planes: int, inputs: int, stride: int = 1, activation: bool = True) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, planes, 1, bias=False), nn.BatchNorm2d(planes)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(planes)
        self.conv3, self.bn3 = nn.Conv2d(planes, 2 * planes, 1, bias=False), nn.BatchNorm2d(2 * planes)
        self.down = nn.Sequential()
        if stride != 1 or inputs != 2 * planes:
            self.down = nn.Sequential(nn.Conv2d(inputs, 2 * planes, 1, stride, bias=False), nn.BatchNorm2d(2 * planes))
        self.act = nn.ReLU(inplace=True) if activation else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.bn1(self.conv1(x)))
        out = F.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.down(x)
        return self.act(out)


def chain(activation: bool = True) -> nn.Sequential:
    """A stem, whose result is used twice, and three blocks, of which two are."""
    torch.manual_seed(0)
    stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(inplace=True))
    blocks = (Bottleneck(8, 16, 1, activation), Bottleneck(16, 16, 2, activation), Bottleneck(16, 32, 1, activation))
    return nn.Sequential(stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 4))


class Sums(TorchDispatchMode):
    """Counts sums of 4-D tensors, and the most memory of tensors that were alive at once."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.peak, self._alive = 0, 0, dict[int, tuple[int, StorageWeakRef]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        made = [t for t in (result if isinstance(result, (tuple, list)) else (result,)) if isinstance(t, torch.Tensor)]
        name = func.overloadpacket._qualified_op_name
        self.count += name in ("aten::add", "aten::add_") and made[0].dim() == 4
        for tensor in made:
            storage = tensor.untyped_storage()
            self._alive[storage._cdata] = storage.nbytes(), StorageWeakRef(storage)
        self._alive = {key: (size, ref) for key, (size, ref) in self._alive.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for size, _ in self._alive.values()))
        return result


def captured(model: nn.Module) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(model, backend=dynamo.backend({FAMILY.id: match.MatchReport()}, mode=None), dynamic=False)


@pytest.mark.long
@pytest.mark.parametrize("activation", [True, False])
def test_a_chain_of_blocks_trains_as_the_plain_one_without_autograds_sums(emulated, activation: bool) -> None:
    model = chain(activation).to(memory_format=torch.channels_last)
    plain = copy.deepcopy(model).double()
    before = FAMILY.engaged.copy()
    run, x = captured(model), torch.randn(4, 3, 8, 8).contiguous(memory_format=torch.channels_last)
    loss, other = run(x).square().sum(), plain(x.double()).square().sum()
    with Sums() as mine:
        loss.backward()
    with Sums() as theirs:
        other.backward()
    assert (mine.count, theirs.count) == (0, 3)
    ends = "add+relu forked" if activation else "add+none forked"
    assert {name: n for name, n in (FAMILY.engaged - before).items() if name.endswith(spec.FORKED)} == {
        "relu forked": 1,
        ends: 2,
    }
    for (name, parameter), wide in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad.double(), wide.grad, msg=name, rtol=2e-3, atol=2e-3)
    for (name, buffer), wide in zip(model.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(buffer.double(), wide.double(), msg=name, rtol=1e-5, atol=1e-6)


def test_a_chain_of_blocks_takes_no_more_memory_than_the_plain_one(emulated) -> None:
    model = chain().to(memory_format=torch.channels_last)
    plain, x = copy.deepcopy(model), torch.randn(8, 3, 24, 24).contiguous(memory_format=torch.channels_last)
    run = captured(model)
    run(x).sum().backward()
    plain(x).sum().backward()
    with Sums() as mine:
        run(x).sum().backward()
    with Sums() as theirs:
        plain(x).sum().backward()
    assert mine.peak <= theirs.peak


def forks(
    forward: Callable[..., Any], *, compiled: bool = False, change: Callable[[fx.Graph], None] | None = None
) -> int:
    """How many results the rewrites give out twice in a model of one convolution, one batch norm and this forward."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.bn = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)

        def forward(self, x: torch.Tensor) -> Any:
            return forward(F.relu(self.bn(self.conv(x))))

    graphs: list[fx.GraphModule] = []
    torch._dynamo.reset()
    torch.compile(Model(), backend=lambda graph, _: graphs.append(graph) or graph, fullgraph=True)(
        torch.randn(2, 3, 4, 4)
    )
    (graph_module,) = graphs
    rewrite(graph_module, match.MatchReport(), compiled=compiled)
    if change is not None:
        change(graph_module.graph)
    finish(graph_module, match.MatchReport(), compiled=compiled)
    graph_module.graph.lint()
    torch._dynamo.reset()
    return sum(node.target is api.forked_batchnorm_act for node in graph_module.graph.nodes)


def _writes_a_view(y: torch.Tensor) -> torch.Tensor:
    z = torch.sin(y)
    y.flatten(1).mul_(2.0)
    return z + torch.cos(y)


def _sets_an_item(y: torch.Tensor) -> torch.Tensor:
    z = torch.sin(y)
    y[0] = 1.0
    return z


@pytest.mark.parametrize(
    ("forward", "found"),
    [
        (lambda y: torch.sin(y) + torch.cos(y), 1),
        (lambda y: torch.sin(y) + torch.cos(y) + torch.tan(y), 1),
        (lambda y: torch.sin(y) + y.mean((2, 3), keepdim=True).detach(), 1),
        (lambda y: torch.sin(y), 0),
        (lambda y: y * y, 0),  # one place
        (lambda y: (torch.sin(y), y), 0),  # a hook on what goes out would see half the gradient
        (lambda y: torch.sin(y) + y.relu_(), 0),
        (lambda y: torch.sin(y) + F.dropout(y, 0.5, True, True), 0),
        (lambda y: torch.sin(y) + torch.square(y, out=None), 1),
        (_writes_a_view, 0),
        (_sets_an_item, 0),
    ],
)
def test_which_results_are_given_out_twice(forward: Callable[..., Any], found: int) -> None:
    with dispatch.everything():
        assert forks(forward) == found


def test_a_graph_for_inductor_is_left_alone() -> None:
    with dispatch.everything():
        assert forks(lambda y: torch.sin(y) + torch.cos(y), compiled=True) == 0


def test_a_hook_in_the_graph_is_left_the_whole_gradient() -> None:
    def hooked(graph: fx.Graph) -> None:
        norm = next(node for node in graph.nodes if node.target is api.batchnorm_act)
        with graph.inserting_after(norm):
            graph.call_method("register_hook", (norm, print))

    with dispatch.everything():
        assert forks(lambda y: torch.sin(y) + torch.cos(y), change=hooked) == 0


def test_nothing_is_given_out_twice_that_was_not_measured() -> None:
    of = dispatch_table.read()["batchnorm_act"]
    without = {kind: dtypes for kind, dtypes in of.taken.items() if not kind.endswith(spec.FORKED)}
    with dispatch_table.instead("batchnorm_act", replace(of, taken=without)):
        assert forks(lambda y: torch.sin(y) + torch.cos(y)) == 0
    assert forks(lambda y: torch.sin(y) + torch.cos(y)) == 1
