"""What the child leaves in the run folder: file names and types, in one place. No torch here: the supervisor reads these.

`steps.json` and `facts.json` go through core.storage. `trace.json` can hold a million events, so it is written and read
column by column, without a look at each value.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.core import storage
from advisor.core.errors import AdvisorError, cause
from advisor.core.profile import InputStats, MemoryStats, ModelFacts, Spread
from advisor.core.trace import DeviceTable, DramSamples, OpTable, RuntimeTable, Trace

SESSION_FILE = "session.json"
PROGRESS_FILE = "progress.jsonl"
SAMPLES_FILE = "samples.json"
STEPS_FILE = "steps.json"
MEASURED = "measured"  # the event of a process whose profile is on disk
NEXT_FILE = "next.json"  # orders for a process that has been profiled, to go on by
FACTS_FILE = "facts.json"
TRACE_FILE = "trace.json"

MAX_LOSSES = 512
OWN_WORK = "advisor's own work"  # a reason in `StepsRecord.excluded`


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """A stretch of the run on the host's two clocks, ns: CLOCK_REALTIME (Kineto's) and CLOCK_MONOTONIC (the sampler's)."""

    start_unix_ns: int
    end_unix_ns: int
    start_monotonic_ns: int
    end_monotonic_ns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StepsRecord:
    """`steps.json`: step times with no profiler on, raw.

    `step_us` is by CUDA events on a GPU and equals `wall_us` on a CPU; both hold clean intervals only, in order, in
    `raw`. When the script ended before its warm-up did, they hold the warm-up's intervals and `provisional` is True.
    `loader_us` and `losses` stand beside `wall_us.raw`: one value a clean timed step (`losses` at most 512, NaN as null).
    """

    kind: str  # optimizer, marker, period, forward, none
    device: str = "cpu"
    step_us: Spread | None = None
    wall_us: Spread | None = None
    steps_seen: int = 0  # boundaries, warm-up and traced ones included
    warmup: int = 0  # boundaries before the timed window
    forward_steps: int = (
        0  # rounds of model calls, where nothing was trained and the script ended before that was certain
    )
    first_step_us: float | None = None  # from the first batch or forward to the first boundary
    excluded: dict[str, int] = field(default_factory=dict)  # reason → timed intervals left out
    every_us: tuple[float, ...] = ()  # wall time of every timed interval in order, those left out included
    held: tuple[str, ...] = ()  # of each of these why it was left out; "" for a clean one
    loader_us: tuple[float, ...] = ()  # time in the loader's next() per clean timed step
    losses: tuple[float, ...] = ()
    backwards: tuple[int, ...] = ()  # backward passes in each clean timed step
    timed: Window | None = None
    traced: Window | None = None
    traced_wall_us: tuple[float, ...] = ()  # wall time of each traced step
    phase: str = "warm-up"  # the phase reached: warm-up, timed, traced, done
    complete: bool = False
    provisional: bool = False
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class FactsRecord:
    """`facts.json`: what the live objects said."""

    model: ModelFacts = field(default_factory=ModelFacts)
    input: InputStats = field(default_factory=InputStats)
    memory: MemoryStats = field(default_factory=MemoryStats)
    notes: tuple[str, ...] = ()


_TABLES = {"ops": OpTable, "runtime": RuntimeTable, "kernels": DeviceTable, "dram": DramSamples}


def save_trace(path: Path, trace: Trace) -> None:
    """Write a Trace as compact JSON, atomically. 1,000,000 events take seconds, so values are not looked at one by one."""
    document: dict[str, Any] = {"schema_version": storage.SCHEMA_VERSION, "type": "Trace"}
    for entry in dataclasses.fields(trace):
        value = getattr(trace, entry.name)
        if entry.name in _TABLES:
            value = {column.name: getattr(value, column.name) for column in dataclasses.fields(value)}
        document[entry.name] = value
    storage.write_text(path, json.dumps(document, separators=(",", ":"), ensure_ascii=False))


def load_trace(path: Path) -> Trace:
    """Read what `save_trace` or core.storage.save wrote.

    Raises:
        AdvisorError: when the file is missing, cut off, of another version, or its columns differ in length.
    """
    try:
        document = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise AdvisorError(f"no {path.name} in {path.parent}", fix="Run `advisor profile` first.") from None
    except (OSError, ValueError, RecursionError) as error:
        raise AdvisorError(f"{path} cannot be read ({cause(error)})", expected="a trace written by advisor") from None
    if not isinstance(document, dict) or document.get("schema_version") != storage.SCHEMA_VERSION:
        raise AdvisorError(f"{path} is of another version", expected=f"schema_version {storage.SCHEMA_VERSION}")
    values: dict[str, Any] = {}
    for entry in dataclasses.fields(Trace):
        if entry.name not in document:
            continue
        value = document[entry.name]
        if entry.name in _TABLES:
            value = _table(_TABLES[entry.name], value, f"{path.name}: {entry.name}")
        values[entry.name] = value
    try:
        return Trace(**values)
    except TypeError as error:
        raise AdvisorError(f"{path} is no trace ({error})", expected="a trace written by advisor") from None


def _table(kind: type[Any], columns: object, where: str) -> Any:
    if not isinstance(columns, dict):
        raise AdvisorError(f"{where} holds {type(columns).__name__}", expected="columns")
    known = {f.name: columns[f.name] for f in dataclasses.fields(kind) if f.name in columns}
    if len({len(column) for column in known.values()}) > 1:
        raise AdvisorError(f"{where} has columns of different length", expected="one value per event in each column")
    return kind(**known)
