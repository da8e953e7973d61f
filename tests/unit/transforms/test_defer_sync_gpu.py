"""Scalars that really are on their way from a GPU."""

from __future__ import annotations

import math

import pytest
import torch
from loops import make_loop
from torch.profiler import ProfilerActivity, profile

from advisor.transforms.defer_sync import DeferSync
from advisor.transforms.deferred import Deferred, defer

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


@pytest.mark.parametrize(
    ("value", "dtype", "kind"),
    [
        (1.5, torch.float16, float),
        (-3.0e38, torch.bfloat16, float),
        (0.1, torch.float32, float),
        (-math.inf, torch.float64, float),
        (-7, torch.int64, int),
        (200, torch.uint8, int),
        (True, torch.bool, bool),
    ],
)
def test_values_and_kinds(value, dtype, kind) -> None:
    tensor = torch.tensor([value], dtype=dtype, device="cuda")
    number = defer(tensor)
    assert type(number) is Deferred
    tensor.zero_()  # later work on the stream does not reach the copy
    assert isinstance(number, kind)
    assert number == torch.tensor(value, dtype=dtype).item()


def test_nan_and_the_sign_of_zero() -> None:
    assert math.isnan(float(defer(torch.tensor(math.nan, device="cuda"))))
    assert math.copysign(1.0, float(defer(torch.tensor(-0.0, device="cuda")))) == -1.0


def test_streams_do_not_share_places() -> None:
    slow, fast = torch.cuda.Stream(), torch.cuda.Stream()
    busy = torch.randn(4096, 4096, device="cuda")
    one, two = torch.full((), 1.0, device="cuda"), torch.full((), 2.0, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        for _ in range(20):
            busy = busy @ busy / 70
        defer(one + busy.sum() * 0)  # nobody reads it, and it arrives last
    with torch.cuda.stream(fast):
        number = defer(two)
    torch.cuda.synchronize()
    assert number == 2.0


def test_numbers_that_nobody_reads_leave_those_beside_them_alone() -> None:
    """What was put aside is not handed out again before it has arrived, however far the host runs ahead."""
    busy, numbers = torch.randn(2048, 2048, device="cuda"), []
    for i in range(400):
        busy = busy @ busy / 50
        number = defer(torch.full((), float(i), device="cuda"))
        if i % 3:
            numbers.append((i, number))  # each third is dropped unread, its memory free for the next
        torch.full((), -1.0, device="cuda")
    assert all(number == i for i, number in numbers)


def test_a_trace_sees_no_wait_for_what_has_arrived() -> None:
    numbers = [defer(torch.full((), float(i), device="cuda")) for i in range(3)]
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        assert [float(number) for number in numbers] == [0.0, 1.0, 2.0]
    assert not [e.name for e in found.events() if "EventSynchronize" in e.name]


def train(switch, steps: int = 8) -> tuple[float, int]:
    busy, total, hits = torch.randn(2048, 2048, device="cuda"), 0.0, 0
    unfinished = 0
    for i in range(steps):
        for _ in range(20):
            busy = busy @ busy / 50
        loss = busy.sum() * 0 + i * 0.1
        switch(i)
        total += loss.item()
        hits += (loss > 0.25).sum().item()
        unfinished += not torch.cuda.current_stream().query()
    return total * 1.0, unfinished


def test_the_host_runs_ahead_and_numbers_are_equal() -> None:
    loop = make_loop(device="cuda", steps=1)
    expected, none = train(lambda i: None)
    assert none == 0
    actual, unfinished = train(lambda i: DeferSync().apply(loop.training, {}) if i == 0 else None)
    assert actual == expected
    assert unfinished > 0
    assert DeferSync().effect(loop.training, None, None).passed
