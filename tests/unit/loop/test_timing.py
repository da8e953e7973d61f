"""Step times from boundaries, and the spread of repeated values."""

from __future__ import annotations

import pytest
import torch

from advisor.loop.timing import lags_us, mark, spread, step_times
from advisor.loop.training import Draw, StepEvent


class FakeEvent:
    def __init__(self, at_ms: float) -> None:
        self.at_ms, self.waited = at_ms, False

    def synchronize(self) -> None:
        self.waited = True

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at_ms - self.at_ms


def boundary(index: int, ms: float, reason: str = "", event: FakeEvent | None = None) -> StepEvent:
    return StepEvent(index=index, host_ns=int(ms * 1e6), event=event, clean=not reason, reason=reason)


def test_only_clean_intervals_count_and_the_others_are_told_by_reason() -> None:
    times = step_times(
        [
            boundary(0, 100, "first step"),
            boundary(1, 110),
            boundary(2, 150, "evaluation"),
            boundary(3, 161),
            boundary(4, 200, "evaluation"),
            boundary(5, 230, "another batch shape"),
        ]
    )
    assert times.wall_us == (10_000.0, 11_000.0)
    assert times.step_us == times.wall_us
    assert times.positions == (1, 3)
    assert times.excluded == {"evaluation": 2, "another batch shape": 1}


def test_cuda_events_stand_for_the_step_where_there_are_any() -> None:
    events = [FakeEvent(at) for at in (0.0, 9.0, 18.5)]
    times = step_times([boundary(i, 10.0 * i, event=event) for i, event in enumerate(events)])
    assert times.event_us == (9_000.0, 9_500.0)
    assert times.step_us == times.event_us
    assert times.wall_us == (10_000.0, 10_000.0)
    assert events[-1].waited


def test_two_kinds_of_time_do_not_mix() -> None:
    times = step_times([boundary(0, 0), boundary(1, 10, event=FakeEvent(1.0)), boundary(2, 20, event=FakeEvent(9.0))])
    assert times.event_us == ()
    assert times.step_us == (10_000.0, 10_000.0)


@pytest.mark.parametrize("count", [0, 1])
def test_no_interval_no_time(count: int) -> None:
    assert step_times([boundary(0, 0)][:count]).wall_us == ()


def test_spread() -> None:
    told = spread([5.0, 1.0, 3.0, 2.0, 4.0])
    assert told is not None
    assert (told.median, told.p10, told.p90, told.n) == (3.0, 1.4, pytest.approx(4.6), 5)
    assert told.raw == (5.0, 1.0, 3.0, 2.0, 4.0)
    assert spread([]) is None


def test_lags_are_the_device_behind_the_host_at_clean_boundaries() -> None:
    idle = boundary(0, 100.0, event=FakeEvent(7.0))
    steps = [
        boundary(1, 110.0, event=FakeEvent(17.1)),
        boundary(2, 120.0, event=FakeEvent(35.0)),
        boundary(3, 130.0, "evaluation", FakeEvent(60.0)),
    ]
    assert lags_us(idle, steps) == pytest.approx((100.0, 8000.0))
    assert lags_us(idle, [boundary(1, 110.0)]) == ()
    here = mark(torch.device("cpu"))
    assert here.event is None
    assert not here.clean


def draw(before_ms: float, after_ms: float, events: tuple[FakeEvent, FakeEvent] | None = None) -> Draw:
    first, last = events or (None, None)
    return Draw((first, int(before_ms * 1e6)), (last, int(after_ms * 1e6)))


def test_the_devices_time_is_the_step_without_its_waits_for_the_loader() -> None:
    boundaries = [boundary(i, 10.0 * i) for i in range(3)]
    boundaries[1].draws = (draw(1.0, 4.0), draw(5.0, 6.0))  # two batches in a step
    assert step_times(boundaries).device_us == (6_000.0, 10_000.0)


def test_a_batch_that_comes_while_the_device_is_busy_is_no_wait_of_the_device() -> None:
    boundaries = [boundary(i, 10.0 * i, event=FakeEvent(10.0 * i)) for i in range(3)]
    # The host waits for 8 ms; the device reaches both events when it is done with what came before.
    boundaries[1].draws = (draw(0.0, 8.0, (FakeEvent(8.0), FakeEvent(8.0))),)
    boundaries[2].draws = (draw(10.0, 18.0, (FakeEvent(12.0), FakeEvent(18.0))),)
    assert step_times(boundaries).device_us == (10_000.0, 4_000.0)


class OnAnotherStream(FakeEvent):
    """Not behind the boundary's event: torch raises where nobody has waited for it."""

    def elapsed_time(self, other: FakeEvent) -> float:
        assert other.waited, "Both events must be completed before calculating elapsed time."
        return super().elapsed_time(other)


def test_a_draw_on_a_stream_of_its_own_is_waited_for() -> None:
    events = OnAnotherStream(100), OnAnotherStream(104)
    last = StepEvent(index=1, host_ns=0, event=FakeEvent(110), clean=True, draws=(draw(100, 101, events),))
    assert step_times([boundary(0, 100, event=FakeEvent(100)), last]).waited_us == (4_000.0,)
