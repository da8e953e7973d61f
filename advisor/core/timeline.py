"""One traced step as rows of events in time: what the host and the device did, and why the device was idle. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field

# Kinds of rows, in the order in which they are shown.
IDLE, STREAM, COPIES, HOST, CALLS = "idle", "stream", "copies", "host", "calls"


@dataclass(frozen=True, slots=True)
class Event:
    """Times are nanoseconds from the start of the step. `depth` is how many events of the row are around it."""

    start_ns: int
    end_ns: int
    name: str
    key: str  # what colours it: a kind of work, a cause of idle time, or the kind of host event
    depth: int = 0
    detail: str = ""  # module, source line, shapes: what belongs to it


@dataclass(frozen=True, slots=True)
class TimelineRow:
    """Events in the order of their start; those of one depth do not overlap."""

    kind: str
    name: str
    events: tuple[Event, ...]
    deepest: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step of `steps` traced ones, the one with this `number`, from 1; all of them where that is 0. `left_out` counts its shortest host events, where there were too many."""

    number: int = 0
    steps: int = 0
    length_ns: int = 0
    bounds_ns: tuple[int, ...] = ()  # where steps begin and end on the host
    rows: tuple[TimelineRow, ...] = ()
    left_out: int = 0
    notes: tuple[str, ...] = field(default=())

    @property
    def events(self) -> int:
        return sum(len(row.events) for row in self.rows)
