"""What a search leaves in the run folder, and how verdicts there are read and revised. No torch here."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from advisor.core import storage, transform_table
from advisor.core.errors import AdvisorError
from advisor.core.findings import Recommendation
from advisor.core.plan import PlanItem
from advisor.core.transform_row import Stage
from advisor.core.verdict import Check, Status, Verdict
from advisor.trials.statistics import rate_by_means, whole_blocks

# What `apply` shows for its work, ...
TRIALS_FILE, PLAN_FILE, OUTPUT_FILE = "trials.json", "plan.yaml", "script-output.log"
# ... and what the child of a search tells its supervisor.
TRIALS_DIR = "trials"
CURRENT_FILE = "current.json"
SEARCH_FILE = "search.json"
MEASURE_FILE = "measure.json"
PLAIN_FILE = "plain.json"  # a `Measurement` of the plain script by the process that was profiled
FAULT_FILE = "fault.txt"
SPENT_FILE = "spent.json"
UNDECIDED = "fresh runs decide"  # behind the reason of what the loop keeps until then


@dataclass(frozen=True, slots=True, kw_only=True)
class InTrial:
    """`trials/current.json`: the candidate on trial, so that a crash has a name. Gone between trials.

    phase: match, gate, warm-up, effect, timing. What is proved so far and the pairs survive an early end of the script,
    and the next process goes on from them.
    """

    transform: str
    parameters: dict[str, str] = field(default_factory=dict)
    phase: str = "match"
    limit_s: float = 0.0
    starts: int = 0  # processes that have begun or gone on with this trial
    off_us: tuple[float, ...] = ()  # block medians
    on_us: tuple[float, ...] = ()
    off_mean_us: tuple[float, ...] = ()
    on_mean_us: tuple[float, ...] = ()
    off_wall_us: tuple[float, ...] = ()
    on_wall_us: tuple[float, ...] = ()
    off_device_us: tuple[float, ...] = ()  # without waits for the loader
    on_device_us: tuple[float, ...] = ()
    steps_per_block: int = 0
    parts: int = 1  # that make a block, of which the times above are
    traced: bool = True  # False once a process died while the effect was traced
    bursty: int = 0  # blocks whose steps come in bursts
    numerics: Check | None = None  # once passed
    effect: Check | None = None
    first_step_us: float = 0.0

    @property
    def pairs(self) -> list[tuple[float, float]]:
        """Whole pairs of blocks (off, on), µs: their medians, or their means where steps come in bursts."""
        by_means = rate_by_means(self.bursty, len(self.off_us) + len(self.on_us))
        off, on = (self.off_mean_us, self.on_mean_us) if by_means else (self.off_us, self.on_us)
        return list(zip(whole_blocks(off, self.parts), whole_blocks(on, self.parts), strict=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class Spent:
    """`trials/spent.json`: where the time of the running search process went so far, seconds by phase."""

    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchRecord:
    """`search.json`: one search process came to its end. `restart`: the candidate that only fresh processes can try, now;
    `on_top`: those that apply here, and are tried in fresh processes on top of what is kept in the end; `whole_kept`: what was tried as
    one, first of all, is kept, and to be proved in fresh processes now.
    """

    complete: bool = False
    restart: str = ""
    on_top: tuple[str, ...] = ()
    whole_kept: bool = False
    out_of_time: bool = False
    model_hash: str = ""
    steps: int = 0
    step_us: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """`measure.json`: one arm of a comparison of fresh processes. Times of clean steps in order; losses from step 1 on."""

    step_us: tuple[float, ...] = ()
    wall_us: tuple[float, ...] = ()
    device_us: tuple[
        float, ...
    ] = ()  # of `step_us`, without what the device waited for loaders; empty where nobody saw
    settled_s: float = 0.0  # from the first step to the first one timed
    settled_steps: int = 0  # of a CuPy loop, steps in between
    kernel_us: tuple[float, ...] = ()  # of steps behind these, for how long any kernel ran; empty where nobody asked
    every_us: tuple[float, ...] = ()  # wall time of every step after the warm-up, epoch starts and evaluations included
    held: tuple[str, ...] = ()  # of each of them, what the script did beside a usual step; "" for nothing
    waited_us: tuple[float, ...] = ()  # of each of them, for how long the device had nothing to do in loaders' `next()`
    cpu_us: tuple[float, ...] = ()  # in each of them, what all threads of the script's own process computed
    workers: int = 0  # of its loader, which deliver one batch each in turn
    losses: tuple[float, ...] = ()
    batch_size: int = 0
    model_hash: str = ""
    applied: tuple[str, ...] = ()
    left_out: dict[str, str] = field(default_factory=dict)
    effects: dict[str, str] = field(default_factory=dict)  # of a CuPy loop, what changes did, or why nothing
    kernels: tuple[str, ...] = ()  # sources of the bundled kernels that ran
    loaded: tuple[str, ...] = ()  # of the source files that were watched
    prints: dict[str, tuple[float, ...]] = field(
        default_factory=dict
    )  # of gradients and buffers: distributed/prints.py
    ranks: int = 1  # processes that train together: the times and losses are of rank 0, the batch is all of theirs
    complete: bool = False


def attempt(item: Verdict | Recommendation) -> tuple[str, tuple[tuple[str, str], ...], int]:
    """What tells one trial from another: transform, parameters, round."""
    return item.transform, tuple(sorted(item.parameters.items())), item.round


def title_of(candidate: Recommendation) -> str:
    """What people call it; with its setting where one change is tried with several."""
    title, rows = transform_table.title(candidate.transform), transform_table.members(candidate.transform)
    if len(rows) > 1 or rows[0].stage is not Stage.RANKS or not candidate.parameters:
        return title
    return f"{title} ({', '.join(f'{setting} {value}' for setting, value in candidate.parameters.items())})"


def verdict_on(candidate: Recommendation, status: Status, reason: str, **more: Any) -> Verdict:
    """The verdict on this candidate; `more`: further fields of it, and those that are not the candidate's."""
    found = Verdict(
        transform=candidate.transform,
        status=status,
        reason=reason,
        parameters=dict(candidate.parameters),
        title=title_of(candidate),
        round=candidate.round,
        semantics=candidate.semantics,
        predicted=candidate.predicted,
    )
    return dataclasses.replace(found, **more)


def verdict_files(run_dir: Path) -> list[Path]:
    """`trials/NN-<id>.json` in the order of trial."""
    found = (p for p in (run_dir / TRIALS_DIR).glob("*.json") if re.match(r"\d+-", p.name))
    return sorted(found, key=lambda path: int(path.name.split("-")[0]))


def verdicts(run_dir: Path) -> list[Verdict]:
    """Every verdict on disk that can be read, in the order of trial."""
    found = []
    for path in verdict_files(run_dir):
        try:
            found.append(storage.load(path, Verdict))
        except AdvisorError:
            continue  # cut off by a kill: the candidate is tried again
    return found


def left(verdicts: Iterable[Verdict]) -> float | None:
    """The share of the step that is left with what these have kept; None where one of them kept what was not timed.

    What was tried as one has one gain.
    """
    gains: dict[frozenset[str], float] = {}
    for verdict in verdicts:
        if verdict.status != Status.KEPT:
            continue
        numbers = verdict.timing.numbers if verdict.timing is not None else {}
        if verdict.gain is not None and verdict.gain_of == "step":
            gain = 0.5 * (verdict.gain.low + verdict.gain.high)
        elif "gain" in numbers and (verdict.together or verdict.gain is not None):
            gain = numbers["gain"]
        else:
            return None
        gains[frozenset((verdict.transform, *verdict.together))] = gain
    return math.prod(1.0 - gain for gain in gains.values())


def skip(run_dir: Path, candidates: Iterable[Recommendation], reason: str) -> None:
    """The verdict on each of these: not tried, and why."""
    for candidate in candidates:
        save_verdict(run_dir, verdict_on(candidate, Status.SKIPPED, reason))


def save_verdict(run_dir: Path, verdict: Verdict) -> None:
    """Write the verdict as the next in order, or over an earlier one of the same round, transform and parameters."""
    files = verdict_files(run_dir)
    for path in files:
        try:
            known = storage.load(path, Verdict)
        except AdvisorError:
            continue
        if attempt(known) == attempt(verdict):
            storage.save(path, verdict)
            return
    number = max((int(p.name.split("-")[0]) for p in files), default=0) + 1
    safe = re.sub(r"[^\w.-]", "_", verdict.transform)
    storage.save(run_dir / TRIALS_DIR / f"{number:02d}-{safe}.json", verdict)


def withdraw(run_dir: Path, verdict: Verdict) -> None:
    """Its candidate has no verdict any more."""
    for path in verdict_files(run_dir):
        with contextlib.suppress(AdvisorError):
            if attempt(storage.load(path, Verdict)) == attempt(verdict):
                path.unlink(missing_ok=True)


def revise_kept(run_dir: Path, transform: str, **changes: Any) -> None:
    """The verdicts that keep this transform say something else from now on."""
    for verdict in verdicts(run_dir):
        if verdict.transform == transform and verdict.status == Status.KEPT:
            save_verdict(run_dir, dataclasses.replace(verdict, **changes))


def replace_kept(run_dir: Path, transform: str, by: str) -> None:
    """The verdicts that keep this transform say from now on that another one is in its place."""
    for old in verdicts(run_dir):
        if old.transform == transform and old.status == Status.KEPT:
            reason = f"replaced by {by}, which is faster; before that: {old.reason}"
            save_verdict(run_dir, dataclasses.replace(old, status=Status.REVERTED, reason=reason))


def kept_items(run_dir: Path) -> tuple[PlanItem, ...]:
    """What is kept so far, in the order of trial."""
    return tuple(
        PlanItem(transform=v.transform, status=Status.KEPT, parameters=dict(v.parameters), semantics=v.semantics.value)
        for v in verdicts(run_dir)
        if v.status == Status.KEPT
    )


def untried(run_dir: Path, candidates: Iterable[Recommendation]) -> list[Recommendation]:
    """Candidates without a verdict."""
    done = {attempt(v) for v in verdicts(run_dir)}
    return [c for c in candidates if attempt(c) not in done]


def load_search(run_dir: Path) -> SearchRecord | None:
    """How the last search process ended, or None when it was not asked, or died."""
    try:
        return storage.load(run_dir / SEARCH_FILE, SearchRecord)
    except AdvisorError:
        return None


def load_plain(run_dir: Path) -> Measurement | None:
    """What the process that was profiled has measured of the plain script, or None."""
    try:
        return storage.load(run_dir / TRIALS_DIR / PLAIN_FILE, Measurement)
    except AdvisorError:
        return None


def save_plain(run_dir: Path, found: Measurement) -> None:
    """As `load_plain` has it from now on."""
    storage.save(run_dir / TRIALS_DIR / PLAIN_FILE, found)


def load_current(run_dir: Path) -> InTrial | None:
    """The candidate on trial when the process ended, or None."""
    try:
        return storage.load(run_dir / TRIALS_DIR / CURRENT_FILE, InTrial)
    except AdvisorError:
        return None


def spent(run_dir: Path) -> dict[str, float]:
    """Seconds by phase, as the last search process told; empty when it told nothing."""
    try:
        return storage.load(run_dir / TRIALS_DIR / SPENT_FILE, Spent).seconds
    except AdvisorError:
        return {}


def native_fault(run_dir: Path) -> str:
    """Where in Python the process was that died in native code, as "file:line in function"; "" when it left no word."""
    try:
        text = (run_dir / TRIALS_DIR / FAULT_FILE).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    found = re.search(r'File "([^"]+)", line (\d+) in (\S+)', text)
    return f"{Path(found[1]).name}:{found[2]} in {found[3]}" if found else ""


def save_current(run_dir: Path, current: InTrial) -> None:
    """`current` is the candidate on trial."""
    storage.save(run_dir / TRIALS_DIR / CURRENT_FILE, current)


def clear_current(run_dir: Path) -> None:
    """Nothing is on trial."""
    (run_dir / TRIALS_DIR / CURRENT_FILE).unlink(missing_ok=True)
