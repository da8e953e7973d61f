"""The views of a StepProfile that all reports share: time by cause, gaps to the limit, modules, roofline points. Pure."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace

from advisor.analysis.idle import host_waiting_us, idle, operators_us
from advisor.analysis.view import View
from advisor.core import layers
from advisor.core.profile import IdleCause, KernelRow, Site, StepProfile
from advisor.core.provenance import Provenance

KIND_LABELS = {
    "conv": "convolution",
    "gemm": "matrix product",
    "norm": "normalisation",
    "activation": "activation",
    "elementwise": "elementwise",
    "pool": "pooling",
    "reduce": "reduction",
    "layout": "layout conversion",
    "copy": "device copies",
    "memset": "fills",
    "optimizer": "optimizer",
    "average": "average of weights",
    "loss": "loss",
    "upsample": "upsampling",
    "concat": "concatenation",
    "dropout": "random numbers",
    "comm": "communication",
    "other": "other work",
}
IDLE_LABELS = {
    "data": "idle: waiting for data",
    "launch": "idle: waiting for launches",
    "copy": "idle: waiting for copies",
    "sync": "idle: after a synchronisation",
    "other": "idle: no known cause",
}
HOST_LABELS = {"data": "waiting for data", "other": "outside operators"}  # a CPU is not idle between operators
SMALL_FRAC = 0.005  # kinds below this share of the step are shown together


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """One share of a step. `key` is a kernel kind, or `idle_<cause>`; `limit_us` is 0 where no limit is known."""

    key: str
    label: str
    time_us: float
    frac: float
    limit_us: float = 0.0
    idle: bool = False
    sites: tuple[Site, ...] = ()


PLACES = 2  # that are named of a kind of work


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Time that a group of rows takes beyond what this machine needs for it.

    `layer` is what the module is (`Conv2d 64→128, 3×3`). `module` has `*` for the index of repeated blocks (`layer1.*.bn3`); `modules` counts what it stands for.
    """

    kind: str
    module: str
    layer: str
    modules: int
    op: str
    source: str
    time_us: float
    limit_us: float
    gap_us: float
    frac: float  # gap over step


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTime:
    """Device time below one module path, its children included."""

    path: str
    type: str
    depth: int
    leaf: bool
    forward_us: float
    backward_us: float
    other_us: float
    limit_us: float
    dram_bytes: float | None
    frac: float

    @property
    def time_us(self) -> float:
        return self.forward_us + self.backward_us + self.other_us


@dataclass(frozen=True, slots=True, kw_only=True)
class RooflinePoint:
    """One operator of one module in one phase. `intensity` is FLOP per byte, 0 for work without floating-point count."""

    label: str
    kind: str
    intensity: float
    tflops: float
    gbps: float
    time_us: float
    frac: float
    provenance: Provenance


@dataclass(frozen=True, slots=True)
class Division:
    """The step that all shares here are of: some device work ran for `busy_us` of its `total_us`, and for the rest it stood idle.

    It is the untraced step. On a GPU tracing makes gaps longer, kernels not, and the traced gaps are scaled to it as for the findings; on
    a CPU all that is traced takes longer, and `stretch` turns a row's time into its part of this step. Where no step was timed it is the
    traced one.
    """

    total_us: float
    busy_us: float
    idle: tuple[IdleCause, ...]
    untraced: bool
    stretch: float = 1.0


def division(profile: StepProfile) -> Division:
    """The step, divided into work and idle causes."""
    view = View.of(profile)
    found = idle(view)
    if found is not None:
        return Division(found.busy_us + found.total_us, found.busy_us, _scaled(profile, found.by_cause), untraced=True)
    traced = {row.cause: row.time_us for row in profile.idle}
    work = profile.busy_us + sum(time for cause, time in traced.items() if cause != "data")
    if view.on_gpu or view.step_us <= 0 or work <= 0:
        total = profile.busy_us + sum(traced.values()) or sum(r.time_us for r in profile.kernels)
        return Division(total, profile.busy_us, profile.idle, untraced=False)
    waits, operators = host_waiting_us(view), operators_us(view)
    between = (view.step_us - waits - operators) / max(work - profile.busy_us, 1e-9)
    times = {**{cause: time * between for cause, time in traced.items()}, "data": waits}
    stretch = operators / profile.busy_us if profile.busy_us > 0 else 1.0
    return Division(view.step_us, operators, _scaled(profile, times), untraced=True, stretch=stretch)


def _scaled(profile: StepProfile, times: Mapping[str, float]) -> tuple[IdleCause, ...]:
    """Idle causes with these times, their sites' scaled as they are."""
    traced = {row.cause: row for row in profile.idle if row.time_us > 0}
    return tuple(
        IdleCause(
            cause=cause,
            time_us=time,
            sites=tuple(replace(site, time_us=site.time_us * time / row.time_us) for site in row.sites)
            if (row := traced.get(cause))
            else (),
        )
        for cause, time in times.items()
    )


def causes(profile: StepProfile, small_frac: float = SMALL_FRAC) -> tuple[Cause, ...]:
    """The step divided by cause, device work first, each part largest first; the shares add up to 1.

    Kinds below `small_frac` of the step are counted with "other work".
    """
    step = division(profile)
    total, rows_us = step.total_us, step.stretch * sum(r.time_us for r in profile.kernels)
    if total <= 0:
        return ()
    # Below 1 where kernels of several streams run side by side.
    scale = step.stretch * (min(1.0, step.busy_us / rows_us) if rows_us > 0 and step.busy_us > 0 else 1.0)
    times: dict[str, float] = {}
    limits: dict[str, float] = {}
    for row in profile.kernels:
        times[row.kind] = times.get(row.kind, 0.0) + row.time_us * scale
        limits[row.kind] = limits.get(row.kind, 0.0) + row.limit_us
    for kind in [k for k, t in times.items() if t < small_frac * total and k != "other"]:
        times["other"] = times.get("other", 0.0) + times.pop(kind)
        limits["other"] = limits.get("other", 0.0) + limits.pop(kind)
    work = [
        Cause(
            key=kind,
            label=KIND_LABELS.get(kind, kind),
            time_us=time,
            frac=time / total,
            limit_us=limits[kind],
            sites=_places((r for r in profile.kernels if (r.kind if r.kind in times else "other") == kind), scale),
        )
        for kind, time in times.items()
    ]
    work.sort(key=lambda c: (-c.time_us, c.key))
    labels = IDLE_LABELS if profile.environment.device == "cuda" else HOST_LABELS
    waits = [
        Cause(
            key=f"idle_{i.cause}",
            label=labels.get(i.cause, IDLE_LABELS.get(i.cause, f"idle: {i.cause}")),
            time_us=i.time_us,
            frac=i.time_us / total,
            idle=True,
            sites=i.sites,
        )
        for i in step.idle
        if i.time_us > 0
    ]
    waits.sort(key=lambda c: (-c.time_us, c.key))
    return (*work, *waits)


def _places(rows: Iterable[KernelRow], scale: float) -> tuple[Site, ...]:
    """Where these rows' work comes from, by line and module (or operator), what takes longest first."""
    found: dict[tuple[str, str], list[KernelRow]] = {}
    for row in rows:
        found.setdefault((row.source, row.module or row.op), []).append(row)
    sites = [
        Site(source=source, what=what, calls=sum(r.calls for r in of), time_us=scale * sum(r.time_us for r in of))
        for (source, what), of in found.items()
    ]
    sites.sort(key=lambda site: (-site.time_us, site.source, site.what))
    return tuple(site for site in sites[:PLACES] if site.time_us > 0)


def _groups(rows: Iterable[KernelRow], key: Callable[[KernelRow], Hashable]) -> list[list[KernelRow]]:
    groups: dict[Hashable, list[KernelRow]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _dominant(rows: list[KernelRow]) -> KernelRow:
    return max(rows, key=lambda r: (r.time_us, r.name))


def gaps(profile: StepProfile, count: int) -> tuple[Gap, ...]:
    """The `count` groups of module and kind that hold most of the time above the limit, largest first.

    The same module of repeated blocks is one group, since one change serves them all.
    Rows without a known limit are left out: their gap is not zero, it is unknown.
    """
    step, convs = division(profile), layers.convolutions(profile)
    found = []
    for rows in _groups(
        (r for r in profile.kernels if r.limit_us > 0), lambda r: (layers.repeated(r.module) or r.op, r.kind)
    ):
        time, limit, first = step.stretch * sum(r.time_us for r in rows), sum(r.limit_us for r in rows), _dominant(rows)
        gap, paths = max(0.0, time - limit), {r.module for r in rows}
        source = next((r.source for r in rows if r.source and r.phase == "forward"), first.source)
        found.append(
            Gap(
                kind=first.kind,
                module=next(iter(paths)) if len(paths) == 1 else layers.repeated(first.module),
                layer=layers.layers(rows, convs),
                modules=len(paths),
                op=first.op or first.name,
                source=source,
                time_us=time,
                limit_us=limit,
                gap_us=gap,
                frac=gap / step.total_us if step.total_us else 0.0,
            )
        )
    found.sort(key=lambda g: (-g.gap_us, g.module, g.kind))
    return tuple(g for g in found[:count] if g.gap_us > 0)


def modules(profile: StepProfile) -> tuple[ModuleTime, ...]:
    """Device time by module path, every ancestor included, in tree order with larger siblings first."""
    step = division(profile)
    total, stretch = step.total_us, step.stretch
    rows_below: dict[tuple[str, ...], list[KernelRow]] = {}
    types: dict[tuple[str, ...], str] = {}
    for row in profile.kernels:
        if not row.module:
            continue
        path = tuple(row.module.split("."))
        types[path] = row.module_type
        for depth in range(1, len(path) + 1):
            rows_below.setdefault(path[:depth], []).append(row)
    times = {path: stretch * sum(r.time_us for r in rows) for path, rows in rows_below.items()}

    def order(path: tuple[str, ...]) -> tuple[tuple[float, str], ...]:
        return tuple((-times[path[:depth]], path[depth - 1]) for depth in range(1, len(path) + 1))

    parents = {path[:-1] for path in rows_below}
    result = []
    for path in sorted(rows_below, key=order):
        rows = rows_below[path]
        known = [r.dram_bytes for r in rows if r.dram_bytes is not None]
        forward = stretch * sum(r.time_us for r in rows if r.phase == "forward")
        backward = stretch * sum(r.time_us for r in rows if r.phase == "backward")
        result.append(
            ModuleTime(
                path=".".join(path),
                type=types.get(path, ""),
                depth=len(path) - 1,
                leaf=path not in parents,
                forward_us=forward,
                backward_us=backward,
                other_us=times[path] - forward - backward,
                limit_us=sum(r.limit_us for r in rows),
                dram_bytes=sum(known) if len(known) == len(rows) else None,
                frac=times[path] / total if total else 0.0,
            )
        )
    return tuple(result)


def row_bytes(row: KernelRow) -> tuple[float, Provenance]:
    """DRAM bytes of a row where known, else its bytes from shapes, else 0; with where the number comes from."""
    if row.dram_bytes is not None:
        return row.dram_bytes, row.dram_provenance
    if row.modelled_bytes > 0:
        return row.modelled_bytes, Provenance.MODELLED
    return 0.0, Provenance.UNAVAILABLE


def roofline_points(profile: StepProfile, count: int) -> tuple[RooflinePoint, ...]:
    """The `count` longest operators (module × operator × phase) whose bytes are known, longest first."""
    step = division(profile)
    total = step.total_us
    points = []
    for rows in _groups(profile.kernels, lambda r: (r.module, r.op or r.name, r.phase)):
        time = step.stretch * sum(r.time_us for r in rows)
        parts = [row_bytes(r) for r in rows]
        nbytes = sum(b for b, _ in parts)
        if time <= 0 or nbytes <= 0:
            continue
        flops, first = sum(r.flops for r in rows), _dominant(rows)
        measured = all(p is Provenance.MEASURED for _, p in parts)
        points.append(
            RooflinePoint(
                label=" · ".join(part for part in (first.module, first.op or first.name, first.phase) if part),
                kind=first.kind,
                intensity=flops / nbytes,
                tflops=flops / time / 1e6,
                gbps=nbytes / time / 1e3,
                time_us=time,
                frac=time / total if total else 0.0,
                provenance=Provenance.MEASURED if measured else Provenance.MODELLED,
            )
        )
    points.sort(key=lambda p: (-p.time_us, p.label))
    return tuple(points[:count])


def dram_bytes(profile: StepProfile) -> tuple[float, Provenance]:
    """Bytes of a whole step, measured where every row's are, else partly or wholly modelled."""
    parts = [row_bytes(r) for r in profile.kernels]
    total = sum(b for b, _ in parts)
    if total <= 0:
        return 0.0, Provenance.UNAVAILABLE
    measured = all(p is Provenance.MEASURED for b, p in parts if b > 0)
    return total, Provenance.MEASURED if measured else Provenance.MODELLED


def limit_frac(profile: StepProfile) -> float | None:
    """How near the step is to this machine's limit, 1 being there; None where either time is unknown."""
    if profile.step_us is None or not profile.typical_us > 0 or not profile.limit_us > 0:
        return None
    return profile.limit_us / profile.typical_us


def samples_per_s(profile: StepProfile) -> float | None:
    """Samples a second from batch size and what a step takes; None where either is unknown."""
    batch = profile.model.batch_size or profile.input.batch_size
    if not batch or profile.step_us is None or not profile.typical_us > 0:
        return None
    return batch / profile.typical_us * 1e6
