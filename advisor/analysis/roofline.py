"""How far from this machine's limits the kernels run, and how many bytes they move.

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from advisor.analysis.time import NO_ROWS, NO_STEP, no_limit
from advisor.analysis.view import View
from advisor.core import roofline
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance

# By the definition of conv_worst_efficiency: a convolution below this share of the step is not worth naming.
WORST_SHARE = 0.02


def traffic(row: KernelRow) -> float:
    """Bytes of the row per step: counted where counted, else from shapes; 0.0 when neither is known."""
    return row.dram_bytes if row.dram_bytes is not None else row.modelled_bytes


def is_memory_bound(view: View, row: KernelRow) -> bool:
    """Bytes, not flops, set the row's limit. Minimum bytes decide: excess traffic must not change a row's class."""
    nbytes = row.modelled_bytes or traffic(row)
    # A kernel on tensor cores that works on fp32 is bound by the TF32 rate.
    dtype = "tf32" if row.dtype == "fp32" and row.tensor_core else row.dtype
    return nbytes > 0 and roofline.memory_bound(view.profile.environment, nbytes=nbytes, flops=row.flops, dtype=dtype)


def efficiency(chosen: Iterable[KernelRow]) -> float | None:
    """Limit over time of the rows whose limit is known, at most 1; None when none is."""
    known = [row for row in chosen if row.limit_us > 0 and row.time_us > 0]
    time = sum(row.time_us for row in known)
    return min(1.0, sum(row.limit_us for row in known) / time) if time > 0 else None


def fill(view: View, table: MetricTable) -> None:
    """Set efficiencies by kind, and DRAM bytes per step where they were counted."""
    groups: dict[str, Callable[[KernelRow], bool]] = {
        "memory_bound": lambda row: is_memory_bound(view, row),
        "conv": lambda row: row.kind == "conv",
        "norm": lambda row: row.kind == "norm",
        "depthwise": view.conv(lambda g: g.depthwise),
        "grouped": view.conv(lambda g: g.grouped),
        "pool": lambda row: row.kind == "pool",
        "upsample": lambda row: row.kind == "upsample",
    }
    for name, wanted in groups.items():
        chosen = [row for row in view.rows if wanted(row)]
        value = efficiency(chosen)
        if value is not None:
            table.set(f"{name}_efficiency", value, Provenance.MODELLED)
        else:
            table.miss(f"{name}_efficiency", no_limit(view.profile) if chosen else "the step has no such kernel")
    _worst(view, table)
    _memory_bound(view, table)
    if view.on_gpu:
        _dram(view, table)


def _worst(view: View, table: MetricTable) -> None:
    if view.step_us <= 0:
        table.miss("conv_worst_efficiency", NO_STEP)
        return
    heavy = [
        value
        for row in view.rows
        if row.kind == "conv" and row.time_us >= WORST_SHARE * view.step_us and (value := efficiency([row])) is not None
    ]
    if heavy:
        table.set("conv_worst_efficiency", min(heavy), Provenance.MODELLED)
    else:
        table.miss("conv_worst_efficiency", "no convolution with a known limit takes 2 % of the step")


def _memory_bound(view: View, table: MetricTable) -> None:
    known = [row for row in view.rows if traffic(row) > 0]
    if not known:
        for name in ("memory_bound_frac", "l2_fit_frac"):
            table.miss(name, no_limit(view.profile) if view.rows else NO_ROWS)
        return
    bound = [row for row in known if is_memory_bound(view, row)]
    time = sum(row.time_us for row in bound)
    table.set("memory_bound_frac", time / view.device_us, Provenance.MODELLED)
    cache = view.profile.environment.l2_bytes
    if not view.on_gpu or not cache:
        table.miss("l2_fit_frac", "the size of the last-level cache is not known")
    elif time <= 0:
        table.miss("l2_fit_frac", "the step has no memory-bound kernel")
    else:
        fits = sum(row.time_us for row in bound if row.calls > 0 and 0 < row.modelled_bytes / row.calls <= cache)
        table.set("l2_fit_frac", fits / time, Provenance.MODELLED)


def _dram(view: View, table: MetricTable) -> None:
    counted = [row for row in view.rows if row.dram_bytes is not None]
    measured = all(row.dram_provenance is Provenance.MEASURED for row in counted)
    if not counted:
        return
    total = sum(row.dram_bytes or 0.0 for row in counted)
    provenance = Provenance.MEASURED if measured else Provenance.MODELLED
    table.set("dram_gb_per_step", total, provenance)
    environment = view.profile.environment
    if environment.rates_doubt:
        table.miss("dram_frac", no_limit(view.profile))
    elif environment.copy_gbps > 0 and view.step_us > 0:
        table.set("dram_frac", total / (view.step_us * environment.copy_gbps * 1e3), provenance)
    minimum = [row for row in counted if row.modelled_bytes > 0]
    if minimum:
        ratio = sum(row.dram_bytes or 0.0 for row in minimum) / sum(row.modelled_bytes for row in minimum)
        table.set("dram_excess_ratio", ratio, Provenance.MODELLED, f"{provenance.value} bytes over bytes from shapes")
    else:
        table.miss("dram_excess_ratio", "no operator's minimum bytes are known")
