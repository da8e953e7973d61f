"""Where the host waits for the device."""

from __future__ import annotations

import re
from collections.abc import Iterable

from advisor.analysis.time import NO_STEP
from advisor.analysis.view import View
from advisor.core.metrics import MetricTable
from advisor.core.profile import Site

_SCALAR = re.compile(r"item|_local_scalar_dense|is_nonzero|tolist|__bool__|__float__|__int__|equal", re.IGNORECASE)
_DATA_SHAPE = re.compile(r"nonzero|masked_select|unique|repeat_interleave|bincount|aten::index", re.IGNORECASE)
_EXPLICIT = re.compile(r"(Device|Ctx|Event|Stream)Synchronize", re.IGNORECASE)


def is_scalar_read(site: Site) -> bool:
    """`.item()`, `float(loss)`, `if tensor:` and printing: one number copied to the host."""
    return bool(_SCALAR.search(site.what)) and not is_data_shape(site)


def is_data_shape(site: Site) -> bool:
    """An operator whose output's shape depends on data, so that the host must wait for it."""
    return bool(_DATA_SHAPE.search(site.what)) and "is_nonzero" not in site.what


def fill(view: View, table: MetricTable) -> None:
    """Set waits per step by cause; only on a GPU, as a CPU step has nobody to wait for."""
    facts = view.profile.model
    if not view.on_gpu:
        return
    table.set("launch_blocking", facts.env.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0"))
    sites = view.profile.syncs
    if not view.profile.cost.traced_steps and not sites:
        return
    table.set("syncs_per_step", waits(sites))
    if view.step_us > 0:
        table.set("sync_wait_frac", min(1.0, sum(site.time_us for site in sites) / view.step_us))
    else:
        table.miss("sync_wait_frac", NO_STEP)
    table.set("item_syncs", waits(site for site in sites if is_scalar_read(site)))
    table.set("nonzero_syncs", waits(site for site in sites if is_data_shape(site)))
    table.set("explicit_syncs", waits(site for site in sites if _EXPLICIT.search(site.what) and not operator(site)))
    table.set("pageable_syncs", waits(s for s in sites if "(pageable)" in s.what and not is_scalar_read(s)))


def operator(site: Site) -> str:
    """The operator that waited; "" for a wait that the script asked for itself."""
    return site.what.partition(" from ")[2]


def waits(sites: Iterable[Site]) -> float:
    """Waits per step. A copy from pageable memory and the synchronisation after it are one wait of one operator."""
    calls: dict[tuple[str, str], float] = {}
    for site in sites:
        key = (site.source, operator(site) or site.what)
        calls[key] = max(calls.get(key, 0.0), site.calls)
    return sum(calls.values())
