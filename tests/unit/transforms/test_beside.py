"""What reads a gradient of the second stream, by a model of streams on a CPU; test_cuda_graphs_gpu.py has the streams themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from emulation.device import emulated
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from advisor.loop.training import RootModule, Training
from advisor.ops.weight_casts import cast_weights
from advisor.transforms import beside, cuda_graphs
from advisor.transforms.beside import WeightGradientsBeside
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.gradient_stream import GradientStream

__all__ = ["emulated"]


class Stream:
    """Operations in order; `seen` says how many of each stream's come before what is launched here next."""

    def __init__(self, *_: object) -> None:
        self.seen: dict[int, int] = {id(self): 0}

    def launch(self) -> tuple[int, int]:
        self.seen[id(self)] += 1
        return id(self), self.seen[id(self)]

    def record_event(self) -> dict[int, int]:
        return dict(self.seen)

    def wait_event(self, event: dict[int, int]) -> None:
        for stream, count in event.items():
            self.seen[stream] = max(self.seen.get(stream, 0), count)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.seen)


class Recorder(TorchDispatchMode):
    """Notes every race: memory read, or written once more, on a stream that has not waited for who wrote or read it last."""

    def __init__(self, streams: list[Stream]) -> None:
        super().__init__()
        self.streams = streams
        self.races: list[str] = []
        self.on_side: list[str] = []
        self.launched: list[tuple[str, Stream]] = []
        self.made_there: set[int] = set()
        self._users: dict[int, list[tuple[tuple[int, int], bool]]] = {}  # memory → (launch, wrote)
        self._alive: list[torch.Tensor] = []  # so that no address is given out twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        stream = self.streams[-1]
        before = dict(stream.seen)
        launch = stream.launch()
        self.launched.append((str(func), stream))
        read = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        found = func(*args, **(kwargs or {}))
        written = [t for t in pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
        self._alive += read + written
        if len(self.streams) > 1:
            self.on_side.append(str(func))
            self.made_there |= {t.untyped_storage().data_ptr() for t in written} - set(self._users)
        for tensor in read:
            for (where, number), wrote in self._users.get(tensor.untyped_storage().data_ptr(), ()):
                if (wrote or func._schema.is_mutable) and before.get(where, 0) < number:
                    self.races.append(f"{func} reads before it is written")
        for tensors, wrote in ((read, func._schema.is_mutable), (written, True)):
            for tensor in tensors:
                self._users.setdefault(tensor.untyped_storage().data_ptr(), []).append((launch, wrote))
        return found


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The current stream last."""
    current = [Stream()]

    @contextmanager
    def on(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: current[-1])
    return current


def gradients(
    streams: list[Stream] | None, loss: Callable[[], torch.Tensor], leaves: list[torch.Tensor]
) -> tuple[list[torch.Tensor], Recorder | None, WeightGradientsBeside | None]:
    """Of the loss, on one stream where `streams` is None; and what was launched where."""
    value = loss()
    if streams is None:
        return list(torch.autograd.grad(value, leaves)), None, None
    recorder, mode = Recorder(streams), WeightGradientsBeside(torch.device("cpu"))
    with recorder:
        with mode:
            found = list(torch.autograd.grad(value, leaves))
        for gradient in found:
            gradient.clone()  # the first reader behind the backward
    return found, recorder, mode


def plain(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    for weight in weights:
        x = F.relu(F.conv2d(x, weight, padding=1))
    return x


def under_autocast(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return plain(x, weights)


def cast_together(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return plain(x.bfloat16(), list(cast_weights(torch.bfloat16, *weights)))


def shared(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    return plain(x, [weights[0], weights[1], weights[0], weights[0]])


def with_a_product(x: torch.Tensor, weights: list[torch.Tensor]) -> torch.Tensor:
    """The first weight is used by a convolution and by a product, and all are cast as one with the product's own."""
    *convs, last = cast_weights(torch.bfloat16, *weights)
    y = plain(x.bfloat16(), convs)
    return y.mean((2, 3)) @ (last.flatten(1)[:, :8] + convs[0].flatten(1)[:, :8])


FORWARDS = (plain, under_autocast, cast_together, shared, with_a_product)


@pytest.mark.parametrize("forward", FORWARDS, ids=lambda f: f.__name__)
def test_gradients_are_the_same_and_nothing_is_read_too_early(streams, forward) -> None:
    torch.manual_seed(0)
    x, weights = torch.randn(2, 8, 9, 7), [torch.randn(8, 8, 3, 3, requires_grad=True) for _ in range(3)]
    leaves = weights[:2] if forward is shared else weights
    expected, _, _ = gradients(None, lambda: forward(x, weights).float().square().sum(), leaves)
    found, recorder, mode = gradients(streams, lambda: forward(x, weights).float().square().sum(), leaves)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert recorder is not None
    assert mode is not None
    assert recorder.races == []
    assert mode.moved == {shared: 4, with_a_product: 2}.get(forward, 3)
    assert mode._made <= recorder.made_there  # nothing of the first stream's, where another tensor may lie later
    assert len(recorder.on_side) >= mode.moved
    assert len(streams) == 1


def test_what_is_made_of_them_follows_them(streams) -> None:
    x, weights = torch.randn(2, 8, 9, 7), [torch.randn(8, 8, 3, 3, requires_grad=True) for _ in range(2)]
    _, recorder, _ = gradients(streams, lambda: cast_together(x, weights).float().sum(), weights)
    assert recorder is not None
    assert [name for name in recorder.on_side if "foreach_copy" in name]


@pytest.mark.parametrize("forward", [cast_together, with_a_product], ids=lambda f: f.__name__)
def test_the_kernel_that_casts_them_does_not_run_ahead_of_them(emulated, streams, forward) -> None:
    """PyTorch sees no launch of ours: the kernel once read gradients on the first stream, which the second had yet to write."""
    x, weights = torch.randn(2, 8, 9, 7), [torch.randn(8, 8, 3, 3, requires_grad=True) for _ in range(3)]
    expected, _, _ = gradients(None, lambda: forward(x, weights).float().square().sum(), weights)
    found, recorder, _ = gradients(streams, lambda: forward(x, weights).float().square().sum(), weights)
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    assert emulated.launches["cast_tensors"] == 4
    assert recorder is not None
    assert recorder.races == []
    seen = [name for name, _ in recorder.launched if "cast_into" in name]
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("the end does not wait", lambda m: m.setattr(Stream, "wait_stream", lambda self, other: None)),
        ("the second does not wait", lambda m: m.setattr(Stream, "wait_event", lambda self, event: None)),
        ("what is made of them stays", lambda m: m.setattr(beside, "memory_of", lambda tensor: object())),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_missing_wait_is_seen(streams, monkeypatch: pytest.MonkeyPatch, name: str, change) -> None:
    """The model of streams finds what these tests are for."""
    x, weights = torch.randn(2, 8, 9, 7), [torch.randn(8, 8, 3, 3, requires_grad=True) for _ in range(3)]
    change(monkeypatch)
    _, recorder, _ = gradients(streams, lambda: under_autocast(x, weights).float().sum(), weights)
    assert recorder is not None
    assert recorder.races


def test_what_is_read_there_is_kept_until_the_first_stream_has_waited(streams) -> None:
    x, weights = torch.randn(2, 8, 9, 7), [torch.randn(8, 8, 3, 3, requires_grad=True) for _ in range(6)]
    value = plain(x, weights).sum()
    most = 0

    class Watched(WeightGradientsBeside):
        def _catch_up(self) -> None:
            nonlocal most
            super()._catch_up()
            most = max(most, len(self._running))
            for done, _ in self._running:  # what was let go of has been waited for, and what is kept has not
                assert any(streams[0].seen.get(s, 0) < count for s, count in done.items())

    with Recorder(streams), Watched(torch.device("cpu")) as mode:
        torch.autograd.grad(value, weights)
    assert most == 1
    assert not mode._running


class Computed(nn.Module):
    """A weight that is made of a parameter."""

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / weight.norm()


def test_gradients_of_computed_weights_stay(streams) -> None:
    conv = nn.Conv2d(8, 8, 3, bias=False)
    nn.utils.parametrize.register_parametrization(conv, "weight", Computed())
    leaf = conv.parametrizations.weight.original
    x = torch.randn(2, 8, 9, 7, requires_grad=True)
    _, recorder, mode = gradients(streams, lambda: conv(x).square().sum(), [leaf, x])
    assert recorder is not None
    assert mode is not None
    assert mode.moved == 0
    assert recorder.on_side == []


def test_a_first_convolution_and_a_bias(streams) -> None:
    """No gradient of the input is asked for; the bias's goes along."""
    conv = nn.Conv2d(3, 8, 3)
    x = torch.randn(2, 3, 9, 7)
    expected = torch.autograd.grad(conv(x).square().sum(), [conv.weight, conv.bias])
    found, recorder, mode = gradients(streams, lambda: conv(x).square().sum(), [conv.weight, conv.bias])
    assert recorder is not None
    assert mode is not None
    assert mode.moved == 1
    assert recorder.races == []
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)


def test_memory_of_the_first_stream_is_written_there(streams) -> None:
    """Else it would count as the second's, and so would what lies there once it is given back."""
    x, dy = torch.randn(2, 8, 9, 7), torch.randn(2, 8, 9, 7)
    weight = torch.randn(8, 8, 3, 3, requires_grad=True)
    recorder, mode = Recorder(streams), WeightGradientsBeside(torch.device("cpu"))
    with recorder, mode, torch.no_grad():
        _, dweight, _ = torch.ops.aten.convolution_backward(
            dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]
        )
        total = torch.zeros(8, 8, 3, 3)
        total.add_(dweight)
        total.clone()
        dweight.mul_(2.0)
        dweight.clone()
    assert recorder.races == []
    assert "aten.add_.Tensor" not in recorder.on_side
    assert recorder.on_side[1:] == ["aten.mul_.Tensor", "aten.clone.default"]
    assert mode._made <= recorder.made_there


class Sum(torch.autograd.Function):
    """Gives the same gradient to both."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return dy, dy


class Doubled(torch.autograd.Function):
    """Writes into the gradient that it is given, which it must not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
        return dy.mul_(2)


@pytest.mark.parametrize("waits", [True, False])
def test_what_is_written_in_place_waits_for_who_reads_it_there(streams, monkeypatch, waits: bool) -> None:
    if not waits:
        monkeypatch.setattr(WeightGradientsBeside, "wait_for_readers", lambda self, memory: None)
    conv = nn.Conv2d(8, 8, 3, padding=1, bias=False)
    x, y = (torch.randn(2, 8, 9, 7, requires_grad=True) for _ in range(2))
    double = Doubled.apply(y)  # before the convolution, so that its gradient comes later
    _, recorder, mode = gradients(streams, lambda: Sum.apply(conv(x), double).square().sum(), [conv.weight, x, y])
    assert recorder is not None
    assert mode is not None
    assert mode.moved == 1
    assert (recorder.races == []) == waits


def test_an_error_in_the_backward_comes_through(streams) -> None:
    class Raises(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: torch.Tensor) -> torch.Tensor:
            raise ValueError("mine")

    conv = nn.Conv2d(3, 8, 3)
    value = conv(Raises.apply(torch.randn(2, 3, 9, 7, requires_grad=True))).sum()
    with pytest.raises(ValueError, match="mine"), WeightGradientsBeside(torch.device("cpu")):
        value.backward()
    assert len(streams) == 1


def test_a_graph_with_a_second_stream_takes_the_other_ones_place() -> None:
    """Which is found again after the undo; what is not in force gives its memory back. On a CPU nothing is captured."""
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3))
    training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Net")])
    graphs, stream, x = CudaGraphs(), GradientStream(), torch.randn(2, 3, 8, 8)
    expected = net(x)
    assert cuda_graphs.current(net) is None
    off = graphs.apply(training, {})
    plain = cuda_graphs.current(net)
    back = stream.apply(training, {})
    beside = cuda_graphs.current(net)
    assert plain is not None
    assert beside is not None
    assert (plain.beside, beside.beside) == (False, True)
    assert torch.equal(net(x), expected)
    assert [forward.layer.beside for forward in beside.forwards] == [True]
    back.run()
    assert cuda_graphs.current(net) is plain
    stream.release(training)
    assert cuda_graphs.current(net) is plain
    stream.apply(training, {})
    assert cuda_graphs.current(net) not in (plain, beside)
    off.run()
    assert cuda_graphs.current(net) is None
    assert "forward" not in vars(net)
