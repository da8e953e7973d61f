"""What training on many devices costs."""

from __future__ import annotations

from advisor.analysis.time import NO_STEP
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance


def fill(view: View, table: MetricTable) -> None:
    """Set the job's shape, and communication that no kernel hides."""
    facts = view.profile.model
    table.set("world_size", facts.world_size)
    table.set("data_parallel", facts.data_parallel)
    table.set("distributed", facts.distributed)
    table.set("dist_backend", facts.backend)
    if "find_unused_parameters" in facts.flags:
        table.set("find_unused_parameters", facts.flags["find_unused_parameters"])
    elif facts.distributed != "ddp":
        table.set("find_unused_parameters", False)
    else:
        table.miss("find_unused_parameters", "DDP's settings were not read")
    if not view.on_gpu or view.device_us <= 0:
        return
    if view.step_us <= 0:
        table.miss("comm_exposed_frac", NO_STEP)
        return
    spent = view.time_us(lambda row: row.kind == "comm")
    if spent <= 0:
        table.set("comm_exposed_frac", 0.0)
        return
    copies = sum(c.time_us * (1 - c.overlapped_frac) for c in view.profile.copies if c.kind in ("h2d", "d2h"))
    exposed = view.profile.busy_us - copies - (view.device_us - spent)
    table.set(
        "comm_exposed_frac",
        min(spent, max(0.0, exposed)) / view.step_us,
        Provenance.MODELLED,
        "busy time less the time of all other kernels, taken as one after the other",
    )
