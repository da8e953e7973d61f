"""What a capture costs beside the graph itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from advisor.profiling.training import RootModule, Training
from advisor.transforms.cuda_graphs import CudaGraphs

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
