"""One cast of all weights where launches cost: bit-equal, two kernels a step, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from loops import assert_equal, make_loop, twins, values
from torch.profiler import ProfilerActivity, profile

from advisor.ops import dispatch
from advisor.transforms.autocast import AutocastBf16
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.cuda_graphs import CudaGraphs
from advisor.transforms.fused_casts import FusedCasts
from advisor.transforms.gradient_stream import GradientStream

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def _deterministic():
    torch._dynamo.reset()
    flags = torch.backends.cudnn.flags(enabled=True, deterministic=True, allow_tf32=False)
    with flags, dispatch.everything():  # the kernel takes these small weights outside graphs, too
        yield
    torch._dynamo.reset()


def test_training_is_bit_equal() -> None:
    loop, plain = twins(device="cuda")
    for each in (loop, plain):
        ChannelsLast().apply(each.training, {})
        AutocastBf16().apply(each.training, {})
        each.run(1)
    assert FusedCasts().match(loop.training, {}).applies
    FusedCasts().apply(loop.training, {})
    assert loop.run(4) == plain.run(4)
    assert_equal(values(loop), values(plain))
    assert FusedCasts().effect(loop.training, None, None).passed


def test_all_weights_are_one_kernel_and_all_gradients_another() -> None:
    loop = make_loop(device="cuda")
    AutocastBf16().apply(loop.training, {})
    FusedCasts().apply(loop.training, {})
    loop.run(1)
    x = next(loop.batches)[0]
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        loop.model(x).sum().backward()
        torch.cuda.synchronize()
    kernels = [e.name for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    assert sum("cast_tensors" in name for name in kernels) == 2, kernels


def test_a_cuda_graph_holds_the_casts() -> None:
    loop, plain = twins(device="cuda")
    for each in (loop, plain):
        AutocastBf16().apply(each.training, {})
        CudaGraphs().apply(each.training, {})
    FusedCasts().apply(loop.training, {})
    # Replays read the weights as the optimizer leaves them: casts frozen into the graph would train nothing.
    assert loop.run(8) == plain.run(8)
    assert_equal(values(loop), values(plain))
    assert CudaGraphs().effect(loop.training, None, None).passed
    assert FusedCasts().effect(loop.training, None, None).passed


def test_gradients_of_a_second_stream_are_cast_when_they_are_there() -> None:
    loop, plain = twins(device="cuda")
    for each in (loop, plain):
        ChannelsLast().apply(each.training, {})
        AutocastBf16().apply(each.training, {})
        CudaGraphs().apply(each.training, {})
    GradientStream().apply(loop.training, {})
    FusedCasts().apply(loop.training, {})
    assert loop.run(8) == plain.run(8)
    assert_equal(values(loop), values(plain))
    assert GradientStream().effect(loop.training, None, None).passed
