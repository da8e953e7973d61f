"""What `advisor explain` says of one rule or one change in a run: what came of it there, before what it is."""

from __future__ import annotations

from collections.abc import Sequence

from advisor.core.findings import Finding, Findings, Outcome
from advisor.core.transform_row import Row
from advisor.core.verdict import TrialLog, Verdict
from advisor.reporting import numbers, wording
from advisor.reporting.page import MIN_WIDTH, Page
from advisor.reporting.terminal import evidence_text, finding_lines


def rule_in_run(found: Finding | None, run: str, width: int = 100, color: bool = False) -> str:
    """Whether the rule fired in this run, with each condition's value; `found` is None where the run did not evaluate it."""
    page = Page(max(width, MIN_WIDTH), color)
    if found is None:
        return "\n".join(
            [page.heading("In this run", run), "  Not evaluated: the run's findings do not have this rule."]
        )
    if found.outcome is Outcome.FIRED:
        return "\n".join([page.heading("In this run", run), *finding_lines(page, found, "", explain=True)])
    word = (
        "Quiet: a condition does not hold."
        if found.outcome is Outcome.QUIET
        else "Not evaluated: something is missing."
    )
    lines = [page.heading("In this run", run), *page.wrap(word, 2)]
    for detail in (*map(evidence_text, found.evidence), *found.missing):
        lines += page.wrap(detail, 8, "dim", first=6)
    return "\n".join(lines)


def change_text(row: Row, rules: Sequence[str], by_hand: Sequence[str], width: int = 100, color: bool = False) -> str:
    """What a change is: its effect on the numbers, the rules that ask for it, and the lines to write by hand."""
    page = Page(max(width, MIN_WIDTH), color)
    lines = page.wrap(f"{row.title}  [{row.id}]", 0, "bold")
    lines.append(f"  Numbers     {wording.SEMANTICS[row.semantics]}")
    lines.append(f"  Needs       {'an NVIDIA GPU' if row.needs_gpu else 'nothing: it is tried on a CPU too'}")
    if row.conflicts:
        lines += page.wrap(f"Not with    {', '.join(row.conflicts)}", 14, first=2)
    if rules:
        lines += page.wrap(f"Asked for   by {', '.join(rules)}", 14, first=2)
    lines += ["", page.heading("By hand")]
    if by_hand:
        return "\n".join([*lines, *(f"  {line}" for line in by_hand)])
    lines += page.wrap("It has no short form in source. `advisor run` and `advisor.enable` apply it.", 2)
    return "\n".join(lines)


def change_in_run(
    identifier: str, findings: Findings | None, trials: TrialLog | None, run: str, width: int = 100, color: bool = False
) -> str:
    """What asked for the change in this run, what it was predicted to save, and how its trials ended."""
    page = Page(max(width, MIN_WIDTH), color)
    lines = [page.heading("In this run", run)]
    asking = (
        [f for f in findings.findings if f.outcome is Outcome.FIRED and f.transform == identifier] if findings else []
    )
    for finding in asking:
        lines += finding_lines(page, finding, "", explain=False)
    tried = [v for v in trials.verdicts if identifier in (v.transform, *v.together)] if trials else []
    for verdict in tried:
        lines += _tried(page, verdict)
    if not asking and not tried:
        lines += page.wrap("No rule asks for this change here, and no trial of it is on file.", 2)
    return "\n".join(lines)


def _tried(page: Page, verdict: Verdict) -> list[str]:
    told = f"Tried in round {verdict.round}: {verdict.status}"
    if verdict.gain is not None:
        told += f", saves {numbers.gain(verdict.gain)} of the {verdict.gain_of}"
    lines = page.wrap(f"{told}.", 4, "bold", first=2)
    return lines + page.wrap(wording.sentence(verdict.reason), 4) if verdict.reason else lines
