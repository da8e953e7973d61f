"""What moving data about costs: layout conversion, casts, copies, fills, indexing."""

from __future__ import annotations

from collections import Counter

from advisor.analysis import rows
from advisor.analysis.rows import launches
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance
from advisor.core.row_kinds import is_index

# Of the conversions in the modules that break the layout, so much goes for good: with NHWC left off, libraries convert again around
# convolutions for tensor cores. Of norms that break it, so much at best: by kernels that read NHWC (docs/benchmarks, group_norm).
KEPT_WORST, NORM_KEPT = 0.5, 0.7


def fill(view: View, table: MetricTable) -> None:
    """Set the shares of operators that compute nothing, and the layout in use."""
    facts = view.profile.model
    if facts.convs:
        table.set("channels_last", facts.channels_last)
    else:
        table.miss("channels_last", "no convolution was seen")
    _breaks(view, table)
    if view.device_us <= 0:
        for name in ("layout", "cast", "weight_cast", "device_copy", "memset", "index"):
            table.miss(f"{name}_frac", NO_ROWS)
        table.miss("weight_casts", NO_ROWS)
        return
    table.set("layout_frac", view.share(lambda row: row.kind == "layout"))
    table.set("cast_frac", view.share(rows.is_cast))
    told = "told by shape: a convolution's weight, or no batch dimension"
    table.set("weight_cast_frac", view.share(view.is_weight_cast), Provenance.MODELLED, told)
    table.set("weight_casts", launches(filter(view.is_weight_cast, view.rows)), Provenance.MODELLED, told)
    table.set("device_copy_frac", view.share(lambda row: row.kind == "copy" and not rows.is_cast(row)))
    table.set("memset_frac", view.share(lambda row: row.kind == "memset"))
    # An optimizer's own, such as Rprop's choice of signs, is no line of the script's.
    table.set("index_frac", view.share(lambda row: is_index(row) and row.phase != "optimizer"))


def _breaks(view: View, table: MetricTable) -> None:
    """What turns NHWC into NCHW on the way, and what that costs."""
    facts = view.profile.model
    if facts.convs:
        table.set("weights_channels_last", facts.weights_channels_last)
    else:
        table.miss("weights_channels_last", "no convolution was seen")
    table.set("layout_breaks", len(facts.layout_breaks))
    counts = Counter(entry.what for entry in facts.layout_breaks)
    table.set(
        "layout_broken_by",
        ", ".join(f"{what} ({n}×)" if n > 1 else what for what, n in counts.most_common()) or "no module that was seen",
    )
    step = Step.of(view)
    names = ("layout_kept_saved_low", "layout_kept_saved_high")
    if step is None or not facts.layout_breaks:
        for name in names:
            table.miss(
                name,
                "no module was seen to change the layout" if step is not None else "no step was timed, or none traced",
            )
        return
    breaking = {entry.module for entry in facts.layout_breaks}
    converted = [row for row in view.rows if row.kind == "layout"]
    there = sum(row.time_us for row in converted if row.module in breaking)
    norms = sum(row.time_us for row in view.rows if row.kind == "norm" and row.module in breaking)
    change = Change(
        worst=Saving(device_us=KEPT_WORST * there),
        best=Saving(device_us=sum(row.time_us for row in converted) + NORM_KEPT * norms),
        basis="",
    )
    gain = step.gain(change)
    told = "conversions in these modules at worst; all of them, and norms that read NHWC, at best"
    for name, value in zip(names, (max(0.0, gain.low), gain.high), strict=True):
        table.set(name, value, Provenance.MODELLED, told)
