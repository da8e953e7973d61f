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
    if "find_unused_parameters" in facts.flags:
        table.set("find_unused_parameters", facts.flags["find_unused_parameters"])
    elif facts.distributed != "ddp":
        table.set("find_unused_parameters", False)
    else:
        table.miss("find_unused_parameters", "DDP's settings were not read")
    if view.on_gpu and view.device_us > 0:
        if view.time_us(lambda row: row.kind == "comm") > 0:
            table.miss("comm_exposed_frac", "the trace did not tell how much communication ran alone")
        else:
            table.set("comm_exposed_frac", 0.0)
