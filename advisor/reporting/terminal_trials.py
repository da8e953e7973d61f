"""What `apply` shows in a terminal: the verdict, a line for each trial, places, the whole against the plain script."""

from __future__ import annotations

import statistics

from advisor.core.units import bounds_text, counted, samples_text, time_text
from advisor.core.verdict import Status, TrialLog
from advisor.reporting import drawn, numbers, places, wording
from advisor.reporting.page import MIN_WIDTH, Page, clip, clip_path, printable

_STATUS_COLORS = {
    Status.KEPT: "green",
    Status.REVERTED: "yellow",
    Status.FAILED: "red",
    Status.INCONCLUSIVE: "cyan",
    Status.UNCONFIRMED: "cyan",
}
WIDE = 110  # columns from which on a drawn table has room for reasons
TOP_REASONS = 3
EXAMPLES = 2  # of the places of one reason


def trials_text(
    log: TrialLog,
    width: int = 100,
    color: bool = False,
    *,
    command: str = "advisor",
    plan: str = "",
    listed_in: str = "report.html",
    headline: bool = True,
    drawn: bool = False,
) -> str:
    """What `apply` shows: a line for each trial, then how many places those kept have, then the stack against the plain script,
    files and the next command. `listed_in` is the file that has every place by its path. `headline`: the verdict comes first.
    """
    page = Page(max(width, MIN_WIDTH), color, drawn)
    verdict = page.wrap(wording.trials_headline(log), 0, "bold") if headline and log.verdicts else []
    blocks = [verdict, _trials(page, log), _places(page, log, listed_in), _stack(page, log), _written(page, log)]
    if following := wording.next_of_trials(log, command, plan):
        note = "settles the unconfirmed changes in fresh runs, without a search" if not wording.usable(log) else ""
        blocks.append([page.heading("Next", note), "  " + page.paint(printable(following), "cyan")])
    return "\n\n".join("\n".join(block) for block in blocks if block)


def _trials(page: Page, log: TrialLog) -> list[str]:
    lines = [page.heading("Trials", f"{counted(len(log.verdicts), 'change')}, {time_text(log.seconds * 1e6)} in all")]
    if not log.verdicts:
        return [*lines, "  Nothing was tried."]
    if where := wording.spent(log):
        lines += page.wrap(f"Time: {where}.", 2, "dim")
    if page.drawn and page.width >= WIDE:
        return [*lines, *_drawn_trials(page, log), *_explained(page, log)]
    names = {id(v): v.title or v.transform for v in log.verdicts}
    if any(v.round > 1 for v in log.verdicts):
        lines += page.wrap(wording.round_headline(log, 1), 2, "bold")
    predicted = {id(v): numbers.gain(v.predicted) for v in log.verdicts}
    measured = {id(v): numbers.gain(v.gain) for v in log.verdicts}
    wide, wider = max(map(len, ("predicted", *predicted.values()))), max(map(len, ("measured", *measured.values())))
    name_width = min(max(map(len, names.values())), max(16, page.width - 22 - wide - wider))
    head = f"  {'change':<{name_width}}  {'predicted':>{wide}}  {'measured':>{wider}}  verdict"
    lines.append(page.paint(head, "dim"))
    begun = 1
    shown = sorted(log.verdicts, key=lambda v: v.round)  # what an earlier round left open is decided at the end
    for v, reason in zip(shown, wording.reasons(shown), strict=True):
        if v.round != begun:
            begun = v.round
            lines += page.wrap(wording.round_headline(log, begun), 2, "bold")
        status = clip(v.status, 14)
        painted = page.paint(status, *([_STATUS_COLORS[v.status]] if v.status in _STATUS_COLORS else ["dim"]))
        line = f"  {clip(names[id(v)], name_width):<{name_width}}  {predicted[id(v)]:>{wide}}  {measured[id(v)]:>{wider}}  "
        room = page.width - len(line) - 15
        if len(reason) <= room:
            lines.append(line + painted + " " * (15 - len(status)) + page.paint(printable(reason), "dim"))
        else:
            lines.append(line + painted)
            lines += page.wrap(reason, 6, "dim", first=4)
    return lines + _explained(page, log)


def _drawn_trials(page: Page, log: TrialLog) -> list[str]:
    """A table a round."""
    lines: list[str] = []
    for number in sorted({v.round for v in log.verdicts}):
        if any(v.round > 1 for v in log.verdicts):
            lines += page.wrap(wording.round_headline(log, number), 2, "bold")
        shown = [v for v in log.verdicts if v.round == number]
        rows = [
            [
                v.title or v.transform,
                numbers.gain(v.predicted),
                numbers.gain(v.gain),
                page.paint(v.status, _STATUS_COLORS.get(v.status, "dim")),
                page.paint(printable(reason), "dim"),
            ]
            for v, reason in zip(shown, wording.reasons(shown), strict=True)
        ]
        lines += drawn.table(page, ("change", "predicted", "measured", "verdict", "why"), rows, right={1, 2})
    return lines


def _explained(page: Page, log: TrialLog) -> list[str]:
    lines: list[str] = []
    if any(v.predicted is not None or v.gain is not None for v in log.verdicts):
        text = "Predicted: the share of the step that the change would save, as profiled for its round."
        if percent := wording.confidence(log):
            text += f" Measured: the share that it saved, {percent} interval."
        lines += page.wrap(text, 2, "dim")
    return lines


def _places(page: Page, log: TrialLog, listed_in: str) -> list[str]:
    told = places.told(log)
    if not told:
        return []
    lines = [page.heading("Where kept changes took effect", f"by path in {listed_in} or --format json")]
    for verdict in told:
        lines += page.wrap(places.headline(verdict), 4, first=2)
        reasons = places.grouped(verdict.unmatched)
        shown = TOP_REASONS + (len(reasons) == TOP_REASONS + 1)  # its line may as well say the one that is left
        for reason in reasons[:shown]:
            examples = ", ".join(clip_path(path, page.width // 2) for path in reason.paths[:EXAMPLES])
            also = ", …" if len(reason.paths) > EXAMPLES else ""
            text = clip(reason.text or "no reason was recorded", 2 * page.width)
            lines += page.wrap(f"{len(reason.paths):>5,}  {text}, at {examples}{also}", 11, "dim", first=4)
        if rest := reasons[shown:]:
            count = sum(len(reason.paths) for reason in rest)
            lines += page.wrap(f"{count:>5,}  for {counted(len(rest), 'other reason')}", 11, "dim", first=4)
    return lines


def _stack(page: Page, log: TrialLog) -> list[str]:
    stack = log.stack
    if stack is None:
        return []
    style = {True: "green", False: "red", None: "yellow"}[stack.passed]
    lines = [page.heading("All kept changes together", "against the plain script, in fresh runs")]
    if stack.plain_us and stack.stack_us:
        plain, both = (statistics.geometric_mean(t) for t in (stack.plain_us, stack.stack_us))
        each = len(stack.plain_us), len(stack.stack_us)
        runs = f"({counted(each[0], 'run')} each)" if each[0] == each[1] else f"({each[0]} and {each[1]} runs)"
        lines.append(
            f"  Step     {numbers.duration(plain)} plain, {numbers.duration(both, plain)} with the plan  {page.paint(runs, 'dim')}"
        )
    if stack.speedup is not None:
        text = f"{numbers.factor(stack.speedup)}"
        if stack.speedup_low is not None and stack.speedup_high is not None:
            text += f" ({bounds_text(stack.speedup_low, stack.speedup_high)})"
        lines.append(f"  Speed-up {text if stack.by_device else page.paint(text, 'bold', style)}")
    if device := numbers.device_speedup(stack):
        lines += page.wrap(device, 11, first=11)
    if stack.samples_per_s_plain and stack.samples_per_s_stack:
        rates = (samples_text(r) for r in (stack.samples_per_s_plain, stack.samples_per_s_stack))
        lines.append("  Rate     {} → {} samples/s".format(*rates))
    word = {True: "passed", False: "FAILED", None: "undecided"}[stack.passed]
    lines += page.wrap(f"Checks   {word}: {stack.detail}", 11, style, first=2)
    return lines


def _written(page: Page, log: TrialLog) -> list[str]:
    lines = []
    if log.files_written:
        lines = [page.heading("Files the script wrote during the search, put back since")]
        for name in log.files_written[:8]:
            lines += page.wrap(name, 4, "dim", first=2)
        if len(log.files_written) > 8:
            lines.append(page.paint(f"  {len(log.files_written) - 8} more in the report.", "dim"))
    if not log.complete:
        lines += page.wrap("The search did not finish. The verdicts above are those until then.", 2, "yellow")
    if log.notes:
        lines += [*([""] if lines else []), page.heading("Notes of the search")]
    for note in log.notes:
        lines += page.wrap(wording.sentence(note), 2, "dim")
    return lines
