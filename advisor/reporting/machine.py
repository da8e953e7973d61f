"""Reports for programs: JSON with a stable schema, and Markdown for CI summaries."""

from __future__ import annotations

from typing import Any

from advisor.core.findings import Findings, Outcome
from advisor.core.profile import StepProfile
from advisor.core.storage import to_plain
from advisor.core.units import bytes_text, counted, percent_text, samples_text, time_text
from advisor.core.verdict import TrialLog
from advisor.reporting import breakdown, numbers, places, wording

# Raised when a key is removed or changes its meaning; new keys may come at any time.
REPORT_SCHEMA_VERSION = 1
MARKDOWN_CARDS = 20
MARKDOWN_PLACES = 20  # of which the same is said


def report_json(profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> dict[str, Any]:
    """The whole run as plain data, ready for `json.dumps`: a summary, then profile, findings and trials as recorded.

    Non-finite numbers are null. Keys of `profile`, `findings` and `trials` are the fields of the types in
    `advisor.core`.
    """
    nbytes, provenance = breakdown.dram_bytes(profile)
    stack = trials.stack if trials is not None else None
    summary = {
        "headline": wording.headline(profile, findings, trials),
        "script": profile.script,
        "argv": list(profile.argv),
        "step_us": profile.step_us.median if profile.step_us else None,
        "step_p10_us": profile.step_us.p10 if profile.step_us else None,
        "step_p90_us": profile.step_us.p90 if profile.step_us else None,
        "steps_measured": profile.step_us.n if profile.step_us else 0,
        "samples_per_s": breakdown.samples_per_s(profile),
        "limit_us": profile.limit_us or None,
        "limit_frac": breakdown.limit_frac(profile),
        "dram_bytes": nbytes or None,
        "dram_provenance": provenance.value,
        "divided_step_us": breakdown.division(profile).total_us or None,
        "causes": [
            {"cause": c.key, "label": c.label, "time_us": c.time_us, "frac": c.frac, "limit_us": c.limit_us or None}
            for c in breakdown.causes(profile)
        ],
        "gaps": [to_plain(g) for g in breakdown.gaps(profile, 20)],
        "fired": [rule for card in (findings.cards if findings else ()) for rule in (card.rule, *card.reasons)],
        "cards": [{**to_plain(told.card), "title": told.lead.title} for told in wording.cards(findings)],
        "kept": [v.transform for v in wording.kept(trials)] if trials is not None else [],
        "speedup": stack.speedup if stack is not None else None,
        "speedup_low": stack.speedup_low if stack is not None else None,
        "speedup_high": stack.speedup_high if stack is not None else None,
        "device_speedup": stack.device_speedup if stack is not None else None,
        "device_speedup_low": stack.device_speedup_low if stack is not None else None,
        "device_speedup_high": stack.device_speedup_high if stack is not None else None,
        "complete": profile.complete and (trials is None or trials.complete),
    }
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "type": "report",
        "summary": to_plain(summary),
        "profile": to_plain(profile),
        "findings": to_plain(findings) if findings is not None else None,
        "trials": to_plain(trials) if trials is not None else None,
    }


def proof_json(trials: TrialLog) -> dict[str, Any]:
    """A plan that was proved without a profile: its trials under the keys of `report_json`, whose others are null."""
    return {
        "schema_version": REPORT_SCHEMA_VERSION,
        "type": "report",
        "summary": None,
        "profile": None,
        "findings": None,
        "trials": to_plain(trials),
    }


def proof_markdown(trials: TrialLog) -> str:
    """The same in Markdown."""
    name = cell(" ".join((trials.script, *trials.argv)))
    return (
        "\n".join([f"## advisor: {name}", "", f"**{cell(wording.trials_headline(trials))}**", *_trials(trials)]) + "\n"
    )


def cell(text: str) -> str:
    """Text that stays text in Markdown and in a table's cell: one line, no HTML, no links, no emphasis."""
    flat = " ".join(text.split())
    for character in "\\`*_[]|~":
        flat = flat.replace(character, "\\" + character)
    return flat.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def markdown(profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> str:
    """The run in Markdown: verdict, step, time by cause, findings, trials. Names are escaped."""
    lines = [f"## advisor: {cell(wording.script(profile))}", ""]
    lines += [f"**{cell(wording.headline(profile, findings, trials))}**", ""]
    lines += [f"- Machine: {cell(wording.machine(profile))}", f"- Step: {wording.step_sentence(profile)}"]
    if rate := breakdown.samples_per_s(profile):
        lines.append(f"- Rate: {samples_text(rate)} {wording.rate_unit(profile)}")
    if profile.memory.peak_allocated_bytes:
        lines.append(f"- Peak memory: {bytes_text(profile.memory.peak_allocated_bytes)}")
    if not profile.complete:
        lines.append("- This run is incomplete: the script ended before everything was measured.")
    causes = breakdown.causes(profile)
    if causes:
        lines += ["", "| where the time goes | time | share | of limit |", "|---|---:|---:|---:|"]
        step_us = breakdown.division(profile).total_us
        for c in causes:
            reach = percent_text(min(1.0, c.limit_us / c.time_us)) if c.limit_us > 0 and c.time_us > 0 else ""
            lines.append(f"| {cell(c.label)} | {time_text(c.time_us, step_us)} | {percent_text(c.frac)} | {reach} |")
    if findings is not None:
        lines += _findings(findings)
    if trials is not None:
        lines += _trials(trials)
    return "\n".join(lines) + "\n"


def _findings(findings: Findings) -> list[str]:
    told = wording.cards(findings)
    lines = ["", f"### Findings ({wording.counts(findings)})"]
    if told:
        lines += ["", "| | finding | predicted gain | changes the result | where |", "|---:|---|---:|---|---|"]
    for t in told[:MARKDOWN_CARDS]:
        f = t.lead
        where = ", ".join(f.sites[:2]) + (f" and {len(f.sites) - 2} more" if len(f.sites) > 2 else "")
        name = f"{cell(f.title)} ({cell(f.rule)})"
        if t.reasons:
            name += "; also: " + "; ".join(cell(reason.title) for reason in t.reasons)
        gain = numbers.gain(t.card.predicted)
        result = wording.SEMANTICS[f.semantics] if f.gain or f.transform else "–"
        lines.append(f"| {t.card.rank} | {name} | {gain} | {result} | {cell(where or 'the whole step')} |")
    if len(told) > MARKDOWN_CARDS:
        lines += ["", f"{len(told) - MARKDOWN_CARDS} more in findings.json."]
    missing = [f for f in findings.findings if f.outcome is Outcome.UNKNOWN]
    if missing:
        lines += ["", f"<details><summary>{counted(len(missing), 'rule')} not evaluated</summary>", ""]
        for lacks, group in wording.unevaluated(findings):
            lines.append(f"- {cell(lacks)}: {cell(', '.join(f.rule for f in group))}")
        lines += ["", "</details>"]
    return lines


def _trials(trials: TrialLog) -> list[str]:
    lines = ["", "### Trials", ""]
    rounds = sorted({v.round for v in trials.verdicts})
    if len(rounds) > 1:
        lines += [*(f"- {cell(wording.round_headline(trials, number))}" for number in rounds), ""]
    lines += ["| round | change | predicted | measured | verdict | reason |", "|---:|---|---:|---:|---|---|"]
    for v in trials.verdicts:
        gains = f"{numbers.gain(v.predicted)} | {numbers.gain(v.gain)}"
        lines.append(
            f"| {v.round} | {cell(v.title or v.transform)} | {gains} | {cell(v.status)} | {cell(wording.reason(v))} |"
        )
    for v in places.told(trials):
        lines += ["", f"<details><summary>{cell(places.headline(v))}</summary>", ""]
        lines += [_listed(group) for group in places.grouped(v.matched)]
        lines += [_listed(group, "unchanged") for group in places.grouped(v.unmatched)]
        lines += ["", "</details>"]
    stack = trials.stack
    if stack is not None:
        word = {True: "passed", False: "**failed**", None: "undecided"}[stack.passed]
        lines += ["", f"All kept changes together against the plain script: {word}. {cell(stack.detail)}"]
    if wording.unconfirmed(trials) and not wording.usable(trials):
        lines += ["", f"To settle the unconfirmed changes: {cell(wording.next_of_trials(trials, 'advisor'))}"]
    return lines


def _listed(group: places.Group, left: str = "") -> str:
    """A group of places as an item of a list."""
    what = ", ".join(text for text in (left, group.text, counted(len(group.places), "place")) if text)
    shown = ", ".join(f"{path} ({own})" if own else path for path, own in group.places[:MARKDOWN_PLACES])
    more = len(group.places) - MARKDOWN_PLACES
    return f"- {cell(what)}: {cell(shown)}" + (f" and {more:,} more in trials.json" if more > 0 else "")
