"""The one place that strings the stages together: what each command does, and what the hooked script is handed to.

Nothing here prints to stdout and nothing imports torch before the script has been started.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core import storage, use
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Findings, Recommendation
from advisor.core.plan import Plan, PlanItem
from advisor.core.profile import StepProfile
from advisor.core.transform_table import ROWS, row
from advisor.core.units import percent_text, rate_text, time_text
from advisor.core.verdict import KEPT, TrialLog
from advisor.runs import (
    FINDINGS_FILE,
    PROFILE_FILE,
    REPORT_FILE,
    RUNS_DIR,
    find_plan,
    is_empty,
    load_profile,
    load_run,
    new_run_dir,
)
from advisor.trials.records import OUTPUT_FILE

if TYPE_CHECKING:
    from advisor.analysis.activations import Alternative
    from advisor.analysis.scaling import Foretold, Link
    from advisor.core.attempt import Attempt
    from advisor.core.environment import Environment
    from advisor.core.held import MemoryLook
    from advisor.profiling.launcher import Exit, ScriptCommand
    from advisor.profiling.relay import Relay
    from advisor.profiling.session import Session
    from advisor.trials.choosing import Ask
    from advisor.trials.handover import Handover
    from advisor.trials.script import Launch
    from advisor.trials.search import Search

Say = Callable[[str], None]

# The shortest warm-up in which a script can be understood: discovery looks at three steps, and its findings are then read.
LEAST_WARMUP = 4
BRIEF_WARMUP = 1  # of scripts that make fewer steps than a warm-up and a trace need
FORWARD_LOST = 1  # the first round of model calls only shows what a round is
USUAL_TIME_S = 600.0  # of a search
# Its first profile takes at most a tenth of that behind the script's own start, or half a minute where that is more: `pace` is of what the
# windows of slow steps take together, with the reading of the trace.
PROFILE_SHARE, PROFILE_LEAST_S, USUAL_WINDOWS_S = 0.1, 30.0, 130.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """`profile` and `findings` are None when the script gave nothing to measure."""

    run_dir: Path
    exit_code: int
    profile: StepProfile | None = None
    findings: Findings | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ApplyResult:
    """`log` and `plan` are None for a dry run, and when there was nothing to try; `plan_file` is where people find the plan."""

    run_dir: Path
    exit_code: int
    profile: StepProfile | None = None
    findings: Findings | None = None
    log: TrialLog | None = None
    plan: Plan | None = None
    plan_file: Path | None = None


def _write_report(run_dir: Path, profile: StepProfile, findings: Findings | None, trials: TrialLog | None) -> None:
    from advisor.profiling import timeline
    from advisor.reporting.html import report_html

    step = timeline.of_run(run_dir, profile.environment)
    storage.write_text(run_dir / REPORT_FILE, report_html(profile, findings, trials, step))


# ---------------------------------------------------------------------------------------------------------------------
# profile and recommend


def profile(
    words: Sequence[str],
    *,
    module: bool = False,
    out: Path | None = None,
    warmup: int = 10,
    steps: int = 20,
    detail_steps: int = 3,
    keep_running: bool = False,
    counters: bool = True,
    precision: bool = False,
    rules_dirs: Sequence[Path] = (),
    say: Say,
) -> ProfileResult:
    """Run the script, measure it, and write profile.json, findings.json and report.html. Exit code: the script's own.

    Its files are as they were afterwards, and one line says which were put back; not with `keep_running`, where the run is the user's.

    Raises:
        AdvisorError: for a script that cannot be started or a folder that cannot be written.
    """
    from advisor.profiling.launcher import ScriptCommand

    command = ScriptCommand.parse(words, module=module)
    _check_rules(rules_dirs)
    run_dir = new_run_dir(command.name, out)
    _recover(say)
    return _profile(
        command,
        run_dir,
        warmup=warmup,
        steps=steps,
        detail_steps=detail_steps,
        keep_running=keep_running,
        counters=counters,
        precision=precision,
        rules_dirs=rules_dirs,
        say=say,
    )


def _profile(
    command: Any,
    run_dir: Path,
    *,
    warmup: int,
    steps: int,
    detail_steps: int,
    keep_running: bool,
    counters: bool,
    rules_dirs: Sequence[Path],
    say: Say,
    precision: bool = False,
    searched: bool = False,
    pace: float = 1.0,
    first_step_s: float = 0.0,
    settle_s: float = 0.0,
    on_machine: Callable[[Environment], object] = lambda machine: None,
    handover: Handover | None = None,
    launch: Launch | None = None,
) -> ProfileResult:
    """Measure the script, for its own sake or (`searched`) as a search begins.

    Args:
        first_step_s: no step is waited for beyond this; 0 for as long as the script runs.
        settle_s: of a process that goes on, where its loader has workers: no step is timed before so many seconds behind the first.
        on_machine: called as soon as it is known what machine this is, before the script starts.
        handover: the process goes on as a search, where there is something to try; its end is told there, and ours is the profile.
        launch: as `launcher.launch`, which is what starts the script by default.

    Raises:
        AdvisorError: also where advisor has switched itself off, with exit code 3, or was sure that no step would come, with 4.
    """
    from advisor.profiling import counters as hardware
    from advisor.profiling import environment, launcher
    from advisor.profiling.records import MEASURED, SAMPLES_FILE
    from advisor.profiling.sampler import Sampler
    from advisor.profiling.session import Session, disabled
    from advisor.profiling.waiting import STEP, patience_s
    from advisor.trials import fresh
    from advisor.userfiles import owners, restore

    launch = launch or launcher.launch
    say("measuring this machine (once)")
    machine = environment.probe()
    on_machine(machine)
    refused = ""
    if counters and machine.device == "cuda":
        counters, refused = hardware.preflight()
    protects = not keep_running and not disabled()
    session = Session(
        mode="profile",
        run_dir=str(run_dir),
        script=command.words[0],
        argv=command.words[1:],
        warmup=warmup,
        steps=steps,
        detail_steps=detail_steps,
        pace=pace,
        keep_running=keep_running,
        first_step_s=first_step_s,
        hands_over=handover is not None,
        seed=fresh.SEED if handover is not None else None,
        settle_s=settle_s,
        counters=counters and machine.device == "cuda",
        precision=precision,
        protect_files=protects,
    )
    say(f"running {command.name}; results go to {_shown(run_dir)}")
    sampler = Sampler(gpu=machine.gpu_uuid or None, path=run_dir / SAMPLES_FILE)
    sampler.start()
    began, first_s = time.monotonic(), 0.0
    handed: ProfileResult | None = None
    told = (f"no hardware counters: {refused}",) if refused else ()
    tell = _teller(say)

    def on_progress(event: dict[str, Any]) -> None:
        nonlocal first_s, handed
        if handover is not None and handover.search is not None:
            handover.search.script.told(event)
            return
        tell(event)
        if event.get("event") == STEP:
            first_s = time.monotonic() - began
            if handover is not None:
                handover.first_step = time.monotonic()
        if event.get("event") == MEASURED and handover is not None:
            sampler.stop()
            handed = _read(run_dir, machine, rules_dirs, say, start_s=first_s, notes=told)
            handover.give(handed.profile, handed.findings)

    try:
        # What a search's run prints is in its folder, so that it does not run into what we say.
        output = run_dir / OUTPUT_FILE if searched else None
        if protects:
            owners.hold(run_dir)
        limit = handover.timeout_s if handover is not None else None
        ended = launch(command, session, on_progress=on_progress, output=output, timeout_s=limit)
        over = handed is not None or ended.interrupted or ended.fault or ended.gave_up
        shorter = None if over else _shorter(session, ended.code)
        if shorter is not None and not _restored(run_dir, say):
            shorter = None
        if shorter is not None:
            owners.hold(run_dir)
            say("the script ended before everything was measured; measuring again, with fewer steps")
            shorter = replace(shorter, first_step_s=patience_s(ended.first_step_s), hands_over=False)
            launch(command, shorter, on_progress=tell, output=run_dir / OUTPUT_FILE)
    finally:
        restored = _restored(run_dir, say)
        sampler.stop()
        if line := restore.told(run_dir):
            say(line)
    if handover is not None and handover.search is not None and handed is not None:
        handover.search.script.displaced = not restored
        handover.ended(ended)
        return handed
    if protects and not restored:
        raise AdvisorError(
            f"files that were set aside in {_shown(run_dir)} could not be put back",
            fix=f"Make room for them, and run `advisor doctor --recover {_shown(run_dir)}`.",
        )
    if searched and ended.interrupted:
        raise KeyboardInterrupt  # a script may catch it and end well; no search is to follow
    _check_measured(ended, thrown_away=not keep_running)
    notes = []
    if ended.hung:
        notes.append("the script's process hung as it exited, after it was measured, so advisor ended it")
    if shorter is not None:
        notes.append("the script ends early, so this was measured in a second run, with fewer steps")
    return _read(run_dir, machine, rules_dirs, say, start_s=ended.first_step_s, ended=ended, notes=(*notes, *told))


def _read(
    run_dir: Path,
    machine: Environment,
    rules_dirs: Sequence[Path],
    say: Say,
    *,
    start_s: float | None,
    ended: Exit | None = None,
    notes: Sequence[str] = (),
) -> ProfileResult:
    """What a run has left, with what the rules say to it, in the run folder.

    Args:
        start_s: from its start to its first step.
        ended: how; None where it goes on.
        notes: what people are to know beside what was measured.
    """
    from advisor.profiling.assemble import assemble

    say("reading the trace")
    code = ended.code if ended is not None else 0
    measured = replace(assemble(run_dir, machine, exit_code=code), start_s=start_s)
    if ended is not None and ended.code and not ended.stopped_by_advisor:
        measured = replace(measured, notes=(_ended(ended.code, ended.signal), *measured.notes))
    measured = replace(measured, notes=(*measured.notes, *notes))
    storage.save(run_dir / PROFILE_FILE, measured)
    if is_empty(measured):
        if ended is not None:
            say(_nothing_measured(measured, ended))
        return ProfileResult(run_dir=run_dir, exit_code=code, profile=None)
    found = _evaluate(measured, run_dir, rules_dirs=rules_dirs)
    storage.save(run_dir / FINDINGS_FILE, found)
    if ended is not None:
        _write_report(run_dir, measured, found, None)
    return ProfileResult(run_dir=run_dir, exit_code=code, profile=measured, findings=found)


def profile_trace(file: Path, *, out: Path | None = None, rules_dirs: Sequence[Path] = (), say: Say) -> ProfileResult:
    """Read a trace of torch.profiler that was made elsewhere, and write profile.json, findings.json and report.html.

    Raises:
        AdvisorError: when it cannot be read or holds nothing, or a folder cannot be written.
    """
    from advisor.profiling import kineto
    from advisor.profiling.assemble import assemble

    _check_rules(rules_dirs)
    run_dir = new_run_dir(file.name, out)
    say(f"reading {file}; results go to {_shown(run_dir)}")
    machine = kineto.imported(file, run_dir)
    notes = f"read from {file.name}: its step times hold the profiler's own cost"
    measured = replace(assemble(run_dir, machine, exit_code=0), origin=file.name)
    measured = replace(measured, notes=(notes, *measured.notes))
    storage.save(run_dir / PROFILE_FILE, measured)
    found = _evaluate(measured, run_dir, rules_dirs=rules_dirs)
    storage.save(run_dir / FINDINGS_FILE, found)
    _write_report(run_dir, measured, found, None)
    return ProfileResult(run_dir=run_dir, exit_code=0, profile=measured, findings=found)


def _check_rules(rules_dirs: Sequence[Path]) -> None:
    """The user's own rules are read before anything runs: what is wrong with one is not said after the run."""
    if rules_dirs:
        from advisor import rules

        rules.load(rules_dirs)


def _shorter(session: Session, code: int) -> Session | None:
    """Orders for a second start whose windows fit into the steps that the first one made; None where there is no need or
    no hope.
    """
    from advisor.profiling.records import OWN_WORK, STEPS_FILE, StepsRecord

    if code or session.keep_running or session.detail_steps < 1:
        return None
    try:
        first = storage.load(session.folder / STEPS_FILE, StepsRecord)
    except AdvisorError:
        return None
    infers = first.kind == "none" and first.forward_steps > 0
    if first.complete or first.traced is not None or (first.kind == "none" and not infers):
        return None
    seen = first.forward_steps - FORWARD_LOST if infers else first.steps_seen
    # Not every step can be timed: epochs begin, an evaluation comes between. Reading the model's facts at the start of the
    # timed window and starting the profiler cost two more, and those are advisor's own doing.
    passed_over = sum(count for reason, count in first.excluded.items() if reason != OWN_WORK)
    detail = max(1, min(session.detail_steps, seen // 8))
    warmup = max(LEAST_WARMUP, min(session.warmup, seen // 4))
    steps = min(session.steps, seen - warmup - detail - 2 - passed_over)
    again = replace(session, infers=infers, brief=True)
    if steps >= 1:
        return replace(again, warmup=warmup, steps=steps, detail_steps=detail)
    # Too few for a warm-up: the last is traced, the one before is disturbed by the profiler's start, the others are timed.
    steps = seen - BRIEF_WARMUP - 2
    return replace(again, warmup=BRIEF_WARMUP, steps=steps, detail_steps=1) if steps >= 1 else None


def _ended(code: int, number: int) -> str:
    """How a script ended that was not stopped; empty when all went well."""
    if number:
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"the script was ended by {name}" + (
            "; the machine may have run out of memory" if name == "SIGKILL" else ""
        )
    return f"the script ended with exit code {code}" if code else ""


def _check_measured(ended: Exit, *, thrown_away: bool) -> None:
    """A script of which nothing was measured for a reason that is not its own.

    Raises:
        AdvisorError: with that reason; exit code 3 where advisor has switched itself off, 4 where no step was to come.
    """
    if ended.fault and thrown_away:
        raise AdvisorError(
            f"advisor switched itself off in the script: {ended.fault}",
            fix="`advisor doctor` shows what is installed here.",
            exit_code=ExitCode.OWN_FAULT,
        )
    if ended.gave_up:
        raise AdvisorError(ended.gave_up, exit_code=ExitCode.INCONCLUSIVE)


def _nothing_measured(measured: StepProfile, ended: Exit) -> str:
    from advisor.profiling.session import DISABLE_VARIABLE, disabled
    from advisor.profiling.waiting import Stage, missing

    if disabled():
        return f"{DISABLE_VARIABLE} is set: the script ran by itself, and nothing was measured"
    if ended.fault:
        return f"advisor switched itself off in the script, which went on: {ended.fault}"
    if failed := _ended(ended.code, ended.signal):
        return f"{failed}, before enough training steps were seen"
    if ended.reached < Stage.TORCH:
        return f"nothing was measured: {missing(ended.reached)}"
    if measured.steps_seen:
        return f"only {measured.steps_seen} steps were seen, too few to measure; let the script train for longer"
    return "no training step was seen; if the script trains without an optimizer, call advisor.step() after each step"


def _shown(path: Path) -> str:
    try:
        return os.path.relpath(path)
    except ValueError:
        return str(path)


def _teller(say: Say) -> Callable[[Mapping[str, Any]], None]:
    """Turns the child's progress events into lines."""
    from advisor.profiling.waiting import WAITING

    def tell(event: Mapping[str, Any]) -> None:
        kind = event.get("event")
        if kind == "phase":
            done, total = event.get("done"), event.get("total")
            say(f"{event.get('phase')}: {done} of {total} steps" if total else str(event.get("phase")))
        elif kind in ("trial", "say", "fault", WAITING) and (text := event.get("text") or event.get("error")):
            say(str(text))

    return tell


def _evaluate(
    measured: StepProfile,
    run_dir: Path,
    *,
    rules_dirs: Sequence[Path] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> Findings:
    from advisor import analysis, rules
    from advisor.analysis.predict import predict
    from advisor.trials import planner

    table = analysis.metrics(measured)
    loaded = rules.load(rules_dirs)
    chosen = rules.apply_overrides(loaded, select, ignore, overrides or {})
    findings = rules.evaluate(chosen, table, measured, functools.partial(predict, measured))
    recommended = rules.recommend(findings, table)
    return Findings(
        run=run_dir.name,
        findings=findings,
        cards=rules.cards(findings),
        recommendations=planner.order(recommended, measured),
    )


def recommend(
    run: str | Path,
    *,
    rules_dirs: Sequence[Path] = (),
    select: Sequence[str] = (),
    ignore: Sequence[str] = (),
    overrides: Mapping[str, str] | None = None,
) -> tuple[StepProfile, Findings]:
    """Rules over a saved run. Needs no GPU and changes no file.

    Raises:
        AdvisorError: when the run or a rule cannot be read, or a selection names nothing.
    """
    folder, measured = load_profile(run)
    found = _evaluate(measured, folder, rules_dirs=rules_dirs, select=select, ignore=ignore, overrides=overrides)
    return measured, found


# ---------------------------------------------------------------------------------------------------------------------
# apply and run


def apply(
    words: Sequence[str] = (),
    *,
    module: bool = False,
    auto: bool = False,
    ask: Ask | None = None,
    dry_run: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    min_gain: float = 0.01,
    max_time_s: float = USUAL_TIME_S,
    max_pairs: int = 20,
    out: Path | None = None,
    rules_dirs: Sequence[Path] = (),
    share: int = 1,
    say: Say,
) -> ApplyResult:
    """Profile the script (or start from the last profiled run), try what is recommended, write trials.json and plan.yaml.

    What was kept is profiled in its turn, and what the rules recommend then is tried in a round of its own: trials/rounds.py.

    `share`: the process trains on what one of so many ranks would be given of each batch.

    Exit code: 0 when something was kept or nothing was to be done, 4 when noise, time or the user's answers left that open, the
    script's own when it failed before anything could be measured.

    Raises:
        AdvisorError: for a script that cannot be started, an unknown transform id, or no run to start from.
        KeyboardInterrupt: when the user ends the script that is profiled.
    """
    from advisor.distributed import starting
    from advisor.profiling.launcher import ScriptCommand
    from advisor.profiling.relay import Relay
    from advisor.reporting import wording

    _check_apply(only, skip)
    if not auto and ask is None and not dry_run:
        raise AdvisorError("neither --auto nor a way to ask", fix="Use --auto.")
    _check_rules(rules_dirs)
    source = None if words else load_run("last")
    if source is not None:
        words, module = (source.profile.script, *source.profile.argv), False
    command = ScriptCommand.parse(words, module=module)
    if share > 1:
        command = starting.one_of(command, share)
    run_dir = _begin(command.name, out, say)
    with contextlib.closing(Relay()) as relay:
        work = _Applying(
            command=command,
            run_dir=run_dir,
            relay=relay,
            only=only,
            skip=skip,
            ask=None if auto else ask,
            min_gain=min_gain,
            max_time_s=max_time_s,
            max_pairs=max_pairs,
            rules_dirs=rules_dirs,
            say=say,
        )
        if source is None:
            result = work.profile(goes_on=auto and not dry_run)
            if result.profile is None or result.findings is None or result.exit_code:
                return work.not_measured(result)
            measured, found = result.profile, result.findings
        else:
            measured = source.profile
            found = _evaluate(measured, run_dir, rules_dirs=rules_dirs)
            say(f"starting from {_shown(source.run_dir)}")
            storage.save(run_dir / PROFILE_FILE, measured)
            storage.save(run_dir / FINDINGS_FILE, found)
        _check_kind(only, measured)
        candidates = _chosen(found.recommendations, only, skip)
        forward = measured.step_kind == "forward"
        if (why := wording.refused(measured, "advisor")) and (forward or not dry_run):
            say(why)
            exit_code = int(ExitCode.OK if forward else ExitCode.INCONCLUSIVE)
            return ApplyResult(run_dir=run_dir, exit_code=exit_code, profile=measured, findings=found)
        if dry_run:
            found = replace(found, recommendations=candidates)
            return ApplyResult(run_dir=run_dir, exit_code=0, profile=measured, findings=found)
        if not candidates and not measured.complete:
            say("too few steps were measured to say what would help; let the script train for longer")
            return ApplyResult(run_dir=run_dir, exit_code=int(ExitCode.INCONCLUSIVE), profile=measured, findings=found)
        return work.search(candidates, measured, found)


@dataclass(slots=True, eq=False, kw_only=True)
class _Applying:
    """One `apply`, from its profile to its plan; fields as the arguments of `apply`."""

    command: ScriptCommand
    run_dir: Path
    relay: Relay
    only: Sequence[str]
    skip: Sequence[str]
    ask: Ask | None
    min_gain: float
    max_time_s: float
    max_pairs: int
    rules_dirs: Sequence[Path]
    say: Say
    handover: Handover | None = None
    _started: float = field(default_factory=time.monotonic)

    def profile(self, *, goes_on: bool) -> ProfileResult:
        """The first profile. `goes_on`: its process is the first of the search."""
        from advisor.profiling import bytecode
        from advisor.trials import budget
        from advisor.trials.beforehand import compile_ahead
        from advisor.trials.handover import Handover

        self.handover = Handover(self._orders, self.run_dir) if goes_on else None
        return _profile(
            self.command,
            self.run_dir,
            warmup=10,
            steps=20,
            detail_steps=3,
            keep_running=False,
            counters=True,
            rules_dirs=self.rules_dirs,
            say=self.say,
            searched=True,
            pace=min(1.0, max(PROFILE_LEAST_S, PROFILE_SHARE * self.max_time_s) / USUAL_WINDOWS_S),
            first_step_s=self.max_time_s,
            settle_s=budget.settle_s(self.max_time_s),
            on_machine=compile_ahead,
            handover=self.handover,
            launch=functools.partial(self.relay, environment=bytecode.variables()),
        )

    def not_measured(self, result: ProfileResult) -> ApplyResult:
        """The script has failed, or shown too little."""
        from advisor.trials.script import last_line

        if result.exit_code:
            self.say("the script ended before it could be measured, so nothing is tried")
            if last := last_line(self.run_dir / OUTPUT_FILE):
                self.say(f"its last line, from {_shown(self.run_dir / OUTPUT_FILE)}: {last}")
        return ApplyResult(
            run_dir=self.run_dir,
            exit_code=result.exit_code or int(ExitCode.INCONCLUSIVE),
            profile=result.profile,
            findings=result.findings,
        )

    def search(self, candidates: Sequence[Recommendation], measured: StepProfile, found: Findings) -> ApplyResult:
        """Try the candidates; in the process that was profiled that has begun, where it goes on."""
        from advisor.trials import ledger

        begun = self.handover.search if self.handover is not None else None
        log, plan, exit_code = (begun or self._begin(measured)).finish(candidates)
        ledger.append(ledger.entries(log, measured))
        _write_report(self.run_dir, measured, found, log)
        file = _beside(plan, self.run_dir, self.say)
        return ApplyResult(
            run_dir=self.run_dir,
            exit_code=exit_code,
            profile=measured,
            findings=found,
            log=log,
            plan=plan,
            plan_file=file,
        )

    def _begin(self, measured: StepProfile) -> Search:
        from advisor.trials.search import begin

        now = time.monotonic()
        profiled_s, before_s = now - self._started, measured.start_s or 0.0
        if self.handover is not None and self.handover.first_step is not None:
            before_s = self.handover.first_step - self._started  # the machine was measured too, once
        return begin(
            self.command,
            measured,
            ask=self.ask,
            min_gain=self.min_gain,
            # What the script itself takes to its first step is its own time, not the search's.
            max_time_s=max(0.0, self.max_time_s - profiled_s + before_s),
            profiled_s=profiled_s,
            before_s=before_s,
            max_pairs=self.max_pairs,
            recommend=self._asked_anew,
            run_dir=self.run_dir,
            say=self.say,
            launch=self.relay,
        )

    def _asked_anew(self, again: StepProfile, folder: Path) -> Sequence[Recommendation]:
        """What the rules say to a later round's profile."""
        found = _evaluate(again, folder, rules_dirs=self.rules_dirs)
        storage.save(folder / PROFILE_FILE, again)
        storage.save(folder / FINDINGS_FILE, found)
        return _chosen(found.recommendations, self.only, self.skip)

    def _orders(self, measured: StepProfile, found: Findings) -> tuple[Search, Session] | None:
        """The search, and the orders of its first process, for the one that was profiled; None where nothing is to be tried."""
        from advisor.reporting import wording

        if measured.model.flags.get("cupy_alone", False):
            return None  # its changes are on from the start
        _check_kind(self.only, measured)
        candidates = _chosen(found.recommendations, self.only, self.skip)
        if not candidates or measured.step_kind == "forward" or wording.refused(measured, "advisor"):
            return None
        search = self._begin(measured)
        orders = search.first_orders(candidates)
        return (search, orders) if orders is not None else None


def _beside(plan: Plan, run_dir: Path, say: Say) -> Path:
    """The proved plan in the working directory too; the file to name."""
    from advisor.trials import plans

    file, told = plans.beside(plan, run_dir, Path.cwd())
    if told:
        say(told)
    return file


def prove(
    words: Sequence[str] = (),
    *,
    plan: Path,
    module: bool = False,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    max_time_s: float = USUAL_TIME_S,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Prove a plan (its file, the folder of its run, or `last`) again, here and now, without a profile or a search, and write
    trials.json and plan.yaml: trials/prove.py.

    Without words the script is the plan's own. Exit code: 0 when the plan, or some of it, is proved, or nothing of it holds; 4 when
    that was left open; the script's own where it fails before it is measured.

    Raises:
        AdvisorError: for a plan that cannot be read or has nothing to prove, a script that cannot be started, an unknown transform id.
        KeyboardInterrupt: before anything was started.
    """
    from advisor.profiling import environment
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials import planfile
    from advisor.trials.prove import TO_PROVE, prove_plan, wanted

    _check_apply(only, skip)
    command = ScriptCommand.parse(words, module=module) if words else None
    named = command.name if command is not None else ""
    found = find_plan(plan, lambda known: any(item.status in TO_PROVE for item in known.items), named)[1]
    loaded = wanted(found, only=only, skip=skip)
    if command is None:
        command = ScriptCommand.parse((loaded.script, *loaded.argv))
    if other := planfile.another_script(loaded, command.name):
        say(f"plan: {other}")
    run_dir = _begin(command.name, out, say)
    log, proved, exit_code = prove_plan(
        command,
        loaded,
        environment=planfile.environment_text(environment.probe()),
        max_time_s=max_time_s,
        run_dir=run_dir,
        say=say,
    )
    file = _beside(proved, run_dir, say)
    return ApplyResult(run_dir=run_dir, exit_code=exit_code, log=log, plan=proved, plan_file=file)


def try_patch(
    words: Sequence[str],
    patch: Path,
    *,
    module: bool = False,
    min_gain: float = 0.01,
    max_time_s: float = USUAL_TIME_S,
    out: Path | None = None,
    say: Say,
) -> Attempt:
    """Judge a source patch on the script, on a copy of its project: trials/patched.py.

    Raises:
        AdvisorError: for a script that cannot be started or measured, or a patch that cannot be applied.
    """
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials.patched import try_patch

    _check_apply((), ())
    command = ScriptCommand.parse(words, module=module)
    run_dir = _begin(command.name, out, say)
    return try_patch(
        command, words, patch, module=module, min_gain=min_gain, max_time_s=max_time_s, run_dir=run_dir, say=say
    )


def _begin(name: str, out: Path | None, say: Say) -> Path:
    """The run folder of what throws its training away, once earlier ones have left nothing aside and the user knows the limits."""
    run_dir = new_run_dir(name, out)
    _recover(say)
    say("the script's files are put back afterwards (`advisor apply --help` says what cannot be)")
    return run_dir


def _check_apply(only: Sequence[str], skip: Sequence[str]) -> None:
    """Said before any work: changes that do not exist, and that none may be made.

    Raises:
        AdvisorError: for either.
    """
    from advisor.profiling.session import DISABLE_VARIABLE, disabled

    for name in (*only, *skip):
        row(name)
    if disabled():
        raise AdvisorError(f"{DISABLE_VARIABLE} is set, so nothing can be tried", fix="Unset it for this command.")


def _check_kind(only: Sequence[str], measured: StepProfile) -> None:
    """Said before a search: what was asked for by name is for another kind of loop.

    Raises:
        AdvisorError: for such a change.
    """
    alone = measured.model.flags.get("cupy_alone", False)
    for name in only:
        if row(name).cupy != alone:
            raise AdvisorError(
                f"{name} is for loops of {'PyTorch' if alone else 'CuPy alone'}, and this loop is {'CuPy' if alone else 'PyTorch'}'s",
                fix="Leave it out.",
            )


def _chosen(
    recommendations: Sequence[Recommendation], only: Sequence[str], skip: Sequence[str]
) -> tuple[Recommendation, ...]:
    """What to try. A transform named in `only` is tried even when no rule asked for it: the user did."""
    chosen = [r for r in recommendations if r.transform not in skip and (not only or r.transform in only)]
    known = {r.transform for r in chosen}
    chosen += [
        Recommendation(transform=name, title=row(name).title, reason="named with --only")
        for name in only
        if name not in known and name not in skip
    ]
    return tuple(chosen)


def _restored(run_dir: Path, say: Say) -> bool:
    """Put the script's files back where they were; whether all are."""
    from advisor.userfiles import restore

    problems = restore.restore(run_dir)
    for problem in problems:
        say(f"could not be put back: {problem}")
    return not problems


def _recover(say: Say) -> None:
    """Put back what a killed run had set aside."""
    from advisor.userfiles import restore

    found = restore.restore_pending(Path(RUNS_DIR))
    for path in found.restored:
        say(f"put back after an interrupted run: {path}")
    for problem in found.problems:
        say(f"could not be put back after an interrupted run: {problem}")
    for path in found.foreign:
        say(
            f"{path} holds files that a run elsewhere set aside; if they are yours, `advisor doctor --recover {path}` "
            "puts them back"
        )


def recover(run_dir: Path | None, say: Say) -> bool:
    """Put back what an interrupted run had set aside: in this run folder, or in each below advisor-runs/ here and each that this
    user has started on this machine.

    Returns:
        Whether everything is back in its place. `say` has been told what was put back, and what was not and why.

    Raises:
        AdvisorError: when nothing was set aside in `run_dir`, or its run goes on.
    """
    from advisor.userfiles import restore

    found = (
        restore.restore_pending(Path(RUNS_DIR))
        if run_dir is None
        else restore.Pending(problems=restore.restore_asked(run_dir))
    )
    restored = found.restored if run_dir is None else (str(run_dir),) * (not found.problems)
    for path in restored:
        say(f"the files set aside in {path} are back in their places")
    for problem in found.problems:
        say(f"could not be put back: {problem}")
    for path in found.foreign:
        say(f"left alone: {path} was run elsewhere; `advisor doctor --recover {path}` puts its files back")
    if not (restored or found.problems or found.foreign):
        say("no interrupted run of yours has anything set aside")
    return not found.problems


def run(
    words: Sequence[str] = (),
    *,
    module: bool = False,
    plan: Path = Path("last"),
    strict: bool = False,
    gpus: int = 1,
    allow: bool = False,
    saves: bool = False,
    say: Say,
) -> int:
    """Train with a plan (its file, the folder of its run, or `last`) to the end. Returns the script's own exit code.

    With `gpus` a script written for one runs as so many ranks, with the plan that was proved for them; else that is proved first, and
    they train without one. `saves`: checkpoints are written in the background. `allow`: as parts of a batch that do not train as the whole does.

    Raises:
        AdvisorError: when there is no plan, it cannot be read, or, with `strict`, an item of it no longer fits; when the ranks cannot
            or do not train as one process does.
    """
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials import planfile
    from advisor.trials.run import run_plan

    command = ScriptCommand.parse(words, module=module) if words else None
    also = (PlanItem(transform="background_saves", status="kept"),) if saves else ()
    if gpus > 1:
        return _run_on_ranks(command, plan, gpus, allow=allow, strict=strict, also=also, say=say)
    named = command.name if command is not None else ""
    try:
        plan, loaded = find_plan(plan, lambda known: not planfile.left_open(known), named)
    except AdvisorError:
        if not saves or command is None or str(plan) != "last":
            raise
        loaded = Plan(
            script=command.words[0], argv=command.words[1:], created="", items=()
        )  # it is asked for without one
    if command is None:
        command = ScriptCommand.parse((loaded.script, *loaded.argv))
    _recover(say)
    return run_plan(command, plan, loaded, run_dir=new_run_dir(command.name), strict=strict, also=also, say=say)


def _run_on_ranks(
    command: ScriptCommand | None,
    name: Path,
    gpus: int,
    *,
    allow: bool,
    strict: bool,
    also: Sequence[PlanItem],
    say: Say,
) -> int:
    from advisor.distributed import starting
    from advisor.profiling import environment, launcher
    from advisor.trials import planfile, ranks
    from advisor.trials.run import run_plan

    if command is None:
        raise AdvisorError("no script given", expected="a Python script with --gpus")
    norms, machine = ranks.norms(allow), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=allow)
    _recover(say)
    run_dir = new_run_dir(command.name)
    path, plan = ranks.plan_for(command, name, gpus, norms, find=find_plan)
    if plan is None:
        say(
            f"no plan on file was proved for {gpus} ranks of this script: it is proved now that they train as one process does"
        )
        proof = ranks.prove_alone(command, gpus, run_dir, norms=norms, say=say)
        say(ranks.told(proof))
        path, plan = (
            run_dir,
            ranks.bare_plan(command, proof, run_dir, norms, environment=planfile.environment_text(machine)),
        )
        planfile.write(run_dir / "plan.yaml", plan)
    seed = ranks.new_seed()
    together = starting.on_ranks(command, gpus, run_dir, seed=seed, norms=norms)
    try:
        return run_plan(
            together, path, plan, run_dir=run_dir, strict=strict, also=also, say=say, launch=launcher.launch
        )
    finally:
        starting.clear(run_dir, gpus)


def apply_on_ranks(
    words: Sequence[str],
    gpus: int,
    *,
    plan: Path | None = None,
    module: bool = False,
    allow: bool = False,
    out: Path | None = None,
    max_time_s: float = USUAL_TIME_S,
    only: Sequence[str] = (),
    skip: Sequence[str] = (),
    say: Say,
    **search: Any,
) -> ApplyResult:
    """Prove that `gpus` ranks train as one process does; search in one process what one of them does faster, or take `plan`; and prove
    that in all of them.

    Raises:
        AdvisorError: as `apply`, `prove` and `run` do.
    """
    from advisor.distributed import starting
    from advisor.profiling import environment
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials import planfile, ranks
    from advisor.trials.prove import TO_PROVE, prove_plan, wanted

    command = ScriptCommand.parse(words, module=module)
    norms, machine = ranks.norms(allow), environment.probe()
    ranks.checked(command, gpus, gpus=machine.gpu_count, allowed=allow)
    _check_apply(only, skip)
    run_dir = _begin(command.name, out, say)
    proof = ranks.prove_alone(command, gpus, run_dir, norms=norms, say=say)
    say(ranks.told(proof))
    searched: ApplyResult | None = None
    if plan is None:
        say(f"the search runs in one process, on what one of {gpus} ranks is given")
        searched = apply(
            words,
            module=module,
            out=run_dir / "one-rank",
            max_time_s=max_time_s,
            only=only,
            skip=skip,
            share=gpus,
            say=say,
            **search,
        )
        found = searched.plan
    else:
        found = find_plan(plan, lambda known: True, command.name)[1]
    here = planfile.environment_text(machine)
    bare = ranks.bare_plan(command, proof, run_dir, norms, environment=here)
    items = [item for item in found.items if item.status in TO_PROVE] if found is not None else []
    early = ""
    together = starting.on_ranks(command, gpus, run_dir, seed=ranks.new_seed(), norms=norms)
    if plan is None:
        passes = searched.profile.model.backwards if searched is not None and searched.profile is not None else 1
        tried, early = ranks.search(
            together,
            items,
            run_dir,
            passes=passes,
            only=only,
            skip=skip,
            min_gain=search.get("min_gain", 0.01),
            say=say,
        )
        items += tried
    if not items:
        planfile.write(run_dir / "plan.yaml", bare)
        return ApplyResult(
            run_dir=run_dir, exit_code=0, profile=searched.profile if searched else None,
            findings=searched.findings if searched else None, log=ranks.bare_log(command, proof, run_dir, early), plan=bare,
            plan_file=run_dir / "plan.yaml",
        )  # fmt: skip
    loaded = wanted(replace(bare, items=tuple(items)), only=only, skip=skip)
    log, proved, exit_code = prove_plan(
        together, loaded, environment=here, max_time_s=max_time_s, run_dir=run_dir, say=say
    )
    foretold = _foretold(searched.profile if searched else None, log, gpus, synchronised=not norms)
    log = replace(log, notes=(ranks.told(proof), *foretold, *filter(None, (early,)), *log.notes))
    storage.save(run_dir / "trials.json", log)
    starting.clear(run_dir, gpus)
    return ApplyResult(
        run_dir=run_dir, exit_code=exit_code, log=log, plan=proved, plan_file=_beside(proved, run_dir, say)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryResult:
    """What a step holds, and what other ways would; `batch`: samples that `memory_bytes` would hold."""

    look: MemoryLook
    others: Sequence[Alternative]
    batch: int
    memory_bytes: int


def memory(
    words: Sequence[str],
    *,
    module: bool = False,
    memory_bytes: int = 0,
    gpus: int = 1,
    out: Path | None = None,
    say: Say,
) -> MemoryResult:
    """Watch one step of the script for what it holds.

    Raises:
        AdvisorError: for a script that cannot be started, or that shows no step.
    """
    from advisor.analysis import activations
    from advisor.profiling import launcher
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials.memory import watched
    from advisor.trials.script import Script
    from advisor.userfiles import owners

    command = ScriptCommand.parse(words, module=module)
    run_dir = _begin(command.name, out, say)
    owners.hold(run_dir)
    script = Script(command, run_dir, launcher.launch, say)
    try:
        look = watched(script, ())
    finally:
        script.put_back()
    if look is None:
        raise AdvisorError(
            f"no step could be watched ({script.last_line or 'the script ended early'})",
            exit_code=ExitCode.INCONCLUSIVE,
        )
    there = memory_bytes or look.total_bytes
    return MemoryResult(
        look=look,
        others=activations.alternatives(look, gpus),
        batch=activations.largest_batch(look, there) if there else 0,
        memory_bytes=there,
    )


def reach_memory(
    words: Sequence[str],
    *,
    module: bool = False,
    cost: float = 0.05,
    limit_bytes: int = 0,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Make a step hold less, for at most `cost` of its time, and prove it: trials/memory.py.

    Raises:
        AdvisorError: for a script that cannot be started, or that shows no step.
    """
    from advisor.profiling import environment
    from advisor.profiling.launcher import ScriptCommand
    from advisor.trials import planfile
    from advisor.trials.memory import reach

    command = ScriptCommand.parse(words, module=module)
    run_dir = _begin(command.name, out, say)
    machine = planfile.environment_text(environment.probe())
    log, plan, _, exit_code = reach(command, run_dir, cost=cost, limit_bytes=limit_bytes, environment=machine, say=say)
    return ApplyResult(run_dir=run_dir, exit_code=exit_code, log=log, plan=plan, plan_file=_beside(plan, run_dir, say))


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleResult:
    """`links`: what was assumed of them, a line each."""

    rows: Sequence[Foretold]
    one_us: float
    links: tuple[str, ...]


def scale(
    run: str | Path, gpus: Sequence[int], *, link: str, between: str, host: int = 8, local_norms: bool = False
) -> ScaleResult:
    """A step of several GPUs, foretold from a run's profile.

    Raises:
        AdvisorError: when the run cannot be read or does not serve, or a link cannot be measured or has no such name.
    """
    from advisor.analysis import scaling

    _, measured = load_profile(run)
    inside, outside = _link(link), scaling.link(between)
    rows = scaling.foretell(measured, gpus, inside=inside, between=outside, host=host, synchronised=not local_norms)
    told = tuple(
        f"{where}: {time_text(one.latency_us)} and {rate_text(one.gbps)} ({one.basis})"
        for where, one in (("inside a host", inside), ("between hosts", outside))
        if where == "inside a host" or max(gpus) > host
    )
    return ScaleResult(rows=rows, one_us=measured.typical_us, links=told)


def _link(name: str, ranks: int = 2) -> Link:
    import tempfile

    from advisor.analysis import scaling
    from advisor.distributed import links

    if name != "measured":
        return scaling.link(name)
    with tempfile.TemporaryDirectory() as folder:
        return scaling.link(name, links.measure(ranks, Path(folder) / "link.json"))


def _foretold(profile: StepProfile | None, log: TrialLog, gpus: int, *, synchronised: bool) -> tuple[str, ...]:
    """What the profile of one rank's share had foretold of the plain step of all, beside what was measured; nothing without either."""
    from advisor.analysis import scaling

    if profile is None or log.stack is None or not log.stack.plain_us:
        return ()
    try:
        link = _link("measured", gpus)
        (row,) = scaling.foretell(profile, (gpus,), inside=link, between=link, host=gpus, synchronised=synchronised)
    except AdvisorError as error:
        return (f"nothing was foretold of {gpus} ranks: {error}",)
    took = sum(log.stack.plain_us) / len(log.stack.plain_us)
    low, high = map(time_text, row.step_us)
    return (
        f"foretold from one rank's profile: {low} to {high} a step of {gpus} ranks, {time_text(row.exposed_us)} of it exposed "
        f"communication (link {time_text(link.latency_us)}, {rate_text(link.gbps)}); measured {time_text(took)}: "
        f"{percent_text(abs(row.middle_us / took - 1))} off",
    )


# ---------------------------------------------------------------------------------------------------------------------
# inside the script


def attach(session: Session) -> None:
    """Called in the hooked process once torch is imported: hand over to the driver of the session's mode.

    Raises:
        AdvisorError: for a mode that does not exist.
    """
    use.hold(session.folder)
    if session.protect_files:
        from advisor.userfiles.protect import protect

        protect(session.protecting)
    from advisor.distributed import joining

    joining.join(session)
    if session.mode == "profile" and session.kept:
        from advisor.trials.profile import attach_kept_profile

        attach_kept_profile(session)
    elif session.mode == "profile" and session.hands_over:
        from advisor.trials.live.handed import attach_handed

        attach_handed(session)
    elif session.mode == "profile":
        from advisor.profiling.attach import attach_profile

        attach_profile(session)
    elif session.mode == "search":
        from advisor.trials.live.driver import attach_search

        attach_search(session)
    elif session.mode == "memory":
        from advisor.trials.look import attach_look

        attach_look(session)
    elif session.mode == "across":
        from advisor.trials.across import attach_across

        attach_across(session)
    elif session.mode == "measure":
        from advisor.trials.measure import attach_measure

        attach_measure(session)
    elif session.mode == "run":
        from advisor.trials.kept import attach_run

        attach_run(session)
    else:
        raise AdvisorError(f"session mode {session.mode!r}", expected="profile, search, across, memory, measure or run")
    _prefer_torch()


def attach_to_cupy(session: Session) -> None:
    """Called in the hooked process once CuPy is imported and torch is not: hand over to what reads loops of CuPy alone.

    A mode that such a loop has not waits for torch.
    """
    from advisor.cupy_loops import attach as cupy_loop

    use.hold(session.folder)
    if session.protect_files:
        from advisor.userfiles.protect import protect

        protect(session.protecting)
    cupy_loop.attach(session)


def _prefer_torch() -> None:
    """Where a loop of CuPy's is watched as well, it is let go of at the first step of torch's."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is None:
        return
    from advisor.profiling.attach import Attached

    training = Attached.training
    if training is not None:

        def first(step: object) -> None:
            training.on_step.remove(first)
            cupy_loop.let_go()

        training.on_step.insert(0, first)


def enable(plan: str | Path) -> None:
    """Apply a plan from inside a script, before training begins: `import advisor; advisor.enable("plan.yaml")`.

    Does nothing under `ADVISOR_DISABLE=1`, or when the script already runs under an `advisor` command.

    Raises:
        AdvisorError: when the plan cannot be read.
    """
    from advisor.profiling.session import SESSION_VARIABLE, disabled

    if disabled() or os.environ.get(SESSION_VARIABLE):
        return
    from advisor.core import stderr
    from advisor.trials import planfile

    loaded, script = planfile.read(Path(plan)), sys.argv[0]
    use.hold(Path(plan).parent)
    if script.endswith(".py") and (other := planfile.another_script(loaded, script)):
        stderr.say(f"plan: {other}")
    kept_items = tuple(item for item in loaded.items if item.status == KEPT)
    if any(item.transform in ROWS and ROWS[item.transform].cupy for item in kept_items):
        import cupy

        from advisor.cupy_loops import attach as cupy_loop

        cupy_loop.put_on(kept_items, cupy)
        return
    from advisor.trials import kept

    kept.enable(loaded)


def disable() -> None:
    """Take back what `enable` applied. Does nothing when nothing is applied."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is not None:
        cupy_loop.take_off()
    if "torch" in sys.modules:
        from advisor.trials import kept

        kept.disable()


def step() -> None:
    """Mark the end of a training step, where advisor cannot find it by itself. Costs nothing when not profiled."""
    cupy_loop = sys.modules.get("advisor.cupy_loops.attach")
    if cupy_loop is not None:
        cupy_loop.step()
    if "torch" in sys.modules:
        from advisor.profiling.attach import mark_step

        mark_step()


# ---------------------------------------------------------------------------------------------------------------------
# kernels


def kernels_list() -> list[dict[str, object]]:
    """Every bundled kernel source with its entries, hash and what it replaces. Needs no GPU."""
    from advisor.ops import catalog

    return catalog.listing()


def kernels_verify(say: Say, family: str = "") -> list[dict[str, object]]:
    """Compile each kernel (of one family, if named) for this GPU and hold it to its fp64 reference. One row a case.

    Raises:
        AdvisorError: for an unknown family; without a GPU or CuPy, with exit code 5.
    """
    from advisor.ops import catalog

    return catalog.verify(say, family)
