"""What a capture costs beside the graph itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from advisor.loop.training import RootModule, Training
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.gradient_stream import GradientStream
from advisor.transforms.graphs import captured

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


class Net(nn.Module):
    """Computes in half precision, whatever surrounds it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.fc = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.fc(torch.relu(self.bn(self.conv(x))).mean((2, 3))).float()


def test_a_capture_traces_a_captured_forward_no_second_time() -> None:
    """Each takes Dynamo seconds for a net of any depth; a flag that its guards know must not change around the capture."""
    net = Net().to("cuda")
    net.__dict__["forward"] = torch.compile(type(net).forward.__get__(net), backend="eager", dynamic=False)
    training = Training(device=torch.device("cuda"), roots=[RootModule(module=net, name="Net")])
    transform = CudaGraphs()
    counters.clear()
    undo = transform.apply(training, {})
    try:
        for _ in range(6):
            net(torch.randn(16, 3, 8, 8, device="cuda")).sum().backward()
        assert transform.effect(training, None, None).numbers["replays"] == 3
        assert counters["stats"]["unique_graphs"] == 1
    finally:
        undo.run()


def test_what_replays_take_counts_as_peak_memory() -> None:
    """The allocator counts a replay's activations as free; a search told that graphs save 16 GB of an EfficientNet's memory."""
    net = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()))).to("cuda")
    x = torch.randn(64, 16, 64, 64, device="cuda")
    training = Training(device=torch.device("cuda"), roots=[RootModule(module=net, name="Net")])
    others = torch.cuda.memory_allocated()

    def peak_bytes() -> int:
        for _ in range(6):
            net(x).sum().backward()
        torch.cuda.reset_peak_memory_stats()
        captured.reset_peak_memory()
        net(x).sum().backward()
        return torch.cuda.max_memory_allocated() + captured.hidden_bytes() - others

    eager = peak_bytes()
    assert captured.hidden_bytes() == 0
    undo = CudaGraphs().apply(training, {})
    try:
        assert 0.95 * eager < peak_bytes() < 2.5 * eager
        assert captured.hidden_bytes() > 8 * x.nbytes  # what the convolutions have read
    finally:
        undo.run()


class Block(nn.Module):
    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1)
        self.short = nn.Conv2d(inside, outside, 1, stride, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm2(self.conv2(torch.relu(self.norm1(self.conv1(x))))) + self.short(x))


class Deep(nn.Module):
    """Gradients of very different sizes, one convolution used twice, one whose weight is computed."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.dtype = dtype
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.blocks = nn.Sequential(*(Block(64 * 2 ** max(0, i - 1), 64 * 2**i, 1 + (i > 0)) for i in range(4)))
        self.twice = nn.Conv2d(512, 512, 3, padding=1)
        self.computed = nn.utils.parametrizations.weight_norm(nn.Conv2d(512, 64, 1))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", dtype=self.dtype or torch.bfloat16, enabled=self.dtype is not None):
            x = self.blocks(torch.relu(self.stem(x)))
            x = self.computed(torch.relu(self.twice(torch.relu(self.twice(x)))))
            return self.fc(x.mean((2, 3))).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, None], ids=["bf16", "fp32"])
@pytest.mark.parametrize("images", [128, 3])
def test_weight_gradients_on_a_second_stream_are_the_same(
    dtype: torch.dtype | None, images: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay after replay, while other memory comes and goes; the first stream's again after the undo."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    torch.manual_seed(0)
    net = Deep(dtype).to("cuda", memory_format=torch.channels_last)
    training = Training(device=torch.device("cuda"), roots=[RootModule(module=net, name="Deep")])
    batches = [torch.randn(images, 3, 32, 32, device="cuda") for _ in range(3)]

    def gradients(batch: torch.Tensor) -> list[torch.Tensor]:
        net.zero_grad(set_to_none=True)
        net(batch).square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    def all_equal(times: int) -> bool:
        return all(
            torch.equal(one, other)
            for _ in range(times)
            for batch, wanted in zip(batches, expected, strict=True)
            for one, other in zip(gradients(batch), wanted, strict=True)
        )

    graphs, stream = CudaGraphs(), GradientStream()
    assert not stream.match(training, {}).applies
    off = graphs.apply(training, {})
    try:
        for _ in range(5):
            gradients(batches[0])
        expected = [gradients(batch) for batch in batches]
        assert stream.match(training, {}).applies
        back = stream.apply(training, {})
        for _ in range(5):
            gradients(batches[1])
        assert all_equal(20)
        found = stream.effect(training, None, None)
        assert found.passed
        assert found.numbers["moved"] == 1 + 3 * 4 + 2  # all but the computed weight's
        back.run()
        assert all_equal(1)
        assert graphs.effect(training, None, None).passed
        assert not stream.effect(training, None, None).passed
        stream.release(training)
        assert all_equal(1)
    finally:
        off.run()
