"""Sites: calls that are recorded in Python and replayed from C++, on emulated kernels."""

from __future__ import annotations

import copy
import ctypes
import gc
import struct
import subprocess
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from emulation.compiler import EmulationError
from emulation.device import only_what_wins
from torch import nn
from torch._dynamo import compiled_autograd
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from advisor.bench.placed import placed
from advisor.core.errors import AdvisorError
from advisor.ops import catalog, cuda_driver, dispatch, dynamo, match, tensor_map, verify
from advisor.ops.batchnorm_act import api as norm
from advisor.ops.bias_act import api as bias_act
from advisor.ops.family import Case, Family
from advisor.ops.function import Function
from advisor.ops.pointwise import api as pointwise
from advisor.ops.pooling import api as pooling
from advisor.ops.sites import install, native, recording
from advisor.ops.upsample import api as upsample

Step = Callable[..., list[torch.Tensor]]


@pytest.fixture(autouse=True)
def _fresh(sites: None) -> Iterator[None]:
    torch._dynamo.reset()
    install.recorded.clear()
    install.refused.clear()
    yield
    torch._dynamo.reset()


class Net(nn.Module):
    """A convolution, norms with a pooling, a residual and an activation behind them, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3, padding=1)
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm2d(16) for _ in range(3))
        self.conv = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.pool = nn.MaxPool2d(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn1(self.first(x))))
        y = self.bn2(self.conv(x))
        x = F.relu(y + x)
        x = F.silu(self.bn3(x))
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


# They take the net's convolutions and their biases, which here stay PyTorch's: a convolution's call is not replayed.
OF_CONVOLUTIONS = {"bias_add", "exact_conv", "few_channels"}


def captured(model: nn.Module) -> Any:
    families = (family for family in catalog.FAMILIES if family.captured and family.id not in OF_CONVOLUTIONS)
    reports = {family.id: match.MatchReport() for family in families}
    return torch.compile(model.forward, backend=dynamo.backend(reports, mode=None), dynamic=False)


def step(run: Any, model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Result, gradients and buffers of a training step."""
    model.zero_grad()
    y = run(x)
    y.float().square().sum().backward()
    gradients = [x.grad, *(p.grad for p in model.parameters())]
    return [y.detach(), *(g for g in gradients if g is not None), *(b.clone() for b in model.buffers())]


def image(*shape: int, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape).contiguous(memory_format=torch.channels_last).requires_grad_(grad)


def vector(channels: int = 16, *, grad: bool = True) -> torch.Tensor:
    return (torch.rand(channels) + 0.5).requires_grad_(grad)


def _told(ran: list[str], own: Callable[..., Any], name: str, *args: Any) -> Any:
    ran.append(name)
    return own(*args)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The Functions whose forward or backward ran in Python inside."""
    ran: list[str] = []
    with monkeypatch.context() as patch:
        for function in Function.__subclasses__():
            for name in ("forward", "backward"):
                own, told = getattr(function, name), f"{function.__name__}.{name}"
                patch.setattr(function, name, staticmethod(partial(_told, ran, own, told)))
        yield ran


def test_steps_are_replayed_and_are_as_python_makes_them(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    model = Net().to(memory_format=torch.channels_last).train()
    other = copy.deepcopy(model)
    run = captured(model)
    counts = []
    for seed in range(4):
        x = image(2, 3, 12, 12)
        emulated.launches.clear()
        dispatch.clear()
        with counted(monkeypatch) as in_python:
            mine = step(run, model, x.detach().requires_grad_())
        theirs = step(other, other, x.detach().requires_grad_())
        counts.append((dict(emulated.launches), {k: dict(v) for k, v in dispatch.engaged.items() if v}))
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
        assert len(in_python) == (8 if seed == 0 else 0)  # four forwards and four backwards
    assert counts[0][0]
    assert all(found == counts[0] for found in counts[1:])
    assert install.recorded == {"batchnorm_max_pool": 1, "batchnorm_act": 2, "global_avg_pool2d": 1}
    assert not install.refused


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_runs_again_is_replayed_too(emulated, monkeypatch, reentrant: bool) -> None:
    class Checkpointed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=reentrant)

    torch.manual_seed(0)
    model = Checkpointed().to(memory_format=torch.channels_last).train()
    other = copy.deepcopy(model)
    run = captured(model)
    for _ in range(3):
        x = image(2, 3, 12, 12)
        with counted(monkeypatch) as in_python:
            mine = step(run, model, x.detach().requires_grad_())
        theirs = step(other, other, x.detach().requires_grad_())
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
    assert not in_python
    assert install.recorded["batchnorm_act"] >= 2


def test_what_a_recording_does_not_fit_runs_in_python_and_is_recorded_too(emulated, monkeypatch) -> None:
    site = install.site(pooling.max_pool2d)
    rest = ((3, 3), (2, 2), (1, 1))
    half = image(2, 16, 8, 8).detach().bfloat16().requires_grad_()
    calls = [
        (image(2, 16, 8, 8), rest),
        (image(3, 16, 8, 8), rest),
        (image(2, 16, 8, 8, grad=False), rest),
        (half, rest),
        (image(2, 16, 8, 8), ((2, 2), (2, 2), (0, 0))),
    ]
    for number, (x, window) in enumerate(calls, 1):
        for again in (False, True):
            with counted(monkeypatch) as in_python:
                y = site(x, *window)
            assert torch.equal(y, pooling.max_pool2d(x, *window))
            assert bool(in_python) is not again
        assert install.recorded["max_pool2d"] == number
    with torch.no_grad():
        assert site(calls[0][0], *rest).grad_fn is None
    assert install.recorded["max_pool2d"] == len(calls) + 1
    with dispatch.everything():  # as before
        site(calls[0][0], *rest)
    assert install.recorded["max_pool2d"] == len(calls) + 1


def test_after_so_many_recordings_a_site_goes_on_in_python(emulated) -> None:
    site = install.site(pooling.global_avg_pool2d)
    for n in range(1, install.MOST_KNOWN + 4):
        x = image(n, 8, 4, 4)
        torch.testing.assert_close(site(x), x.mean((2, 3), keepdim=True))
    assert install.recorded["global_avg_pool2d"] == install.MOST_KNOWN


REPLAYED = [
    family
    for family in catalog.FAMILIES
    if any(isinstance(f, type) and issubclass(f, Function) and f.replays for f in vars(family.module("api")).values())
]
FEW = 3  # cases of a family that are always tried
MAPPED = {"conv3x3", "grouped"}  # whose launches stay in Python where they are emulated: tensor maps are structs there


def smallest(family: Family) -> list[Case]:
    """Of each of the family's names that has a backward the case with the fewest elements, the smallest few of these."""
    found: dict[str, Case] = {}
    for case in sorted(family.verification, key=lambda case: torch.Size(case.shape).numel()):
        if "backward" in case.passes and case.dtype != "float16":
            found.setdefault(case.name, case)
    return list(found.values())[:8]


@pytest.mark.parametrize("few", [pytest.param(FEW, id="few"), pytest.param(None, marks=pytest.mark.long, id="more")])
@pytest.mark.parametrize("family", REPLAYED, ids=lambda family: family.id)
def test_every_operation_is_replayed_as_python_runs_it(
    emulated, monkeypatch: pytest.MonkeyPatch, family: Family, few: int | None
) -> None:
    replayed = 0
    for case in smallest(family)[:few]:
        with placed(case.ours) as ours:
            for number in range(3):
                runs = []
                for function in (ours, case.ours):
                    given = case.inputs(verify.seeded("cpu", number), case.shape[0])
                    with counted(monkeypatch) as in_python:
                        outputs = verify.tensors(function(*given))
                        leaves = [a for a in given if isinstance(a, torch.Tensor) and a.requires_grad]
                        above = [torch.ones_like(y).cumsum(-1) for y in outputs]
                        gradients = torch.autograd.grad(outputs, leaves, above)
                    kept = [a for a in given if isinstance(a, torch.Tensor) and not a.requires_grad]
                    runs.append(([*outputs, *gradients, *kept], in_python))
                (mine, ran), (theirs, _) = runs
                for a, b in zip(mine, theirs, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), case.label
        assert family.id in MAPPED or not ran, (case.label, ran, install.refused)
        replayed += not ran
    assert replayed or family.id in MAPPED


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return operation(*args, **(kwargs or {}))


def test_while_somebody_watches_nothing_is_recorded_or_replayed(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site, x = install.site(pooling.global_avg_pool2d), image(2, 8, 4, 4)
    with Watching():
        for _ in range(install.MOST_KNOWN + 2):
            site(x)
    for _ in range(install.MOST_REFUSED + 2):
        torch.func.vmap(lambda one: site(one.unsqueeze(0)))(x)
    assert not install.recorded
    assert not install.refused
    site(x)
    with counted(monkeypatch) as in_python:
        site(x)
        assert not in_python
        with Watching():
            site(x)
        assert in_python
    assert install.recorded["global_avg_pool2d"] == 1


def test_no_kernel_runs_where_it_is_not_dispatched_any_more(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site, x = install.site(pooling.max_pool2d), image(2, 16, 8, 8)
    expected = site(x, (2, 2), (2, 2))
    emulated.launches.clear()
    monkeypatch.setattr(pooling.spec, "wins", lambda *_, **__: "slower")
    with only_what_wins():
        torch.testing.assert_close(site(x, (2, 2), (2, 2)), expected)
    assert not emulated.launches
    assert dispatch.fell_back["pooling"]["slower"]


def site_and_leaves() -> tuple[Any, list[Any], list[torch.Tensor]]:
    """A batch norm's site that has recorded forward and backward, its arguments and those that want gradients."""
    site = install.site(norm.batchnorm_act)
    x, weight, bias = image(2, 16, 5, 4), vector(), vector()
    arguments = [x, None, vector(grad=False), vector(grad=False), weight, bias, 0.1, 1e-5, "silu", 0.0]
    for _ in range(2):
        y = site(*arguments)
        torch.autograd.grad(y, (x, weight, bias), torch.ones_like(y))
    assert install.recorded["batchnorm_act"] == 1
    return site, arguments, [x, weight, bias]


def as_python(*arguments: Any) -> Any:
    """What the site below stands for."""
    return pointwise.batchnorm_act_pointwise(*arguments[:-1], conv_weight=arguments[-1])


def releasing_site_and_leaves(*, both: bool = True) -> tuple[Any, list[Any], list[torch.Tensor]]:
    """Likewise of a batch norm with a 1x1 convolution, whose backward lets go of the norm's result midway.

    The backward is recorded with gradients of `both` results, or of the convolution's alone.
    """
    site = install.site(pointwise.batchnorm_act_pointwise, ("conv_weight",))
    x, weight, bias = image(2, 64, 16, 16).detach().bfloat16().requires_grad_(), vector(64), vector(64)
    conv = (torch.randn(64, 64, 1, 1) / 8).requires_grad_()
    arguments = [x, None, vector(64, grad=False), vector(64, grad=False), weight, bias, 0.1, 1e-5, "relu", 0.0, conv]
    leaves = [x, weight, bias, conv]
    for _ in range(2):
        outputs = site(*arguments)[0 if both else 1 : 2]
        torch.autograd.grad(outputs, leaves, [torch.ones_like(y) for y in outputs])
    assert install.recorded["batchnorm_act_pointwise"] == 1, install.refused
    return site, arguments, leaves


def test_a_backward_runs_in_python_when_it_is_not_as_recorded(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site, arguments, leaves = site_and_leaves()
    dy = torch.randn(2, 16, 5, 4)  # not channels_last
    with counted(monkeypatch) as in_python:
        found = torch.autograd.grad(site(*arguments), leaves, dy)
    assert in_python == ["_BatchnormAct.backward"]
    expected = torch.autograd.grad(norm.batchnorm_act(*arguments), leaves, dy)
    for mine, other in zip(found, expected, strict=True):
        assert torch.equal(mine, other)


def test_second_derivatives_and_batches_of_gradients_pass_through_a_replayed_node(emulated) -> None:
    site, arguments, leaves = site_and_leaves()
    seconds = []
    for function in (site, norm.batchnorm_act):
        y = function(*arguments)
        first = torch.autograd.grad(y, leaves, torch.ones_like(y).cumsum(0), create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.square().sum() for g in first), leaves))
        y = function(*arguments)
        seconds[-1] += torch.autograd.grad(y, leaves, torch.ones(3, *y.shape).cumsum(0), is_grads_batched=True)
    for mine, other in zip(*seconds, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-5)


def test_a_first_backward_may_take_a_batch_of_gradients(emulated) -> None:
    """It is not recorded; the next one is."""
    function = install.site(pooling.global_avg_pool2d)
    with dispatch.everything():
        x = image(2, 16, 4, 4)
        y = function(x)
        (found,) = torch.autograd.grad(
            y, x, torch.stack([torch.ones_like(y), torch.full_like(y, 2.0)]), True, is_grads_batched=True
        )
        (single,) = torch.autograd.grad(y, x, torch.ones_like(y))
    torch.testing.assert_close(found, torch.stack([single, 2 * single]))


def test_a_graph_is_kept_freed_and_guarded_as_pytorch_s(emulated) -> None:
    site, arguments, leaves = site_and_leaves()
    y = site(*arguments)
    first, second = (torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    torch.autograd.grad(y, leaves, torch.ones_like(y))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))
    y = site(*arguments)
    with torch.no_grad():
        arguments[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


def test_a_result_in_place_of_its_input_is_that_tensor(emulated) -> None:
    site = install.site(bias_act.bias_act)
    bias = vector()
    for _ in range(3):
        base = image(2, 16, 3, 5)
        x = base * 2.0
        version = x._version
        y = site(x, bias, None, "relu", 0.0, True)
        assert y is x
        assert y._version > version
        dx, dbias = torch.autograd.grad(y.square().sum(), (base, bias))
        z = (base * 2.0 + bias.view(1, -1, 1, 1)).relu()
        expected = torch.autograd.grad(z.square().sum(), (base, bias))
        torch.testing.assert_close((dx, dbias), expected, rtol=1e-4, atol=1e-4)
    assert install.recorded["bias_act"] == 1


def test_two_results_over_one_memory_take_a_gradient_each(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install.site(norm.forked_batchnorm_act)
    arguments = [image(2, 16, 3, 5), image(2, 16, 3, 5), vector(grad=False), vector(grad=False), vector(), vector()]
    arguments += [0.1, 1e-5, "relu", 0.0]
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    for number in range(3):
        with counted(monkeypatch) as in_python:
            one, other = site(*arguments)
            assert one is not other
            assert one.data_ptr() == other.data_ptr()
            found = torch.autograd.grad((one, other), leaves, (torch.ones_like(one), 2 * torch.ones_like(one)))
        assert bool(in_python) is (number == 0)
        plain = norm.batchnorm_act(*arguments)
        expected = torch.autograd.grad(plain, leaves, 3 * torch.ones_like(plain))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_tensors_in_a_list_are_arguments_too(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site = install.site(upsample.upsample_concat)
    rest = (0, (8, 6), None, "bilinear", True)
    for number in range(3):
        small, large = image(2, 8, 4, 3), image(2, 16, 8, 6)
        with counted(monkeypatch) as in_python:
            y = site([small, large], *rest)
            found = torch.autograd.grad(y.square().sum(), (small, large))
        assert bool(in_python) is (number == 0)
        expected = upsample.upsample_concat([small, large], *rest)
        assert torch.equal(y, expected)
        torch.testing.assert_close(found, torch.autograd.grad(expected.square().sum(), (small, large)))
    assert install.recorded["upsample_concat"] == 1
    alone = image(2, 8, 4, 3)
    torch.testing.assert_close(site([alone], *rest), upsample.upsample_concat([alone], *rest))


def test_what_a_launch_raises_is_raised(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    site, arguments, leaves = site_and_leaves()
    y = site(*arguments)
    monkeypatch.setattr(emulated.memory, "holding", lambda address: (_ for _ in ()).throw(EmulationError("planted")))
    with pytest.raises(EmulationError, match="planted"):
        site(*arguments)
    with pytest.raises(EmulationError, match="planted"):
        torch.autograd.grad(y, leaves, torch.ones_like(y))


@pytest.mark.parametrize("releasing", [False, True])
def test_compiled_autograd_calls_a_replayed_node_as_it_is(emulated, releasing: bool) -> None:
    site, arguments, leaves = releasing_site_and_leaves(both=False) if releasing else site_and_leaves()

    def loss() -> torch.Tensor:
        found = site(*arguments)
        return (found[1] if releasing else found).sum()

    expected = torch.autograd.grad(loss(), leaves)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        loss().backward()
    for leaf, gradient in zip(leaves, expected, strict=True):
        torch.testing.assert_close(leaf.grad, gradient)


class Faulty(Function):
    """What a test plants in its forward and backward."""

    replays = True
    plant: Callable[[torch.Tensor], Any]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = torch.empty_like(x)
        y.copy_(x)
        found = Faulty.plant(y)
        return found if isinstance(found, torch.Tensor) else y

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy


def launches(*arguments: Any, stream: int = 0) -> Callable[[torch.Tensor], None]:
    def plant(y: torch.Tensor) -> None:
        for watcher in cuda_driver.watchers:
            watcher(
                _Kernel(arguments),
                (1, 1, 1),
                (1, 1, 1),
                tuple(a(y) if callable(a) else a for a in arguments),
                0,
                stream,
                False,
            )

    return plant


class _Kernel:
    name = "planted"

    def __init__(self, arguments: Sequence[Any]) -> None:
        self.types = "".join("i" if type(one) is int else "P" for one in arguments)

    def addresses(self, cooperative: bool) -> tuple[int, int, int, int]:
        return 0, 0, 0, 0

    def __call__(self, *_: Any, **__: Any) -> None: ...


elsewhere = torch.zeros(4)
REFUSED = {
    "it passes an address of no tensor": launches(lambda y: torch.Tensor.data_ptr(elsewhere)),
    "it passes a struct": launches(np.zeros(3, np.int32)),
    "it launches on another stream": launches(3, stream=7),
    "which gives no tensors": lambda y: y.sum().item(),
    "unbind.int, which gives no tensors": lambda y: y.view(1, 4).unbind()[0],
    "with a list of tensors": lambda y: torch.cat([y[:2], y[2:]]),
    "a tensor is none of those given or made": lambda y: elsewhere,
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_replayed_stays_in_python(emulated, monkeypatch, reason: str) -> None:
    monkeypatch.setattr(Faulty, "plant", staticmethod(REFUSED[reason]), raising=False)

    def operation(x: torch.Tensor) -> torch.Tensor:
        return Faulty.apply(x)

    site = install.site(operation)
    for _ in range(4):
        x = torch.randn(4, requires_grad=True)
        y = site(x)
        assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], torch.ones_like(y))
    assert not install.recorded
    ((_, found),) = install.refused
    assert reason in found


def test_operators_between_launches_are_called_again_behind_autocast(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    def plant(y: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return (y.view(2, 2) @ y.view(2, 2).t()).flatten()

    monkeypatch.setattr(Faulty, "plant", staticmethod(plant), raising=False)
    site = install.site(lambda x: Faulty.apply(x))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            x = torch.randn(4)
            found = site(x)
            assert found.dtype == torch.float32  # a product that autocast would make in bf16
            with torch.autocast("cpu", enabled=False):
                torch.testing.assert_close(found, (x.view(2, 2) @ x.view(2, 2).t()).flatten())
    assert sum(install.recorded.values()) == 1


def test_a_tensor_that_is_left_on_ctx_is_not_replayed(emulated) -> None:
    class Leaves(Function):
        replays = True

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.kept = x * 2
            return torch.empty_like(x).copy_(x)

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            return dy * ctx.kept

    site = install.site(lambda x: Leaves.apply(x))
    for _ in range(3):
        x = torch.randn(4, requires_grad=True)
        (dx,) = torch.autograd.grad(site(x).sum(), x)
        assert torch.equal(dx, 2 * x)
    assert list(install.refused) == [("<lambda>", "it leaves a tensor on ctx that is not saved")]


@pytest.mark.parametrize("arguments", ["twice", "unaligned", "subclass"])
def test_tensors_that_a_recording_could_not_tell_apart_are_not_recorded(emulated, arguments: str) -> None:
    x = image(2, 16, 3, 5)
    if arguments == "twice":
        site, given = install.site(bias_act.bias_act), (x, None, x, "relu", 0.0)
    else:
        other = torch.empty(2 * 16 * 15 + 1)[1:].view(2, 3, 5, 16).permute(0, 3, 1, 2).requires_grad_()
        site = install.site(pooling.global_avg_pool2d)
        given = (other if arguments == "unaligned" else x.as_subclass(type("Own", (torch.Tensor,), {})),)
    for _ in range(2):
        site(*given)
    assert not install.recorded
    assert sum(install.refused.values()) == 2


def test_memory_between_launches_is_let_go_and_a_node_lets_its_own_go(emulated) -> None:
    site, arguments, _ = site_and_leaves()
    y = site(*arguments)
    node, kept = y.grad_fn, weakref.ref(y)
    del y
    gc.collect()
    assert kept() is None  # silu keeps x, not its result
    assert node is not None


@pytest.mark.parametrize("replayed", [True, False])
def test_a_result_that_its_node_keeps_is_let_go_of_midway(emulated, monkeypatch, replayed: bool) -> None:
    site, arguments, leaves = releasing_site_and_leaves(both=not replayed)
    for kept in (False, True):
        y, z, _ = site(*arguments)
        result, gone = StorageWeakRef(y.untyped_storage()), []
        del y
        assert not result.expired()
        with counted(monkeypatch) as in_python, monkeypatch.context() as patch:
            patch.setattr(cuda_driver, "watchers", [lambda *_, r=result, g=gone: g.append(r.expired())])
            torch.autograd.grad(z, leaves, torch.ones_like(z), retain_graph=kept)
        assert bool(in_python) is not replayed
        assert gone
        assert all(one is not kept for one in gone)  # each launch comes behind the convolution's gradients


def test_what_is_kept_beside_autograd_s_own_is_kept_freed_and_guarded_alike(emulated) -> None:
    site, arguments, leaves = releasing_site_and_leaves()

    def gradients(of: Any, **keywords: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(of[:2], leaves, [torch.ones_like(y) for y in of[:2]], **keywords)

    outputs = site(*arguments)
    first, second = (gradients(outputs, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))
    gradients(outputs)
    with pytest.raises(RuntimeError, match="second time"):
        gradients(outputs)
    outputs = site(*arguments)
    with torch.no_grad():
        outputs[0].add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(outputs)
    seconds = []
    for function in (site, as_python):
        y, z, _ = function(*arguments)
        found = torch.autograd.grad(
            (y.square(), z.square()), leaves, (torch.ones_like(y), torch.ones_like(z)), create_graph=True
        )
        seconds.append(torch.autograd.grad(sum(g.float().square().sum() for g in found), leaves))
    for mine, other in zip(*seconds, strict=True):
        assert torch.equal(mine, other)
        assert mine.abs().sum() > 0


def test_hooks_are_asked_about_a_result_that_its_node_keeps_as_in_python(emulated) -> None:
    """So save_on_cpu takes it off the device."""
    site, arguments, leaves = releasing_site_and_leaves()
    found = []
    for function in (site, as_python):
        asked: list[Any] = []

        def pack(tensor: torch.Tensor, asked: list[Any] = asked) -> torch.Tensor:
            asked.append((tensor.shape, tensor.dtype))
            return tensor.detach().clone()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            y, z, _ = function(*arguments)
        result = StorageWeakRef(y.untyped_storage())
        del y
        assert result.expired()
        found.append((asked, torch.autograd.grad(z, leaves, torch.ones_like(z))))
    (asked, mine), (expected, theirs) = found
    assert asked == expected
    assert all(map(torch.equal, mine, theirs))


@pytest.mark.parametrize("inside", ["forward", "backward"])
def test_a_checkpoint_that_runs_once_in_python_saves_alike(emulated, inside: str) -> None:
    site, arguments, leaves = releasing_site_and_leaves()
    with Watching() if inside == "forward" else nullcontext():
        y, z, _ = checkpoint(site, *arguments, use_reentrant=False)
    with Watching() if inside == "backward" else nullcontext():
        found = torch.autograd.grad((y, z), leaves, (torch.ones_like(y), torch.ones_like(z)))
    y, z, _ = site(*arguments)
    expected = torch.autograd.grad((y, z), leaves, (torch.ones_like(y), torch.ones_like(z)))
    assert all(map(torch.equal, found, expected))


def test_no_node_keeps_a_result_where_there_will_be_no_backward(emulated) -> None:
    """A tensor of inference mode has no version to note beside it."""
    site, arguments, _ = releasing_site_and_leaves()
    expected = as_python(*arguments)
    for without in (torch.inference_mode, torch.no_grad):
        for _ in range(3):
            with without():
                found = site(*arguments)
            assert all(map(torch.equal, found[:2], expected[:2]))
    assert install.recorded == {"batchnorm_act_pointwise": 2}


def test_a_site_that_nobody_calls_any_more_is_freed(emulated) -> None:
    def operation(x: torch.Tensor) -> torch.Tensor:
        return pooling.global_avg_pool2d(x)

    freed, site = weakref.ref(operation), install.site(operation)
    x = image(2, 8, 4, 4)
    for _ in range(3):
        y = site(x)
        torch.autograd.grad(y, x, torch.ones_like(y))
    assert install.recorded == {"operation": 1}
    del operation, site, y
    gc.collect()
    assert freed() is None


def test_a_process_ends_with_graphs_alive() -> None:
    """Nodes that Python's end finds hold objects of it."""
    code = (
        "import sys; sys.path.insert(0, 'tests'); import torch\n"
        "from advisor.ops.sites import install, recording\n"
        "from advisor.ops.function import Function; from advisor.ops import nvrtc; nvrtc.stream = lambda device: 0\n"
        "class F(Function):\n"
        "    replays = True\n"
        "    @staticmethod\n"
        "    def forward(ctx, x): ctx.save_for_backward(x); return x.clone()\n"
        "    @staticmethod\n"
        "    def backward(ctx, dy): return dy.clone()\n"
        "site = install.site(lambda x: F.apply(x)); x = torch.randn(4, requires_grad=True)\n"
        "for _ in range(3): y = site(x); y.sum().backward(retain_graph=True)\n"
        "sys.modules['kept'] = y; torch.kept = site(x)\n"
        "print(install.recorded.total(), install.refused)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1 Counter()\n"), done.stderr


def test_without_a_compiler_graphs_call_the_functions_themselves(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "module", lambda: None)
    model = Net().train()
    x = image(2, 3, 12, 12)
    y = captured(model)(x)
    torch.testing.assert_close(y, copy.deepcopy(model)(x), rtol=1e-4, atol=1e-4)
    assert emulated.launches
    assert not install.recorded


class Driver:
    """Stands for the CUDA driver: what it is asked to launch, as it finds it, and the status that it answers with."""

    def __init__(self, sizes: list[int]) -> None:
        self.sizes, self.statuses = sizes, [0]
        self.launched: list[dict[str, Any]] = []
        self.maps: list[tuple[Any, ...]] = []
        pointer = ctypes.c_void_p
        self._launch = ctypes.CFUNCTYPE(ctypes.c_int, pointer, pointer, pointer, pointer)(self._asked)
        kinds = (pointer, ctypes.c_int, ctypes.c_uint, pointer, pointer, pointer, pointer, pointer, *[ctypes.c_int] * 4)
        self._encode = ctypes.CFUNCTYPE(ctypes.c_int, *kinds)(self._mapped)
        self.launch, self.encode = (ctypes.cast(f, pointer).value for f in (self._launch, self._encode))

    def _asked(self, config: int, function: int, arguments: int, extra: int | None) -> int:
        places = (ctypes.c_void_p * len(self.sizes)).from_address(arguments)
        values = [ctypes.string_at(place, size) for place, size in zip(places, self.sizes, strict=True)]
        found = cuda_driver.CONFIG.unpack(ctypes.string_at(config, cuda_driver.CONFIG.size))
        self.launched.append({"config": found, "function": function, "values": values, "extra": extra})
        return self.statuses.pop(0) if len(self.statuses) > 1 else self.statuses[0]

    def _mapped(
        self, at: int, kind: int, rank: int, address: int, sizes: int, strides: int, box: int, *rest: int
    ) -> int:
        assert at % 64 == 0
        words = [(ctypes.c_uint64 * n).from_address(p) for p, n in ((sizes, 5), (strides, 4))]
        self.maps.append(
            (kind, rank, address, *map(tuple, words), tuple((ctypes.c_uint * 5).from_address(box)), rest[1:])
        )
        ctypes.memset(at, len(self.maps), 128)
        return 0


class Driven:
    """A kernel as ops/cuda_driver has it, of that driver."""

    name = "driven"

    def __init__(self, driver: Driver, types: str) -> None:
        self.driver, self.types, self.entered = driver, types, 0

    def addresses(self, cooperative: bool) -> tuple[int, int, int, int]:
        return self.driver.launch, 0xF00, 0xA77, 1 + cooperative

    @contextmanager
    def current(self) -> Iterator[None]:
        self.entered += 1
        yield

    def refuse(self, status: int) -> None:
        raise AdvisorError(f"refused: {status}")


def driven(kernel: Driven, y: torch.Tensor, *arguments: Any) -> None:
    for watcher in cuda_driver.watchers:
        watcher(kernel, (7, 2, 3), (64, 1, 1), (torch.Tensor.data_ptr(y), *arguments), 96, 0, True)


def test_a_launch_reaches_the_driver_as_python_would_have_made_it(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Driver([8, 8, 4, 4, 8, 8])
    kernel = Driven(driver, "PPifqP")
    ticket = emulated.counters.data_ptr()
    scalars = -3, 0.5, 1 << 40
    plant = lambda y: driven(kernel, y, torch.Tensor.data_ptr(y) + 8, *scalars, ticket)  # noqa: E731 – as short as what it stands for
    monkeypatch.setattr(Faulty, "plant", staticmethod(plant), raising=False)
    site = install.site(lambda x: Faulty.apply(x))
    for _ in range(3):
        y = site(torch.randn(8))
    assert len(driver.launched) == 2  # the first call was Python's
    found = driver.launched[-1]
    begin = torch.Tensor.data_ptr(y)
    assert found["config"] == (7, 2, 3, 64, 1, 1, 96, 0, 0xA77, 2)
    assert (found["function"], found["extra"]) == (0xF00, None)
    layout = struct.Struct("@P")
    assert [layout.unpack(found["values"][i])[0] for i in (0, 1, 5)] == [begin, begin + 8, ticket]
    assert found["values"][2:5] == [struct.pack(*one) for one in zip("ifq", scalars, strict=True)]
    driver.statuses = [201, 0]  # the device is not current in this thread
    site(torch.randn(8))
    assert kernel.entered == 1
    driver.statuses = [700]
    with pytest.raises(AdvisorError, match="refused: 700"):
        site(torch.randn(8))


def test_a_tensor_map_is_made_of_where_the_tensor_lies_now(emulated, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = ((0, 8, 3), (64, 9, 2))
    made_of = tuple(
        (offset, (8, 1, w, 4, 2), (16, 16, 64, 256), (8, 1, 4, 2, 1), swizzle) for offset, w, swizzle in parts
    )
    driver = Driver([8, 256])

    def plant(y: torch.Tensor) -> None:
        maps = np.zeros(256, np.uint8).view(np.dtype((np.void, 256))).view(tensor_map.Boxes)
        maps.address, maps.made_of = torch.Tensor.data_ptr(y) + 16, made_of
        driven(Driven(driver, "PP"), y, maps)

    monkeypatch.setattr(Faulty, "plant", staticmethod(plant), raising=False)
    site = install.site(lambda x: Faulty.apply(x))
    native.module().use(driver.encode)
    try:
        for _ in range(3):
            y = site(torch.randn(64))
    finally:
        native.module().use(tensor_map.encoder())
    begin = torch.Tensor.data_ptr(y) + 16
    expected = [(1, 5, begin + offset, *of, (0, swizzle, 2, 0)) for offset, *of, swizzle in made_of]
    assert driver.maps[-2:] == expected
    assert driver.launched[-1]["values"][1] == bytes([3] * 128 + [4] * 128)


def test_a_refused_launch_says_what_the_driver_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_driver, "reason", lambda status: f"status {status}")
    kernel = cuda_driver.Kernel.__new__(cuda_driver.Kernel)
    kernel.name = "some_kernel"
    with pytest.raises(AdvisorError, match="refuses to launch some_kernel: status 3"):
        kernel.refuse(3)


def test_a_tape_sees_its_own_thread_alone(emulated) -> None:
    import threading

    x = image(2, 8, 3, 3, grad=False)
    with recording.Tape([x]) as tape:
        thread = threading.Thread(target=launches(1), args=(x,))
        thread.start()
        thread.join()
        assert not tape.steps
        launches(1)(x)
        assert [kind for kind, *_ in tape.steps] == ["launch"]
    assert not cuda_driver.watchers


def test_counters_may_grow_in_another_thread_while_a_recording_reads_them() -> None:
    counter = Counter(mine=1)

    class Before(Counter[str]):
        def __missing__(self, key: str) -> int:
            counter["theirs"] += 1  # Python runs here, and so may any thread
            return 0

    assert recording.more({0: (counter, Before())}) == [(counter, "mine")]
