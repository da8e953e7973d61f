"""One change, tried and judged: what `advisor try` says of it, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field

from advisor.core.errors import ExitCode
from advisor.core.verdict import OPEN, Check, Status

ATTEMPT_FILE = "attempt.json"
CHANGE, PATCH = "change", "patch"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """The outcome of trying one change of the registry, or one patch, on a script.

    Only a verdict of `kept` is proved: it took effect, trains alike and is faster in fresh processes.
    Times are of the whole step, in microseconds: the centre of each fresh run.
    """

    kind: str  # "change" or "patch"
    name: str  # the change's id, or the patch's file
    verdict: Status
    reason: str
    script: str
    argv: tuple[str, ...] = ()
    effect: Check | None = None
    numerics: Check | None = None
    timing: Check | None = None
    speedup: float | None = None
    speedup_low: float | None = None
    speedup_high: float | None = None
    plain_us: tuple[float, ...] = ()
    changed_us: tuple[float, ...] = ()
    files: tuple[str, ...] = ()  # that the patch changes, from its root
    seconds: float = 0.0
    run: str = ""  # the folder with all that was recorded
    notes: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)

    @property
    def exit_code(self) -> int:
        """0 proved; 4 noise, time or an interruption left it open; 1 tried, and not worth keeping here."""
        if self.verdict == Status.KEPT:
            return int(ExitCode.OK)
        return int(ExitCode.INCONCLUSIVE if self.verdict in {*OPEN, Status.SKIPPED} else ExitCode.FINDINGS)
