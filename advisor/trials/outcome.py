"""What a run of `apply` comes to, when all its processes have ended: its log, its exit code, the line in its plan."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from advisor.core.errors import INTERRUPTED, ExitCode
from advisor.core.transform_row import TOGETHER
from advisor.core.units import bounds_text
from advisor.core.verdict import OPEN, Round, Status, TrialLog, Verdict
from advisor.trials import records, spent
from advisor.trials.proof import Proof
from advisor.trials.script import Script
from advisor.userfiles import restore


def log(
    script: Script,
    proved: Proof | None,
    *,
    rounds: Sequence[Round] = (),
    seconds: float,
    proved_s: float | None = None,
    profiled_s: float = 0.0,
    before_s: float = 0.0,
    complete: bool = True,
) -> TrialLog:
    """The verdicts on disk, the whole's, and where the time went.

    Args:
        seconds: in all, `profiled_s` of them for a first profile, and of those `before_s` before the script's first step.
        proved_s: until something was proved, from the script's first step on.
        complete: nothing was left to try.
    """
    notes = [script.stepless, *script.notes] if script.stepless else list(script.notes)
    held = proved.items if proved is not None and proved.holds else ()
    verdicts = [_decided(v) if v.transform in held else v for v in records.verdicts(script.run_dir)]
    for split in verdicts:
        if TOGETHER in split.transform:
            notes.append(f"{split.title or split.transform}, tried as one: {split.status}, {split.reason}")
    written, temporary = restore.written(script.run_dir)
    if temporary:
        what = "temporary file was" if temporary == 1 else "temporary files were"
        notes.append(f"{temporary} {what} written and removed")
    return TrialLog(
        script=script.command.words[0],
        argv=script.command.words[1:],
        verdicts=tuple(v for v in verdicts if TOGETHER not in v.transform),
        rounds=tuple(rounds),
        stack=proved.verdict if proved is not None else None,
        files_written=written,
        seconds=seconds,
        proved_s=proved_s,
        spent=spent.whole(seconds, {spent.BEFORE: before_s, spent.PROFILE: profiled_s - before_s, **script.seconds}),
        complete=complete,
        interrupted=script.interrupted,
        fault=script.fault,
        notes=tuple(notes),
    )


def _decided(verdict: Verdict) -> Verdict:
    """What the loop left to fresh runs, now that they have decided."""
    return dataclasses.replace(verdict, reason=verdict.reason.replace(records.UNDECIDED, "fresh runs confirmed it"))


def leave_unconfirmed(script: Script, proved: Proof | None) -> None:
    """What is kept and was not compared with the plain script is neither proved nor refuted."""
    reason = f"not confirmed in fresh runs: {script.why_over or 'it ended'} before the comparison with the plain script"
    held = proved.items if proved is not None and proved.holds else ()
    for item in records.kept_items(script.run_dir):
        if item.transform in held:
            continue
        records.revise_kept(script.run_dir, item.transform, status=Status.UNCONFIRMED, reason=reason)


def exit_code(log: TrialLog) -> int:
    """0 when something is kept and proved, or there was nothing to do; 3 where a fault in advisor has ended it; 130 where the user
    has, before anything was proved; 4 when noise, time, the script or the user's answers left it open.
    """
    if any(v.status == Status.KEPT for v in log.verdicts) and log.stack is not None and log.stack.passed:
        return int(ExitCode.OK)
    if log.fault:
        return int(ExitCode.OWN_FAULT)
    if log.interrupted:
        return INTERRUPTED
    if any(v.status == Status.KEPT for v in log.verdicts):
        return int(ExitCode.INCONCLUSIVE)
    open_ended = any(v.status in OPEN for v in log.verdicts) or not log.complete
    return int(ExitCode.INCONCLUSIVE if open_ended else ExitCode.OK)


def speedup(log: TrialLog) -> str:
    """As a plan has it, "3.10× (3.05 to 3.14)", and what of it is proved where that is the device's time; "" where the whole is not proved."""
    stack = log.stack
    if stack is None or not stack.passed or stack.speedup is None:
        return ""
    low, high = stack.speedup_low or 0.0, stack.speedup_high or math.inf
    step = f"{stack.speedup:.2f}× ({bounds_text(low, high)})"
    if not stack.by_device or stack.device_speedup is None:
        return step
    between = bounds_text(stack.device_speedup_low or 0.0, stack.device_speedup_high or math.inf)
    return f"the device's time {stack.device_speedup:.2f}× shorter ({between}), the step not slower: {step}"
