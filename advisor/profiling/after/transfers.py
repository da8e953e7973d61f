"""Host/device traffic in the trace: waits of the host for the device, and copies."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from advisor.core.profile import CopyRow, Site
from advisor.core.trace import Trace
from advisor.profiling.after.rows import cost_of
from advisor.profiling.trace.hostcalls import copy_kind, is_wait, wait_text
from advisor.profiling.trace.hosttree import HostTree
from advisor.profiling.trace.intervals import Interval, clip, total

Wait = tuple[int, int, str, str]  # start and end, ns; source line; what


def waits(trace: Trace, tree: HostTree, inside: list[bool]) -> list[Wait]:
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


def sync_sites(found: list[Wait], steps: int) -> tuple[Site, ...]:
    """Waits per source line, call and operator, as means over the steps; longest first."""
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for start, end, source, what in found:
        entry = sums[source, what]
        entry[0] += 1
        entry[1] += end - start
    sites = [
        Site(source=source, what=what, calls=n / steps, time_us=ns / 1e3 / steps)
        for (source, what), (n, ns) in sums.items()
    ]
    return tuple(sorted(sites, key=lambda site: (-site.time_us, site.source, site.what)))


def copy_rows(
    trace: Trace, tree: HostTree, copies: Iterable[tuple[int, int]], busy: list[Interval], steps: int
) -> tuple[CopyRow, ...]:
    """Copies per kind and source line, as means over the steps.

    Args:
        copies: device records (their index, and the event they were started from or -1).
        busy: time with compute on the device, sorted and disjoint.
    """
    device = trace.kernels
    sums: dict[tuple[str, bool, str], list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for i, op in copies:
        kind = copy_kind(device.name[i])
        name, start, end = device.name[i], device.start_ns[i], device.end_ns[i]
        entry = sums[kind, "Pageable" in name, tree.line[op] if op >= 0 else ""]
        entry[0] += device.nbytes[i] or (cost_of(trace, op).nbytes / 2 if op >= 0 else 0.0)
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
