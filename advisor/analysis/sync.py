"""Where the host waits for the device."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

from advisor.analysis.time import NO_STEP
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.metrics import MetricTable
from advisor.core.profile import Site, StepProfile
from advisor.core.provenance import Provenance

# Of the idle time behind a fetched result: what the host does next may have to be done in any case.
FETCH_WORST = 0.7
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
    fetched = fetches(view.profile)
    sent = (s for s in sites if "(pageable)" in s.what and not is_scalar_read(s) and not fetched(s))
    table.set("pageable_syncs", waits(sent))
    _fetching(view, table)


def fetches(profile: StepProfile) -> Callable[[Site], bool]:
    """A predicate: the site waits for results, whole tensors, that are copied to the host.

    Told from copies the other way by their lines; where no lines are known, by there being none.
    """
    lines = {kind: {copy.source for copy in profile.copies if copy.kind == kind} for kind in ("d2h", "h2d")}
    only = lines["d2h"] - (lines["h2d"] if lines["d2h"] - {""} else lines["h2d"] | {""} if lines["h2d"] else set())

    def wanted(site: Site) -> bool:
        return site.source in only and not is_scalar_read(site) and not is_data_shape(site)

    return wanted


def _fetching(view: View, table: MetricTable) -> None:
    """What the device waits for while the host works on results that it has fetched."""
    profile = view.profile
    names = ("fetch_idle_frac", "fetch_wait_frac", "fetch_saved_low", "fetch_saved_high")
    step = Step.of(view)
    if step is None or not profile.copies:
        for name in names:
            table.miss(name, NO_STEP if view.step_us <= 0 else "nothing is copied to the host in a step")
        return
    wanted = fetches(profile)
    sync = [site for cause in profile.idle if cause.cause == "sync" for site in cause.sites]
    traced = sum(cause.time_us for cause in profile.idle if cause.cause == "sync")
    idle = step.sync_us * sum(site.time_us for site in sync if wanted(site)) / traced if traced > 0 else 0.0
    waited = sum(site.time_us for site in profile.syncs if wanted(site))
    back = [copy for copy in profile.copies if copy.kind == "d2h"]
    alone = min(step.copy_us, sum(copy.time_us * (1 - copy.overlapped_frac) for copy in back))
    table.set("fetch_idle_frac", (idle + alone) / view.step_us)
    table.set("fetch_wait_frac", min(1.0, waited / view.step_us))
    # What the host did with them goes with the wait; behind a queue that is never empty the gaps close as well.
    gain = step.gain(
        Change(
            worst=Saving(sync_us=FETCH_WORST * idle, host_us=FETCH_WORST * idle, host_closes_gaps=False),
            best=Saving(sync_us=idle, copy_us=alone, gaps_us=step.gaps_us if idle > 0 else 0.0, host_us=idle + waited),
            basis="",
        )
    )
    told = "idle time after the wait at worst; the copies and the gaps behind an emptied queue as well at best"
    for name, value in zip(names[2:], (max(0.0, gain.low), gain.high), strict=True):
        table.set(name, value, Provenance.MODELLED, told)


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
