"""Which intervals between two step boundaries hold a step like the others."""

from __future__ import annotations

import pytest
import torch

from advisor.loop import interval
from advisor.loop.interval import OWN, StepInterval, Usual
from advisor.loop.training import Training

MS = 1_000_000


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> Usual:
    monkeypatch.setattr(interval, "LISTENER_NS", MS // 5)
    return Usual(Training(torch.device("cpu")))


def _judged(usual: Usual, taken_ns: int, interval_ns: int) -> str:
    usual.listened(taken_ns, interval_ns)
    reason = usual.judge(StepInterval(), first=False)
    usual.disturbed = False
    return reason


def test_a_listener_that_takes_long_disturbs_the_next_step(usual: Usual) -> None:
    assert [_judged(usual, MS // 10, 30 * MS) for _ in range(4)] == [""] * 4
    assert _judged(usual, MS, 30 * MS) == OWN


def test_batches_that_come_several_at_once_make_no_listener_slow(usual: Usual) -> None:
    """Six workers: five intervals of a few milliseconds on the host, and a wait of a second; a step takes 200 ms in the mean."""
    told = [_judged(usual, MS // 2, length * MS) for length in (1000, *([3, 3, 3, 3, 3, 1000] * 5))]
    assert set(told) == {""}
