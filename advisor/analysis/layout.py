"""What moving data about costs: layout conversion, casts, copies, fills, indexing."""

from __future__ import annotations

from advisor.analysis import view as rows
from advisor.analysis.time import NO_ROWS
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable


def fill(view: View, table: MetricTable) -> None:
    """Set the shares of operators that compute nothing, and the layout in use."""
    facts = view.profile.model
    if facts.convs:
        table.set("channels_last", facts.channels_last)
    else:
        table.miss("channels_last", "no convolution was seen")
    if view.device_us <= 0:
        for name in ("layout", "cast", "device_copy", "memset", "index"):
            table.miss(f"{name}_frac", NO_ROWS)
        return
    table.set("layout_frac", view.share(lambda row: row.kind == "layout"))
    table.set("cast_frac", view.share(rows.is_cast))
    table.set("device_copy_frac", view.share(lambda row: row.kind == "copy" and not rows.is_cast(row)))
    table.set("memset_frac", view.share(lambda row: row.kind == "memset"))
    table.set("index_frac", view.share(rows.is_index))
