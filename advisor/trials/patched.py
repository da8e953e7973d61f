"""A source patch, tried and judged: the script as it is against a patched copy of its project, in pairs of fresh processes.

Three checks, as of every change. Effect: the patched files were loaded by the process that trained. Numerics: the same seed gives the
same first loss and losses in the plain runs' envelope, with as large batches. Timing: the interval of the speed-up lies above the
least gain. What a patch does to gradients of single tensors is not looked at, as it is with changes of the registry.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from advisor.core import storage
from advisor.core.attempt import ATTEMPT_FILE, PATCH, Attempt
from advisor.core.errors import AdvisorError
from advisor.core.units import bounds_text, counted, percent_text
from advisor.core.verdict import Check, Status
from advisor.profiling.beside.command import BrokenScript, ScriptCommand
from advisor.profiling.beside.launcher import Elsewhere, launch
from advisor.trials import losses, proof, shadow, spent
from advisor.trials.budget import SETTLE_S, Budget
from advisor.trials.fresh import FreshRuns
from advisor.trials.options import SearchOptions
from advisor.trials.proof import PLAIN, ROUND
from advisor.trials.records import Measurement
from advisor.trials.script import Launch, Say, Script
from advisor.userfiles import owners

ROUNDS = 3  # of two plain and two patched runs each, while the answer is open
COPY = "patched"  # in the run folder
FIRST_LOSS = 0.02  # of its own size; the same batch through the same weights, in another precision at most
# And this many times what two seeds of the plain script differ by, where random numbers are drawn otherwise.
SEEDS_FACTOR = 4.0


@dataclass(frozen=True, slots=True)
class _Both:
    """Runs of either kind; those at one index had one seed."""

    plain: list[Measurement]
    changed: list[Measurement]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trial:
    """One patch on one script: both as commands, and what starts them."""

    plain: FreshRuns
    changed: FreshRuns
    copy: shadow.Shadow
    limits: Budget
    min_gain: float
    say: Say

    def judged(self) -> dict[str, Any]:
        """Gather runs until the answer is there, or the time is over; the fields of the attempt.

        Raises:
            AdvisorError: where the plain script gives no measurement.
        """
        runs, checks = _Both([], []), dict[str, Check]()
        for number in range(1, ROUNDS + 1):
            if number > 1 and (time.time() > self.limits.until or _decided(checks)):
                break
            if ended := self._round(number, runs):
                verdict, reason = ended
                return {"verdict": verdict, "reason": reason, **checks}
            checks = _checks(runs, self.copy, self.min_gain)
        ratio = proof.ratio(runs.plain, runs.changed, flow=False)
        low, point, high = ratio.bounds or (None, None, None)
        verdict, reason = _verdict(checks)
        return {
            "verdict": verdict,
            "reason": reason,
            "speedup": point,
            "speedup_low": low,
            "speedup_high": high,
            "plain_us": ratio.slow_us,
            "changed_us": ratio.fast_us,
            "notes": _notes(runs),
            **checks,
        }

    def _round(self, number: int, runs: _Both) -> tuple[Status, str] | None:
        """Two runs of each kind more; a verdict with its reason where one of them ends the trial."""
        for kind in ROUND:
            one, gathered = (self.plain, runs.plain) if kind == PLAIN else (self.changed, runs.changed)
            self.say(f"round {number}: {'the script as it is' if kind == PLAIN else 'the patched copy'}")
            found = one.measure(spent.STACK, (), turn=len(gathered), watched=self.copy.paths())
            if one.script.interrupted:
                return Status.INCONCLUSIVE, "interrupted"
            if found is None and kind == PLAIN:
                raise AdvisorError(f"the script as it is gave no measurement: {one.script.why_unmeasured}")
            if found is None:
                return Status.FAILED, f"the patched script gave no measurement: {one.script.why_unmeasured}"
            gathered.append(found)
        return None


def try_patch(
    command: ScriptCommand,
    words: Sequence[str],
    patch: Path,
    *,
    module: bool,
    options: SearchOptions,
    run_dir: Path,
    say: Say,
    start: Launch = launch,
) -> Attempt:
    """Judge the patch on this script, and write `attempt.json` into the run folder.

    Args:
        words: of the command, as the user wrote them.
        options: `min_gain` and `time_s` of them: no further round of runs begins after that. The first is always made.
        start: runs a process; another one in tests.

    Raises:
        AdvisorError: for a patch that cannot be applied, and where the plain script gives no measurement.
    """
    began = time.time()
    owners.hold(run_dir)
    copy = shadow.make(patch, run_dir / COPY, command.name)
    say(f"the patch is applied to a copy; it changes {', '.join(copy.files)}")
    limits = Budget.from_now(options.time_s, None)
    there = functools.partial(start, elsewhere=Elsewhere(copy.directory(), copy.python_path()))
    try:
        patched = Script(_command_in(copy, words, module), run_dir, there, say)
    except BrokenScript as error:
        told = f"the patched script does not compile: {str(error).splitlines()[-1]}"
        outcome: dict[str, Any] = {"verdict": Status.FAILED, "reason": told}
    else:
        trial = _Trial(
            plain=FreshRuns(Script(command, run_dir, start, say), limits.trial_s, settle_s=SETTLE_S),
            changed=FreshRuns(patched, limits.trial_s, settle_s=SETTLE_S),
            copy=copy,
            limits=limits,
            min_gain=options.min_gain,
            say=say,
        )
        outcome = trial.judged()
    found = Attempt(
        kind=PATCH,
        name=str(patch),
        script=command.words[0],
        argv=command.words[1:],
        files=copy.files,
        seconds=time.time() - began,
        run=str(run_dir),
        **outcome,
    )
    storage.save(run_dir / ATTEMPT_FILE, found)
    return found


def _command_in(copy: shadow.Shadow, words: Sequence[str], module: bool) -> ScriptCommand:
    """The same command, in the copy."""
    inside = copy.words(words)
    if module or inside[:1] == ("-m",):
        return ScriptCommand.parse(inside, module=module)
    # A relative script is looked for from the working directory, which is another one while this parses.
    first = copy.directory() / inside[0]
    if first.is_file():
        ScriptCommand.parse((str(first), *inside[1:]))
    return ScriptCommand.parse(inside)


def _checks(runs: _Both, copy: shadow.Shadow, min_gain: float) -> dict[str, Check]:
    return {
        "effect": _effect(runs.changed, copy),
        "numerics": _numerics(runs),
        "timing": _timing(runs, min_gain),
    }


def _effect(changed: Sequence[Measurement], copy: shadow.Shadow) -> Check:
    watched = copy.paths()
    if not watched:
        return Check(passed=None, detail="the patch changes no Python file, so whether it is read cannot be seen")
    loaded = {path for run in changed for path in run.loaded}
    missing = [Path(path).relative_to(copy.folder).as_posix() for path in watched if path not in loaded]
    numbers = {"files": float(len(watched)), "loaded": float(len(loaded))}
    if not loaded:
        return Check(passed=False, detail=f"the training did not load {', '.join(missing)}", numbers=numbers)
    told = f"{counted(len(loaded), 'patched file')} loaded"
    return Check(passed=True, detail=told + (f"; not loaded: {', '.join(missing)}" if missing else ""), numbers=numbers)


def _numerics(runs: _Both) -> Check:
    sizes = runs.plain[0].batch_size, runs.changed[0].batch_size
    if all(sizes) and sizes[0] != sizes[1]:
        return Check(passed=False, detail=f"the batch is {sizes[1]} samples in place of {sizes[0]}: another recipe")
    check = losses.compare([m.losses for m in runs.plain], [m.losses for m in runs.changed], precision=True)
    firsts = [
        (a.losses[0], b.losses[0]) for a, b in zip(runs.plain, runs.changed, strict=False) if a.losses and b.losses
    ]
    if check.passed is not True or not firsts:
        return check
    plain = [a for a, _ in firsts]
    allowed = FIRST_LOSS * max(abs(a) for a in plain) + SEEDS_FACTOR * (max(plain) - min(plain))
    apart = max(abs(a - b) for a, b in firsts)
    numbers = {**check.numbers, "first_loss_apart": apart, "first_loss_allowed": allowed}
    if math.isfinite(apart) and apart > allowed:
        told = f"the first loss, before any update, differs by {apart:.3g}; {allowed:.3g} are allowed"
        return Check(passed=False, detail=told, numbers=numbers)
    return Check(passed=True, detail=check.detail, numbers=numbers)


def _timing(runs: _Both, min_gain: float) -> Check:
    bounds = proof.ratio(runs.plain, runs.changed, flow=False).bounds
    if bounds is None:
        return Check(passed=None, detail="too few steps were timed")
    low, point, high = bounds
    told = f"{point:.2f}× ({bounds_text(low, high)}) in {counted(len(runs.changed), 'pair')} of fresh runs"
    numbers = {"speedup": point, "low": low, "high": high}
    least = 1.0 / (1.0 - min_gain)
    if low > least:
        return Check(passed=True, detail=told, numbers=numbers)
    if high < least:
        return Check(passed=False, detail=f"no gain above {percent_text(min_gain)}: {told}", numbers=numbers)
    return Check(
        passed=None, detail=f"too noisy to confirm a gain of {percent_text(min_gain)}: {told}", numbers=numbers
    )


def _decided(checks: dict[str, Check]) -> bool:
    """Further runs would not change the verdict."""
    refused = any(check.passed is False for check in checks.values())
    return refused or checks["timing"].passed is not None


def _verdict(checks: dict[str, Check]) -> tuple[Status, str]:
    effect, numerics, timing = checks["effect"], checks["numerics"], checks["timing"]
    if effect.passed is False:
        return Status.NOT_APPLICABLE, effect.detail
    if numerics.passed is False:
        return Status.REVERTED, f"it changes the training: {numerics.detail}"
    if timing.passed is None:
        return Status.INCONCLUSIVE, timing.detail
    if timing.passed and numerics.passed is None:
        return Status.INCONCLUSIVE, f"{timing.detail}; whether it trains alike is open: {numerics.detail}"
    return (Status.KEPT if timing.passed else Status.REVERTED), timing.detail


def _notes(runs: _Both) -> tuple[str, ...]:
    models = {run.model_hash for run in (*runs.plain, *runs.changed) if run.model_hash}
    if len(models) > 1:
        told = "modules or parameters have other names, classes or shapes with the patch: checkpoints may not be interchangeable"
        return (told,)
    return ()
