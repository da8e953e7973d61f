"""Profiles to cards, all the way: which cause comes first, and that each number is told once."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.core.findings import Card, Finding, Findings, Outcome, Semantics
from advisor.core.profile import MemoryStats, StepProfile
from advisor.reporting import wording

RULES = rules.load()


def found(profile: StepProfile) -> Findings:
    table = metrics(profile)
    told = rules.evaluate(RULES, table, profile, partial(predict, profile))
    recommended = rules.recommend(told, table)
    return Findings(run="", findings=told, cards=rules.cards(told), recommendations=recommended)


def card_of(profile: StepProfile, cause: str) -> Card:
    (card,) = (card for card in found(profile).cards if card.cause == cause)
    return card


def loaded(base: StepProfile, frac: float, **more: object) -> StepProfile:
    """Waits for a loader without workers for this share of each untraced step; the traced ones are not known."""
    waits = replace(base.input, loader="DataLoader", source="train.py:3", next_us=frac * base.typical_us, workers=0)
    return replace(base, input=waits, **more)


def test_a_host_that_is_too_slow_is_one_card_and_the_first() -> None:
    base = profiles.cifar()
    small = MemoryStats(peak_allocated_bytes=1 << 30, peak_reserved_bytes=1 << 30, total_bytes=140 << 30)
    short = tuple(replace(row, calls=4 * row.calls) for row in base.kernels)
    told = found(replace(base, kernels=short, memory=small))
    host = [f for f in told.findings if f.cause == "host-bound" and f.outcome is Outcome.FIRED]
    assert len(host) > 2, "told several times"
    first, *others = told.cards
    assert (first.rank, first.cause) == (1, "host-bound")
    assert {first.rule, *first.reasons} >= {f.rule for f in host}
    assert "host-bound" not in {card.cause for card in others}


def test_a_starved_step_is_one_card_and_the_first() -> None:
    first, *others = found(profiles.starved()).cards
    assert first.cause == "loader-bound"
    assert "loader-bound" not in {card.cause for card in others}


def test_nchw_goes_above_what_only_describes_the_step() -> None:
    base = profiles.resnet50()
    told = found(replace(base, limit_us=0.3 * base.typical_us))
    ranks = {card.cause: card.rank for card in told.cards}
    assert ranks["layout"] <= 2
    roles = [told.of(card.rule).role for card in told.cards]
    assert roles == sorted(roles)
    assert told.of("busy-but-far-from-the-limit").outcome is Outcome.FIRED


@pytest.mark.parametrize("make", [profiles.resnet50, profiles.cifar, profiles.starved, profiles.laptop])
def test_one_change_has_one_prediction_wherever_it_is_told(make) -> None:
    profile = make()
    told = found(profile)
    asking: dict[str, list[Finding]] = {}
    for finding in told.findings:
        if finding.outcome is Outcome.FIRED and finding.transform:
            asking.setdefault(finding.transform, []).append(finding)
    assert asking
    for recommended in told.recommendations:
        assert {f.gain for f in asking[recommended.transform]} == {recommended.predicted}
    for card in told.cards:
        assert card.predicted == told.of(card.rule).gain
    fired = sorted(f.rule for f in told.findings if f.outcome is Outcome.FIRED)
    assert sorted(rule for card in told.cards for rule in (card.rule, *card.reasons)) == fired


@pytest.mark.parametrize("frac", [0.5, 0.95])
def test_nothing_is_promised_below_the_limit(frac: float) -> None:
    base = profiles.resnet50()
    for finding in found(replace(base, limit_us=frac * base.typical_us)).findings:
        if finding.gain is not None and finding.semantics is not Semantics.PRECISION:
            assert finding.gain.high <= 1.0 - frac + 1e-9, finding.rule


def test_a_step_that_waits_for_its_loader_says_so_in_the_headline_or_in_a_card() -> None:
    """On two cores, on a CPU, and where the run ended before anything was traced."""
    untraced = replace(profiles.resnet50(), kernels=(), idle=(), busy_us=0.0, limit_us=0.0, launches=0.0)
    for base in (profiles.laptop(), untraced):
        for frac in (0.4, 0.7, 0.97):
            profile = loaded(base, frac)
            told = found(profile)
            headline = wording.headline(profile, told, None)
            first = told.of(told.cards[0].rule) if told.cards else None
            said = f"{100 * frac:.0f} % waiting for data" in headline
            assert said or (first is not None and first.cause == "loader-bound"), headline
