"""Sites on a GPU: launches from C++ give, bit for bit, what launches from Python give."""

from __future__ import annotations

import copy

import pytest
import torch
from test_sites import Net, captured, step

from advisor.ops import dispatch
from advisor.ops.sites import install

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("sites")]


@pytest.mark.parametrize("autocast", [False, True])
def test_replayed_steps_are_those_of_python_bit_for_bit(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last).train()
    other = copy.deepcopy(model)
    torch._dynamo.reset()
    install.recorded.clear()
    placed = install.install
    deterministic = torch.backends.cudnn.flags(enabled=True, deterministic=True, benchmark=False)
    with deterministic, dispatch.everything(), torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        replayed, python = captured(model), captured(other)
        side = torch.cuda.Stream()
        for seed in range(8):
            torch.manual_seed(seed)
            shape = (4, 3, 24, 24) if seed != 5 else (2, 3, 16, 16)
            x = torch.randn(shape, device="cuda").contiguous(memory_format=torch.channels_last)
            torch.cuda.synchronize()
            with torch.cuda.stream(side if seed % 3 == 2 else torch.cuda.current_stream()):
                monkeypatch.setattr(install, "install", placed)
                mine = step(replayed, model, x.clone().requires_grad_())
                monkeypatch.setattr(install, "install", lambda graph: None)
                theirs = step(python, other, x.clone().requires_grad_())
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert install.recorded["batchnorm_act"] >= 2, install.refused
    torch._dynamo.reset()


def test_a_captured_step_replays_its_sites_launches() -> None:
    torch.manual_seed(0)
    model = Net().cuda().to(memory_format=torch.channels_last).train()
    torch._dynamo.reset()
    x = torch.randn(4, 3, 24, 24, device="cuda").contiguous(memory_format=torch.channels_last)
    with dispatch.everything():
        run = captured(model)
        for _ in range(3):
            run(x).square().sum().backward()
        model.eval()
        with torch.no_grad():
            plain = [run(x) for _ in range(3)][-1]
            side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2):
                    run(x)
            torch.cuda.current_stream().wait_stream(side)
            with torch.cuda.graph(graph):
                y = run(x)
        y.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
    assert torch.equal(y, plain)
    torch._dynamo.reset()
