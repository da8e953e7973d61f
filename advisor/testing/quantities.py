"""What can be asserted of a measured step: each quantity once, with how it is read and what is to blame for it.

Everything is read from the StepProfile and the metrics that analysis makes of it; what a CPU or a missing counter cannot
tell has no value and a reason, and is never taken for zero.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from advisor.analysis import sync
from advisor.analysis.rows import HALF, MATRIX
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow, Site, StepProfile
from advisor.core.provenance import Provenance
from advisor.reporting import breakdown
from advisor.testing import amounts

_AROUND_COPIES = ("aten::contiguous", "aten::clone", "aten::to", "aten::_to_copy")
# Reads that would make the host wait on a GPU, as far as a CPU step's operators show them: not `.cpu()`, `.tolist()`, `.numpy()`.
HOST_READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::_unique2", "aten::equal")


@dataclass(frozen=True, slots=True, kw_only=True)
class Culprit:
    """One kernel, operator or line with its part of a quantity, in the quantity's unit."""

    what: str
    amount: float
    module: str = ""
    source: str = ""

    def text(self, unit: str) -> str:
        """`14 × aten::add_  ResNet.layer1.0  tests/test_step.py:31`."""
        amount = amounts.text(self.amount, unit)
        parts = [f"{amount} × {self.what}" if unit == "count" else f"{amount}  {self.what}", self.module, self.source]
        return "  ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldTo:
    """Bytes that a source line allocated and that were still held: a step later, or at the peak."""

    source: str
    what: str
    bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Beyond:
    """What the plugin's own windows saw and a StepProfile has no place for.

    growing: memory that a step leaves behind, by line. peak: what was held at the peak, by line. breaks and recompiles:
    one entry each, with the line. compiled: something was compiled since the test began. reads_watched: a CPU step's
    `profile.syncs` are all the reads that would wait on a GPU.
    """

    growing: tuple[HeldTo, ...] = ()
    peak: tuple[HeldTo, ...] = ()
    breaks: tuple[Site, ...] = ()
    recompiles: tuple[Site, ...] = ()
    compiled: bool = False
    memory_basis: str = ""
    reads_watched: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """A quantity's value a step, or None with the reason."""

    value: float | None
    provenance: Provenance = Provenance.MEASURED
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedStep:
    """A measured step as the quantities read it."""

    profile: StepProfile
    metrics: MetricTable
    beyond: Beyond

    @property
    def on_gpu(self) -> bool:
        return self.profile.environment.device == "cuda"


@dataclass(frozen=True, slots=True, kw_only=True)
class JudgedQuantity:
    """`timed`: depends on this very machine and hour, so that a stored baseline says nothing. `more_is_better`: a lower
    bound is what people set, and a fall is a regression."""

    key: str
    title: str
    unit: str
    read: Callable[[JudgedStep], Reading]
    blame: Callable[[JudgedStep], list[Culprit]]
    timed: bool = False
    more_is_better: bool = False

    @property
    def per(self) -> str:
        """What stands after a value: shares and the peak are not of one step."""
        return "" if self.unit == "frac" or self.key in ("memory", "step") else " a step"

    @property
    def tolerance(self) -> float:
        """The share by which it may be worse than a baseline unless told otherwise: shares follow times, allocators round, counts do
        not move."""
        return {"bytes": 0.02, "frac": 0.05}.get(self.unit, 0.0)


def _missing(reason: str) -> Reading:
    return Reading(value=None, provenance=Provenance.UNAVAILABLE, reason=reason)


def _metric(name: str) -> Callable[[JudgedStep], Reading]:
    def read(step: JudgedStep) -> Reading:
        metric = step.metrics[name]
        value = metric.value if isinstance(metric.value, float) else None
        return Reading(value=value, provenance=metric.provenance, reason=metric.reason)

    return read


def _step_time(step: JudgedStep) -> Reading:
    typical_us = step.profile.typical_us
    return Reading(value=typical_us) if typical_us > 0 else _missing("no step was timed")


def _launches(step: JudgedStep) -> Reading:
    if not step.on_gpu:
        return _missing("a step on a CPU launches nothing")
    return Reading(value=step.profile.launches) if step.profile.cost.traced_steps else _missing("nothing was traced")


def host_syncs(step: JudgedStep, allow: tuple[str, ...] = ()) -> tuple[Site, ...]:
    """Places where the host waits for the device (on a CPU: where it would on a GPU) that no text in `allow` names."""
    return tuple(site for site in step.profile.syncs if not any(name in f"{site.what} {site.source}" for name in allow))


def _syncs(step: JudgedStep) -> Reading:
    if not step.profile.cost.traced_steps:
        return _missing("nothing was traced")
    if not step.on_gpu and not step.beyond.reads_watched:
        # Torch's own optimizers keep their step counters on the host, where reading them costs nothing.
        rows = (row for row in step.profile.kernels if row.name in HOST_READS and row.phase != "optimizer")
        shown = "".join(f"\n  {culprit.text('count')}" for culprit in grouped(rows, lambda row: row.calls))
        told = f"; its trace shows{shown}" if shown else ""
        return _missing(f"what a script on a CPU reads is not watched, as a callable's reads are{told}")
    reason = "" if step.on_gpu else "reads that would wait on a GPU"
    return Reading(value=sync.waits(host_syncs(step)), reason=reason)


def sync_culprits(sites: Iterable[Site]) -> list[Culprit]:
    return [Culprit(what=site.what, amount=site.calls, source=site.source) for site in sites]


def _copies(kind: str, *, nbytes: bool) -> Callable[[JudgedStep], Reading]:
    def read(step: JudgedStep) -> Reading:
        if not step.on_gpu:
            return _missing("needs a CUDA GPU")
        if not step.profile.cost.traced_steps:
            return _missing("nothing was traced")
        rows = [row for row in step.profile.copies if row.kind == kind]
        return Reading(value=sum(row.bytes if nbytes else row.calls for row in rows))

    return read


def _copy_culprits(kind: str, *, nbytes: bool) -> Callable[[JudgedStep], list[Culprit]]:
    def blame(step: JudgedStep) -> list[Culprit]:
        return [
            Culprit(
                what=f"{kind} copy" + (" (pageable)" if row.pageable else ""),
                amount=row.bytes if nbytes else row.calls,
                source=row.source,
            )
            for row in step.profile.copies
            if row.kind == kind
        ]

    return blame


def _dram(step: JudgedStep) -> Reading:
    nbytes, provenance = breakdown.dram_bytes(step.profile)
    if provenance is Provenance.UNAVAILABLE:
        return _missing("no operator with a known size was traced")
    reason = "" if provenance is Provenance.MEASURED else "from shapes: each operand read and written once"
    return Reading(value=nbytes, provenance=provenance, reason=reason)


def _memory(step: JudgedStep) -> Reading:
    peak = step.profile.memory.peak_allocated_bytes
    return Reading(value=float(peak), reason=step.beyond.memory_basis) if peak else _missing("was not gathered")


def _growth(step: JudgedStep) -> Reading:
    if not step.profile.memory.allocations:
        if step.profile.environment.device == "cpu":
            return _missing("on a CPU the allocator's requests are counted of a callable, not of a script")
        return _missing("allocator requests were not counted")
    return Reading(value=max(0.0, step.profile.memory.growth_bytes or 0.0))


def _half(step: JudgedStep) -> Reading:
    """By flops, which do not vary from run to run as times do."""
    rows = [row for row in step.profile.kernels if row.kind in MATRIX and row.flops > 0]
    total = sum(row.flops for row in rows)
    if not total:
        return _missing("the step has no convolution or matrix product of known size")
    return Reading(value=sum(row.flops for row in rows if row.dtype in HALF) / total)


def _conversions(step: JudgedStep) -> list[KernelRow]:
    # On a CPU the operators around a copy (contiguous, clone, to) have rows of their own: the copy is what counts.
    return [
        row for row in step.profile.kernels if row.kind == "layout" and (step.on_gpu or row.name not in _AROUND_COPIES)
    ]


def _layouts(step: JudgedStep) -> Reading:
    if not step.profile.kernels:
        return _missing("nothing was traced")
    return Reading(value=sum(row.calls for row in _conversions(step)))


def _layout_culprits(step: JudgedStep) -> list[Culprit]:
    """Forward first: what a lost layout makes convolutions convert comes after the line that lost it."""
    rows = _conversions(step)
    return [
        culprit
        for forward in (True, False)
        for culprit in grouped((row for row in rows if (row.phase == "forward") is forward), lambda row: row.calls)
    ]


def _breaks(step: JudgedStep) -> Reading:
    if not step.beyond.compiled:
        return _missing(
            "nothing was compiled since this test began; compile in the test, or call torch.compiler.reset() before"
        )
    return Reading(value=float(len(step.beyond.breaks)))


def _recompiles(step: JudgedStep) -> Reading:
    return Reading(value=sum(site.calls for site in step.beyond.recompiles))


def grouped(rows: Iterable[KernelRow], amount: Callable[[KernelRow], float]) -> list[Culprit]:
    """Rows of one kernel, module and line together, the largest amount first."""
    sums: dict[tuple[str, str, str], float] = defaultdict(float)
    for row in rows:
        what = row.name if not row.op or row.op == row.name else f"{row.name} from {row.op}"
        sums[what, row.module, row.source] += amount(row)
    found = [Culprit(what=w, module=m, source=s, amount=total) for (w, m, s), total in sums.items() if total > 0]
    return sorted(found, key=lambda c: (-c.amount, c.what, c.source))


def _rows(amount: Callable[[KernelRow], float]) -> Callable[[JudgedStep], list[Culprit]]:
    return lambda step: grouped(step.profile.kernels, amount)


def _of_products(
    amount: Callable[[KernelRow], float], right: Callable[[KernelRow], bool]
) -> Callable[[JudgedStep], list[Culprit]]:
    """Convolutions and products that are not as they should be, each with its share of them all."""

    def blame(step: JudgedStep) -> list[Culprit]:
        rows = [row for row in step.profile.kernels if row.kind in MATRIX]
        total = sum(map(amount, rows)) or 1.0
        return grouped((row for row in rows if not right(row)), lambda row: amount(row) / total)

    return blame


def _idle(step: JudgedStep) -> list[Culprit]:
    total = sum(cause.time_us for cause in step.profile.idle) + step.profile.busy_us or 1.0
    return [
        Culprit(what=f"idle: {cause.cause}", amount=site.time_us / total, source=site.source)
        for cause in step.profile.idle
        for site in cause.sites or (Site(source="", what="", calls=0, time_us=cause.time_us),)
        if site.time_us > 0
    ]


def _off_the_limit(step: JudgedStep) -> list[Culprit]:
    total = sum(row.time_us for row in step.profile.kernels) or 1.0
    return grouped(step.profile.kernels, lambda row: max(0.0, row.time_us - row.limit_us) / total)


def _held(of: Callable[[Beyond], tuple[HeldTo, ...]]) -> Callable[[JudgedStep], list[Culprit]]:
    return lambda step: [Culprit(what=h.what, amount=h.bytes, source=h.source) for h in of(step.beyond)]


def _is_bytes(row: KernelRow) -> float:
    return row.dram_bytes if row.dram_bytes is not None else row.modelled_bytes


QUANTITIES: tuple[JudgedQuantity, ...] = (
    JudgedQuantity(key="step", title="step time", unit="us", read=_step_time, blame=_rows(lambda r: r.time_us), timed=True),
    JudgedQuantity(key="kernels", title="kernel count", unit="count", read=_metric("kernels_per_step"),
             blame=_rows(lambda r: r.calls)),
    JudgedQuantity(key="launches", title="launches", unit="count", read=_launches, blame=_rows(lambda r: r.calls)),
    JudgedQuantity(key="syncs", title="host synchronisations", unit="count", read=_syncs,
             blame=lambda step: sync_culprits(host_syncs(step))),
    *(
        JudgedQuantity(key=key, title=title, unit="bytes" if nbytes else "count",
                 read=_copies(kind, nbytes=nbytes), blame=_copy_culprits(kind, nbytes=nbytes))
        for kind, what in (("h2d", "host to device"), ("d2h", "device to host"), ("d2d", "device to device"))
        for key, title, nbytes in ((kind, f"copies {what}", False), (f"{kind}_bytes", f"bytes copied {what}", True))
    ),
    JudgedQuantity(key="dram", title="DRAM traffic", unit="bytes", read=_dram, blame=_rows(_is_bytes)),
    JudgedQuantity(key="memory", title="peak memory", unit="bytes", read=_memory, blame=_held(lambda b: b.peak)),
    JudgedQuantity(key="growth", title="memory growth", unit="bytes", read=_growth, blame=_held(lambda b: b.growing)),
    JudgedQuantity(key="tensor_cores", title="tensor-core share of convolutions and products", unit="frac",
             read=_metric("tensor_core_frac"), more_is_better=True,
             blame=_of_products(lambda r: r.time_us, lambda r: r.tensor_core)),
    JudgedQuantity(key="half", title="half-precision share of convolutions and products", unit="frac", read=_half,
             more_is_better=True, blame=_of_products(lambda r: r.flops, lambda r: r.dtype in HALF)),
    JudgedQuantity(key="busy", title="GPU busy share", unit="frac", read=_metric("busy_frac"), blame=_idle, timed=True,
             more_is_better=True),
    JudgedQuantity(key="limit", title="share of the speed of light", unit="frac", read=_metric("limit_frac"),
             blame=_off_the_limit, timed=True, more_is_better=True),
    JudgedQuantity(key="layouts", title="layout conversions", unit="count", read=_layouts,
             blame=_layout_culprits),
    JudgedQuantity(key="recompiles", title="compilations after warm-up", unit="count", read=_recompiles,
             blame=lambda step: sync_culprits(step.beyond.recompiles)),
    JudgedQuantity(key="graph_breaks", title="graph breaks", unit="count", read=_breaks,
             blame=lambda step: sync_culprits(step.beyond.breaks)),
)  # fmt: skip

BY_KEY: dict[str, JudgedQuantity] = {quantity.key: quantity for quantity in QUANTITIES}
