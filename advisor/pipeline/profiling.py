"""`advisor profile` and `recommend`: measure a script's steps, or read what was measured, and ask the rules."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Findings
from advisor.core.profile import StepProfile
from advisor.pipeline.shared import (
    Say,
    check_rules,
    evaluate_run,
    other_gpu,
    progress_teller,
    recover_pending,
    restore_files,
    shown_path,
    write_report,
)
from advisor.runs import FINDINGS_FILE, PROFILE_FILE, is_empty, load_profile, new_run_dir
from advisor.trials.records import OUTPUT_FILE

if TYPE_CHECKING:
    from advisor.core.environment import Environment
    from advisor.loop.session import Session
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.beside.launcher import Exit
    from advisor.trials.handover import Handover
    from advisor.trials.script import Launch


# The shortest warm-up in which a script can be understood: discovery looks at three steps, and its findings are then read.
LEAST_WARMUP = 4


BRIEF_WARMUP = 1  # of scripts that make fewer steps than a warm-up and a trace need


FORWARD_LOST = 1  # the first round of model calls only shows what a round is


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileResult:
    """`profile` and `findings` are None when the script gave nothing to measure."""

    run_dir: Path
    exit_code: int
    profile: StepProfile | None = None
    findings: Findings | None = None


def profile(
    words: Sequence[str],
    *,
    module: bool = False,
    out: Path | None = None,
    rules_dirs: Sequence[Path] = (),
    say: Say,
    **windows: Any,
) -> ProfileResult:
    """Run the script, measure it, and write profile.json, findings.json and report.html. Exit code: the script's own.

    Its files are as they were afterwards, and one line says which were put back; not with `keep_running`, where the run is the user's.

    Args:
        windows: fields of loop.session.Session: warmup, steps, detail_steps, keep_running, counters, precision.

    Raises:
        AdvisorError: for a script that cannot be started or a folder that cannot be written.
    """
    from advisor.loop.session import Session
    from advisor.profiling.beside.command import ScriptCommand

    command = ScriptCommand.parse(words, module=module)
    check_rules(rules_dirs)
    run_dir = new_run_dir(command.name, out)
    recover_pending(say)
    script, *argv = command.words
    orders = Session(mode="profile", run_dir=str(run_dir), script=script, argv=tuple(argv), **windows)
    return profile_script(command, orders, rules_dirs=rules_dirs, say=say)


def profile_script(
    command: ScriptCommand,
    orders: Session,
    *,
    rules_dirs: Sequence[Path],
    say: Say,
    searched: bool = False,
    ahead: Callable[[], object] = lambda: None,
    handover: Handover | None = None,
    launch: Launch | None = None,
) -> ProfileResult:
    """Measure the script, for its own sake or (`searched`) as a search begins.

    Args:
        orders: the run folder and what is to be measured; what depends on the machine is filled in here.
        ahead: called before anything else: what it begins may go on beside all that follows.
        handover: the process goes on as a search, where there is something to try; its end is told there, and ours is the profile.
        launch: as `launcher.launch`, which is what starts the script by default.

    Raises:
        AdvisorError: also where advisor has switched itself off, with exit code 3, or was sure that no step would come, with 4.
    """
    from advisor.profiling.beside import launcher
    from advisor.profiling.machine import environment
    from advisor.userfiles import restore

    ahead()
    say("measuring this machine (once)")
    machine = environment.probe()
    orders, refused = _on_machine(orders, machine, handover)
    run_dir = orders.folder
    say(f"running {command.name}; results go to {shown_path(run_dir)}")
    told = (f"no hardware counters: {refused}",) if refused else ()
    work = _Measuring(command, orders, machine, rules_dirs, say, handover, told)
    work.sampler.start()
    try:
        # What a search's run prints is in its folder, so that it does not run into what we say.
        ended, again = work.run(launch or launcher.launch, output=run_dir / OUTPUT_FILE if searched else None)
    finally:
        restored = restore_files(run_dir, say)
        work.sampler.stop()
        if line := restore.told(run_dir):
            say(line)
    if handover is not None and handover.search is not None and work.handed is not None:
        handover.search.script.displaced = not restored
        handover.ended(ended)
        return work.handed
    if orders.protect_files and not restored:
        fix = f"Make room for them, and run `advisor doctor --recover {shown_path(run_dir)}`."
        raise AdvisorError(f"files that were set aside in {shown_path(run_dir)} could not be put back", fix=fix)
    if searched and ended.interrupted:
        raise KeyboardInterrupt  # a script may catch it and end well; no search is to follow
    check_measured(ended, thrown_away=not orders.keep_running, held=restore.held_by_another(run_dir))
    notes = {
        "the script's process hung as it exited, after it was measured, so advisor ended it": ended.hung,
        "the script's process crashed as it exited, after it was measured": ended.crashed,
        "the script ends early, so this was measured in a second run, with fewer steps": again,
    }
    told = (*(note for note, is_so in notes.items() if is_so), *told)
    return _read(run_dir, machine, rules_dirs, say, start_s=ended.first_step_s, ended=ended, notes=told)


def _on_machine(orders: Session, machine: Environment, handover: Handover | None) -> tuple[Session, str]:
    """The orders as they can be followed on this machine; and why hardware counters, that were asked for, cannot be read."""
    from advisor.loop.session import disabled
    from advisor.profiling.machine import counters as hardware
    from advisor.trials import fresh

    counters, refused = orders.counters and machine.device == "cuda", ""
    if counters:
        counters, refused = hardware.preflight()
    return replace(
        orders,
        counters=counters,
        hands_over=handover is not None,
        seed=fresh.SEED if handover is not None else None,
        # It resets the allocator's peaks, and takes a step.
        course=not orders.keep_running and handover is None and orders.pace == 1.0,
        protect_files=not orders.keep_running and not disabled(),
    ), refused


class _Measuring:
    """The runs of one profile.

    Attributes:
        handed: what was measured before the script's process went on as a search.
    """

    def __init__(
        self,
        command: ScriptCommand,
        orders: Session,
        machine: Environment,
        rules_dirs: Sequence[Path],
        say: Say,
        handover: Handover | None,
        told: Sequence[str],
    ) -> None:
        from advisor.loop.records import SAMPLES_FILE
        from advisor.profiling.beside.sampler import Sampler

        self._command, self._orders, self._machine, self._rules_dirs = command, orders, machine, rules_dirs
        self._say, self._handover, self._told = say, handover, told
        self._tell = progress_teller(say)
        self.sampler = Sampler(gpu=machine.gpu_uuid or None, path=orders.folder / SAMPLES_FILE)
        self.handed: ProfileResult | None = None
        self._began, self._first_s = time.monotonic(), 0.0

    def run(self, launch: Launch, *, output: Path | None) -> tuple[Exit, bool]:
        """How the script ended, and whether it was started again, with windows that fit into the steps it makes."""
        from advisor.loop.waiting import patience_s
        from advisor.userfiles import owners

        run_dir = self._orders.folder
        if self._orders.protect_files:
            owners.hold(run_dir)
        limit = self._handover.timeout_s if self._handover is not None else None
        ended = launch(self._command, self._orders, on_progress=self._progress, output=output, timeout_s=limit)
        over = self.handed is not None or ended.interrupted or ended.fault or ended.gave_up
        shorter = None if over else shorter_session(self._orders, ended.code)
        if shorter is None or not restore_files(run_dir, self._say):
            return ended, False
        owners.hold(run_dir)
        self._say("the script ended before everything was measured; measuring again, with fewer steps")
        shorter = replace(shorter, first_step_s=patience_s(ended.first_step_s), hands_over=False)
        launch(self._command, shorter, on_progress=self._tell, output=run_dir / OUTPUT_FILE)
        return ended, True

    def _progress(self, event: dict[str, Any]) -> None:
        """What the script's process tells: to the user, and of a search that it goes on as, to that."""
        from advisor.loop.records import MEASURED
        from advisor.loop.waiting import STEP

        handover = self._handover
        if handover is not None and handover.search is not None:
            handover.search.script.told(event)
            return
        self._tell(event)
        if event.get("event") == STEP:
            self._first_s = time.monotonic() - self._began
            if handover is not None:
                handover.first_step = time.monotonic()
        if event.get("event") == MEASURED and handover is not None:
            self.sampler.stop()
            self.handed = _read(
                self._orders.folder, self._machine, self._rules_dirs, self._say, start_s=self._first_s, notes=self._told
            )
            handover.give(self.handed.profile, self.handed.findings)


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
    from advisor.loop import rankrecords
    from advisor.profiling.after.assemble import assemble

    say("reading the trace")
    code = ended.code if ended is not None else 0
    measured = replace(assemble(run_dir, machine, exit_code=code), start_s=start_s)
    if ended is not None and ended.code and not ended.stopped_by_advisor:
        measured = replace(measured, notes=(_ended(ended.code, ended.signal), *measured.notes))
    moved = other_gpu(measured.model.env)
    measured = replace(measured, notes=(*moved, *measured.notes, *notes))
    storage.save(run_dir / PROFILE_FILE, measured)
    if is_empty(measured):
        if ended is not None:
            say(rankrecords.elsewhere(run_dir) or nothing_measured(measured, ended))
        return ProfileResult(run_dir=run_dir, exit_code=code, profile=None)
    found = evaluate_run(measured, run_dir, rules_dirs=rules_dirs)
    storage.save(run_dir / FINDINGS_FILE, found)
    if ended is not None:
        write_report(run_dir, measured, found, None)
    return ProfileResult(run_dir=run_dir, exit_code=code, profile=measured, findings=found)


def profile_trace(file: Path, *, out: Path | None = None, rules_dirs: Sequence[Path] = (), say: Say) -> ProfileResult:
    """Read a trace of torch.profiler that was made elsewhere, and write profile.json, findings.json and report.html.

    Raises:
        AdvisorError: when it cannot be read or holds nothing, or a folder cannot be written.
    """
    from advisor.profiling.after import kineto
    from advisor.profiling.after.assemble import assemble

    check_rules(rules_dirs)
    run_dir = new_run_dir(file.name, out)
    say(f"reading {file}; results go to {shown_path(run_dir)}")
    machine = kineto.imported(file, run_dir)
    notes = f"read from {file.name}: its step times hold the profiler's own cost"
    measured = replace(assemble(run_dir, machine, exit_code=0), origin=file.name)
    measured = replace(measured, notes=(notes, *measured.notes))
    storage.save(run_dir / PROFILE_FILE, measured)
    found = evaluate_run(measured, run_dir, rules_dirs=rules_dirs)
    storage.save(run_dir / FINDINGS_FILE, found)
    write_report(run_dir, measured, found, None)
    return ProfileResult(run_dir=run_dir, exit_code=0, profile=measured, findings=found)


def shorter_session(session: Session, code: int) -> Session | None:
    """Orders for a second start whose windows fit into the steps that the first one made; None where there is no need or
    no hope.
    """
    from advisor.loop.records import OWN_WORK, STEPS_FILE, StepsRecord

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


def check_measured(ended: Exit, *, thrown_away: bool, held: str = "") -> None:
    """A script of which nothing was measured for a reason that is not its own.

    Args:
        held: the file that another run of advisor keeps from it, and which run.

    Raises:
        AdvisorError: with that reason; exit code 2 where another run is to end first, 3 where advisor has switched itself off, 4 where no step was to come.
    """
    if ended.code and held:
        fix = "Try again when that run has ended."
        raise AdvisorError(f"the script failed because another run of advisor keeps its file: {held}", fix=fix)
    if ended.fault and thrown_away:
        raise AdvisorError(
            f"advisor switched itself off in the script: {ended.fault}",
            fix="`advisor doctor` shows what is installed here.",
            exit_code=ExitCode.OWN_FAULT,
        )
    if ended.gave_up:
        raise AdvisorError(ended.gave_up, exit_code=ExitCode.INCONCLUSIVE)


def nothing_measured(measured: StepProfile, ended: Exit) -> str:
    from advisor.loop.session import DISABLE_VARIABLE, disabled
    from advisor.loop.waiting import OTHERS_WORKED, WaitStage, missing

    if disabled():
        return f"{DISABLE_VARIABLE} is set: the script ran by itself, and nothing was measured"
    if ended.fault:
        return f"advisor switched itself off in the script, which went on: {ended.fault}"
    if failed := _ended(ended.code, ended.signal):
        return f"{failed}, before enough training steps were seen"
    if ended.reached < WaitStage.TORCH:
        return f"nothing was measured: {missing(ended.reached)}"
    if measured.steps_seen:
        return f"only {measured.steps_seen} steps were seen, too few to measure; let the script train for longer"
    if OTHERS_WORKED in measured.notes:
        return f"no training step was seen: {OTHERS_WORKED}"
    return "no training step was seen; if the script trains without an optimizer, call advisor.step() after each step"


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
    found = evaluate_run(measured, folder, rules_dirs=rules_dirs, select=select, ignore=ignore, overrides=overrides)
    return measured, found
