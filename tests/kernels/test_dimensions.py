"""Networks of volumes: norms, activations, sums and pooling find their kernels, on views, and train as before."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from advisor.loop.training import RootModule, Training
from advisor.ops import catalog, consumers, dispatch, dynamo, match, plain_graph
from advisor.transforms.channels_last import ChannelsLast

FAMILIES = ("batchnorm_act", "group_norm", "bias_act", "pooling", "volume_pooling")


class Volumes(nn.Module):
    """A stem with pooling, a block with a shortcut, InstanceNorm and LeakyReLU as nnU-Net has them, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv3d(1, 8, 3, padding=1, bias=False), nn.BatchNorm3d(8)
        self.conv, self.bn2 = nn.Conv3d(8, 8, 3, padding=1, bias=False), nn.BatchNorm3d(8)
        self.conv2, self.norm = nn.Conv3d(8, 16, 3, padding=1), nn.InstanceNorm3d(16, affine=True)
        self.up, self.group = nn.ConvTranspose3d(16, 8, 2, 2), nn.GroupNorm(2, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.max_pool3d(F.relu(self.bn(self.stem(x)), inplace=True), 3, 2, 1)
        y = self.bn2(self.conv(x))
        y += x
        y = F.leaky_relu(self.norm(self.conv2(F.relu(y, inplace=True))), 0.2, inplace=True)
        y = F.relu(self.up(y))
        y = self.group(y)
        return self.head(F.adaptive_avg_pool3d(y * torch.sigmoid(y), 1).flatten(1))


def captured(model: nn.Module, families: tuple[str, ...] = FAMILIES) -> tuple[Any, dict[str, match.MatchReport]]:
    """The model with the families' operations put in, and what they found."""
    reports = {family: match.MatchReport() for family in families}

    def put_in(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        return dynamo.backend(reports, mode=None)(dynamo.twin(graph), inputs)

    torch._dynamo.reset()
    return torch.compile(model, backend=put_in, dynamic=False), reports


def trained(model: nn.Module, run: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    """Output, gradients and buffers of one step."""
    y = run(x)
    y.square().mean().backward()
    return [y.detach(), *(p.grad for p in model.parameters()), *model.buffers()]


@pytest.mark.usefixtures("readable_graphs")
def test_a_net_of_volumes_finds_its_kernels_and_trains_as_before(emulated) -> None:
    torch.manual_seed(0)
    model = Volumes().to(memory_format=torch.channels_last_3d).train()
    plain = copy.deepcopy(model).double()
    x = torch.randn(2, 1, 8, 6, 6).contiguous(memory_format=torch.channels_last_3d)
    with dispatch.everything():
        run, reports = captured(model)
        dispatch.clear()
        got = trained(model, run, x)
    assert {name: report.matched for name, report in reports.items()} == {
        "batchnorm_act": {"bn": "bn+relu", "bn2": "bn+add+relu"},
        "group_norm": {"norm": "instancenorm+leaky_relu", "group": "groupnorm2+silu"},
        "bias_act": {"up": "bias+relu"},
        "pooling": {next(iter(reports["pooling"].matched)): "global_avg_pool"},
        "volume_pooling": {next(iter(reports["volume_pooling"].matched)): "max_pool3d k3s2p1"},
    }
    assert {family: dict(catalog.get(family).fell_back) for family in FAMILIES} == {family: {} for family in FAMILIES}
    entries = {"batchnorm", "group_norm", "bias_act", "max_pool3d", "global_avg_pool"}
    assert all(any(name in launched for launched in emulated.launches) for name in entries)
    for mine, want in zip(got, trained(plain, plain, x.double()), strict=True):
        torch.testing.assert_close(mine.double(), want.double(), rtol=1e-3, atol=1e-5)


@pytest.mark.usefixtures("readable_graphs")
def test_a_volume_whose_planes_have_gaps_is_left_as_it_is() -> None:
    """A crop: its image would be a copy."""

    class Cropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm3d(8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.relu(self.norm(x[:, :, :, 1:-1]))

    run, reports = captured(Cropped().train(), ("batchnorm_act",))
    x = torch.randn(2, 8, 3, 5, 4)
    run(x)
    assert reports["batchnorm_act"].unmatched == {"norm": "5-D input"}


@pytest.mark.usefixtures("readable_graphs")
def test_what_no_kernel_takes_runs_on_the_view_and_changes_in_place_what_it_did() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv3d(1, 5, 1), nn.InstanceNorm3d(5, track_running_stats=True)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.norm(self.conv(x))
            z = F.elu(y, inplace=True)
            y.add_(x)
            return F.relu(y, inplace=True), z

    torch.manual_seed(0)
    model = Plain().train()
    plain, x = copy.deepcopy(model), torch.randn(2, 1, 3, 4, 4)
    run, _ = captured(model)
    for mine, want in zip(run(x), plain(x), strict=True):
        torch.testing.assert_close(mine, want)
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)


class Diffusing(nn.Module):
    """A norm in fp32 whatever the rest is in, with Swish written out, as diffusion models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.next = nn.Conv2d(3, 16, 3), nn.GroupNorm(4, 16), nn.Conv2d(16, 16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        y = self.norm(x.float()).type(x.dtype)
        return self.next(y * torch.sigmoid(y))


@pytest.mark.parametrize("half", [False, True])
@pytest.mark.usefixtures("readable_graphs")
def test_a_norm_between_casts_is_one_operation_with_the_activation_behind_it(emulated, half: bool) -> None:
    torch.manual_seed(0)
    model = Diffusing().to(memory_format=torch.channels_last).train()
    plain, x = copy.deepcopy(model), torch.randn(2, 3, 9, 9).to(memory_format=torch.channels_last)
    run, reports = captured(model, ("group_norm",))
    dispatch.clear()
    with torch.autocast("cpu", torch.bfloat16, enabled=half):
        got, want = run(x), plain(x)
    assert reports["group_norm"].matched == {"norm": "groupnorm4+silu"}
    assert set(catalog.get("group_norm").engaged) == {"groupnorm4+silu"}  # stored as the next convolution reads it
    bound = 3e-2 if half else 1e-4
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def test_a_sigmoid_that_gates_something_else_is_no_silu() -> None:
    def gated(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(y)

    graph = torch.fx.symbolic_trace(gated).graph
    before = [node.target for node in graph.nodes]
    plain_graph.written_out_silu(graph)
    assert [node.target for node in graph.nodes] == before


def test_casts_that_change_the_dtype_stay() -> None:
    def cast(x: torch.Tensor) -> torch.Tensor:
        return x.half().float().to(torch.float32)

    graph = torch.fx.symbolic_trace(cast).graph
    value = torch.zeros(2)
    for node in graph.nodes:
        value = {"half": value.half(), "float": value.float()}.get(str(node.target), value)
        node.meta["example_value"] = value
    consumers.without_idle_casts(graph)
    assert [node.target for node in graph.nodes if node.op == "call_method"] == ["half", "float"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_group_norm_takes_parameters_in_half_precision(emulated, dtype: torch.dtype) -> None:
    from advisor.ops.group_norm import api, reference, spec

    torch.manual_seed(0)
    x = torch.randn(2, 5, 4, 16).to(dtype).permute(0, 3, 1, 2).requires_grad_()
    w, b = ((torch.rand(16) + 0.5).to(dtype).requires_grad_() for _ in range(2))
    dispatch.clear()
    with dispatch.everything():
        y = api.group_norm(x, 4, w, b, 1e-5, "relu")
    assert not catalog.get("group_norm").fell_back
    assert spec.narrow(("float16", "bfloat16")) == dispatch.UNMEASURED  # so it is not by itself, so far
    assert not spec.narrow(("float32",))
    dy = torch.randn_like(y)
    got = [y, *torch.autograd.grad(y, (x, w, b), dy)]
    wide = [t.detach().double().requires_grad_() for t in (x, w, b)]
    z = reference.group_norm(wide[0], 4, *wide[1:], 1e-5, "relu")
    for mine, want in zip(got, [z, *torch.autograd.grad(z, wide, dy.double())], strict=True):
        assert mine.dtype == dtype
        torch.testing.assert_close(mine.double(), want, rtol=2e-2, atol=5e-2)


class Signals(nn.Module):
    """A block of a ResNet of signals."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.bn = nn.Conv1d(4, 8, 5, 2, 2, bias=False), nn.BatchNorm1d(8)
        self.conv, self.bn2 = nn.Conv1d(8, 8, 3, padding=1, bias=False), nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(x)))
        return F.relu(self.bn2(self.conv(x)) + x)


@pytest.mark.usefixtures("readable_graphs")
def test_signals_in_channels_last_find_the_kernels_of_images(emulated) -> None:
    torch.manual_seed(0)
    model = Signals().train()
    plain, x = copy.deepcopy(model), torch.randn(3, 4, 16)
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=model, name="Net", args=(x,))])
    undo = ChannelsLast().apply(training, {})
    run, reports = captured(model, ("batchnorm_act",))
    dispatch.clear()
    got = trained(model, run, x)
    assert reports["batchnorm_act"].matched == {"bn": "bn+relu", "bn2": "bn+add+relu"}
    assert not catalog.get("batchnorm_act").fell_back
    undo.run()
    for mine, want in zip(got, trained(plain, plain, x), strict=True):
        torch.testing.assert_close(mine, want, rtol=1e-3, atol=1e-5)


class Half(nn.Module):
    """As a CIFAR speedrun's: all of it in fp16, norms and their statistics too."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.last = nn.Conv2d(3, 16, 3, bias=False), nn.BatchNorm2d(16), nn.BatchNorm2d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.bn(self.conv(x)))
        return F.relu(self.last(x) + x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.usefixtures("readable_graphs")
def test_a_net_that_is_half_as_a_whole_finds_the_kernels_of_batch_norm(emulated, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Half().to(dtype).to(memory_format=torch.channels_last).train()
    with torch.no_grad():
        model.bn.weight.uniform_(0.5, 1.5)
    plain, x = copy.deepcopy(model).double(), torch.randn(4, 3, 8, 8).to(dtype).to(memory_format=torch.channels_last)
    run, reports = captured(model, ("batchnorm_act",))
    dispatch.clear()
    with dispatch.everything():  # not by itself before it is measured
        got = trained(model, run, x)
    assert reports["batchnorm_act"].matched == {"bn": "bn+gelu", "last": "bn+add+relu"}
    assert sum(catalog.get("batchnorm_act").engaged.values()) == 2
    assert {buffer.dtype for name, buffer in model.named_buffers() if "running" in name} == {dtype}
    for mine, want in zip(got, trained(plain, plain, x.double()), strict=True):
        torch.testing.assert_close(mine.double(), want.double(), rtol=3e-2, atol=5e-2)
