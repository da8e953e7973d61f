"""What `advisor try` prints: the verdict first, then the three checks and the times."""

from __future__ import annotations

from advisor.core.attempt import PATCH, Attempt
from advisor.core.transform_table import title
from advisor.core.units import bounds_text, time_text
from advisor.core.verdict import Check, Status
from advisor.reporting.page import Page

_WORDS = {True: "passed", False: "failed", None: "open"}
_COLORS = {True: "green", False: "red", None: "yellow"}


def attempt_text(found: Attempt, width: int = 100, color: bool = False) -> str:
    """The attempt as lines of at most `width` columns."""
    page = Page(max(width, 72), color)
    name = found.name if found.kind == PATCH else title(found.name)
    style = {0: "green", 4: "yellow"}.get(found.exit_code, "red")
    lines = [page.paint(f"{name}: {found.verdict}", "bold", style), *page.wrap(found.reason, 2), ""]
    for label, check in (("Effect", found.effect), ("Numerics", found.numerics), ("Timing", found.timing)):
        if check is not None:
            lines += _check(page, label, check, said=found.reason)
    if found.plain_us and found.changed_us:
        plain, changed = (min(times) for times in (found.plain_us, found.changed_us))
        lines.append(
            f"  Step      {time_text(plain, changed)} as it is, {time_text(changed, plain)} with it  (fastest run of each)"
        )
    if found.verdict == Status.KEPT and found.speedup_low is not None and found.speedup_high is not None:
        lines.append(f"  Speed-up  {found.speedup:.2f}× ({bounds_text(found.speedup_low, found.speedup_high)})")
    if found.files:
        lines += page.wrap("Files     " + ", ".join(found.files), 12, first=2)
    for note in found.notes:
        lines += page.wrap(f"Note      {note}", 12, first=2)
    return "\n".join([*lines, f"  Run       {found.run}"])


def _check(page: Page, label: str, check: Check, *, said: str) -> list[str]:
    """One check; its detail is left out where the verdict's reason has `said` it."""
    word = _WORDS[check.passed]
    detail = "as said above" if check.detail == said else check.detail
    first, *rest = page.wrap(f"{label:9} {word}: {detail}", 12, first=2)
    return [first.replace(word, page.paint(word, _COLORS[check.passed]), 1), *rest]
