"""The transforms whose numbers can also be checked on a CPU, once more where they are meant to run."""

from __future__ import annotations

import pytest
import torch
from loops import ConvNet, ViewNet, assert_close, check_undo_is_exact, make_loop, twins, values

from advisor.transforms.autocast import AutocastBf16, AutocastFp16
from advisor.transforms.channels_last import ChannelsLast
from advisor.transforms.conv_bias import ConvBiasBeforeNorm
from advisor.transforms.cudnn_benchmark import CudnnBenchmark
from advisor.transforms.fused_optimizer import FusedOptimizer
from advisor.transforms.set_to_none import SetToNone
from advisor.transforms.single_device import SingleDevice
from advisor.transforms.tf32 import Tf32

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.fixture(autouse=True)
def _deterministic():
    with torch.backends.cudnn.flags(enabled=True, deterministic=False, allow_tf32=False):
        yield


ALL = [AutocastBf16, AutocastFp16, ChannelsLast, ConvBiasBeforeNorm, FusedOptimizer, Tf32, CudnnBenchmark, SetToNone]


@pytest.mark.parametrize("cls", ALL)
@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_training_is_close_and_undo_leaves_nothing(cls, optimizer) -> None:
    loop, plain = twins(device="cuda", optimizer=optimizer, zero_to_none=cls is not SetToNone, steps=5)
    transform = cls()
    if cls not in (SetToNone,):  # this file reads gradients through its imports
        assert transform.match(loop.training, {}).applies, transform.match(loop.training, {}).reason
    expected = plain.run(3)
    undo = transform.apply(loop.training, {})
    actual = loop.run(3)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    check = transform.effect(loop.training, None, None)
    assert check.passed, check.detail
    undo.run()
    assert not transform.effect(loop.training, None, None).passed


@pytest.mark.parametrize("cls", [ChannelsLast, FusedOptimizer, AutocastBf16])
def test_undo_is_exact(cls) -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loop, plain = twins(device="cuda", optimizer=torch.optim.Adam)
        check_undo_is_exact(cls(), loop, plain)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("optimizer", [torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad])
def test_step_counters_move_to_the_device_and_back(optimizer) -> None:
    loop, plain = twins(device="cuda", optimizer=optimizer)
    if not FusedOptimizer().match(loop.training, {}).applies:
        pytest.skip("no fused implementation in this torch")
    undo = FusedOptimizer().apply(loop.training, {})
    loop.run(2)
    plain.run(2)
    state = next(iter(loop.optimizer.state.values()))
    assert state["step"].device.type == "cuda"
    saved = loop.optimizer.state_dict()
    assert saved["state"][0]["step"].device.type == "cpu"
    assert saved["state"][0]["step"] == plain.optimizer.state_dict()["state"][0]["step"]
    undo.run()
    assert next(iter(loop.optimizer.state.values()))["step"].device.type == "cpu"
    assert_close(values(loop), values(plain), 1e-3)
    loop.run(1)


def test_foreach_where_there_is_no_fused() -> None:
    loop = make_loop(device="cuda", optimizer=torch.optim.RMSprop, foreach=False)
    assert FusedOptimizer().match(loop.training, {}).applies
    undo = FusedOptimizer().apply(loop.training, {})
    assert loop.optimizer.param_groups[0]["foreach"]
    loop.run(1)
    undo.run()
    assert loop.optimizer.param_groups[0]["foreach"] is False


@pytest.mark.parametrize("fused", [False, True])
def test_fp16_scaling_skips_an_overflow(fused) -> None:
    loop = make_loop(device="cuda", steps=0)
    if fused:
        FusedOptimizer().apply(loop.training, {})
    AutocastFp16().apply(loop.training, {})
    x, y = next(loop.batches)
    (torch.nn.functional.cross_entropy(loop.model(x), y) * 1e30).backward()
    before = [parameter.detach().clone() for parameter in loop.model.parameters()]
    loop.optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(loop.model.parameters(), before, strict=True))
    assert all(loss < 10 for loss in loop.run(3))
    assert all(torch.isfinite(parameter).all() for parameter in loop.model.parameters())


def test_channels_last_with_a_view() -> None:
    loop, plain = twins(device="cuda", model=ViewNet)
    expected = plain.run(3)
    undo = ChannelsLast().apply(loop.training, {})
    losses = loop.run(2)
    undo.run()
    torch.testing.assert_close([*losses, *loop.run(1)], expected, rtol=0.02, atol=0.02)


def test_everything_together() -> None:
    loop, plain = twins(device="cuda")
    expected = plain.run(6)
    for cls in (AutocastBf16, ChannelsLast, FusedOptimizer, ConvBiasBeforeNorm, CudnnBenchmark):
        cls().apply(loop.training, {})
    torch.testing.assert_close(loop.run(6), expected, rtol=0.1, atol=0.1)


def test_past_data_parallel_a_training_is_bit_equal() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loop, plain = twins(
            device="cuda", model=lambda: torch.nn.DataParallel(ConvNet(), device_ids=[torch.cuda.current_device()])
        )
        check_undo_is_exact(SingleDevice(), loop, plain)
        SingleDevice().apply(loop.training, {})
        assert loop.run(3) == plain.run(3)
        assert SingleDevice().effect(loop.training, None, None).passed
        images = torch.randn(4, 3, 8, 8)
        assert torch.equal(loop.model(images), plain.model(images))  # which the wrapper brings to the device
    finally:
        torch.use_deterministic_algorithms(False)
