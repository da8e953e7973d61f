"""Why the device had nothing to do: each gap in its work, split by what the host was doing meanwhile.

In this order: a host/device copy was running (copy); the training thread was in the loader's `next()` (data); the gap
began while the host waited for the device, so the queue had been drained (sync), or the host was silent behind a result that
it had copied (sync too: a metric in NumPy or Python, behind a queue that was empty anyway); the host was running operators, launch
calls, module or optimizer code (launch). What is left is other, such as the short gaps between kernels that were queued.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from dataclasses import dataclass, field

from advisor.core.profile import IdleCause, Site
from advisor.profiling.after.transfers import Wait
from advisor.profiling.trace.intervals import Interval, clip, gaps, subtract, total, union

DATA, LAUNCH, COPY, SYNC, OTHER = "data", "launch", "copy", "sync", "other"

# Python between two operators (attribute look-ups, the loop itself) is launch work too; a longer silence is something else.
HOST_PAUSE_NS = 100_000
MAX_SITES = 20
COPYING = (
    "aten::to",
    "aten::_to_copy",
    "aten::copy_",
)  # operators that copy whole tensors, at the end of a wait's name


@dataclass(slots=True, kw_only=True)
class HostActivity:
    """What the host did, as sorted intervals.

    loading: in a loader's `next()`, on the training thread. waiting: in a call that waits for the device, with its site.
    working: in operators, annotated modules or launch calls. starts, launched and sources stand beside each other: when a
    piece of compute began on the device, when the host launched it, and for which source line.
    """

    loading: list[Interval] = field(default_factory=list)
    waiting: list[Wait] = field(default_factory=list)
    working: list[Interval] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)  # ascending
    launched: list[int] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Piece:
    """One stretch of idle time with its cause."""

    start_ns: int
    end_ns: int
    cause: str
    source: str
    what: str


class _Tally:
    """Idle time by cause and site; and each stretch of it, in `pieces`, where they are asked for."""

    def __init__(self, pieces: list[Piece] | None = None) -> None:
        self.pieces = pieces
        self.time: dict[str, int] = defaultdict(int)
        self.sites: dict[str, dict[tuple[str, str], list[int]]] = defaultdict(lambda: defaultdict(lambda: [0, 0]))

    def add(self, cause: str, stretches: list[Interval], source: str, what: str) -> None:
        ns = total(stretches)
        if ns <= 0:
            return
        if self.pieces is not None:
            self.pieces += [Piece(a, b, cause, source, what) for a, b in stretches]
        self.time[cause] += ns
        entry = self.sites[cause][source, what]
        entry[0] += 1
        entry[1] += ns


def device_idle(
    compute: list[Interval],
    copies: list[Interval],
    host: HostActivity,
    start: int,
    end: int,
    steps: int,
    pieces: list[Piece] | None = None,
) -> tuple[IdleCause, ...]:
    """Idle causes per step, in the traced window's own time (tracing makes launches slower; the analysis scales this).

    Args:
        compute: time with kernels, memsets or device-to-device copies running, sorted and disjoint.
        copies: time with host/device copies running, sorted and disjoint.
        start, end: the window on the device, ns.
        steps: steps in the window.
        pieces: gets each stretch, in the order of the gaps.
    """
    tally = _Tally(pieces)
    busy_host = _bridge(union([*host.working, *((a, b) for a, b, _, _ in host.waiting)]), HOST_PAUSE_NS)
    waits = sorted(host.waiting)
    wait_starts = [w[0] for w in waits]
    for a, b in gaps(compute, start, end):
        copying = clip(copies, a, b)
        tally.add(COPY, copying, "", "host/device copy while no kernel runs")
        rest = subtract([(a, b)], copying)
        loading = [piece for piece in host.loading if piece[0] < b and piece[1] > a]
        if loading:
            inside = [piece for r in rest for piece in clip(loading, *r)]
            tally.add(DATA, inside, "", "waiting in the loader's next()")
            rest = subtract(rest, loading)
        _attribute(tally, rest, a, b, host, waits, wait_starts, busy_host)
    return _causes(tally, steps, (DATA, LAUNCH, COPY, SYNC, OTHER))


def _attribute(
    tally: _Tally, rest: list[Interval], a: int, b: int, host: HostActivity,
    waits: list[Wait], wait_starts: list[int], busy_host: list[Interval],
) -> None:  # fmt: skip
    if not rest:
        return
    next_record = bisect_left(host.starts, b)
    known = next_record < len(host.starts) and host.starts[next_record] == b
    launched = host.launched[next_record] if known else b
    source = host.sources[next_record] if known else ""
    if launched <= a:
        tally.add(OTHER, rest, "", "between queued kernels")
        return
    wait = _waiting_at(a, waits, wait_starts)
    if wait is not None:
        tally.add(SYNC, rest, wait[2], wait[3])
        return
    working = [piece for r in rest for piece in clip(busy_host, *r)]
    # From the launch call to the kernel's start the device itself takes its time: part of launching.
    working = (
        union([*working, *(piece for r in rest for piece in clip([(launched, b)], *r))]) if launched < b else working
    )
    tally.add(LAUNCH, working, source, "the host prepares the next launch")
    for silence in subtract(rest, working):
        copied = _copied_before(silence, waits, wait_starts, busy_host)
        if copied is not None:
            tally.add(SYNC, [silence], copied[2], copied[3])
        else:
            tally.add(OTHER, [silence], source, "the host does something else")


def _copied_before(silence: Interval, waits: list[Wait], starts: list[int], busy_host: list[Interval]) -> Wait | None:
    """The wait for a tensor to be copied that was the last thing the host did before it fell silent; None where there was none."""
    last = bisect_right(busy_host, silence[0], key=lambda interval: interval[0]) - 1
    fell_silent = min(busy_host[last][1], silence[0]) if last >= 0 else silence[0]
    found = bisect_right(starts, fell_silent) - 1
    wait = waits[found] if found >= 0 else None
    if wait is None or not wait[3].endswith(COPYING) or fell_silent - wait[1] > HOST_PAUSE_NS:
        return None
    return wait


def _waiting_at(time: int, waits: list[Wait], starts: list[int]) -> Wait | None:
    """The wait for the device that was going on at `time`."""
    for wait in reversed(waits[max(bisect_right(starts, time) - 8, 0) : bisect_right(starts, time)]):
        if wait[1] >= time:
            return wait
    return None


def _bridge(intervals: list[Interval], pause: int) -> list[Interval]:
    """Join intervals with at most `pause` between them."""
    joined: list[Interval] = []
    for start, end in intervals:
        if joined and start - joined[-1][1] <= pause:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def host_idle(
    loading: list[Interval],
    working: list[Interval],
    start: int,
    end: int,
    steps: int,
    pieces: list[Piece] | None = None,
) -> tuple[IdleCause, ...]:
    """On a CPU: time of a step in the loader (data), and outside both the loader and operators (other)."""
    tally = _Tally(pieces)
    in_loader = clip(loading, start, end)
    tally.add(DATA, in_loader, "", "waiting in the loader's next()")
    free = subtract(gaps(union(working), start, end), in_loader)
    tally.add(OTHER, free, "", "Python between operators")
    return _causes(tally, steps, (DATA, OTHER))


def _causes(tally: _Tally, steps: int, names: tuple[str, ...]) -> tuple[IdleCause, ...]:
    causes = []
    for name in names:
        sites = sorted(tally.sites[name].items(), key=lambda item: -item[1][1])[:MAX_SITES]
        causes.append(
            IdleCause(
                cause=name,
                time_us=tally.time[name] / 1e3 / steps,
                sites=tuple(
                    Site(source=source, what=what, calls=n / steps, time_us=ns / 1e3 / steps)
                    for (source, what), (n, ns) in sites
                ),
            )
        )
    return tuple(causes)
