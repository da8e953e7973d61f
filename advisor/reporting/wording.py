"""Sentences and words that several reports share."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from advisor.core.cache import is_cell, told_as
from advisor.core.findings import Card, Finding, Findings, Outcome, Semantics
from advisor.core.profile import ProfilerCost, StepProfile
from advisor.core.units import bounds_text, counted, percent_text, time_text
from advisor.core.verdict import UNTRIED, Status, TrialLog, Verdict
from advisor.reporting import breakdown, unexplained
from advisor.reporting.numbers import device_speedup, duration, factor, gain, saves, spread

SEMANTICS = {
    Semantics.EXACT: "bit-equal",
    Semantics.REASSOCIATED: "same maths, other order",
    Semantics.PRECISION: "lower precision",
    Semantics.TRAINING: "another recipe",
}
NAMES = frozenset({"advisor", "torch"})  # stay small where a sentence begins with them
LEAST_GAIN = 0.01  # of the step: less is kept by no search (--min-gain)
NO_CHANGE = "No rule found a change that would help."
ENOUGH_FRAC = 0.8  # at this share of the limit a step without findings is called done


def rate_unit(profile: StepProfile) -> str:
    """What a rate counts: the rank that was profiled knows of its own samples."""
    return "samples/s on one rank" if profile.model.world_size > 1 else "samples/s"


def fed(profile: StepProfile) -> str:
    """`65 to 71 ms if every batch were ready: the step waits 57 % of its time for the loader`; "" where it hardly waits."""
    if not profile.fed_us:
        return ""
    waits = percent_text(1.0 - profile.fed_us / profile.typical_us)
    low, high = (duration(end, max(profile.fed_within_us)) for end in profile.fed_within_us)
    took = high if low == high else f"{low.split()[0]} to {high}"
    return f"{took} if every batch were ready: the step waits {waits} of its time for the loader"


def batch_making(profile: StepProfile) -> str:
    """`47 ms of the training's thread: decode 56 %, resize 36 %, to fp32 4 %`; "" where nobody has seen it."""
    work = profile.input.work
    if work is None or not work.told:
        return ""
    of = "one worker" if work.worker else "the training's thread"
    return f"{duration(work.batch_us)} of {of}: {work.shares_text()}"


def bursts(profile: StepProfile) -> str:
    """`mean 19.05 ms (batches come in bursts)`, where that is what a step takes; else ""."""
    if profile.step_us is None or not profile.in_bursts:
        return ""
    return f"mean {duration(profile.typical_us)} (batches come in bursts)"


def step_spread(profile: StepProfile) -> str:
    """The step's spread, and its mean where that is what it takes."""
    parts = (spread(profile.step_us) if profile.step_us is not None else "", bursts(profile))
    return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class ToldCard:
    """A card with its findings: the one that leads, and its other reasons."""

    card: Card
    lead: Finding
    reasons: tuple[Finding, ...]

    @property
    def matters(self) -> bool:
        """Something is to be gained by it, or may be where that is not known."""
        predicted = self.card.predicted
        if self.lead.role == "description":
            return False
        return predicted.high >= LEAST_GAIN if predicted is not None else self.lead.severity in ("high", "medium")


def cards(findings: Findings | None) -> tuple[ToldCard, ...]:
    """The cards of a run, by rank."""
    if findings is None:
        return ()
    return tuple(ToldCard(c, findings.of(c.rule), tuple(map(findings.of, c.reasons))) for c in findings.cards)


def counts(findings: Findings) -> str:
    """`61 rules: 9 fired, 44 quiet, 8 not evaluated`."""
    of = {o: sum(f.outcome is o for f in findings.findings) for o in Outcome}
    return (
        f"{counted(len(findings.findings), 'rule')}: {of[Outcome.FIRED]} fired, {of[Outcome.QUIET]} quiet, "
        f"{of[Outcome.UNKNOWN]} not evaluated"
    )


def machine(profile: StepProfile) -> str:
    """The machine and the main library in a few words."""
    env = profile.environment
    name = env.gpu_name if env.device == "cuda" else env.cpu_name or "CPU"
    parts = [name or env.device, f"torch {env.torch}" if env.torch else ""]
    return " · ".join(p for p in parts if p)


def script(profile: StepProfile) -> str:
    """The command line of the script, quoted as a shell needs it."""
    if is_cell(profile.script):
        return told_as(profile.script)
    return shlex.join((profile.script, *profile.argv))


def limit_sentence(profile: StepProfile) -> str:
    """How near the step is to the limit, or why that is not known."""
    frac = breakdown.limit_frac(profile)
    device = "GPU" if profile.environment.device == "cuda" else "machine"
    if frac is None:
        doubt = profile.environment.rates_doubt
        because = f": {doubt} while its rates were measured" if doubt else ""
        return f"the distance to this {device}'s limit is not known{because}"
    if frac > 1:
        return (
            f"this step is faster than this {device}'s measured rates allow, so the distance to the limit is not known"
        )
    return f"this step runs at {percent_text(frac)} of this {device}'s limit"


def kept(trials: TrialLog) -> tuple[Verdict, ...]:
    """The verdicts whose change was kept."""
    return tuple(v for v in trials.verdicts if v.status == Status.KEPT)


def usable(trials: TrialLog) -> bool:
    """True when there is a plan worth training with: something was kept, and proved with the rest of it."""
    return bool(kept(trials)) and trials.stack is not None and trials.stack.passed is True


def unconfirmed(trials: TrialLog) -> tuple[Verdict, ...]:
    """The verdicts on what the running loop kept, and fresh runs did not confirm."""
    return tuple(v for v in trials.verdicts if v.status == Status.UNCONFIRMED)


def _in_the_loop(verdicts: Sequence[Verdict]) -> str:
    """`2 changes faster in the running loop and 1 that the loop had too little time to measure`: what is unconfirmed."""
    timed = sum(v.gain is not None for v in verdicts)
    rest = len(verdicts) - timed
    parts = [f"{counted(timed, 'change')} faster in the running loop"] if timed else []
    if rest:
        parts.append(f"{rest if timed else counted(rest, 'change')} that the loop had too little time to measure")
    return " and ".join(parts)


def headline(profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> str:
    """The run in one or two sentences: what `apply` reached, else how near the limit is and what would help most."""
    if trials is not None:
        return trials_headline(trials)
    if profile.step_us is None:
        return "No step could be timed, so nothing can be said about speed."
    limit = limit_sentence(profile)
    limit = limit[0].upper() + limit[1:] + "."
    if findings is None:
        return limit
    verdict = _verdict(profile, findings)
    # What is not known does not lead: reports tell why beside the step's time.
    return f"{limit} {verdict}" if breakdown.limit_frac(profile) is not None else verdict


def _verdict(profile: StepProfile, findings: Findings) -> str:
    """What to fix first, what nothing explains, or that there is nothing to do."""
    silent = unexplained.slices(profile, findings)
    told = ", ".join(f"{percent_text(c.frac)} {c.label.removeprefix('idle: ')}" for c in silent)
    open_yet = f"Not explained by any finding: {told}." if silent else ""
    first = next((t for t in cards(findings) if t.matters), None)
    if first is not None:
        predicted = first.card.predicted
        saved = f" (could save {saves(predicted)})" if predicted is not None else ""
        return f"First to fix: {_clause(first.lead.title)}{saved}. {open_yet}".strip()
    frac = breakdown.limit_frac(profile)
    if open_yet:
        return open_yet
    return "There is nothing to do." if frac is not None and ENOUGH_FRAC <= frac <= 1 else NO_CHANGE


def _clause(title: str) -> str:
    """A title in the middle of a sentence: lower case, unless it begins with a name (`CuPy`, `GPU`, `fp32`)."""
    word = title.split(" ", 1)[0]
    return title[:1].lower() + title[1:] if word[1:].islower() or len(word) == 1 else title


def trials_headline(trials: TrialLog) -> str:
    """What came of the trials, in a sentence or two: proved, settled without a gain, or open and why."""
    count = len(kept(trials))
    known = {(v.transform, *sorted(v.parameters.items())) for v in trials.verdicts}  # some in two rounds
    changes = f"{count} of {len(known)} changes kept"
    if declined := sum(v.status == Status.DECLINED for v in trials.verdicts):
        changes += f", {declined} declined by you"
    stack = trials.stack
    open_yet = unconfirmed(trials)
    if trials.fault and not (stack is not None and stack.passed):
        until_then = f" Before that: {_in_the_loop(open_yet)}, not confirmed in fresh runs." if open_yet else ""
        return f"A fault in advisor ended the search; the script is not to blame: {trials.fault}.{until_then}"
    if open_yet and count:
        changes += f"; not confirmed in fresh runs: {_in_the_loop(open_yet)}"
    elif open_yet:
        why = f" Fresh runs: {stack.detail}." if stack is not None and stack.detail else ""
        return f"Not confirmed in fresh runs: {_in_the_loop(open_yet)}.{why}"
    if not count:
        return _nothing_kept(trials, declined)
    if stack is None or stack.speedup is None or not stack.passed:
        return f"{changes}; the plan was not proved against the plain script."
    between = ""
    if stack.speedup_low is not None and stack.speedup_high is not None:
        between = f" ({bounds_text(stack.speedup_low, stack.speedup_high)})"
    device = device_speedup(stack)
    if stack.by_device:
        return f"Proved: {device}, and is not slower for it: {factor(stack.speedup)} the speed{between}; {changes}."
    return (
        f"Proved: {factor(stack.speedup)} the plain script's speed{between}{'; ' if device else ''}{device}, {changes}."
    )


def _nothing_kept(trials: TrialLog, declined: int) -> str:
    """Of trials that kept nothing: whether anything was tried, and whether that is final."""
    waiting = sum(v.status == Status.INCONCLUSIVE for v in trials.verdicts)
    tried = sum(v.status not in UNTRIED for v in trials.verdicts)
    if trials.interrupted:
        settled = (
            f"{counted(waiting, 'change')} could not be settled until then" if waiting else "no change was settled"
        )
        return f"Nothing is proved: you ended the search, and {settled}."
    if waiting or not trials.complete:
        why = f"{counted(waiting, 'change')} could not be settled" if waiting else "the search did not finish"
        return f"Nothing is proved yet: {why}. A quieter machine, more steps or more --max-time may settle it."
    told = f"you declined {'it' if declined == 1 == len(trials.verdicts) else counted(declined, 'change')}"
    if not tried:
        why = told if declined else "each change was skipped, with a reason"
        return f"Nothing was tried: {why}. The plain script stays as it is."
    if declined:
        return f"Nothing is kept: each tried change was rejected, with a reason, and {told}. The plain script stays as it is."
    return "Nothing helps here: each tried change was rejected, with a reason. The plain script stays as it is."


def spent(trials: TrialLog) -> str:
    """Where the search's time went, most first: "timed blocks 41 s, numeric gate 30 s"; what took under a second is left out."""
    ordered = sorted(trials.spent.items(), key=lambda item: -item[1])
    return ", ".join(f"{phase} {seconds:.0f} s" for phase, seconds in ordered if seconds >= 1.0)


def unevaluated(findings: Findings) -> list[tuple[str, list[Finding]]]:
    """The rules that were not evaluated, by what they lack, the most first: `needs a CUDA GPU` → those rules.

    Of a rule that lacks several things the first stands for all.
    """
    groups: dict[str, list[Finding]] = {}
    for finding in findings.findings:
        if finding.outcome is Outcome.UNKNOWN:
            lacks = finding.missing[0].partition(": ")[2] if finding.missing else ""
            groups.setdefault(lacks or "something that was not measured", []).append(finding)
    return sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))


def unevaluated_line(findings: Findings) -> str:
    """The same in a sentence or two: `39 rules need a CUDA GPU. 3 were not evaluated: was not gathered (2), no loader (1).`; "" for none."""
    needs, other = [], []
    for lacks, group in unevaluated(findings):
        if lacks.startswith("needs "):
            needs.append(f"{counted(len(group), 'rule')} {'need' if len(group) > 1 else 'needs'} {lacks[6:]}")
        else:
            other.append((len(group), lacks))
    told = ["; ".join(needs)] if needs else []
    if other:
        total = sum(count for count, _ in other)
        reasons = [f"{lacks} ({count})" for count, lacks in other] if len(other) > 1 else [other[0][1]]
        was = "was" if total == 1 else "were"
        told.append(f"{f'{total} more' if needs else counted(total, 'rule')} {was} not evaluated: {'; '.join(reasons)}")
    return ". ".join(told) + "." if told else ""


def round_headline(trials: TrialLog, number: int) -> str:
    """From which profile a round's predictions come."""
    if number == 1:
        return "Round 1, from the script as written"
    found = next((r for r in trials.rounds if r.number == number), None)
    if found is None or not found.step_us:
        return f"Round {number}, tried again with the kept changes on"
    titles = {v.transform: v.title for v in trials.verdicts if v.title}
    on = ", ".join(titles.get(name, name) for name in found.kept)
    return f"Round {number}, profiled again with {on}: {duration(found.step_us)} a step"


def tracing(cost: ProfilerCost) -> str:
    """What tracing did to the steps: `3 steps traced, each 44 % slower than untraced`."""
    slower = f"{percent_text(cost.overhead_frac)} slower" if cost.overhead_frac > 0 else "no slower"
    return (
        f"{counted(cost.traced_steps, 'step')} traced, {'each ' if cost.traced_steps > 1 else ''}{slower} than untraced"
    )


def sentence(note: str) -> str:
    """A note as a sentence: it begins with a capital, unless with a name, and ends with a full stop."""
    first = note.split(" ", 1)[0]
    text = note[:1].upper() + note[1:] if first.isalpha() and first.islower() and first not in NAMES else note
    return text if text.endswith((".", "!", "?", ":")) else f"{text}."


def confidence(trials: TrialLog) -> str:
    """Of the measured intervals: `99 %`; empty without any."""
    return " / ".join(sorted({f"{100 * v.confidence:g} %" for v in trials.verdicts if v.gain is not None}))


def reason(verdict: Verdict) -> str:
    """Why the verdict is what it is; of a kept change also what it costs once and what the whole loses without it."""
    parts = [verdict.reason]
    if verdict.status == Status.KEPT and verdict.first_step_us > 0 and verdict.break_even_steps is not None:
        paid = counted(round(verdict.break_even_steps), "step")
        parts.append(f"its first step takes {time_text(verdict.first_step_us)} longer, paid back after {paid}")
    if verdict.left_out_gain is not None:
        parts.append(f"without it the plan is {gain(verdict.left_out_gain)} of the step slower")
    if verdict.blocks.disturbed:
        parts.append(f"{counted(verdict.blocks.disturbed, 'disturbed block')} taken again")
    if verdict.blocks.exponent:
        parts.append("inputs differ in size, so steps were compared at one size")
    if verdict.unmatched and verdict.status != Status.KEPT:  # of what is kept the reports say which places and why
        parts.append(f"{counted(len(verdict.unmatched), 'place')} unchanged")
    return "; ".join(p for p in parts if p)


LONG_REASON = 40  # characters from which on it is not repeated


def reasons(verdicts: Sequence[Verdict]) -> list[str]:
    """Why each is what it is, in this order: "as above" in place of a long reason that the verdict before has too."""
    texts, before = [], ""
    for verdict in verdicts:
        text = reason(verdict)
        if len(before) >= LONG_REASON and verdict.reason == before:
            text = f"as above{text.removeprefix(before)}"
        texts.append(text)
        before = verdict.reason
    return texts


def step_sentence(profile: StepProfile) -> str:
    """Step time with spread and n, or why there is none."""
    if profile.step_us is None:
        return "no step was timed"
    return f"{duration(profile.step_us.median)} median, {step_spread(profile)}"


def refused(profile: StepProfile, command: str) -> str:
    """Why `apply` tries nothing in this script, and what to do instead; "" where it does."""
    if profile.origin:
        return f"this is a trace, so nothing can be tried here; on its own machine, `{command} apply --auto SCRIPT` tries what helps"
    if profile.step_kind == "forward":
        return "the script trains nothing, so no change can be tried; the findings say what would help"
    return ""


def next_apply(profile: StepProfile, command: str, only: str = "") -> str:
    """The command that tries what was found, or this change alone, ready to be pasted; "" where it would be refused.

    A launcher's command is found again by its recorded run.
    """
    if refused(profile, command):
        return ""
    chosen = f"--auto --only {only}" if only else "--auto"
    if is_cell(profile.script):
        return f"%%advisor apply {chosen}"
    if profile.script.endswith((".py", ".ipynb")) or profile.script == "-m":
        return f"{command} apply {chosen} {script(profile)}"
    return f"{command} apply {chosen}"


def next_of_trials(trials: TrialLog, command: str, plan: str = "") -> str:
    """The command that follows from the trials: it trains with what is kept, or settles what is unconfirmed; "" for neither."""
    if is_cell(trials.script):
        return f'import advisor; advisor.enable("{plan}")' if usable(trials) and plan else ""
    if usable(trials):
        return _with_plan(trials, f"{command} run", plan)
    return _with_plan(trials, f"{command} apply", plan or "last") if unconfirmed(trials) else ""


def _with_plan(trials: TrialLog, command: str, plan: str) -> str:
    """This command with the plan at this path, else the last proved one.

    A launcher's command is found again in the plan itself, so only a script or a module is spelled out.
    """
    words = ["--plan", plan] if plan else []
    if trials.script.endswith(".py") or trials.script == "-m":
        words += [trials.script, *trials.argv]
    return f"{command} {shlex.join(words)}".rstrip()
