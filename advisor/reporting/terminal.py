"""Reports for a terminal of any width, with or without colour. Plain text in, plain text out; nothing is printed here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

from advisor.core.findings import Evidence, Finding, Findings, Outcome, Recommendation
from advisor.core.profile import StepProfile
from advisor.core.units import bytes_text, count_text, counted, percent_text, samples_text, time_text
from advisor.core.verdict import TrialLog
from advisor.reporting import breakdown, drawn, numbers, wording
from advisor.reporting.compare import Delta, RunComparison
from advisor.reporting.page import MIN_WIDTH, Page, bar, clip, clip_path, printable

_SEVERITY_COLORS = {"high": "red", "medium": "yellow", "low": "cyan", "info": "blue"}
TOP_GAPS = 5
BAR = 24  # columns of a drawn table's bars
WIDE = 120  # columns from which on a drawn table says where
TOP_CARDS = 6


def profile_text(
    profile: StepProfile,
    findings: Findings | None,
    width: int = 100,
    color: bool = False,
    *,
    command: str = "advisor",
    explain: bool | Literal["fired"] = False,
    trials: TrialLog | None = None,
    drawn: bool = False,
) -> str:
    """What a profiled run shows: the verdict, step time, how near the limit, where the time goes, largest gaps, what would help.

    Args:
        profile: the run; incomplete ones are shown as far as they go.
        findings: rule outcomes, or None when no rules were applied.
        width: columns to fill; at least `MIN_WIDTH` are used.
        color: whether to use ANSI colours.
        command: how advisor is called here, for the next command.
        explain: show each condition with its value, and the rules that did not fire; "fired": only how to see those.
        trials: what the trials of it came to; their text follows, with the next command.
        drawn: whether tables have lines around them.
    """
    page = Page(max(width, MIN_WIDTH), color, drawn)
    verdict = page.wrap(wording.headline(profile, findings, trials), 0, "bold")
    blocks = [verdict, _summary(page, profile), _causes(page, profile), _gaps(page, profile)]
    if findings is not None:
        blocks.append(_findings(page, findings, bool(explain), command=command if explain == "fired" else ""))
    if notes := _notes(page, profile):
        blocks.append(notes)
    if trials is None:
        blocks.append(_next(page, profile, findings, command))
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _summary(page: Page, profile: StepProfile) -> list[str]:
    lines = [
        page.paint(clip(wording.script(profile), page.width), "dim"),
        page.paint(clip(wording.machine(profile), page.width), "dim"),
        "",
    ]
    if profile.step_us is None:
        return [*lines, page.paint("  No step could be timed.", "yellow")]
    s = profile.step_us
    median, spread = numbers.duration(s.median), numbers.spread(s)
    lines.append(f"  Step   {page.paint(median, 'bold')}   {spread}")
    if rate := breakdown.samples_per_s(profile):
        told = f"{samples_text(rate)} {wording.rate_unit(profile)}"
        if len(f"  Step   {median}   {spread}   {told}") <= page.width:
            lines[-1] += f"   {told}"
        else:
            lines.append(f"         {told}")
    if bursts := wording.bursts(profile):
        lines.append(f"         {bursts}")
    if fed := wording.fed(profile):
        lines.append(f"  Data   {fed}")
        if making := wording.batch_making(profile):
            lines += page.wrap(f"a batch takes {making}", 9)
    frac = breakdown.limit_frac(profile)
    if frac is not None:
        style = "green" if wording.ENOUGH_FRAC <= frac <= 1 else "yellow" if frac >= 0.5 else "red"
        lines.append(
            f"  Limit  {numbers.duration(profile.limit_us, profile.typical_us)}   {page.paint(wording.limit_sentence(profile), style)}"
        )
    else:
        lines += page.wrap(f"Limit  –   {wording.limit_sentence(profile)}", 13, first=2)
    facts = []
    if profile.memory.peak_allocated_bytes:
        facts.append(f"peak memory {bytes_text(profile.memory.peak_allocated_bytes)}")
    nbytes, provenance = breakdown.dram_bytes(profile)
    if nbytes:
        facts.append(f"{bytes_text(nbytes)} to and from memory a step ({provenance.value})")
    if profile.launches:
        facts.append(f"{count_text(round(profile.launches))} launches")
    if facts:
        lines += page.wrap(" · ".join(facts), 9, "dim")
    return lines


def _causes(page: Page, profile: StepProfile) -> list[str]:
    causes = breakdown.causes(profile)
    if not causes:
        return []
    step = breakdown.division(profile)
    note = f"shares of {'the' if step.untraced else 'a traced'} step, {numbers.duration(step.total_us)}"
    if page.drawn:
        return [page.heading("Where the time goes", note), *_drawn_causes(page, causes, step.total_us)]
    label_width = min(max(len(c.label) for c in causes), 30)
    fixed = label_width + 20  # margins, time and share
    with_limit = page.width >= fixed + 17 + 8
    room = max(6, min(50, page.width - fixed - (17 if with_limit else 0)))
    longest = max(c.frac for c in causes)
    lines = [page.heading("Where the time goes", note)]
    for cause in causes:
        filled = page.paint(bar(cause.frac / longest, room), "yellow" if cause.idle else "blue")
        label = clip(cause.label, label_width)
        line = f"  {label:<{label_width}} {filled} {time_text(cause.time_us, step.total_us):>8} {percent_text(cause.frac):>6}"
        if with_limit and cause.limit_us > 0 and cause.time_us > 0:
            line += f"  {percent_text(min(1.0, cause.limit_us / cause.time_us)):>6} of limit"
        lines.append(line)
        for site in cause.sites[:2] if cause.idle else ():  # those of work are among the gaps
            lines += page.wrap(f"{site.source} {site.what}".strip(), 4, "dim")
    return lines


def _drawn_causes(page: Page, causes: Sequence[breakdown.Cause], step_us: float) -> list[str]:
    longest, limits = max(c.frac for c in causes), any(c.limit_us > 0 for c in causes)
    where = page.width >= WIDE
    rows = []
    for c in causes:
        row = [c.label, page.paint(bar(c.frac / longest, BAR).rstrip(), "yellow" if c.idle else "blue")]
        row += [time_text(c.time_us, step_us), percent_text(c.frac)]
        if limits:
            row.append(percent_text(min(1.0, c.limit_us / c.time_us)) if c.limit_us > 0 and c.time_us > 0 else "")
        if where:
            row.append(page.paint("\n".join(f"{site.source} {site.what}".strip() for site in c.sites[:1]), "dim"))
        rows.append(row)
    head = ["", "", "time", "share", *(["of limit"] if limits else []), *(["where"] if where else [])]
    return drawn.table(page, head, rows, right={2, 3, *([4] if limits else [])})


def _gaps(page: Page, profile: StepProfile) -> list[str]:
    gaps = breakdown.gaps(profile, TOP_GAPS)
    if not gaps:
        return []
    lines = [page.heading("Largest gaps to the limit", "time above this machine's minimum")]
    longest_us = max(g.time_us for g in gaps)
    if page.drawn:
        rows = [
            [
                (g.module or g.op) + (f" ×{g.modules}" if g.modules > 1 else ""),
                breakdown.KIND_LABELS.get(g.kind, g.kind),
                time_text(g.time_us, longest_us),
                time_text(g.limit_us, longest_us),
                page.paint(" · ".join(part for part in (g.layer, g.source) if part), "dim"),
            ]
            for g in gaps
        ]
        return [lines[0], *drawn.table(page, ("module", "work", "time", "limit", "where"), rows, right={2, 3})]
    names = [(g.module or g.op) + (f" ×{g.modules}" if g.modules > 1 else "") for g in gaps]
    name_width = min(max(map(len, names)), max(20, (page.width - 50) // 2))
    kind_width = min(max(len(breakdown.KIND_LABELS.get(g.kind, g.kind)) for g in gaps), 18)
    for g, full in zip(gaps, names, strict=True):
        name, kind = clip_path(full, name_width), clip(breakdown.KIND_LABELS.get(g.kind, g.kind), kind_width)
        took, least = time_text(g.time_us, longest_us), time_text(g.limit_us, longest_us)
        head = f"  {name:<{name_width}}  {kind:<{kind_width}}  {took:>8}, limit {least:>8}"
        about = " · ".join(part for part in (g.layer, g.source) if part)
        if len(head) + 2 + len(about) <= page.width:
            lines.append(head + "  " + page.paint(about, "dim"))
        else:
            lines += [head, "    " + page.paint(clip_path(about, page.width - 4), "dim")]
    return [line.rstrip() for line in lines]


def _findings(page: Page, findings: Findings, explain: bool, *, command: str = "") -> list[str]:
    """With a `command`, the rules that did not fire are those that it shows."""
    told = wording.cards(findings)
    helpful = [card for card in told if card.matters]
    lines = [page.heading("What would help" if helpful else "Findings", wording.counts(findings))]
    if not told:
        lines.append("  No rule fired.")
    elif not helpful:
        lines += page.wrap(f"No change is known that would save {numbers.share(wording.LEAST_GAIN)} of the step.", 2)
    shown = told if explain else helpful[:TOP_CARDS]
    # Numbered as they stand here: between them lie cards that would save too little to be shown.
    for number, card in enumerate(shown, 1):
        lines += _card(page, card, number, explain)
    if len(told) > len(shown):
        lines.append(page.paint(f"  {len(told) - len(shown)} more in the report.", "dim"))
    if command:
        lines += page.wrap(f"The rules that did not fire: {command} recommend RUN --explain", 2, "dim")
    elif explain:
        lines += _unfired(page, findings)
    elif lacking := wording.unevaluated_line(findings):
        lines += page.wrap(lacking, 2, "dim")
    return lines


def _card(page: Page, told: wording.ToldCard, number: int, explain: bool) -> list[str]:
    lines = finding_lines(page, told.lead, f"{number}. ", explain)
    if told.reasons and not explain:
        lines += page.wrap("also: " + "; ".join(reason.title for reason in told.reasons), 4, "dim")
    for reason in told.reasons if explain else ():
        lines += finding_lines(page, reason, "also: ", explain)
    return lines


def finding_lines(page: Page, finding: Finding, lead: str, explain: bool) -> list[str]:
    """One finding: title, prediction, message and places; with `explain` every place, and each condition with its value."""
    mark = page.paint("●", _SEVERITY_COLORS.get(finding.severity, "blue"))
    about = [
        f"predicted to save {numbers.saves(finding.gain)}" if finding.gain else "",
        wording.SEMANTICS[finding.semantics] if finding.transform or finding.gain else "",
    ]
    about.append(f"apply:\N{NO-BREAK SPACE}{finding.transform}" if finding.transform else "for you to decide")
    lines = page.wrap(f"{lead}{finding.title}  [{finding.rule}]", 4)
    lines[0] = f"  {mark} {page.paint(lines[0].strip(), 'bold')}"
    lines += page.wrap(" · ".join(a for a in about if a), 4, "green" if finding.gain else "dim")
    if finding.message:
        lines += page.wrap(finding.message, 4)
    unnamed = [s for s in finding.sites if s not in finding.message]
    shown = unnamed if explain else unnamed[:2]
    for site in shown:
        lines += page.wrap(clip(f"at {site}", 2 * page.width - 16), 7, "dim", first=4)
    if len(unnamed) > len(shown):
        lines.append("    " + page.paint(f"and {len(unnamed) - len(shown)} more", "dim"))
    if explain:
        for evidence in finding.evidence:
            lines += page.wrap(evidence_text(evidence), 8, "dim", first=6)
    return lines


def _unfired(page: Page, findings: Findings) -> list[str]:
    lines = []
    for outcome, title in ((Outcome.QUIET, "Quiet"), (Outcome.UNKNOWN, "Not evaluated")):
        group = [f for f in findings.findings if f.outcome is outcome]
        if not group:
            continue
        lines += ["", page.heading(title, counted(len(group), "rule"))]
        for f in group:
            lines += page.wrap(f"{f.rule}: {f.title}", 6, first=4)
            for detail in (*map(evidence_text, f.evidence), *f.missing):
                lines += page.wrap(detail, 8, "dim", first=6)
    return lines


def evidence_text(evidence: Evidence) -> str:
    """`fp32_conv_frac = 53 % (condition: > 0.2; measured)`."""
    condition = f"condition: {evidence.threshold}; " if evidence.threshold else ""
    return f"{evidence.metric} = {numbers.value(evidence.value, evidence.unit)} ({condition}{evidence.provenance})"


def _notes(page: Page, profile: StepProfile) -> list[str]:
    cost = profile.cost
    lines = []
    if cost.traced_steps:
        text = (
            wording.tracing(cost) if not profile.origin else f"{counted(cost.traced_steps, 'step')} read from the trace"
        )
        if profile.environment.device == "cuda":
            text += f"; {100 * cost.coverage_frac:.1f} % of launches have a device record"
        lines += page.wrap(text + ".", 2, "dim")
    if profile.environment.shared_gpu:
        lines += page.wrap("Another process used this GPU during the run. Do not trust the times.", 2, "yellow")
    if not profile.complete:
        lines += page.wrap("This run is incomplete: the script ended before everything was measured.", 2, "yellow")
    told = [page.wrap(wording.sentence(note), 2, "dim") for note in (*profile.notes, *profile.environment.notes)]
    lines = [line for note in told for line in note] + lines  # what the script is, before how it was looked at
    return [page.heading("Notes"), *lines] if lines else []


def _next(page: Page, profile: StepProfile, findings: Findings | None, command: str) -> list[str]:
    if findings is None or not findings.recommendations:
        return []
    if why := wording.refused(profile, command):
        return [page.heading("Next"), *page.wrap(wording.sentence(why), 2)]
    # Never cut or wrapped: it is there to be copied.
    return [page.heading("Next"), "  " + page.paint(printable(wording.next_apply(profile, command)), "cyan")]


def question_text(recommendation: Recommendation, width: int = 100) -> str:
    """One change that could be tried: what it is, what it promises, what asks for it."""
    return "\n".join(_recommendation(Page(max(width, MIN_WIDTH), False), recommendation, "", 2))


def _recommendation(page: Page, r: Recommendation, mark: str, indent: int) -> list[str]:
    about = [f"predicted to save {numbers.saves(r.predicted)}" if r.predicted else "", wording.SEMANTICS[r.semantics]]
    return [
        *page.wrap(f"{mark}{r.title or r.transform}  [{r.transform}]", indent, "bold", first=2 if mark else 0),
        *page.wrap(" · ".join(a for a in about if a), indent, "green"),
        *page.wrap(r.reason, indent, "dim"),
    ]


def recommendations_text(
    profile: StepProfile | None,
    findings: Findings | None,
    width: int = 100,
    color: bool = False,
    *,
    command: str = "advisor",
) -> str:
    """What `apply --dry-run` shows: the changes that would be tried, in order."""
    page = Page(max(width, MIN_WIDTH), color)
    recommendations = findings.recommendations if findings is not None else ()
    lines = [page.heading("Would try, in this order", "nothing was changed")]
    if not recommendations:
        return "\n".join([*lines, "  Nothing: no rule asks for a change that can be tried."])
    for number, r in enumerate(recommendations, 1):
        lines += _recommendation(page, r, f"{number:>2}. ", 6)
    lines += page.wrap(
        "This is the first round. If it keeps a change, advisor profiles the script again with that change on. "
        "The next round tries what the rules ask for then.",
        2,
        "dim",
    )
    if profile is not None:
        lines += ["", *_next(page, profile, findings, command)]
    return "\n".join(lines)


def comparison_text(comparison: RunComparison, width: int = 100, color: bool = False, drawn: bool = False) -> str:
    """A finished comparison as text."""
    page = Page(max(width, MIN_WIDTH), color, drawn)
    lines = [
        *page.wrap(f"A  {comparison.a}", 5, "dim", first=2),
        *page.wrap(f"B  {comparison.b}", 5, "dim", first=2),
        "",
        *page.wrap(comparison.sentence, 2, "bold"),
    ]
    for difference in comparison.differences:
        lines += page.wrap(difference, 2, "yellow")
    for title, note, deltas in (
        ("Step", "", comparison.totals),
        ("By kind", "time in a step", comparison.kinds),
    ):
        if deltas:
            lines += ["", page.heading(title, note), *_deltas(page, deltas)]
    return "\n".join(lines)


def _drawn_deltas(page: Page, deltas: Sequence[Delta]) -> list[str]:
    rows = []
    for d in deltas:
        change = d.change_text if d.comparable else "not comparable"
        if d.comparable and d.ratio is not None and abs(d.ratio - 1) >= 0.02:
            change = page.paint(change, "red" if (d.ratio > 1) != d.more_is_better else "green")
        rows.append([d.label, numbers.value(d.a, d.unit), numbers.value(d.b, d.unit), change])
    return drawn.table(page, ("", "A", "B", "change"), rows, right={1, 2, 3})


def _deltas(page: Page, deltas: Sequence[Delta]) -> list[str]:
    if page.drawn:
        return _drawn_deltas(page, deltas)
    label_width = min(max(len(d.label) for d in deltas), page.width - 44)
    lines = [page.paint(f"  {'':<{label_width}}  {'A':>11}  {'B':>11}  {'change':>14}", "dim")]
    for d in deltas:
        change = f"{d.change_text if d.comparable else 'not comparable':>14}"
        if d.comparable and d.ratio is not None and abs(d.ratio - 1) >= 0.02:
            change = page.paint(change, "red" if (d.ratio > 1) != d.more_is_better else "green")
        values = f"{numbers.value(d.a, d.unit):>11}  {numbers.value(d.b, d.unit):>11}"
        lines.append(f"  {clip(d.label, label_width):<{label_width}}  {values}  {change}")
    return lines


def checks_text(checks: Sequence[Mapping[str, str]], width: int = 100, color: bool = False) -> str:
    """What `doctor` found: a line for each check (`name`, `status`, `found`), below it what to do (`fix`)."""
    page = Page(max(width, MIN_WIDTH), color)
    marks = {"ok": ("✓", "green"), "warn": ("!", "yellow"), "missing": ("✗", "red")}
    name_width = max((len(c["name"]) for c in checks), default=0)
    lines = []
    for check in checks:
        mark, style = marks.get(check["status"], ("?", "cyan"))
        indent = name_width + 6
        found = page.wrap(check["found"], indent) or [""]
        lines.append(f"  {page.paint(mark, style)} {check['name']:<{name_width}}  {found[0].strip()}".rstrip())
        lines += found[1:]
        lines += page.wrap(check.get("fix", ""), indent, style)
    return "\n".join(lines)
