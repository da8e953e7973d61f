"""A Trace of n steps → what one step does: rows per kernel × op × module × phase × source line, idle time, waits, copies.

Every number is a mean over the traced steps, in the traced window's own time. Bytes and flops are modelled from shapes
(shapes.py); DRAM bytes are measured where the trace holds counter samples, and None otherwise.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from advisor.core import roofline
from advisor.core.environment import Environment
from advisor.core.profile import CopyRow, IdleCause, KernelRow, Site
from advisor.core.provenance import Provenance
from advisor.core.trace import DeviceTable, DramSamples, Trace
from advisor.profiling import kinds, shapes
from advisor.profiling.hostcalls import copy_kind, is_launch, is_wait, wait_text
from advisor.profiling.hosttree import HostTree, build, is_activity
from advisor.profiling.idle import HostActivity, device_idle, host_idle
from advisor.profiling.intervals import Interval, clip, overlap_ns, subtract, total, union

MAX_NAME = 1000  # characters of a kernel's name that are kept; templates can make them ten thousand long
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
    copies: tuple[CopyRow, ...] = ()
    launches: float = 0.0
    launch_us: float = 0.0
    phase_us: dict[str, float] = field(default_factory=dict)
    limit_us: float = 0.0
    overlap_us: float = 0.0  # two or more kernels at once
    streams: int = 0
    host_us: float = 0.0
    comm_exposed_us: float = 0.0
    dram_bytes: float | None = None  # all of it, kernels' and copies'
    coverage_frac: float | None = None  # launches with a device record; None when no launch was seen
    events: int = 0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Precision:
    """Which fp32 products may run as TF32 (torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32)."""

    tf32_conv: bool = False
    tf32_matmul: bool = False


@dataclass(slots=True)
class _Work:
    """One piece of work: a device record, or on a CPU an operator's own time."""

    name: str
    op: int  # event the work was started from; -1 if none
    ns: int
    stream: int = 0
    grid: str = ""
    block: str = ""
    dram: float | None = None


def aggregate(trace: Trace, environment: Environment, *, precision: Precision | None = None) -> Aggregate:
    """What one step of the window does on average.

    Args:
        trace: the window. Work belongs to a step by when the host started it, not by when the device ran it.
        environment: measured rates, for the rows' limits; without rates limits are 0.
        precision: whether fp32 products are held to the TF32 or to the strict rate (the default).
    """
    bounds, precision = trace.step_bounds_ns, precision or Precision()
    events = len(trace.ops.name) + len(trace.runtime.name) + len(trace.kernels.name)
    if len(bounds) < 2 or bounds[-1] <= bounds[0]:
        return Aggregate(events=events, notes=(*trace.notes, "no step was traced"))
    tree = build(trace.ops, trace.runtime)
    if trace.device == "cuda":
        return _device_steps(trace, tree, environment, precision, events)
    return _host_steps(trace, tree, environment, precision, events)


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
    trace: Trace, tree: HostTree, environment: Environment, precision: Precision, events: int
) -> Aggregate:
    bounds, runtime, device = trace.step_bounds_ns, trace.runtime, trace.kernels
    steps, first, last = len(bounds) - 1, bounds[0], bounds[-1]
    inside = [first <= t < last for t in runtime.start_ns]
    launches = [i for i, name in enumerate(runtime.name) if inside[i] and is_launch(name)]
    coverage = trace.launches_matched / trace.launches if trace.launches else None
    waits = _waits(trace, tree, inside)
    notes = list(trace.notes)
    if not device.name:
        # No device records means that nothing is known, not that the device was idle.
        return Aggregate(steps=steps, step_us=(last - first) / 1e3 / steps, syncs=_sync_sites(waits, steps),
                         launches=len(launches) / steps, coverage_frac=0.0, events=events,
                         notes=tuple(notes))  # fmt: skip
    if coverage is not None and coverage < LOW_COVERAGE:
        notes.append(f"only {coverage:.0%} of the kernel launches have a device record: shares of time are uncertain")

    everything = _records(trace, tree)
    records = [r for r in everything if first <= r.launched < last]
    orphans = sum(r.op < 0 and r.launched == device.start_ns[r.index] for r in records)
    if orphans:
        notes.append(f"{orphans} device records have neither a launch call nor an operator")
    # The host runs ahead: on the device the window opens when the work launched before it is done, and closes when the
    # work launched in it is.
    start = max([first, *(device.end_ns[r.index] for r in everything if r.launched < first and r.compute)])
    end = max([last, *(device.end_ns[r.index] for r in records)])

    def span(record: _Record) -> Interval:
        return device.start_ns[record.index], device.end_ns[record.index]

    compute = sorted((r for r in records if r.compute), key=span)
    busy = clip(union(map(span, compute)), start, end)
    copying = clip(union(span(r) for r in records if not r.compute), start, end)
    comm = [r for r in compute if kinds.kind_of_kernel(device.name[r.index]) == "comm"]
    beside_comm = union(span(r) for r in compute if kinds.kind_of_kernel(device.name[r.index]) != "comm")
    host = HostActivity(
        loading=_loading(trace, tree, _training_thread(trace)),
        waiting=waits,
        working=_working(trace, tree),
        starts=[device.start_ns[r.index] for r in compute],
        launched=[r.launched for r in compute],
        sources=[tree.line[r.op] if r.op >= 0 else "" for r in compute],
    )
    away = clip(union([*((a, b) for a, b, _, _ in waits), *host.loading]), first, last)
    dram = _spread_dram(device, trace.dram) if trace.dram.start_ns else None
    rows, limit = _rows([_work(device, r, dram) for r in compute], trace, tree, environment, precision, steps)
    return Aggregate(
        steps=steps,
        step_us=(end - start) / 1e3 / steps,
        kernels=rows,
        busy_us=total(busy) / 1e3 / steps,
        idle=device_idle(busy, copying, host, start, end, steps),
        syncs=_sync_sites(waits, steps),
        copies=_copy_rows(trace, tree, [r for r in records if r.copy], busy, steps),
        launches=len(launches) / steps,
        launch_us=sum(runtime.end_ns[i] - runtime.start_ns[i] for i in launches) / 1e3 / steps,
        phase_us=_phases(rows),
        limit_us=limit,
        overlap_us=overlap_ns(map(span, compute)) / 1e3 / steps,
        streams=len({device.stream[r.index] for r in compute}),
        host_us=(last - first - total(away)) / 1e3 / steps,
        comm_exposed_us=total(subtract(union(map(span, comm)), beside_comm)) / 1e3 / steps,
        dram_bytes=_window_bytes(trace.dram, start, end) / steps if dram is not None else None,
        coverage_frac=coverage,
        events=events,
        notes=tuple(notes),
    )


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


def _work(device: DeviceTable, record: _Record, dram: list[float] | None) -> _Work:
    i = record.index
    return _Work(device.name[i], record.op, device.end_ns[i] - device.start_ns[i], device.stream[i], device.grid[i],
                 device.block[i], None if dram is None else dram[i])  # fmt: skip


def _host_steps(trace: Trace, tree: HostTree, environment: Environment, precision: Precision, events: int) -> Aggregate:
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
    work = []
    busy: list[Interval] = []
    for i in tree.order:
        if not tree.is_operator(i) or tree.loading[i] or not start <= ops.start_ns[i] < end:
            continue
        if tree.top[i] == i and ops.thread[i] == training:
            busy.append((ops.start_ns[i], ops.end_ns[i]))
        if own[i] > 0:
            work.append(_Work(ops.name[i], i, own[i]))
    rows, limit = _rows(work, trace, tree, environment, precision, steps)
    merged = clip(union(busy), start, end)
    return Aggregate(
        steps=steps,
        step_us=(end - start) / 1e3 / steps,
        kernels=rows,
        busy_us=total(merged) / 1e3 / steps,
        idle=host_idle(_loading(trace, tree, training), merged, start, end, steps),
        phase_us=_phases(rows),
        limit_us=limit,
        host_us=(end - start - total(clip(_loading(trace, tree, training), start, end))) / 1e3 / steps,
        events=events,
        notes=tuple(trace.notes),
    )


def _rows(
    work: list[_Work], trace: Trace, tree: HostTree, environment: Environment, precision: Precision, steps: int
) -> tuple[tuple[KernelRow, ...], float]:
    """Rows with their shares of their operators' modelled cost, longest first; and the limit of the step."""
    ops = trace.ops
    time_of: dict[int, int] = defaultdict(int)  # by the operator instance whose model covers the work
    for item in work:
        if item.op >= 0:
            time_of[_unit(tree, item.op)] += item.ns
    groups: dict[tuple[str, str, str, str, str], list[float]] = {}
    longest: dict[tuple[str, str, str, str, str], tuple[int, _Work]] = {}
    costs: dict[int, tuple[float, float, float]] = {}
    for item in work:
        op, unit = item.op, _unit(tree, item.op)
        owner = tree.owner[op] if op >= 0 and tree.owner[op] >= 0 else op
        key = (
            item.name if len(item.name) <= MAX_NAME else item.name[: MAX_NAME - 1] + "…",
            tree.name(owner),
            tree.module[op] if op >= 0 else "",
            tree.phase(op),
            tree.line[op] if op >= 0 else "",
        )
        sums = groups.get(key)
        if sums is None:
            sums = groups[key] = [0.0] * 7  # calls, ns, flops, bytes, limit, DRAM bytes, with DRAM bytes
        if unit >= 0 and unit not in costs:
            costs[unit] = _cost(trace, tree, unit, environment, precision)
        flops, nbytes, limit = costs.get(unit, (0.0, 0.0, 0.0))
        share = item.ns / time_of[unit] if unit >= 0 and time_of[unit] else 0.0
        sums[0] += 1
        sums[1] += item.ns
        sums[2] += flops * share
        sums[3] += nbytes * share
        sums[4] += limit * share
        if item.dram is not None:
            sums[5] += item.dram
            sums[6] += 1
        if key not in longest or item.ns > longest[key][0]:
            longest[key] = (item.ns, item)
    rows = []
    for key, sums in groups.items():
        name, op_name, module, phase, source = key
        item = longest[key][1]
        op, unit = item.op, _unit(tree, item.op)
        owner = tree.owner[op] if op >= 0 and tree.owner[op] >= 0 else op
        in_conv = unit >= 0 and unit != owner and kinds.kind_of_op(ops.name[unit]) == "conv"
        path, _, module_type = module.partition("|")
        rows.append(
            KernelRow(
                name=name,
                kind=_kind(trace, item, op_name, name, phase, in_conv),
                op=op_name,
                module=path,
                module_type=module_type,
                phase=phase,
                source=source,
                calls=sums[0] / steps,
                time_us=sums[1] / 1e3 / steps,
                grid=item.grid,
                block=item.block,
                stream=item.stream,
                dtype=_cost_of(trace, owner).dtype if owner >= 0 else "",
                layout=_layout(trace, owner, unit, name),
                shapes=ops.shapes[owner] if owner >= 0 and ops.shapes else "",
                flops=sums[2] / steps,
                dram_bytes=sums[5] / steps if sums[6] else None,
                dram_provenance=Provenance.MEASURED if sums[6] else Provenance.UNAVAILABLE,
                modelled_bytes=sums[3] / steps,
                limit_us=sums[4] / steps,
                tensor_core=trace.device == "cuda" and kinds.tensor_core(name),
            )
        )
    rows.sort(key=lambda row: (-row.time_us, row.name, row.module, row.source))
    return tuple(rows), sum(row.limit_us for row in rows)


def _kind(trace: Trace, item: _Work, op_name: str, name: str, phase: str, in_conv: bool) -> str:
    found = kinds.kind(op_name, name, phase=phase, inside_conv=in_conv)
    if found == "copy" and item.op >= 0 and trace.ops.name[item.op] == "aten::copy_" and trace.ops.strides:
        layouts = shapes.layouts(trace.ops.shapes[item.op], trace.ops.strides[item.op])
        return "layout" if len(set(layouts)) > 1 else found
    return found


def _unit(tree: HostTree, op: int) -> int:
    """The operator instance whose modelled cost covers work started from `op`; -1 if none."""
    if op < 0 or not tree.is_operator(op):
        return -1
    if tree.whole[op] >= 0:
        return tree.whole[op]
    owner = tree.owner[op]
    return -1 if tree.composite[owner] else owner


def _cost_of(trace: Trace, op: int) -> shapes.Cost:
    ops = trace.ops
    if not ops.shapes or not ops.shapes[op]:
        return shapes.Cost()
    return shapes.cost(
        ops.name[op], ops.shapes[op], ops.dtypes[op] if ops.dtypes else "", ops.arguments[op] if ops.arguments else ""
    )


def _cost(
    trace: Trace, tree: HostTree, unit: int, environment: Environment, precision: Precision
) -> tuple[float, float, float]:
    """Flops, bytes and limit in µs of one operator instance."""
    cost, kind = _cost_of(trace, unit), kinds.kind_of_op(trace.ops.name[unit])
    dtype, flops = cost.dtype, cost.flops
    tf32 = environment.matrix_tflops.get("tf32", 0.0) > 0  # a CPU has no such rate
    if tf32 and dtype == "fp32" and (precision.tf32_conv if kind == "conv" else precision.tf32_matmul):
        dtype = "tf32"
    # Only products run at the matrix rate; all other work is bounded by its bytes.
    bounding = flops if kinds.matrix(kind) else 0.0
    return flops, cost.nbytes, roofline.limit_us(environment, nbytes=cost.nbytes, flops=bounding, dtype=dtype)


def _layout(trace: Trace, owner: int, unit: int, kernel: str) -> str:
    strides = trace.ops.strides
    for op in (owner, unit):
        if op >= 0 and strides and strides[op]:
            found = shapes.layout(trace.ops.shapes[op], strides[op])
            if found:
                return found
    lowered = kernel.lower()
    # Conversion kernels name both layouts: that says nothing about the tensor.
    return "nhwc" if "nhwc" in lowered and "nchw" not in lowered else ""


def _phases(rows: tuple[KernelRow, ...]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for row in rows:
        sums[row.phase] += row.time_us
    return dict(sums)


def _training_thread(trace: Trace) -> int:
    """The thread that steps: that of the step marks, else of the optimizer's ranges, else of most operators."""
    ops = trace.ops
    for prefix in ("step:", "user:Optimizer.step#"):
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


def _working(trace: Trace, tree: HostTree) -> list[Interval]:
    """Time in which some host thread ran operators, runtime calls, annotated modules or the optimizer."""
    ops, runtime = trace.ops, trace.runtime
    outermost = (
        (ops.start_ns[i], ops.end_ns[i])
        for i in tree.order
        if (tree.parent[i] < 0 or ops.annotation[tree.parent[i]]) and is_activity(ops.annotation[i])
    )
    calls = ((runtime.start_ns[i], runtime.end_ns[i]) for i in range(len(runtime.name)) if not is_wait(runtime.name[i]))
    return union([*outermost, *calls])


def _waits(trace: Trace, tree: HostTree, inside: list[bool]) -> list[tuple[int, int, str, str]]:
    """Runtime calls in which the host waited for the device: start, end, source line, what."""
    runtime, device = trace.runtime, trace.kernels
    pageable = {c for c, name in zip(device.correlation, device.name, strict=True) if "Pageable" in name}
    found = []
    for i, name in enumerate(runtime.name):
        blocking = is_wait(name)
        if not inside[i] or not (blocking or runtime.correlation[i] in pageable):
            continue
        op = tree.call_op[i]
        what = wait_text(name, _ancestors(tree, op), pageable=not blocking)
        found.append((runtime.start_ns[i], runtime.end_ns[i], tree.line[op] if op >= 0 else "", what))
    return sorted(found)


def _ancestors(tree: HostTree, op: int) -> list[str]:
    """Names of the operators around and including `op`, innermost first."""
    names = []
    while op >= 0 and tree.is_operator(op):
        names.append(tree.ops.name[op])
        op = tree.parent[op]
    return names


def _sync_sites(waits: list[tuple[int, int, str, str]], steps: int) -> tuple[Site, ...]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for start, end, source, what in waits:
        entry = sums[source, what]
        entry[0] += 1
        entry[1] += end - start
    sites = [
        Site(source=source, what=what, calls=n / steps, time_us=ns / 1e3 / steps)
        for (source, what), (n, ns) in sums.items()
    ]
    return tuple(sorted(sites, key=lambda site: (-site.time_us, site.source, site.what)))


def _copy_rows(
    trace: Trace, tree: HostTree, copies: list[_Record], busy: list[Interval], steps: int
) -> tuple[CopyRow, ...]:
    device = trace.kernels
    sums: dict[tuple[str, bool, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for record in copies:
        i, op, kind = record.index, record.op, record.copy
        name, start, end = device.name[i], device.start_ns[i], device.end_ns[i]
        entry = sums[kind, "Pageable" in name, tree.line[op] if op >= 0 else ""]
        entry[0] += device.nbytes[i] or (_cost_of(trace, op).nbytes / 2 if op >= 0 else 0.0)
        entry[1] += end - start
        entry[2] += 1
        if kind != "d2d":  # device-to-device copies are compute themselves
            entry[3] += total(clip(busy, start, end))
    rows = [
        CopyRow(
            kind=kind,
            bytes=nbytes / steps,
            time_us=ns / 1e3 / steps,
            calls=calls / steps,
            pageable=pageable,
            overlapped_frac=beside / ns if ns else 0.0,
            source=source,
        )
        for (kind, pageable, source), (nbytes, ns, calls, beside) in sums.items()
    ]
    return tuple(sorted(rows, key=lambda row: (-row.time_us, row.kind, row.source)))


def _spread_dram(device: DeviceTable, samples: DramSamples) -> list[float]:
    """DRAM bytes of each device record: each sample shared among the records that ran in it, by length of overlap."""
    result = [0.0] * len(device.name)
    records = sorted(range(len(device.name)), key=device.start_ns.__getitem__)
    first = 0
    for a, b, read, written in sorted(
        zip(samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes, strict=True)
    ):
        if a <= 0 or b <= a:
            continue  # CUPTI leaves time stamps of unfilled samples at zero
        while first < len(records) and device.end_ns[records[first]] <= a:
            first += 1
        present: list[tuple[int, int]] = []
        position = first
        while position < len(records) and device.start_ns[records[position]] < b:
            i = records[position]
            beside = min(b, device.end_ns[i]) - max(a, device.start_ns[i])
            if beside > 0:
                present.append((i, beside))
            position += 1
        together = sum(beside for _, beside in present)
        for i, beside in present:
            result[i] += (read + written) * beside / together
    return result


def _window_bytes(samples: DramSamples, start: int, end: int) -> float:
    return sum(
        read + written
        for a, b, read, written in zip(
            samples.start_ns, samples.end_ns, samples.read_bytes, samples.write_bytes, strict=True
        )
        if a >= start and b <= end
    )
