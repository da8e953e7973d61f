"""Are there too many, too short or badly shaped kernels, and is the host the limit."""

from __future__ import annotations

import math

from advisor.analysis.rows import launches
from advisor.analysis.time import NO_ROWS, NO_STEP
from advisor.analysis.view import View
from advisor.core import architectures
from advisor.core.metrics import MetricTable
from advisor.core.profile import KernelRow
from advisor.core.provenance import Provenance

SHORT_US = 10.0  # by the definition of short_kernel_frac
WARP = 32


def extent(text: str) -> int:
    """`"132x2x1"` → 264; 0 when unknown."""
    try:
        return math.prod(int(part) for part in text.split("x")) if text else 0
    except ValueError:
        return 0


def _short(row: KernelRow) -> bool:
    return row.calls > 0 and row.time_us / row.calls < SHORT_US


def fill(view: View, table: MetricTable) -> None:
    """Set kernel counts and lengths, launch geometry and the host's share."""
    count = launches(view.rows)
    if count > 0:
        table.set("kernels_per_step", count)
    else:
        table.miss("kernels_per_step", NO_ROWS)
    _host(view, table)
    if not view.on_gpu or count <= 0:
        return
    if view.profile.launches > 0:
        table.set("launch_us", view.profile.launch_us)
    else:
        table.miss("launch_us", "no launch call was traced")
    table.set("mean_kernel_us", view.device_us / count)
    table.set("short_kernel_frac", launches(row for row in view.rows if _short(row)) / count)
    table.set("short_kernel_time_frac", view.share(_short))
    table.set("streams", len({row.stream for row in view.rows}))
    _geometry(view, table)
    table.miss("kernel_overlap_frac", "the trace did not tell how long kernels ran at the same time")


def _host(view: View, table: MetricTable) -> None:
    if view.step_us <= 0:
        table.miss("host_frac", NO_STEP)
        return
    waits = sum(site.time_us for site in view.profile.syncs) + view.profile.input.next_us
    table.set(
        "host_frac",
        max(0.0, 1 - waits / view.step_us),
        Provenance.MODELLED,
        "the step without its waits for device and loader; launches that wait for a full queue count as host time",
    )


def _geometry(view: View, table: MetricTable) -> None:
    multiprocessors = view.profile.environment.sm_count
    shaped = [row for row in view.rows if extent(row.grid) and extent(row.block)]
    if not shaped:
        for name in ("small_grid_frac", "tail_wave_frac", "odd_block_frac"):
            table.miss(name, "the trace holds no launch geometry")
        return
    table.set("odd_block_frac", view.share(lambda row: extent(row.block) % WARP != 0))
    if not multiprocessors:
        for name in ("small_grid_frac", "tail_wave_frac"):
            table.miss(name, "the number of SMs is not known")
        return
    table.set("small_grid_frac", view.share(lambda row: 0 < extent(row.grid) < multiprocessors))
    holds = architectures.of(view.profile.environment.sm_arch)
    lost = 0.0
    for row in shaped:
        resident = max(1, min(holds.blocks, holds.threads // extent(row.block)))
        waves = extent(row.grid) / (multiprocessors * resident)
        if waves > 1:
            lost += row.time_us * (1 - waves / math.ceil(waves))
    table.set(
        "tail_wave_frac",
        lost / view.device_us,
        Provenance.MODELLED,
        "as many blocks on an SM as its threads allow; registers and shared memory may allow fewer",
    )
