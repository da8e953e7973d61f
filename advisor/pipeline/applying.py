"""`advisor apply` and `try`: search for what helps, prove a plan again, judge a patch."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import storage
from advisor.core.errors import AdvisorError, ExitCode
from advisor.core.findings import Findings, Recommendation
from advisor.core.profile import StepProfile
from advisor.core.transform_table import row
from advisor.pipeline.applied import ApplyResult, plan_beside
from advisor.pipeline.profiling import ProfileResult, profile_script
from advisor.pipeline.shared import Say, begin_run, check_rules, evaluate_run, shown_path, write_report
from advisor.runs import FINDINGS_FILE, PROFILE_FILE, LoadedRun, find_plan, load_run
from advisor.trials.options import USUAL, USUAL_TIME_S, SearchOptions
from advisor.trials.records import OUTPUT_FILE

if TYPE_CHECKING:
    from advisor.core.attempt import Attempt
    from advisor.loop.session import Session
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.beside.relay import Relay
    from advisor.trials.choosing import Ask
    from advisor.trials.handover import Handover
    from advisor.trials.search import Search


# Its first profile takes at most a tenth of that behind the script's own start, or half a minute where that is more: `pace` is of what the
# windows of slow steps take together, with the reading of the trace.
PROFILE_SHARE, PROFILE_LEAST_S, USUAL_WINDOWS_S = 0.1, 30.0, 130.0
# --max-time counts from the script's first step on. Until then torch is imported and data are read, however short the search is to be.
FIRST_STEP_LEAST_S = 120.0


def apply(
    words: Sequence[str] = (),
    *,
    module: bool = False,
    options: SearchOptions = USUAL,
    ask: Ask | None = None,
    dry_run: bool = False,
    out: Path | None = None,
    share: int = 1,
    say: Say,
) -> ApplyResult:
    """Profile the script (or start from the last profiled run), try what is recommended, write trials.json and plan.yaml.

    What was kept is profiled in its turn, and what the rules recommend then is tried in a round of its own: trials/rounds.py.

    Args:
        ask: asked before each candidate; None tries all of them (`--auto`).
        share: the process trains on what one of so many ranks would be given of each batch.

    Exit code: 0 when something was kept or nothing was to be done, 4 when noise, time or the user's answers left that open, the
    script's own when it failed before anything could be measured.

    Raises:
        AdvisorError: for a script that cannot be started, an unknown transform id, or no run to start from.
        KeyboardInterrupt: when the user ends the script that is profiled.
    """
    from advisor.distributed import starting
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.beside.relay import Relay

    check_names(options)
    check_rules(options.rules_dirs)
    source = None if words else load_run("last")
    if source is not None:
        words, module = (source.profile.script, *source.profile.argv), False
    command = ScriptCommand.parse(words, module=module)
    if share > 1:
        command = starting.one_of(command, share)
    run_dir = begin_run(command.name, out, say)
    with contextlib.closing(Relay()) as relay:
        work = _Applying(command=command, run_dir=run_dir, relay=relay, options=options, ask=ask, say=say)
        if source is None:
            result = work.profile(goes_on=ask is None and not dry_run)
            if result.profile is None or result.findings is None or result.exit_code:
                return work.not_measured(result)
            measured, found = result.profile, result.findings
        else:
            measured, found = work.start_from(source)
        _check_kind(options.only, measured)
        candidates = options.chosen(found.recommendations)
        if (exit_code := work.nothing_to_try(candidates, measured, dry_run=dry_run)) is not None:
            shown = replace(found, recommendations=candidates) if dry_run else found
            return ApplyResult(run_dir=run_dir, exit_code=exit_code, profile=measured, findings=shown)
        if measured.model.world_size > 1:
            return work.search_in_ranks(candidates, measured, found)
        return work.search(candidates, measured, found)


@dataclass(slots=True, eq=False, kw_only=True)
class _Applying:
    """One `apply`, from its profile to its plan; fields as the arguments of `apply`."""

    command: ScriptCommand
    run_dir: Path
    relay: Relay
    options: SearchOptions
    ask: Ask | None
    say: Say
    handover: Handover | None = None
    _started: float = field(default_factory=time.monotonic)
    _begun: Search | None = None  # while the profiled process waited for its orders

    def profile(self, *, goes_on: bool) -> ProfileResult:
        """The first profile. `goes_on`: its process is the first of the search."""
        from advisor.loop.session import Session
        from advisor.profiling.beside import bytecode
        from advisor.trials import budget
        from advisor.trials.beforehand import compile_ahead
        from advisor.trials.handover import Handover

        self.handover = Handover(self._orders, self.run_dir) if goes_on else None
        return profile_script(
            self.command,
            Session(
                mode="profile",
                run_dir=str(self.run_dir),
                script=self.command.words[0],
                argv=self.command.words[1:],
                pace=min(1.0, max(PROFILE_LEAST_S, PROFILE_SHARE * self.options.time_s) / USUAL_WINDOWS_S),
                first_step_s=max(FIRST_STEP_LEAST_S, self.options.time_s),
                settle_s=budget.settle_s(self.options.time_s),
            ),
            rules_dirs=self.options.rules_dirs,
            say=self.say,
            searched=True,
            ahead=compile_ahead,
            handover=self.handover,
            launch=functools.partial(self.relay, environment=bytecode.variables()),
        )

    def start_from(self, source: LoadedRun) -> tuple[StepProfile, Findings]:
        """The profile of an earlier run, with what the rules say to it now, is this run's."""
        measured = source.profile
        found = evaluate_run(measured, self.run_dir, rules_dirs=self.options.rules_dirs)
        self.say(f"starting from {shown_path(source.run_dir)}")
        storage.save(self.run_dir / PROFILE_FILE, measured)
        storage.save(self.run_dir / FINDINGS_FILE, found)
        return measured, found

    def nothing_to_try(
        self, candidates: Sequence[Recommendation], measured: StepProfile, *, dry_run: bool
    ) -> int | None:
        """The exit code where it ends with the profile, with the reason said; None where the candidates are to be tried."""
        from advisor.reporting import wording

        forward = measured.step_kind == "forward"
        if (why := wording.refused(measured, "advisor")) and (forward or not dry_run):
            self.say(why)
            return int(ExitCode.OK if forward else ExitCode.INCONCLUSIVE)
        if dry_run:
            return int(ExitCode.OK)
        if not candidates and not measured.complete and measured.model.world_size == 1:
            self.say("too few steps were measured to say what would help; let the script train for longer")
            return int(ExitCode.INCONCLUSIVE)
        return None

    def not_measured(self, result: ProfileResult) -> ApplyResult:
        """The script has failed, or shown too little."""
        from advisor.trials.script import last_line

        if result.exit_code:
            self.say("the script ended before it could be measured, so nothing is tried")
            if last := last_line(self.run_dir / OUTPUT_FILE):
                self.say(f"its last line, from {shown_path(self.run_dir / OUTPUT_FILE)}: {last}")
        return ApplyResult(
            run_dir=self.run_dir,
            exit_code=result.exit_code or int(ExitCode.INCONCLUSIVE),
            profile=result.profile,
            findings=result.findings,
        )

    def search(self, candidates: Sequence[Recommendation], measured: StepProfile, found: Findings) -> ApplyResult:
        """Try the candidates; in the process that was profiled that has begun, where it goes on."""
        from advisor.trials import ledger, proved_before

        log, plan, exit_code = (self._begun or self._begin(measured)).finish(candidates)
        whole = proved_before.entry(log, measured)
        ledger.append([*ledger.entries(log, measured), *([whole] if whole is not None else [])])
        write_report(self.run_dir, measured, found, log)
        file = plan_beside(plan, self.run_dir, self.say)
        return ApplyResult(
            run_dir=self.run_dir,
            exit_code=exit_code,
            profile=measured,
            findings=found,
            log=log,
            plan=plan,
            plan_file=file,
        )

    def search_in_ranks(
        self, candidates: Sequence[Recommendation], measured: StepProfile, found: Findings
    ) -> ApplyResult:
        """Try the candidates, and how gradients are sent, in all processes of the script at once.

        Raises:
            AdvisorError: without --auto, for nobody can be asked in the middle of all of them.
        """
        from advisor.pipeline.script_ranks import search_script

        if self.ask is not None:
            world = measured.model.world_size
            raise AdvisorError(f"the script trains in {world} processes", expected="--auto", fix="Use --auto.")
        until_s = self._started + self.options.time_s + (measured.start_s or 0.0)
        return search_script(
            self.command, self.run_dir, candidates, (measured, found), self.options, until_s=until_s, say=self.say
        )

    def _begin(self, measured: StepProfile) -> Search:
        from advisor.trials.search import begin

        now = time.monotonic()
        profiled_s, before_s = now - self._started, measured.start_s or 0.0
        if self.handover is not None and self.handover.first_step is not None:
            before_s = self.handover.first_step - self._started  # the machine was measured too, once
        # What the script itself takes to its first step is its own time, not the search's.
        left_s = max(0.0, self.options.time_s - profiled_s + before_s)
        search = begin(
            self.command,
            measured,
            options=replace(self.options, time_s=left_s),
            ask=self.ask,
            recommend=self._asked_anew,
            run_dir=self.run_dir,
            say=self.say,
            launch=self.relay,
        )
        search.profiled_s, search.before_s, search.given_s = profiled_s, before_s, self.options.time_s
        return search

    def _asked_anew(self, again: StepProfile, folder: Path) -> Sequence[Recommendation]:
        """What the rules say to a later round's profile."""
        found = evaluate_run(again, folder, rules_dirs=self.options.rules_dirs)
        storage.save(folder / PROFILE_FILE, again)
        storage.save(folder / FINDINGS_FILE, found)
        return self.options.chosen(found.recommendations)

    def _orders(self, measured: StepProfile, found: Findings) -> tuple[Search, Session] | None:
        """The search, and the orders of its first process, for the one that was profiled; None where nothing is to be tried."""
        from advisor.reporting import wording

        if measured.model.flags.get("cupy_alone", False):
            return None  # its changes are on from the start
        if measured.model.world_size > 1:
            return None  # all ranks go on together, or none
        _check_kind(self.options.only, measured)
        candidates = self.options.chosen(found.recommendations)
        if not candidates or measured.step_kind == "forward" or wording.refused(measured, "advisor"):
            return None
        self._begun = search = self._begin(measured)
        orders = search.first_orders(candidates)
        return (search, orders) if orders is not None else None


def prove(
    words: Sequence[str] = (),
    *,
    plan: Path,
    module: bool = False,
    options: SearchOptions = USUAL,
    out: Path | None = None,
    say: Say,
) -> ApplyResult:
    """Prove a plan (its file, the folder of its run, or `last`) again, here and now, without a profile or a search, and write
    trials.json and plan.yaml: trials/prove.py.

    Without words the script is the plan's own. Of the options `only`, `skip` and `time_s` are asked. Exit code: 0 when the plan, or some of it, is proved, or nothing of it holds; 4 when
    that was left open; the script's own where it fails before it is measured.

    Raises:
        AdvisorError: for a plan that cannot be read or has nothing to prove, a script that cannot be started, an unknown transform id.
        KeyboardInterrupt: before anything was started.
    """
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.profiling.machine import environment
    from advisor.trials import planfile
    from advisor.trials.prove import TO_PROVE, prove_plan, wanted

    check_names(options)
    command = ScriptCommand.parse(words, module=module) if words else None
    named = command.name if command is not None else ""
    found = find_plan(plan, lambda known: any(item.status in TO_PROVE for item in known.items), named)[1]
    loaded = wanted(found, only=options.only, skip=options.skip)
    if command is None:
        command = ScriptCommand.parse((loaded.script, *loaded.argv))
    if other := planfile.another_script(loaded, command.name):
        say(f"plan: {other}")
    run_dir = begin_run(command.name, out, say)
    log, proved, exit_code = prove_plan(
        command,
        loaded,
        environment=planfile.environment_text(environment.probe()),
        max_time_s=options.time_s,
        run_dir=run_dir,
        say=say,
    )
    file = plan_beside(proved, run_dir, say)
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
    from advisor.profiling.beside.command import ScriptCommand
    from advisor.trials.patched import try_patch

    check_names(USUAL)
    command = ScriptCommand.parse(words, module=module)
    run_dir = begin_run(command.name, out, say)
    options = SearchOptions(min_gain=min_gain, time_s=max_time_s)
    return try_patch(command, words, patch, module=module, options=options, run_dir=run_dir, say=say)


def check_names(options: SearchOptions) -> None:
    """Said before any work: changes that do not exist, and that none may be made.

    Raises:
        AdvisorError: for either.
    """
    from advisor.loop.session import DISABLE_VARIABLE, disabled

    for name in (*options.only, *options.skip):
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
