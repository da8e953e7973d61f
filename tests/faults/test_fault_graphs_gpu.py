"""What a CUDA graph may freeze that the training changes (number 91 in catalogue.yaml): each beside an eager twin."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from advisor.loop.training import RootModule, Training
from advisor.transforms import direct_gradients
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.graphs import calls

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

DEVICE = "cuda"
STEPS = 12  # nine of them replays


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0, reads: bool = False) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)
        self.dropout, self.reads = dropout, reads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.dropout(F.relu(self.bn(self.conv(x))), self.dropout, self.training)
        if self.reads and x.sum().item() < 0:
            x = x * 0
        return self.fc(x.mean((2, 3)))


class Pair:
    """A loop with graphs and the same loop without."""

    def __init__(self, **options: bool | float) -> None:
        torch.manual_seed(0)
        self.plain = Net(**options).to(DEVICE)
        self.graphed = copy.deepcopy(self.plain)
        self.optimizers = [
            torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (self.plain, self.graphed)
        ]
        root = RootModule(module=self.graphed, name="Net")
        self.training = Training(device=torch.device(DEVICE), roots=[root], optimizers=[self.optimizers[1]])
        self.transform = CudaGraphs()
        self.undo = self.transform.apply(self.training, {})

    def step(self, shape: tuple[int, ...] = (16, 3, 8, 8), parts: int = 1) -> list[float]:
        """One update of each from the same numbers; the losses."""
        batches = [
            (torch.randn(shape, device=DEVICE), torch.randint(5, shape[:1], device=DEVICE)) for _ in range(parts)
        ]
        losses = []
        for net, optimizer in zip((self.plain, self.graphed), self.optimizers, strict=True):
            optimizer.zero_grad()
            for x, y in batches:
                loss = F.cross_entropy(net(x), y)
                loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    def assert_alike(self) -> None:
        theirs = self.plain.state_dict()
        for name, value in self.graphed.state_dict().items():
            torch.testing.assert_close(
                value, theirs[name], rtol=1e-3, atol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
            )

    @property
    def replays(self) -> float:
        return self.transform.effect(self.training, None, None).numbers.get("replays", 0)


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    with torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False):
        yield


@pytest.fixture
def pair() -> Iterator[Callable[..., Pair]]:
    made: list[Pair] = []

    def make(**options: bool | float) -> Pair:
        made.append(Pair(**options))
        return made[-1]

    yield make
    for each in made:
        each.undo.run()
        each.transform.release(each.training)


def test_a_schedule_goes_on_under_graphs(pair: Callable[..., Pair]) -> None:
    found = pair()
    schedules = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7) for optimizer in found.optimizers]
    for _ in range(STEPS):
        found.step()
        for schedule in schedules:
            schedule.step()
    assert found.replays == STEPS - 3
    found.assert_alike()
    before = [p.detach().clone() for p in found.graphed.parameters()]
    for optimizer in found.optimizers:
        optimizer.param_groups[0]["lr"] = 0.0
    found.step()
    assert all(torch.equal(a, b) for a, b in zip(before, found.graphed.parameters(), strict=True))


def test_statistics_and_their_counter_go_on_under_graphs(pair: Callable[..., Pair]) -> None:
    found = pair()
    for _ in range(STEPS):
        found.step()
    assert found.replays == STEPS - 3
    assert found.graphed.bn.num_batches_tracked.item() == STEPS
    found.assert_alike()


def test_shapes_that_change_are_computed_all_the_same(pair: Callable[..., Pair]) -> None:
    found = pair()
    sizes = [(16, 8), (5, 8), (16, 12), (3, 10), (7, 9), (2, 16)]
    for _ in range(5):  # every size often enough to be captured, were there no limit
        for batch, size in sizes:
            found.step((batch, 3, size, size))
    assert found.replays == 2 * calls.MAX_SIGNATURES
    found.assert_alike()
    found.training.fixed_shapes = False
    assert not found.transform.match(found.training, {}).applies


def accumulated(found: Pair) -> list[float]:
    """How far the graphs' summed gradients are from eager ones, relative, in each of some updates from equal states."""
    errors = []
    for _ in range(STEPS):
        found.graphed.load_state_dict(found.plain.state_dict())
        found.step(parts=3)
        ours, theirs = ([p.grad for p in net.parameters()] for net in (found.graphed, found.plain))
        flat = [torch.cat([g.flatten() for g in side if g is not None]) for side in (ours, theirs)]
        errors.append(((flat[0] - flat[1]).norm() / flat[1].norm()).item())
    return errors


def test_gradients_accumulate_under_graphs(pair: Callable[..., Pair]) -> None:
    found = pair()
    errors = accumulated(found)
    assert found.replays == 3 * STEPS - 3
    assert max(errors) < 1e-3, errors


def test_gradients_that_are_not_kept_are_seen(pair: Callable[..., Pair], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_gradients.ParameterGradients, "keep", lambda captured: {})
    assert max(accumulated(pair())) > 0.1


def test_gradients_go_past_autograd_and_hooks_run_all_the_same(pair: Callable[..., Pair]) -> None:
    found = pair()
    for _ in range(6):
        found.step()
    x = torch.randn(16, 3, 8, 8, device=DEVICE)
    found.plain(x)  # statistics go on there too
    out = found.graphed(x)
    assert len([node for node, _ in out.grad_fn.next_functions if node is not None]) == 1
    del out  # a forward that waits for its backward keeps the next one from being replayed
    for net in (found.plain, found.graphed):
        net.fc.weight.register_hook(lambda g: g * 2)
    for _ in range(3):
        found.step()
    found.assert_alike()


def test_gradients_that_are_asked_for_are_found_under_graphs(pair: Callable[..., Pair]) -> None:
    found = pair()
    for _ in range(6):
        found.step()
    x, y = torch.randn(16, 3, 8, 8, device=DEVICE), torch.randint(5, (16,), device=DEVICE)
    nets = (found.graphed, found.plain)
    for optimizer in found.optimizers:
        optimizer.zero_grad()
    ours, theirs = (torch.autograd.grad(F.cross_entropy(net(x), y), [net.conv.weight, net.fc.bias]) for net in nets)
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)
    assert found.graphed.fc.bias.grad is None
    for net in nets:
        F.cross_entropy(net(x), y).backward(inputs=[net.fc.weight])
    torch.testing.assert_close(found.graphed.fc.weight.grad, found.plain.fc.weight.grad, rtol=1e-3, atol=1e-4)
    assert found.graphed.conv.weight.grad is None


def test_on_another_stream_every_parameter_has_its_edge(pair: Callable[..., Pair]) -> None:
    found = pair()
    for _ in range(6):
        found.step()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        out = found.graphed(torch.randn(16, 3, 8, 8, device=DEVICE))
    torch.cuda.current_stream().wait_stream(stream)
    edges = [node for node, _ in out.grad_fn.next_functions if node is not None]
    assert len(edges) == len(list(found.graphed.parameters()))


def test_gradients_stay_when_the_next_forward_runs(pair: Callable[..., Pair]) -> None:
    """Of parameters and of inputs, read only after it."""
    found = pair()
    for _ in range(5):
        found.step()
    (x, y) = torch.randn(16, 3, 8, 8, device=DEVICE, requires_grad=True), torch.randint(5, (16,), device=DEVICE)
    for _ in range(5):  # an input with a gradient is another signature
        found.optimizers[1].zero_grad()
        x.grad = None
        F.cross_entropy(found.graphed(x), y).backward()
        kept = [t.grad for t in (x, *found.graphed.parameters())]
        values = [g.clone() for g in kept if g is not None]
        F.cross_entropy(found.graphed(x.detach() * 2), y)
        F.cross_entropy(found.graphed(x * 2), y)
        assert all(torch.equal(g, value) for g, value in zip(kept, values, strict=True))


@pytest.mark.parametrize("accumulated", [False, True])
@pytest.mark.parametrize("alias", [lambda g: g, torch.Tensor.detach])
def test_gradients_that_the_script_keeps_outlast_the_next_backward(
    pair: Callable[..., Pair], alias: Callable[[torch.Tensor], torch.Tensor], accumulated: bool
) -> None:
    found = pair()
    for _ in range(6):
        found.step()
    kept: list[list[torch.Tensor]] = []
    replays = found.replays
    for _ in range(3):
        x, y = torch.randn(16, 3, 8, 8, device=DEVICE), torch.randint(5, (16,), device=DEVICE)
        for module, optimizer in zip((found.plain, found.graphed), found.optimizers, strict=True):
            if not accumulated:
                optimizer.zero_grad()
            F.cross_entropy(module(x), y).backward()
            kept.append([alias(p.grad) for p in module.parameters() if p.grad is not None])
    assert found.replays == replays + 3
    for plain, graphed in zip(kept[::2], kept[1::2], strict=True):
        for one, other in zip(plain, graphed, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-2, atol=1e-3)


def test_a_forward_that_reads_a_number_stays_eager(pair: Callable[..., Pair]) -> None:
    found = pair(reads=True)
    for _ in range(STEPS):
        found.step()
    found.assert_alike()
    effect = found.transform.effect(found.training, None, None)
    assert effect.passed is False
    assert "no graph was replayed (" in effect.detail
    torch.randn(4, device=DEVICE)  # the generator has left the capture that failed


class Replacing(Net):
    """Keeps an average in a buffer that every forward replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.average = 0.9 * self.average + 0.1 * y.detach().mean(0)
        return y + self.average


def test_a_forward_that_replaces_a_buffer_stays_eager() -> None:
    torch.manual_seed(0)
    plain = Replacing().to(DEVICE)
    graphed = copy.deepcopy(plain)
    training = Training(device=torch.device(DEVICE), roots=[RootModule(module=graphed, name="Replacing")])
    transform = CudaGraphs()
    undo = transform.apply(training, {})
    try:
        for _ in range(STEPS):
            x = torch.randn(16, 3, 8, 8, device=DEVICE)
            torch.testing.assert_close(graphed(x), plain(x), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(graphed.average, plain.average, rtol=1e-3, atol=1e-4)
        effect = transform.effect(training, None, None)
        assert effect.passed is False
        assert "replaces tensors that its modules keep: average" in effect.detail
    finally:
        undo.run()


def test_dropout_draws_anew_in_each_replay(pair: Callable[..., Pair]) -> None:
    found = pair(dropout=0.5)
    for _ in range(5):
        found.step()
    x = torch.randn(16, 3, 8, 8, device=DEVICE)
    outputs = [found.graphed(x).detach().clone() for _ in range(4)]
    assert found.replays == 2 + 4
    for a, b in itertools.pairwise(outputs):
        assert not torch.equal(a, b)


class Cast(Net):
    """Computes in half precision, whatever surrounds it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            return super().forward(x).float()


@pytest.mark.parametrize("around", [True, False])
def test_casts_of_weights_follow_their_updates(around: bool) -> None:
    """Also one that autocast keeps from a call before the capture, in the region around both."""
    torch.manual_seed(0)
    nets = [Cast().to(DEVICE)]
    nets.append(copy.deepcopy(nets[0]))
    training = Training(device=torch.device(DEVICE), roots=[RootModule(module=nets[1], name="Cast")])
    transform = CudaGraphs()
    undo = transform.apply(training, {})
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    try:
        for _ in range(STEPS):
            x, y = torch.randn(16, 3, 8, 8, device=DEVICE), torch.randint(5, (16,), device=DEVICE)
            losses = []
            for net, optimizer in zip(nets, optimizers, strict=True):
                optimizer.zero_grad()
                with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=around):
                    other = net.fc(x.mean((2, 3)).repeat(1, 3)[:, :8])  # its weight's cast stays until the region's end
                    loss = F.cross_entropy(net(x), y) + 0.1 * F.cross_entropy(other.float(), y)
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            assert losses[1] == pytest.approx(losses[0], rel=2e-2)
        assert transform.effect(training, None, None).numbers["replays"] == STEPS - 3
        for ours, theirs in zip(nets[1].parameters(), nets[0].parameters(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    finally:
        undo.run()
