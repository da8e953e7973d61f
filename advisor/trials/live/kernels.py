"""The kernels' own time in a few steps of the running loop."""

from __future__ import annotations

from collections.abc import Callable, Generator

from advisor.loop.interval import OWN
from advisor.loop.training import StepEvent
from advisor.profiling.inside.kernel_time import KernelTime
from advisor.trials.live.loop import Loop

# Of so many times as many steps none need be clean (short epochs, evaluation) before it is given up.
UNCLEAN_FACTOR = 4


def kernel_times(
    loop: Loop, steps: int, note: Callable[[str], object], check: Callable[[], None] = lambda: None
) -> Generator[None, StepEvent, tuple[float, ...]]:
    """The kernels' time in so many clean steps, µs, behind one that pays for a switch and one for the tracer; empty where it is not seen.

    note: called with why nothing was seen. check: called at each step, to raise when there is no time left.
    """
    yield
    kernels, clean = KernelTime(loop.training.device, lasting=True), [False]
    if not kernels.start():
        note(f"the kernels' own time could not be measured: {kernels.why}")
        return ()
    found: tuple[float, ...] = ()
    try:
        while sum(clean) < steps and len(clean) <= UNCLEAN_FACTOR * steps:
            event = yield
            kernels.boundary()
            # Each boundary waits for the device, which is work of ours in the next step, and takes nothing from its kernels.
            clean.append((event.clean or event.reason == OWN) and len(clean) > 1)
            check()
    finally:
        found = kernels.stop()  # also where the search is given up here: a profiler must not stay on
    if not found:
        note(f"the kernels' own time could not be measured: {kernels.why}")
    return tuple(us for us, counts in zip(found, clean[1:], strict=False) if counts)
