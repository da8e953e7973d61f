"""What training on many devices costs."""

from __future__ import annotations

from advisor.analysis.view import View
from advisor.core.metrics import MetricTable


def fill(view: View, table: MetricTable) -> None:
    """Set the job's shape, and communication that no kernel hides."""
    facts = view.profile.model
    table.set("world_size", facts.world_size)
    table.set("data_parallel", facts.data_parallel)
    if facts.data_parallel_us is not None and view.step_us > 0:
        table.set("data_parallel_frac", facts.backwards * facts.data_parallel_us / view.step_us)
    elif view.on_gpu:
        table.miss("data_parallel_frac", "no nn.DataParallel over one device")
    table.set("distributed", facts.distributed)
    table.set("dist_backend", facts.backend)
    for name in ("find_unused_parameters", "no_sync"):
        if name in facts.flags:
            table.set(name, facts.flags[name])
        elif facts.distributed != "ddp":
            table.set(name, False)
        else:
            table.miss(name, "DDP's settings were not read")
    if view.on_gpu and view.device_us > 0:
        if view.time_us(lambda row: row.kind == "comm") > 0:
            table.miss("comm_exposed_frac", "the trace did not tell how much communication ran alone")
        else:
            table.set("comm_exposed_frac", 0.0)
