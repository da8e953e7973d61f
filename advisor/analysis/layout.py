"""What moving data about costs: layout conversion, casts, copies, fills, indexing."""

from __future__ import annotations

from advisor.analysis import view as rows
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View, launches
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance


def fill(view: View, table: MetricTable) -> None:
    """Set the shares of operators that compute nothing, and the layout in use."""
    facts = view.profile.model
    if facts.convs:
        table.set("channels_last", facts.channels_last)
    else:
        table.miss("channels_last", "no convolution was seen")
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
    table.set("index_frac", view.share(rows.is_index))
