"""`advisor scale`: a step on several GPUs, foretold from a run on one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import storage
from advisor.core.errors import AdvisorError
from advisor.core.profile import StepProfile
from advisor.core.units import percent_text, rate_text, time_text
from advisor.core.verdict import TrialLog
from advisor.runs import PROFILE_FILE, load_profile
from advisor.runs.folders import here

if TYPE_CHECKING:
    from advisor.analysis.scaling import Foretold, Link


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """`links`: what was assumed of them, a line each; `device`: what the run was on, cuda or cpu."""

    rows: Sequence[Foretold]
    one_us: float
    links: tuple[str, ...]
    device: str


def scale(
    run: str | Path,
    gpus: Sequence[int],
    *,
    link: str,
    between: str,
    host: int = 8,
    local_norms: bool = False,
    cores: int = 0,
    storage: tuple[float, float] = (0.0, 0.0),
) -> ScaleResult:
    """A step of several GPUs, foretold from a run's profile. `cores` of a host, 0 for as many a GPU as there; `storage`: bytes of a sample,
    and GB/s of the file system for all hosts, 0 for no limit.

    Raises:
        AdvisorError: when the run cannot be read or does not serve, or a link cannot be measured or has no such name.
    """
    from advisor.analysis import scaling

    _, measured = load_profile(run)
    inside, outside = link_of(link), scaling.link(between)
    supply = scaling.Supply(cores=cores, sample_bytes=storage[0], gbps=storage[1])
    rows = scaling.foretell(
        measured, gpus, inside=inside, between=outside, host=host, synchronised=not local_norms, supply=supply
    )
    told = tuple(
        f"{where}: {time_text(one.latency_us)} and {rate_text(one.gbps)} ({one.basis})"
        for where, one in (("inside a host", inside), ("between hosts", outside))
        if where == "inside a host" or max(gpus) > host
    )
    return ScaleResult(rows=rows, one_us=measured.typical_us, links=told, device=measured.environment.device)


def link_of(name: str, ranks: int = 2) -> Link:
    """The link by its name, or measured here over so many ranks.

    Raises:
        AdvisorError: when it cannot be measured or has no such name.
    """
    import tempfile

    from advisor.analysis import scaling
    from advisor.distributed import links

    if name != "measured":
        return scaling.link(name)
    with tempfile.TemporaryDirectory() as folder:
        return scaling.link(name, links.measure(ranks, Path(folder) / "link.json"))


LITTLE = 0.5  # of a step that ranks compute at best, below which it is said


def foretold_scaling(profile: StepProfile | None, log: TrialLog, gpus: int, *, synchronised: bool) -> tuple[str, ...]:
    """What the profile of one rank's share had foretold of the plain step of all, beside what was measured; nothing without either."""
    from advisor.analysis import scaling

    if profile is None or log.stack is None or not log.stack.plain_us:
        return ()
    try:
        link = link_of("measured", gpus)
        (row,) = scaling.foretell(profile, (gpus,), inside=link, between=link, host=gpus, synchronised=synchronised)
    except AdvisorError as error:
        return (f"no prediction for {gpus} ranks: {error}",)
    took = sum(log.stack.plain_us) / len(log.stack.plain_us)
    low, high = (time_text(bound, took) for bound in row.step_us)
    return (
        f"predicted from one rank's profile: {low} to {high} a step of {gpus} ranks, {time_text(row.exposed_us)} of it exposed "
        f"communication (link {time_text(link.latency_us)}, {rate_text(link.gbps)}); measured {time_text(took)}: "
        f"{percent_text(abs(row.middle_us / took - 1))} off",
    )


def loses(script: str, gpus: int, *, synchronised: bool) -> str:
    """What the newest profile of this script here says against dividing its batch among so many ranks; "" where nothing does, or there is none."""
    for folder in here(PROFILE_FILE):
        try:
            profile = storage.load(folder / PROFILE_FILE, StepProfile)
        except AdvisorError:
            continue
        if profile.script != script or profile.model.world_size > 1 or not profile.typical_us:
            continue
        try:
            link = link_of("measured", gpus)
        except AdvisorError:
            return ""
        return too_little(profile, gpus, link, synchronised=synchronised)
    return ""


def too_little(profile: StepProfile, gpus: int, link: Link, *, synchronised: bool) -> str:
    """Whether so many ranks would lose, or gain little, because each gets too little of the batch, and what batch would pay; else nothing."""
    from advisor.analysis import scaling

    one = profile.typical_us
    least = scaling.least_divided_us(profile, gpus, link, synchronised=synchronised)
    if one / gpus >= LITTLE * least:
        return ""
    what = "will lose" if least >= one else "gain little"
    told = f"{gpus} ranks {what}: a step of {time_text(one)} cannot be shorter than {time_text(least)} when its batch is divided. "
    batch, busy = scaling.batch_that_pays(profile, gpus, link, synchronised=synchronised)
    if not batch:
        return told + "No batch of a usual size would pay"
    return told + f"Give the script batches of {batch}: then they compute for {percent_text(busy)} of a step at best"
