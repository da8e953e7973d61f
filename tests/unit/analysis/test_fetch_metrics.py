"""Results that the host fetches and works on in each step: told by the time, in the lines that do it."""

from __future__ import annotations

from dataclasses import replace

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.core.findings import Finding, Outcome
from advisor.core.profile import CopyRow, IdleCause, Site, StepProfile

RULES = rules.load()
FETCH, SEND = "fit.py:65", "fit.py:40"
BACK = CopyRow(kind="d2h", bytes=2.4e6, time_us=660.0, calls=2, pageable=True, source=FETCH)
THERE = CopyRow(kind="h2d", bytes=2.4e6, time_us=300.0, calls=1, pageable=True, source=SEND)


def waits(source: str, time_us: float, what: str = "cudaMemcpyAsync (pageable) from aten::to") -> Site:
    return Site(source=source, what=what, calls=1.0, time_us=time_us)


def step(idle: list[Site], copies: tuple[CopyRow, ...] = (BACK,), busy_us: float = 14_400.0) -> StepProfile:
    """Of 25.3 ms on an H200, 14.4 busy; traced, the device was idle behind these waits and 3.6 ms for launches."""
    row = profiles.row(name="k", kind="conv", op="aten::convolution", phase="forward", time_us=busy_us, calls=200)
    causes = (
        IdleCause(cause="sync", time_us=sum(site.time_us for site in idle), sites=tuple(idle)),
        IdleCause(cause="launch", time_us=3_600.0),
        IdleCause(cause="copy", time_us=660.0),
    )
    base = profiles.profile([row], step_us=25_300, launches=211, launch_us=1_500.0)
    return replace(base, idle=causes, copies=copies, syncs=tuple(replace(site, time_us=2_500.0) for site in idle))


def finding(profile: StepProfile, rule: str = "results-fetched-each-step") -> Finding:
    chosen = [entry for entry in RULES if entry.id == rule]
    return rules.evaluate(chosen, metrics(profile), profile)[0]


def test_two_copies_that_cost_a_third_of_the_step_are_told_with_line_and_share() -> None:
    found = finding(step([waits(FETCH, 11_300.0)]))
    assert found.outcome is Outcome.FIRED
    assert found.sites[0].startswith(f"{FETCH}: the GPU stands idle behind the copy")
    assert found.gain is not None
    # Without them the device works on: the step is no longer than what it is busy, and no shorter.
    assert found.gain.low < 1 - 14_400 / 25_300 <= found.gain.high + 1e-6
    assert found.gain.low > 0.15


@pytest.mark.parametrize("idle_us", [100.0, 11_300.0])
def test_it_goes_by_the_time_and_not_by_their_number(idle_us: float) -> None:
    many = replace(BACK, calls=40, time_us=50.0, overlapped_frac=1.0)
    outcome = finding(step([waits(FETCH, idle_us)], (many,), busy_us=24_500.0 if idle_us < 1e3 else 14_400.0)).outcome
    assert outcome is (Outcome.FIRED if idle_us > 1e3 else Outcome.QUIET)


def test_copies_to_the_device_and_scalars_are_other_rules_affair() -> None:
    sent = step([waits(SEND, 11_300.0)], (BACK, THERE))
    table = metrics(sent)
    assert table["fetch_idle_frac"].value == pytest.approx(660 / 25_300)
    assert table["pageable_syncs"].value == 1.0
    scalar = step([waits(FETCH, 11_300.0, "cudaMemcpyAsync from aten::_local_scalar_dense")])
    assert metrics(scalar)["fetch_idle_frac"].value == pytest.approx(660 / 25_300)


def test_copies_to_the_host_are_no_reason_to_prefetch() -> None:
    """They were told as "Copies from pageable memory block the host", which a prefetch cannot cure."""
    profile = step([waits(FETCH, 11_300.0)])
    assert metrics(profile)["pageable_syncs"].value == 0.0
    assert finding(profile, "pageable-copy-waits").outcome is Outcome.QUIET


def test_without_lines_they_are_told_where_nothing_goes_the_other_way() -> None:
    bare = replace(BACK, source="")
    assert finding(step([waits("", 11_300.0)], (bare,))).outcome is Outcome.FIRED
    both = step([waits("", 11_300.0)], (bare, replace(THERE, source="")))
    assert metrics(both)["fetch_idle_frac"].value == pytest.approx(660 / 25_300)
