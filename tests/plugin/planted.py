"""Training steps, each sound or with one fault planted. A line that is at fault ends in a comment `# fault: <name>`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

Step = Callable[[], object]


def line_of(fault: str) -> str:
    """`planted.py:<line>` of a planted fault."""
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    (number,) = [i for i, line in enumerate(lines, 1) if line.endswith(f"# fault: {fault}")]
    return f"planted.py:{number}"


class Block(nn.Module):
    """Two convolutions; with `fault` something between them that costs."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.first = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3, padding=1)
        self.fault = fault

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.first(x)))
        if self.fault == "layout":
            x = x.contiguous()  # fault: layout
        if self.fault == "traffic":
            x = x.repeat_interleave(16, 1).view(x.size(0), 16, 16, *x.shape[2:]).mean(2)  # fault: traffic
        if self.fault == "autocast":
            with torch.autocast(x.device.type, enabled=False):
                return self.second.float()(x.float())  # fault: autocast
        return self.second(x)


class Net(nn.Module):
    """A small residual net; the fault is in its second block."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(fault), Block()])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x.mean((2, 3)))


def training(device: str, fault: str = "", *, autocast: bool = False) -> Step:
    """A step of the net in channels_last, with SGD."""
    torch.manual_seed(0)
    net = Net(fault).to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    images = torch.randn(8, 16, 16, 16, device=device).to(memory_format=torch.channels_last)
    labels = torch.randint(0, 4, (8,), device=device)
    on_host = images.cpu()
    kept: list[torch.Tensor] = []

    def step() -> None:
        optimizer.zero_grad()
        batch = images
        if fault == "copy":
            batch = on_host.to(device)  # fault: copy
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            loss = functional.cross_entropy(net(batch), labels)
        loss.backward()
        optimizer.step()
        if fault == "item":
            loss.item()  # fault: item
        if fault == "growth":
            kept.append(torch.empty(2**18, device=device))  # fault: growth

    return step


def compiled(device: str, fault: str = "") -> Step:
    """A compiled forward and its backward."""
    layer = nn.Linear(8, 8).to(device)
    values = torch.randn(4, 8, device=device)

    def forward(x: torch.Tensor) -> torch.Tensor:
        x = layer(x)
        if fault == "graph break":
            torch._dynamo.graph_break()  # fault: graph break
        return x.square().mean()

    run = torch.compile(forward, backend="eager")

    def step() -> None:
        layer.zero_grad()
        run(values).backward()

    return step


def reading(kind: str, *, compiled: bool = False) -> Step:
    """A forward on the CPU that reads a tensor on the host."""
    values = torch.arange(4.0)

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    if compiled:
        double = torch.compile(double, backend="eager")

    def step() -> object:
        scaled = double(values)
        if kind == "cpu":
            return scaled.cpu()  # fault: cpu
        if kind == "tolist":
            return scaled.tolist()  # fault: tolist
        if kind == "numpy":
            return scaled.numpy()  # fault: numpy
        if kind == "print":
            return f"{scaled}"  # fault: print
        if kind == "float":
            return float(scaled.sum())  # fault: float
        if kind == "branch":
            return 1 if scaled.sum() > 3 else 2  # fault: branch
        if kind == "mask":
            return scaled[scaled > 2]  # fault: mask
        if kind == "nonzero":
            return torch.nonzero(scaled)  # fault: nonzero
        if kind == "allclose":
            return torch.allclose(scaled, values)  # fault: allclose
        return scaled

    return step


def matmuls(device: str, count: int, size: int = 2048) -> Step:
    """`count` products in a row."""
    matrix = torch.randn(size, size, device=device)

    def step() -> None:
        for _ in range(count):
            torch.mm(matrix, matrix)

    return step
