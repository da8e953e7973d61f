"""A Trace of n steps → what one step does: rows per kernel × op × module × phase × source line, idle time, waits, copies.

Every number is a mean over the traced steps, in the traced window's own time. Bytes and flops are modelled from shapes
(shapes.py); DRAM bytes are measured where the trace holds counter samples, and None otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial

from advisor.core.environment import Environment
from advisor.core.profile import CopyRow, IdleCause, KernelRow, Site
from advisor.core.trace import DeviceTable, Trace
from advisor.core.units import percent_text
from advisor.profiling.after import bylines, dram, promotions, rows, transfers
from advisor.profiling.after.idle import HostActivity, Piece, device_idle, host_idle
from advisor.profiling.after.rows import Precision, WorkItem
from advisor.profiling.after.transfers import Wait
from advisor.profiling.trace import kinds
from advisor.profiling.trace.cupy_names import MADE, PREFIX
from advisor.profiling.trace.hostcalls import copy_kind, is_allocation, is_launch, is_load, is_wait
from advisor.profiling.trace.hosttree import (
    AVERAGE,
    CLOSURE,
    ENGINE,
    OPTIMIZER,
    OPTIMIZER_STEP,
    HostTree,
    build,
    is_activity,
)
from advisor.profiling.trace.intervals import Interval, clip, overlap_ns, subtract, total, union

LOW_COVERAGE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Aggregate:
    """One step, from the traced window. Fields are those of StepProfile, with what else the trace tells.

    `busy_us` is the union over streams of kernels, memsets and device-to-device copies (operators on a CPU): with the
    idle causes it makes up `step_us`. `host_us` is the training thread's time outside waits for device and loader.
    """

    steps: int = 0
    step_us: float = 0.0
    kernels: tuple[KernelRow, ...] = ()
    busy_us: float = 0.0
    idle: tuple[IdleCause, ...] = ()
    syncs: tuple[Site, ...] = ()
    promotions: tuple[Site, ...] = ()  # operators that compute in fp64 because one of their tensors is
    copies: tuple[CopyRow, ...] = ()
    launches: float = 0.0
    launch_us: float = 0.0
    phase_us: dict[str, float] = field(default_factory=dict)
    limit_us: float = 0.0
    overlap_us: float = 0.0  # two or more kernels at once
    streams: int = 0
    host_us: float = 0.0
    next_us: float = 0.0  # the training thread in a loader's `next()`
    optimizer_host_us: float = 0.0  # of these, inside Optimizer.step, or at lines that update weights by hand
    average_host_us: float = 0.0  # the training thread at lines that average weights, with Python between their calls
    average_calls_us: float = 0.0  # of these, inside the calls
    backward_nodes: float = 0.0  # that autograd's engine has run
    allocating_us: float = 0.0  # the host in calls that take memory from the driver or give it back
    allocating_idle_us: float = 0.0  # of these, with the device idle
    comm_exposed_us: float = 0.0
    cupy_made: float | None = None  # kernel objects of CuPy's; None where none of its calls was seen
    cupy_compiles: float | None = None  # modules of compiled kernels loaded
    dram_bytes: float | None = None  # all of it, kernels' and copies'
    coverage_frac: float | None = None  # launches with a device record; None when no launch was seen
    events: int = 0
    notes: tuple[str, ...] = ()


def aggregate(
    trace: Trace,
    environment: Environment,
    *,
    precision: Precision | None = None,
    pieces: list[Piece] | None = None,
) -> Aggregate:
    """What one step of the window does on average.

    Args:
        trace: the window. Work belongs to a step by when the host started it, not by when the device ran it.
        environment: measured rates, for the rows' limits; without rates limits are 0.
        precision: whether fp32 products are held to the TF32 or to the strict rate (the default).
        pieces: gets each stretch of idle time in the window, with its cause.
    """
    bounds, precision = trace.step_bounds_ns, precision or Precision()
    events = len(trace.ops.name) + len(trace.runtime.name) + len(trace.kernels.name)
    # Bounds without events are a profiler's that never ran: nothing is known of these steps, and not that they ran no operator.
    if not events or len(bounds) < 2 or bounds[-1] <= bounds[0]:
        return Aggregate(events=events, notes=(*trace.notes, "no step was traced"))
    tree = build(trace.ops, trace.runtime, trace.roles)
    if trace.device == "cuda":
        return _device_steps(trace, tree, environment, precision, events, pieces)
    return _host_steps(trace, tree, environment, precision, events, pieces)


@dataclass(slots=True)
class _Record:
    """A device record with what started it: the event `op` (-1 if none), at `launched`."""

    index: int
    op: int
    launched: int
    copy: str  # h2d, d2h, d2d or "" for kernels and memsets

    @property
    def compute(self) -> bool:
        return self.copy in ("", "d2d")


def _device_steps(
    trace: Trace,
    tree: HostTree,
    environment: Environment,
    precision: Precision,
    events: int,
    pieces: list[Piece] | None,
) -> Aggregate:
    bounds, runtime, device = trace.step_bounds_ns, trace.runtime, trace.kernels
    steps, first, last = len(bounds) - 1, bounds[0], bounds[-1]
    inside = [first <= t < last for t in runtime.start_ns]
    launches = [i for i, name in enumerate(runtime.name) if inside[i] and is_launch(name)]
    coverage = trace.launches_matched / trace.launches if trace.launches else None
    waits = transfers.waits(trace, tree, inside)
    notes = list(trace.notes)
    if not device.name:
        return _without_records(trace, transfers.sync_sites(waits, steps), len(launches) / steps, events)
    everything = _records(trace, tree)
    records = [r for r in everything if first <= r.launched < last]
    span = partial(_span, device)
    compute = sorted((r for r in records if r.compute), key=span)
    gpus = len({device.device[r.index] for r in compute})
    replayed = sum("GraphLaunch" in runtime.name[i] for i in launches)
    notes += _cautions(device, records, coverage, replayed / steps, gpus)
    # The host runs ahead: on the device the window opens when the work launched before it is done, and closes when the
    # work launched in it is.
    start = max([first, *(device.end_ns[r.index] for r in everything if r.launched < first and r.compute)])
    end = max([last, *(device.end_ns[r.index] for r in records)])

    busy = clip(union(map(span, compute)), start, end)
    copying = clip(union(span(r) for r in records if not r.compute), start, end)
    host = _host_activity(trace, tree, waits, compute)
    # The counters are those of one GPU.
    moved = dram.spread(device, trace.dram) if trace.dram.start_ns and gpus == 1 else None
    table, limit = rows.rows([_work(device, r, moved) for r in compute], trace, tree, environment, precision, steps)
    return Aggregate(
        steps=steps,
        step_us=(end - start) / 1e3 / steps,
        kernels=table,
        busy_us=total(busy) / 1e3 / steps,
        idle=device_idle(busy, copying, host, start, end, steps, pieces),
        syncs=transfers.sync_sites(waits, steps),
        copies=transfers.copy_rows(trace, tree, [(r.index, r.op) for r in records if r.copy], busy, steps),
        launches=len(launches) / steps,
        launch_us=sum(runtime.end_ns[i] - runtime.start_ns[i] for i in launches) / 1e3 / steps,
        phase_us=rows.phases(table),
        limit_us=limit,
        overlap_us=overlap_ns(map(span, compute)) / 1e3 / steps,
        streams=len({(device.device[r.index], device.stream[r.index]) for r in compute}),
        promotions=promotions.sites(trace, tree, first, last, steps),
        comm_exposed_us=_comm_exposed_ns(device, compute) / 1e3 / steps,
        dram_bytes=dram.within(trace.dram, start, end) / steps if moved is not None else None,
        coverage_frac=coverage,
        events=events,
        notes=tuple(notes),
        **_host_times(trace, tree, host, inside, busy),
        **_of_cupy(trace, inside, steps),
    )


def _without_records(trace: Trace, syncs: tuple[Site, ...], launches: float, events: int) -> Aggregate:
    """No device records means that nothing is known, not that the device was idle."""
    bounds = trace.step_bounds_ns
    steps = len(bounds) - 1
    step_us = (bounds[-1] - bounds[0]) / 1e3 / steps
    return Aggregate(steps=steps, step_us=step_us, syncs=syncs, launches=launches, coverage_frac=0.0, events=events,
                     notes=tuple(trace.notes))  # fmt: skip


def _host_activity(trace: Trace, tree: HostTree, waits: list[Wait], compute: list[_Record]) -> HostActivity:
    return HostActivity(
        loading=_loading(trace, tree, _training_thread(trace)),
        waiting=waits,
        working=_working(trace, tree),
        starts=[trace.kernels.start_ns[r.index] for r in compute],
        launched=[r.launched for r in compute],
        sources=[tree.line[r.op] if r.op >= 0 else "" for r in compute],
    )


def _comm_exposed_ns(device: DeviceTable, compute: list[_Record]) -> int:
    """How long the device does nothing but communicate."""
    comm = {r.index for r in compute if kinds.kind_of_kernel(device.name[r.index]) == "comm"}
    beside = union(_span(device, r) for r in compute if r.index not in comm)
    return total(subtract(union(_span(device, r) for r in compute if r.index in comm), beside))


def _span(device: DeviceTable, record: _Record) -> Interval:
    return device.start_ns[record.index], device.end_ns[record.index]


def _cautions(
    device: DeviceTable, records: list[_Record], coverage: float | None, replays: float, gpus: int
) -> Iterator[str]:
    """What makes these numbers say less than they seem to."""
    if coverage is not None and coverage < LOW_COVERAGE:
        yield f"only {percent_text(coverage)} of the kernel launches have a device record: shares of time are uncertain"
    orphans = sum(r.op < 0 and r.launched == device.start_ns[r.index] for r in records)
    if orphans:
        yield f"{orphans} device records have neither a launch call nor an operator"
    if replays:
        yield (
            f"{replays:g} CUDA graph replays a step: their kernels have no operator, module or line, and no "
            "modelled limit"
        )
    if gpus > 1:
        yield f"the step runs on {gpus} GPUs: it counts as busy while one of them works, and the limit is of the GPU with most to do"


def _host_times(
    trace: Trace, tree: HostTree, host: HostActivity, inside: list[bool], busy: list[Interval]
) -> dict[str, float]:
    """What the host did in a step, by the fields of `Aggregate`; `busy`: when the device was."""
    bounds, runtime, thread = trace.step_bounds_ns, trace.runtime, _training_thread(trace)
    steps, first, last = len(bounds) - 1, bounds[0], bounds[-1]
    waited = union((a, b) for a, b, _, _ in host.waiting)
    away = clip(union([*waited, *host.loading]), first, last)
    by_hand, _ = bylines.spans(trace, tree, OPTIMIZER, thread)
    stepping = clip(union([*_stepping(trace, thread), *by_hand]), first, last)
    averaging, calls = bylines.spans(trace, tree, AVERAGE, thread)
    nodes = sum(
        name.startswith(ENGINE) and first <= trace.ops.start_ns[i] < last for i, name in enumerate(trace.ops.name)
    )
    allocating = union(
        (runtime.start_ns[i], runtime.end_ns[i])
        for i, name in enumerate(runtime.name)
        if inside[i] and is_allocation(name)
    )
    nanoseconds = {
        "host_us": last - first - total(away),
        "next_us": total(clip(host.loading, first, last)),
        "optimizer_host_us": total(subtract(stepping, waited)),
        "average_host_us": total(clip(averaging, first, last)),
        "average_calls_us": total(clip(union(calls), first, last)),
        "allocating_us": total(allocating),
        "allocating_idle_us": total(subtract(allocating, busy)),
    }
    return {name: ns / 1e3 / steps for name, ns in nanoseconds.items()} | {"backward_nodes": nodes / steps}


def _of_cupy(trace: Trace, inside: list[bool], steps: int) -> dict[str, float]:
    """Kernel objects that CuPy made per step, and modules that were loaded; None where the loop is not CuPy's; by the fields of `Aggregate`."""
    ops, first, last = trace.ops, trace.step_bounds_ns[0], trace.step_bounds_ns[-1]
    if not any(name.startswith(PREFIX) for name in ops.name):
        return {}
    made = sum(
        name.startswith(PREFIX) and name.endswith(MADE) and first <= start < last
        for name, start in zip(ops.name, ops.start_ns, strict=True)
    )
    loaded = sum(held and is_load(name) for held, name in zip(inside, trace.runtime.name, strict=True))
    return {"cupy_made": made / steps, "cupy_compiles": loaded / steps}


def _records(trace: Trace, tree: HostTree) -> list[_Record]:
    """Every device record, joined to its launch call by correlation id and to the operator around that call."""
    runtime, device, ops = trace.runtime, trace.kernels, trace.ops
    call_of = {c: i for i, c in enumerate(runtime.correlation)}
    op_of = {c: i for i, c in enumerate(ops.correlation) if c}
    records = []
    for i, correlation in enumerate(device.correlation):
        call = call_of.get(correlation, -1)
        op = tree.call_op[call] if call >= 0 else -1
        if op < 0 or not tree.is_operator(op):
            # Kineto's own link is the operator's; the call's place in time may only give an annotation.
            linked = op_of.get(device.op[i], -1) if device.op[i] else -1
            op = linked if linked >= 0 and (op < 0 or tree.is_operator(linked)) else op
        launched = runtime.start_ns[call] if call >= 0 else ops.start_ns[op] if op >= 0 else device.start_ns[i]
        records.append(_Record(i, op, launched, copy_kind(device.name[i])))
    return records


def _work(device: DeviceTable, record: _Record, moved: list[float] | None) -> WorkItem:
    i = record.index
    return WorkItem(device.name[i], record.op, device.end_ns[i] - device.start_ns[i], device.stream[i], device.grid[i],
                 device.block[i], None if moved is None else moved[i], device.device[i])  # fmt: skip


def _host_steps(
    trace: Trace,
    tree: HostTree,
    environment: Environment,
    precision: Precision,
    events: int,
    pieces: list[Piece] | None,
) -> Aggregate:
    """On a CPU the rows are operators with their own time: their duration less that of the operators inside them."""
    ops, bounds = trace.ops, trace.step_bounds_ns
    steps, start, end = len(bounds) - 1, bounds[0], bounds[-1]
    own = [b - a for a, b in zip(ops.start_ns, ops.end_ns, strict=True)]
    nearest = [-1] * len(own)  # enclosing operator, seen through annotations
    for i in tree.order:
        parent = tree.parent[i]
        if parent < 0:
            continue
        outer = parent if tree.is_operator(parent) else nearest[parent]
        nearest[i] = outer
        if outer >= 0 and tree.is_operator(i):
            own[outer] -= ops.end_ns[i] - ops.start_ns[i]
    training = _training_thread(trace)
    work: list[WorkItem] = []
    busy: list[Interval] = []
    for i in tree.order:
        if not tree.is_operator(i) or tree.loading[i] or not start <= ops.start_ns[i] < end:
            continue
        if tree.top[i] == i and ops.thread[i] == training:
            busy.append((ops.start_ns[i], ops.end_ns[i]))
        if own[i] > 0:
            work.append(WorkItem(ops.name[i], i, own[i]))
    table, limit = rows.rows(work, trace, tree, environment, precision, steps)
    merged = clip(union(busy), start, end)
    loading = _loading(trace, tree, training)
    nodes = sum(name.startswith(ENGINE) and start <= ops.start_ns[i] < end for i, name in enumerate(ops.name))
    by_hand, _ = bylines.spans(trace, tree, OPTIMIZER, training)
    stepping = clip(union([*_stepping(trace, training), *by_hand]), start, end)
    averaging, calls = bylines.spans(trace, tree, AVERAGE, training)
    return Aggregate(
        steps=steps,
        step_us=(end - start) / 1e3 / steps,
        kernels=table,
        busy_us=total(merged) / 1e3 / steps,
        idle=host_idle(loading, merged, start, end, steps, pieces),
        phase_us=rows.phases(table),
        limit_us=limit,
        host_us=(end - start - total(clip(loading, start, end))) / 1e3 / steps,
        next_us=total(clip(loading, start, end)) / 1e3 / steps,
        backward_nodes=nodes / steps,
        promotions=promotions.sites(trace, tree, start, end, steps),
        optimizer_host_us=total(stepping) / 1e3 / steps,
        average_host_us=total(clip(averaging, start, end)) / 1e3 / steps,
        average_calls_us=total(clip(union(calls), start, end)) / 1e3 / steps,
        events=events,
        notes=tuple(trace.notes),
    )


def _training_thread(trace: Trace) -> int:
    """The thread that steps: that of the step marks, else of the optimizer's ranges, else of most operators."""
    ops = trace.ops
    for prefix in (("step:",), OPTIMIZER_STEP):
        for thread, text in zip(ops.thread, ops.annotation, strict=True):
            if text.startswith(prefix):
                return thread
    counts: dict[int, int] = defaultdict(int)
    for thread in ops.thread:
        counts[thread] += 1
    return max(counts, key=counts.__getitem__, default=0)


def _loading(trace: Trace, tree: HostTree, thread: int) -> list[Interval]:
    ops = trace.ops
    return union((ops.start_ns[i], ops.end_ns[i]) for i in tree.order if tree.loading[i] and ops.thread[i] == thread)


def _stepping(trace: Trace, thread: int) -> list[Interval]:
    return _updates(trace, [i for i, other in enumerate(trace.ops.thread) if other == thread])


def _updates(trace: Trace, events: Iterable[int]) -> list[Interval]:
    """Of these events the optimizer's ranges, less the closures that updates call."""
    ops = trace.ops
    updates: list[Interval] = []
    closures: list[Interval] = []
    for i in events:
        text = ops.annotation[i]
        if text.startswith(OPTIMIZER_STEP) or text == CLOSURE:
            (closures if text == CLOSURE else updates).append((ops.start_ns[i], ops.end_ns[i]))
    return subtract(union(updates), union(closures))


def _working(trace: Trace, tree: HostTree) -> list[Interval]:
    """Time in which some host thread ran operators, runtime calls, annotated modules or the optimizer."""
    ops, runtime = trace.ops, trace.runtime
    outermost = [
        i
        for i in tree.order
        if (tree.parent[i] < 0 or ops.annotation[tree.parent[i]]) and is_activity(ops.annotation[i])
    ]
    other = ((ops.start_ns[i], ops.end_ns[i]) for i in outermost if not ops.annotation[i].startswith(OPTIMIZER_STEP))
    calls = ((runtime.start_ns[i], runtime.end_ns[i]) for i in range(len(runtime.name)) if not is_wait(runtime.name[i]))
    return union([*_updates(trace, range(len(ops.name))), *other, *calls])
