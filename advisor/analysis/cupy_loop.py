"""What a loop of CuPy's does that a loop of PyTorch's does not."""

from __future__ import annotations

from advisor.analysis.view import View
from advisor.core import cupy_rows
from advisor.core.metrics import MetricTable

_NOT_CUPY = "the loop is not CuPy's alone"


def fill(view: View, table: MetricTable) -> None:
    """Shares of device time by what CuPy's users write, only in a loop of CuPy alone."""
    names = {
        "cupy_columns_frac": cupy_rows.columns,
        "cupy_scatter_frac": cupy_rows.scatters,
        "cupy_sums_frac": cupy_rows.sums,
        "cupy_raw_frac": cupy_rows.raw,
        "cupy_passes_frac": cupy_rows.short_elementwise,
    }
    alone = view.profile.model.flags.get("cupy_alone", False)
    for name, wanted in names.items():
        if not alone:
            table.miss(name, _NOT_CUPY)
        elif view.rows:
            table.set(name, view.share(wanted))
    if not alone:
        table.miss("cupy_kernels_made", _NOT_CUPY)
        if view.on_gpu:
            table.miss("cupy_compiles", _NOT_CUPY)
    else:
        table.set("cupy_cub", view.profile.model.flags.get("cupy_cub", True))
        table.set("cupy_pool", view.profile.model.flags.get("cupy_pool", True))
