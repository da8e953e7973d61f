"""A training step measured in this process, by the parts that `advisor profile` measures scripts with.

The step is called over and over: once untouched, then warm-up, steps timed with no profiler on, a traced window, a few
calls for memory, and on a CPU one for host reads. Every hook is taken back before `measure` returns or raises.
"""

from __future__ import annotations

import functools
import inspect
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.profile import Site, StepProfile
from advisor.core.stderr import say
from advisor.loop.compiles import Compilations
from advisor.loop.records import SESSION_FILE
from advisor.loop.session import Session
from advisor.loop.training import Training
from advisor.profiling.after.assemble import assemble
from advisor.profiling.inside.driver import ProfileDriver
from advisor.profiling.machine import counters as hardware
from advisor.profiling.machine import environment
from advisor.testing import allocations, host_reads
from advisor.testing.compilations import CompiledRuns
from advisor.testing.device_lock import alone, locked
from advisor.testing.hooked import PLAN_CALLS, found_in, observed
from advisor.testing.live import LiveStep
from advisor.testing.measured import Measured
from advisor.testing.quantities import Beyond
from advisor.userfiles import restore

MOST_CALLS = 10_000  # of a step that never counts as one; the driver gives up long before


def measure(
    step: Callable[[], Any],
    *,
    warmup: int = 10,
    steps: int = 20,
    detail_steps: int = 3,
    device: str | torch.device | None = None,
    counters: bool = True,
    label: str = "",
    since: Compilations | None = None,
) -> Measured:
    """Call `step` about `warmup + steps + 12` times and say what one call of it does.

    Args:
        step: one training step, without arguments; what it returns is dropped.
        warmup: calls before anything counts, at least four: objects are found in them.
        steps: calls timed with no profiler on.
        detail_steps: calls traced.
        device: where it runs; by default the GPU if the first call allocates memory there.
        counters: read DRAM counters on a GPU that offers them.
        label: tells this measurement from others of the same test, in baselines too.
        since: from when on compilations count; by default from now.

    Raises:
        AdvisorError: for a step that cannot be called or is a coroutine, a measurement inside another, a process that
            `advisor` observes already, or a fault in advisor. What the step raises passes.
    """
    since = since or Compilations()
    began = time.perf_counter()
    with alone():
        _check(step, warmup, steps, detail_steps)
        found, compiled = _first_call(step, torch.device(device) if device is not None else None)
        with locked(found), tempfile.TemporaryDirectory(prefix="advisor-perf-") as folder:
            session = Session(
                mode="profile",
                run_dir=folder,
                script=label or getattr(step, "__qualname__", type(step).__name__),
                warmup=warmup,
                steps=steps,
                detail_steps=detail_steps,
                keep_running=True,
                counters=counters and found.type == "cuda" and _counters_usable(),
            )
            live, recompiled = _drive(step, session, found, compiled)
            profile = assemble(folder, _machine(found))
        if profile.step_us is None:
            raise AdvisorError("no call of the step could be timed", expected="calls that do the same work each time")
        memory = allocations.watch(live)
        watched = found.type == "cpu"
        if watched:
            profile = replace(profile, syncs=host_reads.watch(step, compiled=compiled))
    profile, beyond = _completed(profile, memory)
    # What Dynamo has given up in the warm-up would compile anew in each step still.
    recompiles = (*since.given_up(), *recompiled.compiled())
    beyond = replace(beyond, recompiles=recompiles, breaks=since.breaks(), compiled=since.any, reads_watched=watched)
    return Measured(profile, label=label, beyond=beyond, live=live, seconds=time.perf_counter() - began)


def measure_script(
    words: Sequence[str],
    *,
    warmup: int = 10,
    steps: int = 20,
    detail_steps: int = 3,
    counters: bool = True,
    label: str = "",
) -> Measured:
    """Run a training script as `advisor profile` does, stop it once it is measured, and say what its step does.

    Its files are as they were afterwards; a line on stderr says which were put back.

    Raises:
        AdvisorError: when it cannot be started, fails, or gives nothing to measure.
    """
    from advisor import pipeline

    began = time.perf_counter()
    said: list[str] = []
    with alone(), _run_folder() as folder:
        result = pipeline.profile(
            words,
            out=folder,
            warmup=warmup,
            steps=steps,
            detail_steps=detail_steps,
            counters=counters,
            say=said.append,
        )
        if line := restore.told(folder, moved=False):
            say(line)
    if result.profile is None or result.exit_code:
        # The last that was said is of the script's end where nothing was measured, else of the measuring.
        why = said[-1] if said and result.profile is None else f"it ended with exit code {result.exit_code}"
        raise AdvisorError(f"{words[0]} could not be measured: {why}")
    return Measured(result.profile, label=label, beyond=_told_by(result.profile), seconds=time.perf_counter() - began)


@contextmanager
def _run_folder() -> Iterator[Path]:
    """A new folder, gone afterwards, in the working directory: what is set aside from there need not be copied, and is not lost with the
    system's temporary files where this process is killed. It stays while something in it has still to be put back.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=".advisor-perf-", dir="."))
    except OSError:  # nothing can be made there
        folder = Path(tempfile.mkdtemp(prefix="advisor-perf-"))
    try:
        yield folder
    finally:
        if not restore.pending(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _told_by(profile: StepProfile) -> Beyond:
    """What a script's own process has told: of Dynamo numbers, and no lines; of a CPU's memory only the process's own."""
    model = profile.model
    breaks = (Site(source="", what=f"{model.graph_breaks or 0:g} graph breaks a function", calls=1, time_us=0),)
    recompiles = (Site(source="", what="compilation", calls=float(model.recompiles or 0), time_us=0),)
    return Beyond(
        breaks=breaks if model.graph_breaks else (),
        recompiles=recompiles if model.recompiles else (),
        compiled=model.graph_breaks is not None,
        memory_basis="" if profile.environment.device == "cuda" else "resident memory of the script's process",
    )


def training_step(
    model: torch.nn.Module,
    batch: Any,
    loss: Callable[..., torch.Tensor],
    optimizer: torch.optim.Optimizer | None = None,
) -> Callable[[], None]:
    """One step as a callable: forward, loss, backward, and the update where there is an optimizer.

    Args:
        batch: `(inputs, targets)`, for `loss(model(inputs), targets)`; a single tensor is for `loss(model(batch))`.
    """
    inputs, targets = (batch[0], tuple(batch[1:])) if isinstance(batch, (tuple, list)) else (batch, ())

    def step() -> None:
        model.zero_grad(set_to_none=True)
        loss(model(inputs), *targets).backward()
        if optimizer is not None:
            optimizer.step()

    return step


def _check(step: Callable[[], Any], warmup: int, steps: int, detail_steps: int) -> None:
    if not callable(step):
        raise AdvisorError(f"the step is {type(step).__name__}", expected="a callable without arguments")
    if inspect.iscoroutinefunction(step):
        raise AdvisorError(
            "the step is a coroutine function", expected="a plain callable", fix="Run its event loop in it."
        )
    for name, value, least in (("warmup", warmup, 0), ("steps", steps, 1), ("detail_steps", detail_steps, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise AdvisorError(f"{name}={value!r}", expected=f"an integer of {least} or more")


def _first_call(step: Callable[[], Any], device: torch.device | None) -> tuple[torch.device, bool]:
    """Run it untouched: lazy modules are built, compiled code is made, a plan that was enabled finds its objects. Where it
    runs, and whether compiled code does."""
    before = _requests()
    with CompiledRuns() as runs:
        result = step()
        for _ in range(PLAN_CALLS):
            if not observed():
                break
            step()
    if inspect.isawaitable(result):
        getattr(result, "close", lambda: None)()
        raise AdvisorError("the step returned a coroutine", expected="a plain callable")
    if device is None:
        grown = [
            index for index, count in enumerate(_requests()) if count > (before[index] if index < len(before) else 0)
        ]
        device = torch.device("cuda", grown[0]) if grown else torch.device("cpu")
    return device, runs.seen


def _requests() -> list[int]:
    """Allocator requests so far on each GPU; none where CUDA is not in use."""
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return []
    return [
        int(torch.cuda.memory_stats(index).get("allocation.all.allocated", 0))
        for index in range(torch.cuda.device_count())
    ]


def _drive(
    step: Callable[[], Any], session: Session, device: torch.device, compiled: bool
) -> tuple[LiveStep, Compilations]:
    """The profile mode over calls of the step; its raw files are in the session's folder afterwards."""
    storage.save(session.folder / SESSION_FILE, session)
    live, recompiled, timed = LiveStep.of(step, Training(device=device), compiled=compiled), Compilations(), False
    with found_in(device, session, keep_inputs=False) as (training, watcher, discovery):
        driver = ProfileDriver(training, session, watcher, discovery)
        driver.compiled = compiled
        training.on_step.append(driver.on_step)
        try:
            for _ in range(MOST_CALLS):
                if driver.phase == "done" or watcher.patches.fault is not None:
                    break
                step()
                if training.roots or training.optimizers:
                    live = LiveStep.of(step, training, compiled=compiled)
                    live.training.device = device
                watcher.mark()
                if driver.phase == "timed" and not timed:
                    recompiled, timed = Compilations(), True
        finally:
            driver.abandon()
        if watcher.patches.fault is not None:
            fault = watcher.patches.fault
            raise AdvisorError(f"a fault in advisor ended the measurement: {type(fault).__name__}: {fault}")
    return live, recompiled


def _completed(profile: StepProfile, memory: allocations.Allocations | None) -> tuple[StepProfile, Beyond]:
    """The profile with what the memory window has seen: the allocator's own peak is that of all tests so far, and a CPU
    has no such count."""
    if memory is None:
        return profile, Beyond()
    stats = replace(
        profile.memory,
        peak_allocated_bytes=memory.peak_bytes,
        allocations=memory.allocations,
        growth_bytes=memory.growth_bytes,
    )
    on_gpu = profile.environment.device == "cuda"
    basis = "" if on_gpu else "weights, their state, and what torch allocates in a step"
    return replace(profile, memory=stats), Beyond(growing=memory.growing, peak=memory.peak, memory_basis=basis)


@functools.cache
def _counters_usable() -> bool:
    return hardware.preflight()[0]


def _machine(device: torch.device) -> Environment:
    """The machine as a step on `device` sees it. A GPU's rates are measured once a machine; a CPU's are used if known."""
    if device.type == "cuda":
        return _probed()
    known = environment.kept()
    if known is None or known.device != "cpu":
        known = environment.host_facts()
    return known


@functools.cache
def _probed() -> Environment:
    return environment.probe()
