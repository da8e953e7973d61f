"""A process may end right after a trace that takes CUPTI down: it once hung in its exit handlers for good."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

PROGRAM = """
import torch
from advisor.profiling.inside.collector import TraceCollector
from advisor.loop.session import Session

device = torch.device("cuda", 0)
model = torch.nn.Conv2d(3, 64, 3).cuda()
image = torch.randn(8, 3, 64, 64, device=device)
for lasting in {lasting}:
    model(image).sum().backward()
    collector = TraceCollector(device, Session(mode="profile", run_dir="", script="", counters=False), lasting=lasting)
    collector.start()
    model(image).sum().backward()
    trace = collector.stop()
    assert trace.kernels.start_ns, trace.notes
print("through", flush=True)
"""


@pytest.mark.parametrize("lasting", ["[False]", "[True]", "[True, False]", "[True, True, True]"])
def test_a_traced_process_ends(lasting: str) -> None:
    words = [sys.executable, "-c", PROGRAM.format(lasting=lasting)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=90, check=False)
    assert ended.returncode == 0, ended.stderr[-2000:]
    assert ended.stdout == "through\n"
