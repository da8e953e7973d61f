"""The demo's last line: what its search has gained, and where the report is.

    python .ci/gained.py CODE [RUNS]     CODE is what `advisor apply` ended with, RUNS the folder of run folders

Ends with 0 where a change was tried to a verdict of its own, and with 1 where none was, whatever CODE is: a search that tries
nothing has shown nothing. CODE may be 0, or 4 for a machine that was too noisy to settle a change.
"""

from __future__ import annotations

import sys
from pathlib import Path

from advisor.core import storage
from advisor.core.errors import ExitCode
from advisor.core.verdict import Status, TrialLog, Verdict
from advisor.trials.outcome import speedup

REPORT, TRIALS = "report.html", "trials.json"
SETTLED = (Status.KEPT, Status.UNCONFIRMED, Status.REVERTED)


def tried(verdict: Verdict) -> bool:
    """Whether this change was on in a running training, and what is said of it is said for that."""
    return verdict.status in SETTLED or (verdict.status == Status.INCONCLUSIVE and bool(verdict.blocks.on_us))


def told(code: int, log: TrialLog) -> tuple[str, bool]:
    """The last line, and whether the demo has shown what it is there for."""
    proved = speedup(log)
    own = [v for v in log.verdicts if tried(v)]
    if code not in (ExitCode.OK, ExitCode.INCONCLUSIVE) or not own:
        why = log.fault or next((f"{v.title}: {v.status}, {v.reason}" for v in log.verdicts), "nothing was recommended")
        return f"No change was tried to a verdict of its own (exit code {code}). {why}", False
    if proved:
        return (
            f"Gained: {proved} the plain script's speed, by {', '.join(v.title for v in own if v.status == Status.KEPT)}.",
            True,
        )
    return "Gained nothing. " + " ".join(f"{v.title}: {v.status}, {v.reason}." for v in own), True


def main(code: int, runs: Path) -> int:
    newest = max(runs.glob(f"*/{TRIALS}"), key=lambda path: path.stat().st_mtime, default=None)
    if newest is None:
        print(f"No search in {runs} came to its end (exit code {code}).")
        return 1
    line, shown = told(code, storage.load(newest, TrialLog))
    print(f"\nThe report: {newest.with_name(REPORT)}\n{line}")
    return 0 if shown else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), Path(sys.argv[2] if len(sys.argv) > 2 else "advisor-runs")))
