"""A loop that replaying does not speed up is left alone, by a planted clock."""

from __future__ import annotations

from typing import Any

import pytest
import stub_cupy
import test_cupy_replay

from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.replay.arena import Plain
from advisor.cupy_loops.replay.recorder import FIND, OFF, REPLAY
from advisor.loop.patches import Patches


class Timed(Plain):
    timed = True


@pytest.mark.parametrize(
    ("replayed_s", "pause_s", "phase"),
    [(0.5, 0.0, REPLAY), (0.97, 0.0, REPLAY), (0.99, 0.0, OFF), (2.0, 0.0, OFF), (0.5, 100.0, REPLAY)],
)
def test_a_loop_that_gains_nothing_is_left(replayed_s: float, pause_s: float, phase: str) -> None:
    cp, patches, change = stub_cupy.module(), Patches(), Graphs(Timed)
    change.apply(cp, patches)
    recorder = change.recorder
    assert recorder is not None
    clock = [0.0]

    def normal(plain: Any = cp.tanh) -> Any:
        def call(x: Any) -> Any:  # one call of each step
            clock[0] += 1.0 if recorder.phase == FIND else 0.0
            return plain(x)

        return call

    recorder.worth.now = lambda: clock[0]
    ended = recorder.end

    def end() -> None:
        clock[0] += replayed_s + (pause_s if recorder.replayed == 20 else 0.0)  # a plot, once
        ended()

    recorder.end = end
    cp.tanh = normal()
    found = test_cupy_replay.numbers(test_cupy_replay.rebinding(cp, 120))
    patches.restore_all()
    assert recorder.phase == phase, recorder.why
    assert ("a replayed step takes" in recorder.why) == (phase == OFF)
    plain = test_cupy_replay.numbers(test_cupy_replay.rebinding(stub_cupy.module(), 120))
    for a, b in zip(plain, found, strict=True):
        assert a.tobytes() == b.tobytes()
    if phase == OFF:
        assert type(cp.exp).__name__ == "function"  # nothing is seen any more
