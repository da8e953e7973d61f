"""A traced step as a timeline: rows for the device's streams, its copies, its idle time by cause, and each host thread."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.timeline import CALLS, COPIES, HOST, IDLE, STREAM, Event, Timeline, TimelineRow
from advisor.core.trace import Trace
from advisor.core.units import bytes_text
from advisor.loop.records import TRACE_FILE, load_trace
from advisor.profiling.after.aggregate import aggregate
from advisor.profiling.after.idle import Piece
from advisor.profiling.trace import kinds
from advisor.profiling.trace.hostcalls import copy_kind
from advisor.profiling.trace.hosttree import HostTree, build

MOST_EVENTS = 100_000  # of a timeline; the shortest of the host's go first
OPERATOR = "op"
MARKS = ("module", "line", "range")  # what operators are inside of: never left out
COPY_NAMES = {"h2d": "copy to the GPU", "d2h": "copy from the GPU"}


@dataclass(frozen=True, slots=True)
class _Step:
    """The step that is shown: from `start` to `end`, and what of the trace belongs to it."""

    trace: Trace
    tree: HostTree
    start: int
    end: int

    def cut(self, start: int, end: int) -> tuple[int, int] | None:
        """The part of an event inside the step, from its start on; None for none."""
        a, b = max(start, self.start) - self.start, min(end, self.end) - self.start
        return (a, b) if b > a else None


def of_run(run_dir: Path, environment: Environment, *, whole: bool = False) -> Timeline | None:
    """The timeline of a run's trace; None where it has none, or one that cannot be read. `whole` as `timeline` has it."""
    try:
        return timeline(load_trace(run_dir / TRACE_FILE), environment, whole=whole)
    except (AdvisorError, TypeError, ValueError, LookupError):
        return None


def timeline(
    trace: Trace, environment: Environment, *, most: int = MOST_EVENTS, whole: bool = False
) -> Timeline | None:
    """The traced step of median length, as rows; None where no step was traced.

    Args:
        environment: the machine's, as the idle causes need it.
        most: events that it may have; the shortest of the host's operators and calls are left out beyond.
        whole: all traced steps in place of one, and however many events.
    """
    bounds = trace.step_bounds_ns
    if len(bounds) < 2 or bounds[-1] <= bounds[0]:
        return None
    pieces: list[Piece] = []
    aggregate(trace, environment, pieces=pieces)
    number = _median(bounds)
    device = trace.kernels
    first, last = (bounds[0], bounds[-1]) if whole else (bounds[number], bounds[number + 1])
    # The device works behind the host: the step goes on until what it launched is done.
    end = max([last, *(device.end_ns[i] for i in _launched_in(trace, first, last))])
    step = _Step(trace, build(trace.ops, trace.runtime, trace.roles), first, end)
    rows = [*_idle(step, pieces), *_device(step), *_host(step)]
    rows, left_out = (rows, 0) if whole else _limited(rows, most)
    return Timeline(
        number=0 if whole else number + 1,
        steps=len(bounds) - 1,
        bounds_ns=tuple(bound - first for bound in bounds if first <= bound <= last),
        length_ns=end - first,
        rows=tuple(row for row in rows if row.events),
        left_out=left_out,
    )


def _median(bounds: Sequence[int]) -> int:
    """The index of the step of median length; the first of such."""
    lengths = [b - a for a, b in pairwise(bounds)]
    return sorted(range(len(lengths)), key=lambda i: lengths[i])[(len(lengths) - 1) // 2]


def _launched_in(trace: Trace, first: int, last: int) -> Iterable[int]:
    calls = {
        c for c, start in zip(trace.runtime.correlation, trace.runtime.start_ns, strict=True) if first <= start < last
    }
    return (i for i, correlation in enumerate(trace.kernels.correlation) if correlation in calls)


def _idle(step: _Step, pieces: Iterable[Piece]) -> list[TimelineRow]:
    events = []
    for piece in pieces:
        if cut := step.cut(piece.start_ns, piece.end_ns):
            events.append(Event(*cut, piece.what, piece.cause, detail=piece.source))
    name = "idle GPU" if step.trace.device == "cuda" else "between operators"
    return [TimelineRow(IDLE, name, tuple(sorted(events, key=lambda e: e.start_ns)))]


def _device(step: _Step) -> list[TimelineRow]:
    """A row a stream of kernels, and one for the copies between host and device."""
    trace, tree, device = step.trace, step.tree, step.trace.kernels
    op_of = {c: i for i, c in enumerate(trace.ops.correlation) if c}
    call_of = {c: i for i, c in enumerate(trace.runtime.correlation)}
    streams: dict[tuple[int, int], list[Event]] = defaultdict(list)
    copies: list[Event] = []
    for i, name in enumerate(device.name):
        cut = step.cut(device.start_ns[i], device.end_ns[i])
        if cut is None:
            continue
        call = call_of.get(device.correlation[i], -1)
        op = op_of.get(device.op[i], tree.call_op[call] if call >= 0 else -1)
        detail = _detail(tree, op, (f"grid {device.grid[i]}, block {device.block[i]}" if device.grid[i] else "",))
        moved = COPY_NAMES.get(copy_kind(name))
        if moved:
            copies.append(Event(*cut, moved, "copy", detail=bytes_text(device.nbytes[i]) if device.nbytes[i] else ""))
        else:
            streams[device.device[i], device.stream[i]].append(
                Event(*cut, name, _kind(trace, tree, op, name), 0, detail)
            )
    several = len({number for number, _ in streams}) > 1
    rows = [
        TimelineRow(STREAM, f"GPU {number} stream {stream}" if several else f"stream {stream}", *_nested(events))
        for (number, stream), events in sorted(streams.items(), key=lambda item: (item[0][0], -len(item[1])))
    ]
    return [*rows, TimelineRow(COPIES, "copies", *_nested(copies))]


def _kind(trace: Trace, tree: HostTree, op: int, name: str) -> str:
    owner = tree.owner[op] if op >= 0 else -1
    known = kinds.kind_of_op(trace.ops.name[owner]) if owner >= 0 else None
    return known or kinds.kind_of_kernel(name) or "other"


def _detail(tree: HostTree, op: int, more: Iterable[str] = ()) -> str:
    """What an operator belongs to: its module, its line and its shapes."""
    if op < 0:
        return "\n".join(text for text in more if text)
    module = tree.module[op].partition("|")[0]
    shapes = tree.ops.shapes[op] if op < len(tree.ops.shapes) else ""
    return "\n".join(text for text in (module, tree.line[op], shapes[:120], *more) if text)


def _host(step: _Step) -> list[TimelineRow]:
    """A row a thread, of annotations and operators inside each other, and one of its runtime calls."""
    trace, tree, ops, runtime = step.trace, step.tree, step.trace.ops, step.trace.runtime
    threads: dict[int, list[Event]] = defaultdict(list)
    for i in tree.order:
        cut = step.cut(ops.start_ns[i], ops.end_ns[i])
        if cut is not None and (shown := _shown(ops.annotation[i], ops.name[i])):
            name, key = shown
            detail = _detail(tree, i) if key == OPERATOR else ""
            # On a CPU the operators are the work, and have its colours.
            if key == OPERATOR and trace.device == "cpu":
                key = kinds.kind_of_op(name) or "other"
            threads[ops.thread[i]].append(Event(*cut, name, key, 0, detail))
    calls: dict[int, list[Event]] = defaultdict(list)
    for i, name in enumerate(runtime.name):
        if cut := step.cut(runtime.start_ns[i], runtime.end_ns[i]):
            calls[runtime.thread[i]].append(Event(*cut, name, "call"))
    order = sorted({*threads, *calls}, key=lambda thread: -len(threads[thread]))
    rows = []
    for number, thread in enumerate(order):
        name = "training thread" if number == 0 else f"thread {number + 1}"
        rows += [
            TimelineRow(HOST, name, *_nested(threads[thread])),
            TimelineRow(CALLS, f"CUDA calls, {name}", *_nested(calls[thread])),
        ]
    return rows


def _shown(annotation: str, name: str) -> tuple[str, str] | None:
    """What a host event is called, and what it is; None for what only marks."""
    kind, _, rest = annotation.partition(":")
    if kind == "module":
        path, _, cls = rest.partition("|")
        return f"{path or cls} ({cls})" if path and cls else path or cls, "module"
    if kind == "line":
        return rest, "line"
    if kind == "user":
        return rest, "range"
    return None if annotation else (name, OPERATOR)


def _nested(events: list[Event]) -> tuple[tuple[Event, ...], int]:
    """The events with their depth, in the order of their start; and the deepest."""
    events.sort(key=lambda e: (e.start_ns, -e.end_ns))
    ends: list[int] = []  # of the events around
    placed = []
    for event in events:
        while ends and ends[-1] <= event.start_ns:
            ends.pop()
        placed.append(Event(event.start_ns, event.end_ns, event.name, event.key, len(ends), event.detail))
        ends.append(event.end_ns)
    return tuple(placed), max((event.depth for event in placed), default=0)


def _limited(rows: Sequence[TimelineRow], most: int) -> tuple[list[TimelineRow], int]:
    """The rows with at most so many events; the shortest operators and calls of the host are left out, and counted."""
    many = sum(len(row.events) for row in rows) - most
    if many <= 0:
        return list(rows), 0

    def small(row: TimelineRow, event: Event) -> bool:
        return row.kind in (HOST, CALLS) and event.key not in MARKS

    lengths = sorted(e.end_ns - e.start_ns for row in rows for e in row.events if small(row, e))
    least = lengths[min(many, len(lengths)) - 1] if lengths else 0
    kept = [
        TimelineRow(
            row.kind,
            row.name,
            tuple(e for e in row.events if not small(row, e) or e.end_ns - e.start_ns > least),
            row.deepest,
        )
        for row in rows
    ]
    return kept, sum(len(row.events) for row in rows) - sum(len(row.events) for row in kept)
