"""Kinds of trainings under CUDA graphs, each beside an eager twin; graphs are emulated (tests/emulation/graphs.py)."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from emulation.graphs import Graph, graphs
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

from advisor.loop.training import RootModule, Training
from advisor.transforms import capture
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.graphs import calls, hooks, host_values
from advisor.transforms.graphs.calls import WARM_CALLS
from advisor.transforms.graphs.host_values import HostValues
from advisor.transforms.graphs.layer import layers
from advisor.transforms.single_device import SingleDevice

__all__ = ["graphs"]

STEPS = 10


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.norm(self.conv(x))).mean((2, 3)))


Step = Callable[[nn.Module, torch.Tensor, dict[str, Any]], torch.Tensor]


class Twins:
    """The same training twice, one of them under graphs. `step(net, x, state)` runs forward and backward and gives the loss."""

    def __init__(self, make: Callable[[], nn.Module], step: Step) -> None:
        torch.manual_seed(0)
        self.plain = make()
        torch.manual_seed(0)
        self.graphed = make()
        self.step = step
        self.states: list[dict[str, Any]] = [{}, {}]
        self.optimizers = [torch.optim.SGD(net.parameters(), 0.05, momentum=0.9) for net in (self.plain, self.graphed)]
        root = RootModule(module=self.graphed, name="Net")
        self.training = Training(device=torch.device("cuda"), roots=[root], optimizers=[self.optimizers[1]])
        self.transform = CudaGraphs()
        self.matched = self.transform.match(self.training, {})
        self.undo = self.transform.apply(self.training, {})

    def run(self, steps: int = STEPS) -> Twins:
        """Both, on the same inputs with the same random numbers; each step's losses are equal."""
        for _ in range(steps):
            x, losses = torch.randn(4, 3, 8, 8), []
            drawn = torch.get_rng_state()
            for net, optimizer, state in zip((self.plain, self.graphed), self.optimizers, self.states, strict=True):
                torch.set_rng_state(drawn)
                optimizer.zero_grad()
                losses.append(self.step(net, x, state).item())
                optimizer.step()
            assert losses[0] == pytest.approx(losses[1], rel=1e-5)
        self.hold()
        return self

    def hold(self) -> None:
        theirs = self.plain.state_dict()
        for name, value in self.graphed.state_dict().items():
            torch.testing.assert_close(value, theirs[name], msg=lambda text, n=name: f"{n}: {text}")

    @property
    def effect(self) -> Any:
        return self.transform.effect(self.training, None, None)

    @property
    def replays(self) -> float:
        return self.effect.numbers.get("replays", 0)


def trained(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    loss = net(x).square().mean()
    loss.backward()
    return loss.detach()


def test_a_replay_computes_what_the_forward_does(graphs: list[Graph]) -> None:
    found = Twins(Net, trained).run()
    assert found.replays == STEPS - WARM_CALLS
    assert [graph.replays for graph in graphs] == [STEPS - WARM_CALLS] * 2
    found.undo.run()
    found.run(2)
    assert [graph.replays for graph in graphs] == [STEPS - WARM_CALLS] * 2


def test_it_warms_until_it_replays_and_says_how_many_calls_are_lacking(graphs: list[Graph]) -> None:
    """A trial's warm-up ended with three eager steps that agreed, so a UNet's graphs were `without effect` on an H200, and no reason told it."""
    found = Twins(Net, trained)
    assert not found.transform.warming(found.training)
    assert "not called in training" in found.effect.detail
    for seen in range(1, WARM_CALLS + 1):
        found.run(1)
        assert found.transform.warming(found.training)
        assert f"it was called {seen} times, and is captured at call {WARM_CALLS + 1}" in found.effect.detail
    found.run(1)
    assert not found.transform.warming(found.training)
    assert found.replays == 1
    for net in (found.plain, found.graphed):
        net.fc.bias.data = net.fc.bias.data.clone()  # elsewhere in memory: what was captured does not fit any more
    found.run(1)
    assert found.transform.warming(found.training)
    assert "so its graph was dropped 1 times; since then it was called 1 times" in found.effect.detail


def test_gradients_of_other_strides_than_their_parameters(graphs: list[Graph]) -> None:
    """NHWC inputs and NCHW weights, as under DistributedDataParallel: what brings a gradient to its parameter's strides is replayed too."""

    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        return trained(net, x.contiguous(memory_format=torch.channels_last), state)

    found = Twins(Turned, step).run()
    assert found.replays == STEPS - WARM_CALLS


def test_gradients_that_the_script_keeps_are_not_overwritten(graphs: list[Graph]) -> None:
    """Told by references: the capture itself must hold none to what the graph writes gradients to."""

    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        loss = trained(net, x, state)
        state.setdefault("kept", []).append([p.grad for p in net.parameters()])
        return loss

    found = Twins(Net, step).run()
    assert found.replays == STEPS - WARM_CALLS
    for plain, graphed in zip(*(state["kept"] for state in found.states), strict=True):
        for one, other in zip(plain, graphed, strict=True):
            torch.testing.assert_close(other, one)


class Turned(Net):
    """Its first weight's gradient comes with other strides than the weight has."""

    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) @ self.turned.t().contiguous().t()


# ── how a module is called ──────────────────────────────────────────────────────────────────────────


class Refined(nn.Module):
    """Called with a list, a number by name and an option; gives a list, a number and None."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, images: list[torch.Tensor], iters: int = 1, *, scale: float = 1.0) -> dict[str, Any]:
        found, x = [], images[0] - images[1]
        for _ in range(iters):
            x = torch.tanh(self.conv(x.detach() if iters > 2 else x)) * scale
            found.append(x)
        return {"all": found, "iters": iters, "mask": None}


def refined(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    out = net([x, x.flip(3)], iters=3, scale=0.5)
    assert out["iters"] == 3
    assert out["mask"] is None
    valid = x[:, 0] > 0
    loss = sum(0.8 ** (2 - i) * (valid[:, None] * y).abs().mean() for i, y in enumerate(out["all"]))
    error = out["all"][-1].square().sum(1)[valid]
    state["metric"] = error.mean().item()
    loss.backward()
    return loss.detach()


def test_lists_options_and_a_masked_loss(graphs: list[Graph]) -> None:
    """A recurrence as optical flow has it: a list of images, a number of rounds, predictions in a list, boolean masks in the loss."""
    found = Twins(Refined, refined).run()
    assert found.replays == STEPS - WARM_CALLS
    assert found.states[0]["metric"] == pytest.approx(found.states[1]["metric"])


def test_another_option_is_another_graph(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["n"] = state.get("n", 0) + 1
        loss = net([x, x * 2], iters=1 + state["n"] % 2)["all"][-1].square().mean()
        loss.backward()
        return loss.detach()

    found = Twins(Refined, step).run(12)
    assert found.replays == 12 - 2 * WARM_CALLS
    assert len(graphs) == 4


def test_an_option_that_is_another_in_each_call_is_told(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        state["n"] = state.get("n", 0) + 0.25
        loss = net([x, x * 2], scale=state["n"] // 1)["all"][-1].square().mean()
        loss.backward()
        return loss.detach()

    found = Twins(Refined, step).run(24)
    assert found.replays == calls.MAX_SIGNATURES
    layer = next(iter(layers.of(found.graphed, False).forwards))
    assert "arguments that are no tensors change" in layer.reasons()[0]


# ── more than one forward at a time ──────────────────────────────────────────────────────────────────


def two_views(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
    one, other = net(x), net(x.flip(3))
    loss = -F.cosine_similarity(one, other.detach()).mean() - F.cosine_similarity(other, one.detach()).mean()
    loss.backward()
    return loss.detach()


def test_two_views_through_one_encoder(graphs: list[Graph]) -> None:
    found = Twins(Net, two_views).run(12)
    assert len(graphs) == 4  # a forward and a backward for each view
    assert graphs[0].replays > 6
    assert graphs[2].replays > 4
    assert found.replays == sum(graph.replays for graph in graphs[::2])


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 3, 3, padding=1)

    def forward(self, state: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(torch.cat([state, x], 1)))


def test_a_module_that_the_script_calls_over_and_over(graphs: list[Graph]) -> None:
    def unrolled(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        h = torch.zeros_like(x)
        for _ in range(4):
            h = net(h, x)
        loss = h.square().mean()
        loss.backward()
        return loss.detach()

    found = Twins(Cell, unrolled).run(16)
    assert found.replays > 16 * 3  # all four calls of the later steps
    assert not [reason for reason in layers.of(found.graphed, False).failures if "wait" in reason]


def test_the_calls_that_wait_have_an_end(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_IN_FLIGHT", 2)

    def kept(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        outputs = [net(x + i) for i in range(3)]
        loss = sum(output.square().mean() for output in outputs)
        loss.backward()
        return loss.detach()

    found = Twins(Net, kept).run(8)
    assert len(graphs) == 4
    assert "2 earlier forwards wait for their backward" in layers.of(found.graphed, False).failures


def test_no_graph_is_made_where_no_memory_is_left_for_it(graphs: list[Graph], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (0, 1 << 40))
    found = Twins(Net, two_views).run(8)
    assert len(graphs) == 2
    (why,) = [reason for reason in layers.of(found.graphed, False).failures if "no memory" in reason]
    assert why == "1 earlier forwards wait for their backward, and no memory is left for one graph more"


class Critic(Net):
    pass


def test_a_critic_that_learns_and_then_only_judges(graphs: list[Graph]) -> None:
    """A GAN's: two forwards and one backward with its parameters, then one for the gradient of its input alone."""

    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        fake = (x * 0.5).requires_grad_()
        net.requires_grad_(True)
        loss = net(fake.detach()).mean() - net(x).mean()
        loss.backward()
        net.requires_grad_(False)
        judged = -net(fake).mean()
        judged.backward()
        net.requires_grad_(True)
        return loss.detach() + fake.grad.abs().sum()

    found = Twins(Critic, step).run(14)
    assert len(graphs) == 6
    assert found.replays > 20
    assert found.matched.applies


def test_a_graph_that_is_kept_for_a_second_backward(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        out = net(x)
        out.mean().backward(retain_graph=True)
        loss = out.square().mean()
        loss.backward()
        return loss.detach()

    found = Twins(Net, step).run()
    assert found.replays == STEPS - WARM_CALLS
    assert [graph.replays for graph in graphs] == [STEPS - WARM_CALLS, 2 * (STEPS - WARM_CALLS)]


def test_a_summed_loss_that_keeps_its_graph(graphs: list[Graph]) -> None:
    """`total += loss`, printed and begun anew every few steps; gradients go past autograd behind the first such end."""

    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        loss = net(x).square().mean()
        loss.backward()
        state["total"] = state.get("total", 0) + loss
        state["n"] = state.get("n", 0) + 1
        state["loss"] = loss
        if state["n"] % 16 == 0:
            state["total"] = 0
        return loss.detach()

    found = Twins(Net, step).run(60)
    assert found.replays == 60 - WARM_CALLS
    (captured,) = next(iter(layers.of(found.graphed, False).forwards)).all()
    assert captured.gradients.watched is False


def test_second_derivatives_are_told(graphs: list[Graph]) -> None:
    def penalised(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = net(x).sum()
        (slope,) = torch.autograd.grad(out, x, create_graph=True)
        loss = out * 0.01 + slope.square().sum()
        loss.backward()
        return loss.detach()

    found = Twins(Net, penalised).run()
    assert found.replays == 0
    assert "create_graph" in found.effect.detail
    assert graphs == []


class Detector(nn.Module):
    """A backbone, and a loss with a mask in the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 8, 3, padding=1),
            nn.BatchNorm2d(8),
            nn.ReLU(),
            nn.Conv2d(8, 8, 3, padding=1),
            nn.BatchNorm2d(8),
        )
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.head(F.relu(self.body(x)))
        chosen = scores.permute(0, 2, 3, 1)[x[:, 0] > 0.5]
        return chosen.square().mean() + scores.abs().mean()


def test_a_loss_with_masks_in_the_forward_leaves_the_larger_parts_to_graphs(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        loss = net(x)
        loss.backward()
        return loss.detach()

    found = Twins(Detector, step).run(14)
    assert found.replays >= 14 - 2 * WARM_CALLS - 1
    assert f"{Path(__file__).name}:" in found.effect.detail  # the line that chooses
    assert found.graphed.head.__dict__.get("forward") is None
    assert found.graphed.body.__dict__.get("forward") is not None
    found.undo.run()
    assert found.graphed.body.__dict__.get("forward") is None
    before = len(graphs)
    again = found.transform.apply(found.training, {})
    found.run(3)
    assert len(graphs) == before
    again.run()
    found.transform.release(found.training)
    assert found.replays == 0


# ── weights that are computed ────────────────────────────────────────────────────────────────────────


class Scaled:
    """A hook of the script's own that computes a weight, as equalised learning rates have it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def compute(self, module: nn.Module) -> torch.Tensor:
        weight = getattr(module, self.name + "_orig")
        return weight * (2.0 / weight[0].numel()) ** 0.5

    def __call__(self, module: nn.Module, _: Any) -> None:
        setattr(module, self.name, self.compute(module))


def scaled(module: nn.Module) -> nn.Module:
    weight = module.weight
    del module._parameters["weight"]
    module.register_parameter("weight_orig", nn.Parameter(weight.detach()))
    module.weight = weight.detach()
    module.register_forward_pre_hook(Scaled("weight"))
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(module)


class Computed(nn.Module):
    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.conv, self.fc = how(nn.Conv1d(24, 8, 3, padding=1)), how(nn.Linear(8, 5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(F.relu(self.conv(x.reshape(4, 24, 8))).mean(2))


HOW = [
    old_weight_norm,
    nn.utils.spectral_norm,
    nn.utils.parametrizations.weight_norm,
    nn.utils.parametrizations.spectral_norm,
    scaled,
]


@pytest.mark.parametrize("how", HOW, ids=lambda how: f"{how.__module__.rpartition('.')[2]}.{how.__name__}")
def test_weights_that_a_forward_computes(how: Callable[[nn.Module], nn.Module], graphs: list[Graph]) -> None:
    found = Twins(lambda: Computed(how), trained).run()
    assert found.replays == STEPS - WARM_CALLS


def test_a_computed_weight_is_the_forwards_own_afterwards(graphs: list[Graph]) -> None:
    """The loss reads it: values and gradients go through the graph."""

    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        loss = net(x).square().mean() + 0.1 * net.conv.weight.abs().sum()
        loss.backward()
        return loss.detach()

    found = Twins(lambda: Computed(old_weight_norm), step).run()
    assert found.replays == STEPS - WARM_CALLS


class Seen(list):
    pass


seen = Seen()


def fills_a_list(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    seen.append(output)


def counts(module: nn.Module, args: Any) -> None:
    module.count = module.count + 1


def doubles(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
    return torch.mul(output, 2.0)


@pytest.mark.parametrize("hook", [fills_a_list, counts])
def test_hooks_that_do_more_than_compute_are_told_by_their_line(hook: Any, graphs: list[Graph]) -> None:
    def make() -> nn.Module:
        net = Net()
        net.conv.count = torch.zeros(())
        register = net.conv.register_forward_hook if hook is fills_a_list else net.conv.register_forward_pre_hook
        register(hook)
        return net

    found = Twins(make, trained)
    assert not found.matched.applies
    assert f"conv has a hook ({hook.__name__}, {__file__}:" in found.matched.reason
    assert "which a replay would not do" in found.matched.reason


def test_a_hook_that_only_computes(graphs: list[Graph]) -> None:
    def make() -> nn.Module:
        net = Net()
        net.conv.register_forward_hook(doubles)
        return net

    assert Twins(make, trained).run().replays == STEPS - WARM_CALLS


@pytest.mark.parametrize("hook", [lambda m, args: None, print, len])
def test_a_hook_without_a_source_is_not_trusted(hook: Any) -> None:
    net = Net()
    net.conv.register_forward_pre_hook(hook)
    assert "has no source that could be read" in hooks.unfit(net)


def test_a_backward_hook_is_told(graphs: list[Graph]) -> None:
    net = Net()
    net.conv.register_full_backward_hook(fills_a_list)
    assert "conv has a backward hook (fills_a_list, " in hooks.unfit(net)


# ── what a capture cannot hold ───────────────────────────────────────────────────────────────────────


class Reads(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        return y * 0 if y.sum().item() > 1e9 else y


class Draws(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1.0 if random.random() < 2 else 0.0)


class Keeps(Net):
    def __init__(self) -> None:
        super().__init__()
        self.average = torch.zeros(5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y + self.average


class Odd(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return random.Random(0) if x.shape[0] == 0 else (super().forward(x), object())[0:2]


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Reads, "it waits for the device, which a capture cannot"),
        (Draws, "draws random numbers on the host"),
        (Keeps, "replaces tensors that its modules keep: average"),
    ],
)
def test_what_a_capture_cannot_hold_is_told_and_runs_eagerly(
    make: Callable[[], nn.Module], why: str, graphs: list[Graph]
) -> None:
    found = Twins(make, trained).run()
    assert found.replays == 0
    assert why in found.effect.detail
    assert found.effect.passed is False
    assert torch.cuda.current_stream() is torch.cuda.default_stream()
    if make is Reads:
        assert f"{Path(__file__).name}:" in found.effect.detail  # the line that reads


def test_what_is_returned_beside_tensors_is_told(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        loss = net(x)[0].square().mean()
        loss.backward()
        return loss.detach()

    found = Twins(Odd, step).run()
    assert "it returns a object, which no replay would make" in found.effect.detail


def test_a_module_that_is_only_evaluated_is_told(graphs: list[Graph]) -> None:
    def step(net: nn.Module, x: torch.Tensor, state: dict[str, Any]) -> torch.Tensor:
        net.eval()
        return trained(net, x, state)

    assert "evaluation mode or without gradients" in Twins(Net, step).run(5).effect.detail


# ── numbers of the host ──────────────────────────────────────────────────────────────────────────────


class OnDevice(torch.Tensor):
    """A tensor of this machine that counts as one of the device."""


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """`tensor.type_as(on)` brings a tensor to the device, where `on` is an OnDevice."""
    plain = torch.Tensor.type_as

    def type_as(tensor: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        found = plain(tensor, other).clone()
        return found.as_subclass(OnDevice) if isinstance(other, OnDevice) else found

    monkeypatch.setattr(torch.Tensor, "type_as", type_as)
    monkeypatch.setattr(host_values, "on_device", lambda tensor: isinstance(tensor, OnDevice))
    monkeypatch.setattr(host_values, "on_host", lambda tensor: type(tensor) is torch.Tensor)


@pytest.mark.usefixtures("device")
def test_a_table_is_brought_from_the_host_once() -> None:
    there, found = torch.zeros(1).as_subclass(OnDevice), HostValues()

    def forward(scale: float = 1.0, times: int = 1) -> list[torch.Tensor]:
        return [(torch.arange(4.0) * scale * i).type_as(there) for i in range(1, 1 + times)]

    def in_a_capture(**options: Any) -> list[torch.Tensor]:
        with found.standing(within=False):
            return forward(**options)

    for _ in range(2):
        with found.watching(within=False):
            forward(times=2)
    assert found.differ() == ""
    assert [t.tolist() for t in in_a_capture(times=2)] == [[0, 1, 2, 3], [0, 2, 4, 6]]
    in_a_capture(times=2)[0].zero_()  # the forward's own
    assert in_a_capture(times=2)[0].tolist() == [0, 1, 2, 3]
    for options in ({"scale": 2.0}, {"times": 3}):
        with pytest.raises(RuntimeError, match=r"brings other numbers from the host at each call \(.*\.py:\d+\)"):
            in_a_capture(**{"times": 2, **options})
    with found.watching(within=False):
        forward(scale=3.0, times=2)
    assert "brings other numbers from the host at each call" in found.differ()
    for times in (2, 1):
        with found.watching(within=False):
            forward(times=times)
    assert "in some calls alone" in found.differ()
    for times in (1, 2):  # where Dynamo captures, only what runs in its graphs
        with found.watching(within=True):
            forward(times=3)
            host_values.inside(lambda times=times: forward(times=times))
    assert "in some calls alone" in found.differ()


class Tabled(nn.Module):
    """Makes a table in each forward, and moves it to where its input is."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = torch.arange(8, dtype=torch.float64).to(device=x.device, dtype=x.dtype)
        return self.fc(x.mean((1, 2)) + table.to(torch.float64).type_as(x))


@pytest.mark.parametrize("whose", ["ours", "the script's"])
def test_stand_ins_for_what_brings_numbers_are_hidden_from_dynamo(whose: str, graphs: list[Graph]) -> None:
    """It guards on torch's own functions: each watched call was compiled anew, and the graph broke where the stand-in was."""

    def make() -> nn.Module:
        net = Tabled()
        if whose != "ours":
            net.__dict__["forward"] = torch.compile(type(net).forward.__get__(net), backend="eager", dynamic=False)
        return net

    found = Twins(make, trained)
    if whose == "ours":
        capture.set_family([found.graphed], "bias_act")
    torch._dynamo.utils.counters.clear()
    found.run()
    assert found.replays == STEPS - WARM_CALLS
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


# ── wrappers of one ──────────────────────────────────────────────────────────────────────────────────


def replicated(**options: Any) -> Callable[[], nn.Module]:
    return lambda: nn.parallel.DistributedDataParallel(Net(), **options)


@pytest.mark.usefixtures("process_group")
@pytest.mark.parametrize("passes", [False, True])
@pytest.mark.parametrize("options", [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}])
def test_data_parallel_of_one_process_is_the_module_in_it(
    options: dict[str, bool], passes: bool, graphs: list[Graph]
) -> None:
    found = Twins(replicated(**options), trained)
    assert found.matched.sites == ("Net",)
    if passes:
        SingleDevice().apply(found.training, {})
    found.run(14)
    assert found.replays == 14 - WARM_CALLS
    (captured,) = next(iter(layers.of(found.graphed.module, False).forwards)).all()
    assert captured.gradients.watched is (False if passes else None)  # edges, which its reducer hears of
    assert list(found.graphed.state_dict()) == list(found.plain.state_dict())


@pytest.mark.usefixtures("process_group")
def test_data_parallel_of_one_process_goes_on_when_it_is_passed_by_no_longer(graphs: list[Graph]) -> None:
    found = Twins(replicated(), trained)
    undo = SingleDevice().apply(found.training, {})
    found.run(6)
    undo.run()
    found.run(4)
    found.undo.run()
    found.run(2)


@pytest.mark.usefixtures("process_group")
def test_a_communication_hook_is_not_passed_by() -> None:
    net = nn.parallel.DistributedDataParallel(Net())
    net.register_comm_hook(None, fp16_compress_hook)
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])
    match = SingleDevice().match(training, {})
    assert not match.applies
    assert (
        match.reason == "Net: DistributedDataParallel hands each gradient to a communication hook (fp16_compress_hook)"
    )


def test_replicas_of_one_device(graphs: list[Graph]) -> None:
    def make() -> nn.Module:
        wrapped = nn.DataParallel(Net())
        wrapped.device_ids = []
        return wrapped

    assert Twins(make, trained).run().replays == STEPS - WARM_CALLS
