"""The kernels' own time in steps of the running loop, with a planted tracer."""

from types import SimpleNamespace

import pytest
import torch

from advisor.loop.interval import EVALUATION, OWN
from advisor.loop.training import StepEvent
from advisor.trials.live import kernels

LOOP = SimpleNamespace(training=SimpleNamespace(device=torch.device("cuda", 0)))


class Tracer:
    """Has seen as many steps as there were boundaries; the first takes 1 µs, the next 2."""

    def __init__(self, device, *, lasting):
        self.steps, self.why = 0, ""

    def start(self):
        return True

    def boundary(self):
        self.steps += 1

    def stop(self):
        return tuple(float(i + 1) for i in range(self.steps))


def found(monkeypatch, reasons, steps=3):
    """What is told of steps that are clean or not, each with its reason; and the notes."""
    monkeypatch.setattr(kernels, "KernelTime", Tracer)
    notes = []
    course = kernels.kernel_times(LOOP, steps, notes.append)
    next(course)
    try:
        for index, reason in enumerate(["", *reasons]):
            course.send(StepEvent(index=index, host_ns=0, event=None, clean=not reason, reason=reason))
    except StopIteration as ended:
        return ended.value, notes
    pytest.fail("it wants more steps")


def test_steps_that_only_our_own_wait_has_disturbed_count(monkeypatch):
    """The script reads its loss behind the update, so the device is behind at each boundary, and we wait there for it."""
    assert found(monkeypatch, ["", OWN, OWN, OWN]) == ((2.0, 3.0, 4.0), [])


def test_what_holds_more_than_a_step_does_not(monkeypatch):
    assert found(monkeypatch, ["", "", EVALUATION, "", ""]) == ((2.0, 4.0, 5.0), [])
