"""The StepProfile of a run folder: joins what the child and the sampler left, also when a killed child left only a part."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, TypeVar

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.profile import IdleCause, ProfilerCost, Quantity, Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.core.units import time_text
from advisor.loop import rankrecords
from advisor.loop.records import (
    FACTS_FILE,
    SAMPLES_FILE,
    SESSION_FILE,
    STEPS_FILE,
    TRACE_FILE,
    FactsRecord,
    StepsRecord,
    load_trace,
)
from advisor.loop.session import Session
from advisor.profiling.after.aggregate import Aggregate, aggregate
from advisor.profiling.after.rows import Precision
from advisor.profiling.beside import sampler

T = TypeVar("T")

CAUGHT_UP_FRAC = 0.1  # of the step, that its loader took less while it was traced: told


def assemble(run_dir: Path | str, environment: Environment, *, exit_code: int | None = None) -> StepProfile:
    """Everything known about the run in `run_dir`.

    `complete` is False, with a note for each gap, when a file is missing or cannot be read or the child did not finish.

    Args:
        run_dir: folder with `session.json` and whatever of the other raw files exists.
        environment: the machine, with its measured rates.
        exit_code: the script's, where it has ended.

    Raises:
        AdvisorError: when `session.json` is missing or unreadable: then this is no run folder.
    """
    began = time.perf_counter()
    folder = Path(run_dir)
    session = storage.load(folder / SESSION_FILE, Session)
    gaps: list[str] = []
    steps = _read(folder / STEPS_FILE, StepsRecord, gaps) or StepsRecord(kind="none")
    facts = _read(folder / FACTS_FILE, FactsRecord, gaps) or FactsRecord()
    if environment.device == "cuda" and steps.steps_seen and steps.device == "cpu" and facts.model.parameters:
        environment = _beside_its_gpu(environment)
    flags = facts.model.flags
    precision = Precision(tf32_conv=flags.get("tf32_conv", False), tf32_matmul=flags.get("tf32_matmul", False))
    found = _aggregate(folder / TRACE_FILE, environment, precision, gaps)
    step = steps.step_us or steps.wall_us
    loading_frac = facts.input.next_us / step.median if step is not None and step.median > 0 else 0.0
    utilization = {**from_steps(steps), **from_trace(found, loading_frac), **_sampled(folder / SAMPLES_FILE, steps)}
    shared = utilization.get("gpu_shared")
    if environment.device == "cpu":
        utilization.pop("gpu_shared", None)  # by whoever else
    elif shared is not None and shared.value:
        environment = replace(environment, shared_gpu=True)
    if not steps.complete:
        gaps.append(f"the run ended in phase '{steps.phase}', before the measurement was complete")
    notes = _doubts(found, facts, step)
    notes += rankrecords.notes(folder, facts.model.world_size, step.median if step is not None else 0.0)
    return StepProfile(
        script=session.script,
        argv=session.argv,
        created=_created(folder / SESSION_FILE),
        environment=environment,
        **_of_steps(steps),
        **_of_trace(found, facts),
        memory=facts.memory,
        input=facts.input,
        model=facts.model,
        utilization=utilization,
        cost=_cost(found, step, time.perf_counter() - began),
        exit_code=exit_code,
        complete=not gaps,
        notes=tuple(dict.fromkeys((*steps.notes, *facts.notes, *found.notes, *notes, *gaps))),
    )


def _of_steps(steps: StepsRecord) -> dict[str, Any]:
    return {
        "step_kind": steps.kind,
        "window_step_us": _window_step_us(steps),
        "step_us": steps.step_us,
        "wall_us": steps.wall_us,
        "steps_seen": steps.steps_seen,
        "excluded": steps.excluded,
        "every_us": steps.every_us,
        "held": steps.held,
        "losses": steps.losses,
    }


def _of_trace(found: Aggregate, facts: FactsRecord) -> dict[str, Any]:
    return {
        "idle": _with_loader_line(found.idle, facts.input.source),
        "kernels": found.kernels,
        "busy_us": found.busy_us,
        "syncs": found.syncs,
        "promotions": found.promotions,
        "copies": found.copies,
        "launches": found.launches,
        "launch_us": found.launch_us,
        "optimizer_host_us": found.optimizer_host_us,
        "average_host_us": found.average_host_us,
        "average_calls_us": found.average_calls_us,
        "backward_nodes": found.backward_nodes,
        "allocating_us": found.allocating_us,
        "allocating_idle_us": found.allocating_idle_us,
        "limit_us": found.limit_us,
        "phase_us": found.phase_us,
    }


def _cost(found: Aggregate, step: Spread | None, analyse_s: float) -> ProfilerCost:
    overhead = found.step_us / step.median - 1.0 if step is not None and step.median > 0 and found.step_us > 0 else 0.0
    return ProfilerCost(
        traced_step_us=found.step_us,
        traced_next_us=found.next_us,
        overhead_frac=overhead,
        coverage_frac=1.0 if found.coverage_frac is None else found.coverage_frac,
        traced_steps=found.steps,
        events=found.events,
        analyse_s=analyse_s,
    )


def _doubts(found: Aggregate, facts: FactsRecord, step: Spread | None) -> list[str]:
    """Notes on what cannot be as it looks."""
    notes = []
    if step is not None and 0 < step.median < found.limit_us:
        notes.append(
            f"the limit of {time_text(found.limit_us)} is longer than the step of {time_text(step.median, found.limit_us)}: this machine's rates were "
            "measured while it was busy, or the step's data stay in a cache; shares of the limit mean nothing here"
        )
    if step is not None and found.steps and facts.input.next_us - found.next_us > CAUGHT_UP_FRAC * step.median:
        notes.append(
            f"a step spends {time_text(facts.input.next_us)} in the loader's next(), a traced one {time_text(found.next_us, facts.input.next_us)}: tracing "
            "slows the host, and the loader catches up; waits for data are told as in untraced steps"
        )
    return notes


def _window_step_us(steps: StepsRecord) -> float:
    """Mean of all timed intervals by the host's clock, those left out among them."""
    if steps.timed is None or steps.wall_us is None or steps.provisional:
        return 0.0
    count = steps.wall_us.n + sum(steps.excluded.values())
    return (steps.timed.end_monotonic_ns - steps.timed.start_monotonic_ns) / 1e3 / count


def _beside_its_gpu(environment: Environment) -> Environment:
    """The machine as a step sees it that runs on its CPU, whose rates were not asked for."""
    return replace(
        environment, device="cpu", copy_gbps=0.0, matrix_tflops={}, vector_tflops=0.0, rates_provenance="unavailable"
    )


def _read(path: Path, kind: type[T], gaps: list[str]) -> T | None:
    try:
        return storage.load(path, kind)
    except AdvisorError as error:
        gaps.append(f"{path.name} was not used: {error.found}" if path.exists() else f"no {path.name} was left")
        return None


def _aggregate(path: Path, environment: Environment, precision: Precision, gaps: list[str]) -> Aggregate:
    if not path.exists():
        gaps.append("no steps were traced, so there are no times of single operations")
        return Aggregate()
    try:
        return aggregate(load_trace(path), environment, precision=precision)
    except AdvisorError as error:
        gaps.append(f"{path.name} was not used: {error.found}")
    except (TypeError, ValueError, LookupError) as error:
        gaps.append(f"{path.name} was not used: its values are not those of a trace ({type(error).__name__}: {error})")
    return Aggregate()


def _sampled(path: Path, steps: StepsRecord) -> dict[str, Quantity]:
    """Samples over the timed steps; over the whole run when no steps were timed. Sampling is not vital: never a gap."""
    try:
        recording = sampler.load(path)
    except AdvisorError:
        return {}
    window = steps.timed
    return sampler.summarise(
        recording,
        window.start_unix_ns if window is not None else None,
        window.end_unix_ns if window is not None else None,
    )


def from_steps(steps: StepsRecord) -> dict[str, Quantity]:
    """The first step beside the others; on the host's clock, as no event stands before it."""
    if not steps.first_step_us or steps.provisional or steps.wall_us is None or steps.wall_us.median <= 0:
        return {}
    ratio = steps.first_step_us / steps.wall_us.median
    return {"first_step_ratio": Quantity(value=ratio, provenance=Provenance.MEASURED, reason="by wall clock")}


def from_trace(found: Aggregate, loading_frac: float) -> dict[str, Quantity]:
    """Metrics that only the trace can tell and that StepProfile has no field for. `loading_frac`: of an untraced step, in the loader."""
    if not found.kernels or found.coverage_frac is None:
        return {}
    traced = f"over {found.steps} traced steps"
    device_us = sum(row.time_us for row in found.kernels)
    values = {
        "kernel_overlap_frac": found.overlap_us / device_us if device_us > 0 else None,
        "streams": float(found.streams),
        "host_frac": min(found.host_us / found.step_us, max(0.0, 1 - loading_frac)) if found.step_us > 0 else None,
        "comm_exposed_frac": found.comm_exposed_us / found.step_us if found.step_us > 0 else None,
        "dram_gb_per_step": found.dram_bytes,
        "cupy_kernels_made": found.cupy_made,
        "cupy_compiles": found.cupy_compiles,
    }
    return {
        name: Quantity(value=value, provenance=Provenance.MEASURED, reason=traced)
        for name, value in values.items()
        if value is not None
    }


def _with_loader_line(idle: tuple[IdleCause, ...], source: str) -> tuple[IdleCause, ...]:
    """The trace does not see the line that iterates the loader; discovery does."""
    return tuple(
        replace(cause, sites=tuple(replace(site, source=site.source or source) for site in cause.sites))
        if cause.cause == "data"
        else cause
        for cause in idle
    )


def _created(path: Path) -> str:
    moment = datetime.fromtimestamp(path.stat().st_mtime, tz=timezone.utc)
    return moment.isoformat(timespec="seconds").replace("+00:00", "Z")
