"""A trace of one step, as far as an effect check reads it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Generator

from advisor.core.environment import Environment
from advisor.core.profile import StepProfile
from advisor.loop.training import StepEvent
from advisor.profiling.after.aggregate import aggregate
from advisor.profiling.inside.collector import TraceCollector
from advisor.profiling.inside.facts import model_facts
from advisor.transforms.graphs import calls
from advisor.trials.live.loop import Loop

_TRIES = 3


def traced_step(loop: Loop) -> Generator[None, StepEvent, StepProfile | None]:
    """The next clean step's profile; None where there is no profiler to be had."""
    training, plain = loop.training, dataclasses.replace(loop.session, counters=False)
    for _ in range(_TRIES):
        collector = TraceCollector(training.device, plain)
        ends: list[int] = []
        try:
            with calls.paused():  # the kernels of a replay belong to no operator
                collector.start()
                ends.append(time.perf_counter_ns())
                event = yield
                ends.append(event.host_ns)
        finally:
            trace = collector.stop(ends)  # also when the search is given up here: a profiler must not stay on
        found = aggregate(trace, Environment(device=training.device.type))
        # Another profiler may begin at the next boundary only. Ranges around this one that the annotator does not know of (compiled code's)
        # are over by then; ended with a profiler on, they are written into the memory of the one that has ended.
        yield
        if found.kernels:
            return StepProfile(
                script=plain.script,
                argv=plain.argv,
                created="",
                environment=Environment(device=training.device.type),
                step_kind=loop.watcher.kind if loop.watcher is not None else "optimizer",
                step_us=None,
                wall_us=None,
                kernels=found.kernels,
                launches=found.launches,
                launch_us=found.launch_us,
                busy_us=found.busy_us,
                idle=found.idle,
                syncs=found.syncs,
                copies=found.copies,
                model=model_facts(training),
            )
    return None
