"""The supervisor's side, with children that are told what to leave in the run folder."""

import dataclasses
import itertools
import random
import re
import signal
import time

import pytest
import searches
from clocks import Clock

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.findings import Findings, Interval, Recommendation, Semantics
from advisor.core.profile import InputStats, Spread, StepProfile
from advisor.core.verdict import Blocks, StackVerdict, TrialLog, Verdict
from advisor.loop.records import NEXT_FILE
from advisor.loop.session import Session
from advisor.loop.waiting import WaitStage, patience_s
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.reporting import terminal_trials, wording
from advisor.trials import budget, fresh, handover, planfile, planner, processes, prove, records, search, spent
from advisor.trials.choosing import Answer
from advisor.trials.options import SearchOptions
from advisor.trials.script import Script as RealScript
from advisor.trials.script import last_line
from advisor.userfiles import restore
from advisor.userfiles.guard import Guard


def candidate(name, **more):
    return Recommendation(transform=name, title=f"title of {name}", predicted=Interval(low=0.1, high=0.2), **more)


# Advisor has switched itself off in a process that had come to its steps.
OFF = Exit(code=0, stopped_by_advisor=True, fault="KeyError: 1")


class Script:
    """Stands for the launcher and the script: `search` and `measure` decide what each child does."""

    def __init__(self, run_dir, clock=None):
        self.run_dir, self.launches, self.clock = run_dir, [], clock or Clock()
        self.verdicts = {}  # transform → status, or a callable(session) → Exit
        self.step_us = {(): 1000.0}  # kept transforms → step time
        self.restart_only = set()
        self.on_top = ()
        self.together = {}  # transform → those it was tried with as one
        self.noise = 0.01  # of a step
        self.device_us = {}  # kept transforms → of it, the device's own where nobody waits for the loader
        self.loss = lambda kept, step: 2.0 - 0.01 * step
        self.steps_a_life = None  # candidates a child gets through before the script ends by itself
        self.stops = Exit(code=0, stopped_by_advisor=True)

    def __call__(self, command, session, *, on_progress=None, timeout_s=None, environment=None, output=None):
        self.launches.append(session)
        self.clock.sleep(0.01)
        assert session.protect_files
        return self.search(session) if session.mode == "search" else self.measure(session)

    def search(self, session):
        for done, item in enumerate(session.candidates):
            if done == self.steps_a_life:
                return Exit(code=0)
            current = records.load_current(self.run_dir)
            if current is None or current.transform != item.transform:
                current = records.InTrial(transform=item.transform)
            records.save_current(self.run_dir, dataclasses.replace(current, phase="gate"))
            if item.transform in planner.ON_TOP - self.restart_only:
                self.on_top += (item.transform,)
                records.clear_current(self.run_dir)
                continue
            if item.transform in self.restart_only:
                storage.save(self.run_dir / records.SEARCH_FILE, records.SearchRecord(restart=item.transform))
                return self.stops
            outcome = self.verdicts[item.transform]
            if callable(outcome):
                return outcome(session)
            records.save_verdict(
                self.run_dir,
                Verdict(
                    transform=item.transform,
                    status=outcome,
                    reason="as told",
                    semantics=item.semantics,
                    round=item.round,
                    together=self.together.get(item.transform, ()),
                ),
            )
            records.clear_current(self.run_dir)
        done = records.SearchRecord(complete=True, model_hash="m0", on_top=self.on_top)
        storage.save(self.run_dir / records.SEARCH_FILE, done)
        return self.stops

    def measure(self, session):
        names = tuple(item.transform for item in session.kept)
        r = random.Random(len(self.launches))
        base = self.step_us.get(names, self.step_us[()])
        if base is None:
            with (self.run_dir / records.OUTPUT_FILE).open("a") as output:
                output.write("ValueError: cannot decode image 4000\n")
            return Exit(code=1)
        if isinstance(base, Exit):
            return base
        steps = tuple(base * (1 + r.gauss(0, self.noise)) for _ in range(session.steps))
        storage.save(
            self.run_dir / records.MEASURE_FILE,
            records.Measurement(
                step_us=steps,
                every_us=steps,
                device_us=tuple(self.device_us[names] for _ in steps) if names in self.device_us else (),
                losses=tuple(self.loss(names, i) for i in range(session.warmup + session.steps)),
                batch_size=32,
                applied=names,
                kernels=("grouped/f.cu",) if names else (),
                complete=True,
            ),
        )
        return self.stops


@pytest.fixture
def script(tmp_path, clock):
    return Script(tmp_path, clock)


COMMAND = ScriptCommand(argv=("python", "train.py"), name="train.py", arguments=("--lr", "0.1"))


def apply(script, *names, **more):
    items = [n if isinstance(n, Recommendation) else candidate(n) for n in names]
    said = []
    log, plan, code = searches.searched(
        COMMAND, items, None, run_dir=script.run_dir, say=said.append, launch=script, **more
    )
    assert storage.load(script.run_dir / "trials.json", TrialLog) == log
    assert planfile.read(script.run_dir / "plan.yaml") == plan
    return log, plan, code, {v.transform: v for v in log.verdicts}


def test_what_is_kept_goes_into_the_plan_with_its_speedup(script):
    script.verdicts = {"tf32": "kept", "channels_last": "reverted", "compile": "kept"}
    script.step_us[("tf32", "compile")] = 500.0
    log, plan, code, _ = apply(script, "compile", "tf32", "channels_last")
    assert code == 0
    assert [(i.transform, i.status) for i in plan.items] == [
        ("tf32", "kept"),
        ("compile", "kept"),
        ("channels_last", "reverted"),
    ]
    assert log.stack.passed
    assert 1.9 < log.stack.speedup_low < log.stack.speedup < log.stack.speedup_high < 2.1
    assert log.stack.samples_per_s_stack == pytest.approx(64_000, rel=0.02)
    assert log.stack.kernels == ("grouped/f.cu",)
    assert plan.speedup.startswith("2.0")
    assert plan.hashes.model == "m0"
    arms = [tuple(i.transform for i in s.kept) for s in script.launches if s.mode == "measure"]
    assert arms[:4] == [(), ("tf32", "compile"), ("tf32", "compile"), ()]
    assert sorted(arms[4:]) == [("compile",), ("tf32",)]  # then each is left out, in one run where that tells
    assert [s.steps for s in script.launches if s.mode == "measure"][3:] == [30, 15, 15]
    # Each pair of fresh runs, plain and stack, has a seed of its own; the second pair runs in the other order.
    seeds = [s.seed for s in script.launches if s.mode == "measure"]
    assert seeds[0] == seeds[1] == seeds[4] == seeds[5] != seeds[2] == seeds[3]
    assert all(0.48 < v.left_out_gain.low < v.left_out_gain.high < 0.52 for v in log.verdicts if v.status == "kept")
    assert log.complete


def handed_over(script, *names):
    """A search whose first process was profiled before: what it did with its orders, and what came of it all."""
    items = tuple(candidate(n) for n in names)
    begun = search.begin(COMMAND, None, run_dir=script.run_dir, say=lambda text: None, launch=script)
    profile = StepProfile(script="train.py", argv=(), created="", environment=Environment(), step_kind="optimizer",
                          step_us=None, wall_us=None)  # fmt: skip
    given = handover.Handover(lambda *_: (begun, begun.first_orders(items)), script.run_dir)
    given.give(profile, Findings(run="", findings=(), cards=(), recommendations=items))
    orders = storage.load(script.run_dir / NEXT_FILE, Session)
    assert (orders.mode, {c.transform for c in orders.candidates}) == ("search", set(names))
    assert given.timeout_s() > begun.processes.budget.trial_s
    given.ended(script.search(orders))
    return begun.finish(items)


def test_a_process_that_was_profiled_is_the_first_that_searches(script):
    script.verdicts = {"tf32": "kept", "channels_last": "reverted"}
    script.step_us[("tf32",)] = 500.0
    log, _, code = handed_over(script, "tf32", "channels_last")
    assert code == 0
    assert {v.transform: v.status for v in log.verdicts} == {"tf32": "kept", "channels_last": "reverted"}
    assert "search" not in {s.mode for s in script.launches}  # none but the one that was handed over


def test_a_comparison_on_a_machine_that_has_become_slow_ends_with_twice_the_time(script):
    """On two loaded cores a search of 60 s took 150 s: its fresh runs had no end."""
    began, given = script.clock.time(), []

    def hangs(session):
        script.clock.sleep(given[-1])
        return Exit(code=143, timed_out=True)

    def launch(command, session, *, timeout_s=None, **more):
        given.append(timeout_s)
        return hangs(session) if session.mode == "measure" and session.kept else script(command, session, **more)

    script.verdicts = {"tf32": "kept"}
    begun = search.begin(
        COMMAND,
        None,
        options=search.SearchOptions(time_s=100.0),
        run_dir=script.run_dir,
        say=lambda text: None,
        launch=launch,
    )
    log, _, code = begun.finish((candidate("tf32"),))
    assert code == 4
    assert script.clock.time() - began <= 201.0
    (verdict,) = log.verdicts
    assert verdict.status == "unconfirmed"
    assert "its time was up" in verdict.reason


@pytest.mark.parametrize(("kept", "code"), [((), 3), (("tf32",), 4)])
def test_of_one_that_was_handed_over_it_is_told_how_it_ended_also_where_its_time_is_up(script, kept, code):
    """A fault of advisor's was told as the end of time: nothing had looked at how the process ended."""

    def late(session):
        script.clock.sleep(100_000)
        return OFF

    script.verdicts = dict.fromkeys(kept, "kept") | {"channels_last": late}
    log, _, ended = handed_over(script, *kept, "channels_last")
    assert ended == code
    told = {v.transform: (v.status, v.reason) for v in log.verdicts}
    assert told["channels_last"] == ("failed", "advisor switched itself off in its gate: KeyError: 1")
    assert bool(log.fault) is (not kept)


def test_one_that_dies_after_it_was_handed_over_is_followed_by_another(script):
    lives = iter((True, False))

    def dies_once(session):
        if next(lives):
            return Exit(code=139, signal=int(signal.SIGSEGV))
        storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(complete=True))
        return script.stops

    script.verdicts = {"channels_last": "reverted", "tf32": dies_once}
    log, _, _ = handed_over(script, "channels_last", "tf32")
    verdicts = {v.transform: v for v in log.verdicts}
    assert verdicts["tf32"].status == "failed"
    assert "signal 11" in verdicts["tf32"].reason
    assert [s.mode for s in script.launches].count("search") >= 1  # for what is left


def test_where_nothing_is_to_be_tried_the_process_that_was_profiled_is_told_to_end(tmp_path):
    given = handover.Handover(lambda *_: None, tmp_path)
    given.give(None, None)
    assert storage.load(tmp_path / NEXT_FILE, Session).mode == handover.ENDS
    assert given.search is None
    assert given.timeout_s() is None


def plain_run(**more):
    steps = tuple(1000.0 + i % 5 for i in range(30))
    return records.Measurement(
        step_us=steps,
        every_us=steps,
        losses=tuple(2.0 - 0.01 * i for i in range(42)),
        batch_size=32,
        complete=True,
        **more,
    )


@pytest.mark.parametrize(("known", "kernel_steps", "runs"), [
    (plain_run(), 0, [("tf32",)]),
    (plain_run(), 6, [(), ("tf32",)]),  # its kernels' time is asked for, and not known
    (plain_run(kernel_us=(500.0,) * 6), 6, [("tf32",)]),
    (None, 0, [(), ("tf32",)]),
])  # fmt: skip
def test_what_was_timed_while_the_script_was_profiled_is_a_plain_run_of_the_first_proof(
    script, known, kernel_steps, runs
):
    if known is not None:
        records.save_plain(script.run_dir, known)
    script.step_us[("tf32",)] = 500.0
    records.save_verdict(script.run_dir, Verdict(transform="tf32", status="kept", reason="as told"))
    begun = search.begin(COMMAND, None, run_dir=script.run_dir, say=lambda text: None, launch=script)
    begun.stack.runs.kernel_steps = kernel_steps
    proved = begun.stack.prove(quick=True)
    assert proved.holds
    assert [tuple(i.transform for i in s.kept) for s in script.launches] == runs


def test_what_feeds_the_loop_is_held_against_a_whole_plain_run(script):
    """The steps that were timed while the script was profiled are few, and with another loader all steps count."""
    records.save_plain(script.run_dir, plain_run())
    script.step_us.update({("tf32",): 500.0, ("tf32", "loader_workers"): 250.0})
    records.save_verdict(script.run_dir, Verdict(transform="tf32", status="kept", reason="as told"))
    begun = search.begin(COMMAND, None, run_dir=script.run_dir, say=lambda text: None, launch=script)
    begun.processes.on_top.append(candidate("loader_workers", parameters={"workers": "8"}))
    begun.prove_at_once()
    assert set(begun.proved.items) == {"tf32", "loader_workers"}
    runs = [tuple(i.transform for i in s.kept) for s in script.launches]
    assert runs[:3] == [("tf32",), (), ("tf32", "loader_workers")]


def test_fewer_pairs_bound_the_fresh_runs_and_the_trials(script):
    script.restart_only = {"loader_workers"}
    script.step_us.update({("loader_workers",): 995.0})  # hidden in the noise, whatever the number of pairs
    _, _, _, verdicts = apply(script, "loader_workers", max_pairs=3)
    assert verdicts["loader_workers"].status in ("inconclusive", "reverted")
    assert len(verdicts["loader_workers"].blocks.off_us) <= 3
    assert script.launches[0].max_pairs == 3


def test_an_item_that_the_stack_is_as_fast_without_is_dropped(script):
    script.verdicts = {"tf32": "kept", "compile": "kept", "channels_last": "kept"}
    names = ("tf32", "channels_last", "compile")
    script.step_us.update({names: 500.0, ("tf32", "channels_last"): 700.0, ("channels_last", "compile"): 800.0})
    script.step_us[("tf32", "compile")] = 490.0  # channels_last is of no use beside the others
    script.step_us.update({("tf32",): 700.0, ("compile",): 800.0})
    log, plan, code, verdicts = apply(script, *script.verdicts)
    assert code == 0
    assert {n: v.status for n, v in verdicts.items()} == {
        "tf32": "kept",
        "compile": "kept",
        "channels_last": "reverted",
    }
    assert "as fast without it" in verdicts["channels_last"].reason
    assert verdicts["channels_last"].left_out_gain.high < 0.01
    assert log.stack.passed
    assert log.stack.stack_us[0] == pytest.approx(490.0, rel=0.01)
    # A short look says no more than that; what is dropped by has losses as long as the others'.
    rest = [s for s in script.launches if s.mode == "measure" and [i.transform for i in s.kept] == ["tf32", "compile"]]
    assert [s.steps for s in rest] == [15, 30, 30]
    assert [i.transform for i in plan.items if i.status == "kept"] == ["tf32", "compile"]


@pytest.mark.parametrize(
    ("alone_us", "noise", "kept"), [(500.0 * 1.006, 0.001, True), (500.0, 0.001, False), (500.0 * 1.006, 0.004, True)]
)
def test_what_was_kept_with_others_stays_where_the_stack_seems_slower_without(script, alone_us, noise, kept):
    """A gain below the least that is kept alone: 0.6 % of the step, certain or hidden by noise; and none."""
    script.noise = noise
    script.verdicts = {"first_conv": "kept", "fused_optimizer": "kept"}
    script.step_us.update(
        {("first_conv", "fused_optimizer"): 500.0, ("first_conv",): alone_us, ("fused_optimizer",): 900.0}
    )
    script.together = {"first_conv": ("fused_optimizer",), "fused_optimizer": ("first_conv",)}
    *_, verdicts = apply(script, *script.verdicts)
    assert verdicts["first_conv"].status == "kept"
    assert verdicts["fused_optimizer"].status == ("kept" if kept else "reverted")
    assert verdicts["fused_optimizer"].left_out_gain.high < 0.01 or noise > 0.001
    # What stays is settled by the short run: no certainty is worth two whole ones where nothing would be dropped.
    rest = [s for s in script.launches if s.mode == "measure" and [i.transform for i in s.kept] == ["first_conv"]]
    assert [s.steps for s in rest] == ([15] if kept else [15, 30, 30])


def test_by_itself_no_change_stays_for_that_little(script):
    script.noise = 0.001
    script.verdicts = {"first_conv": "kept", "fused_optimizer": "kept"}
    script.step_us.update(
        {("first_conv", "fused_optimizer"): 500.0, ("first_conv",): 503.0, ("fused_optimizer",): 900.0}
    )
    *_, verdicts = apply(script, *script.verdicts)
    assert verdicts["fused_optimizer"].status == "reverted"


def test_nothing_is_left_out_when_time_is_up(script, monkeypatch):
    script.verdicts = {"tf32": "kept", "compile": "kept"}
    script.step_us[("tf32", "compile")] = 500.0
    monkeypatch.setattr(budget, "LEFT_OUT_SHARE", 0.0)
    log, _, code, verdicts = apply(script, *script.verdicts)
    assert code == 0
    assert {v.left_out_gain for v in verdicts.values()} == {None}
    assert [note for note in log.notes if "no time was left to run the plan without" in note] == [
        "no time was left to run the plan without TF32 for fp32 convolutions and matrix products, torch.compile"
    ]


def swinging(by_seed):
    """Losses that a training's first steps leap between, by the seed of the run."""
    return lambda session, step: 2.0 + by_seed[session.seed - fresh.SEED] * (1.0 + 0.01 * (step % 3))


@pytest.mark.parametrize(("later", "status"), [((0.0, 1.5), "kept"), ((0.0, 0.05), "reverted")])
def test_further_plain_runs_are_asked_before_losses_condemn_what_is_kept(script, later, status):
    """Two plain runs that agree by chance are no envelope; four that agree are one."""
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0
    plain, with_it = swinging((0.0, 0.02, *later)), swinging((1.2, 1.2))
    measured_with(
        script,
        lambda names, turn, found: dataclasses.replace(
            found, losses=tuple((with_it if names else plain)(script.launches[-1], i) for i in range(len(found.losses)))
        ),
    )
    _, _, _, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == status
    arms = [tuple(i.transform for i in s.kept) for s in script.launches if s.mode == "measure"]
    assert arms[:6] == [(), ("tf32",), ("tf32",), (), (), ()]
    seeds = [s.seed - fresh.SEED for s in script.launches if s.mode == "measure"]
    assert seeds[:6] == [0, 0, 1, 1, 2, 3]


def test_losses_that_are_not_numbers_are_asked_nothing_more(script):
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0
    nothing = float("nan")
    measured_with(
        script,
        lambda names, turn, found: (
            dataclasses.replace(found, losses=(nothing,) * len(found.losses)) if names else found
        ),
    )
    _, _, _, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == "reverted"
    assert "NaN" in verdicts["tf32"].reason
    assert sum(s.mode == "measure" for s in script.launches) == 4


def test_the_log_tells_where_the_time_went(script):
    def told(session):
        seconds = {spent.GATE: 1e-9, spent.BLOCKS: 2e-9}
        storage.save(script.run_dir / "trials" / records.SPENT_FILE, records.Spent(seconds=seconds))
        script.verdicts["tf32"] = "kept"
        return script.search(session)

    script.verdicts = {"tf32": told, "compile": "kept"}
    script.step_us[("tf32", "compile")] = 500.0
    log, *_ = apply(script, "tf32", "compile", profiled_s=100.0)
    assert log.spent[spent.PROFILE] == 100.0
    assert log.spent[spent.GATE] == 1e-9
    assert {spent.START, spent.STACK, spent.LEFT_OUT} < set(log.spent)
    assert sum(log.spent.values()) == pytest.approx(log.seconds)


def test_nothing_to_do_is_a_good_answer(script):
    log, plan, code, _ = apply(script)
    assert (code, log.verdicts, log.stack, plan.items) == (0, (), None, ())
    script.verdicts = {"tf32": "reverted", "compile": "not applicable"}
    assert apply(script, "tf32", "compile")[2] == 0


def test_a_trial_of_several_as_one_that_failed_is_a_note(script):
    def split(session):
        as_one = Verdict(transform="fused_pooling + first_conv", status="reverted", reason="no gain", title="both")
        records.save_verdict(script.run_dir, as_one)
        script.verdicts["fused_pooling"] = "reverted"
        return script.search(session)

    script.verdicts = {"fused_pooling": split, "first_conv": "kept"}
    script.step_us[("first_conv",)] = 500.0
    log, plan, _, verdicts = apply(script, "fused_pooling", "first_conv")
    assert {n: v.status for n, v in verdicts.items()} == {"fused_pooling": "reverted", "first_conv": "kept"}
    assert "both, tried as one: reverted, no gain" in log.notes
    assert {i.transform for i in plan.items} == set(verdicts)


def test_only_inconclusive_trials_say_so_in_the_exit_code(script):
    script.verdicts = {"tf32": "inconclusive"}
    assert apply(script, "tf32")[2] == 4


def test_a_script_that_ends_too_early_is_started_again_with_what_is_left(script):
    script.verdicts = {"tf32": "kept", "channels_last": "reverted", "fused_optimizer": "reverted"}
    script.steps_a_life = 1
    script.step_us[("tf32",)] = 700.0
    _, _, _, verdicts = apply(script, *script.verdicts)
    assert {n: v.status for n, v in verdicts.items()} == script.verdicts
    searches = [s for s in script.launches if s.mode == "search"]
    assert [len(s.candidates) for s in searches] == [3, 2, 1]
    assert [i.transform for i in searches[1].kept] == ["tf32"]


def test_pairs_of_a_trial_that_time_cuts_off_are_not_lost(script, clock):
    def half_way(session):
        storage.save(
            script.run_dir / "trials" / "current.json",
            records.InTrial(
                transform="tf32",
                phase="timing",
                off_us=(100.0, 101.0, 100.0, 102.0),
                on_us=(150.0, 151.0, 149.0, 150.0),
            ),
        )
        clock.sleep(1e6)  # then time is up
        return Exit(code=0)

    script.verdicts = {"tf32": half_way, "compile": "kept"}
    log, _, code, verdicts = apply(script, "tf32", "compile")
    assert verdicts["tf32"].status == "reverted"
    assert verdicts["tf32"].reason.startswith("out of time: the remaining 150 s are for the final comparison: slower")
    assert verdicts["tf32"].gain.high < -0.3
    assert verdicts["compile"].reason == "out of time: the remaining 150 s are for the final comparison"
    assert code == 4
    assert not log.complete


def test_a_script_too_short_for_any_trial_comes_to_an_end(script):
    script.verdicts = {"tf32": "kept"}
    script.steps_a_life = 0
    _, _, code, verdicts = apply(script, "tf32", "compile")
    assert code == 4
    assert verdicts["tf32"].status == "inconclusive"
    assert "more steps" in verdicts["tf32"].reason
    assert len(script.launches) < 8


@pytest.mark.parametrize(
    ("ended", "told"),
    [
        (Exit(code=1), "the change broke the script in its gate: RuntimeError: boom"),
        (Exit(code=137, signal=int(signal.SIGKILL)), "out of memory"),
        (Exit(code=139, signal=int(signal.SIGSEGV)), "signal 11"),
        (Exit(code=142, signal=int(signal.SIGALRM)), "did not end within"),
        (Exit(code=143, timed_out=True), "did not end within"),
    ],
)
def test_a_crash_is_blamed_on_the_candidate_and_the_search_goes_on(script, ended, told):
    def crashes(session):
        (script.run_dir / records.OUTPUT_FILE).write_text("Traceback\nRuntimeError: boom\n\n")
        return ended

    script.verdicts = {"tf32": crashes, "compile": "reverted"}
    _, _, code, verdicts = apply(script, "tf32", "compile")
    assert verdicts["tf32"].status == "failed"
    assert told in verdicts["tf32"].reason
    assert verdicts["tf32"].predicted is not None
    assert verdicts["compile"].status == "reverted"
    assert code == 0


HINTED = """step 12
Traceback (most recent call last):
  File "train.py", line 9, in <module>
    raise error from None
ValueError: the first of two

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "train.py", line 12, in <module>
    step()
AssertionError: expected size 8==8, stride 27==1 at dim=1

Error in op: input
This error most often comes from a incorrect fake (aka meta) kernel for a custom op.
Use torch.library.opcheck to test your custom op.
"""


@pytest.mark.parametrize(
    ("output", "told"),
    [
        (HINTED, "AssertionError: expected size 8==8, stride 27==1 at dim=1"),
        ("".join(f"[rank1]: {line}\n" for line in HINTED.splitlines()), "AssertionError: expected size 8==8, stride 27==1 at dim=1"),
        (HINTED.replace("AssertionError: expected size 8==8, stride 27==1 at dim=1", "torch._inductor.exc.InductorError"), "torch._inductor.exc.InductorError"),
        ("step 3\nKilled\n", "Killed"),
        ("", ""),
    ],
)  # fmt: skip
def test_of_an_error_its_first_line_is_told_and_not_the_hints_behind_it(tmp_path, output, told):
    (tmp_path / "out.log").write_text("said by an earlier process\n" + output)
    assert last_line(tmp_path / "out.log", since=len("said by an earlier process\n")) == told


def test_an_error_of_the_scripts_own_is_no_candidates(script):
    """It raises after so many steps, whatever is on trial: the first to meet that is tried again."""
    output = script.run_dir / records.OUTPUT_FILE
    met = []

    def raises(then):
        def ended(session):
            name = records.load_current(script.run_dir).transform
            met.append(name)
            if met.count(name) > 1:  # a process that has got farther with its trial comes to a verdict
                script.verdicts[name] = then
                return script.search(session)
            with open(output, "a") as stream:
                stream.write("Traceback\nIndexError: sample 6400\n")
            return Exit(code=1)

        return ended

    script.verdicts = {"tf32": raises("kept"), "compile": raises("reverted"), "channels_last": raises("reverted")}
    script.step_us[("tf32",)] = 500.0
    log, _, code, verdicts = apply(script, "tf32", "compile", "channels_last")
    assert {name: v.status for name, v in verdicts.items()} == {
        "tf32": "kept",
        "compile": "reverted",
        "channels_last": "reverted",
    }
    assert met[:2] != ["tf32", "tf32"]
    assert sum("IndexError: sample 6400" in note for note in log.notes) == 1
    assert code == 0
    assert log.stack.passed


def test_a_silent_end_is_not_told_by_an_earlier_process_error(script):
    output = script.run_dir / records.OUTPUT_FILE

    def raises(session):
        output.write_text("RuntimeError: one\n")
        return Exit(code=1)

    script.verdicts = {"tf32": raises, "compile": lambda session: Exit(code=1)}
    _, _, _, verdicts = apply(script, "tf32", "compile")
    assert verdicts["tf32"].status == verdicts["compile"].status == "failed"
    assert verdicts["compile"].reason == "the change broke the script in its gate: exit code 1"


def test_two_candidates_with_errors_of_their_own_have_failed(script):
    output = script.run_dir / records.OUTPUT_FILE

    def raises(text):
        def ended(session):
            with open(output, "a") as stream:
                stream.write(text)
            return Exit(code=1)

        return ended

    script.verdicts = {"tf32": raises("RuntimeError: one\n"), "compile": raises("RuntimeError: two\n")}
    _, _, _, verdicts = apply(script, "tf32", "compile")
    assert [verdicts[name].status for name in ("tf32", "compile")] == ["failed", "failed"]


def dies_in_its_effect(script, seen, unless_untraced=None):
    def ended(session):
        current = records.load_current(script.run_dir)
        seen.append(current.traced)
        if unless_untraced and not current.traced:
            script.verdicts[current.transform] = unless_untraced
            return script(None, session, environment={})
        records.save_current(script.run_dir, dataclasses.replace(current, phase="effect"))
        told = "Fatal Python error: Segmentation fault\n\nCurrent thread 0x1 [python] (most recent call first):\n"
        (script.run_dir / "trials" / records.FAULT_FILE).write_text(f'{told}  File "/a/collector.py", line 7 in stop\n')
        return Exit(code=139, signal=int(signal.SIGSEGV))

    return ended


def test_a_process_that_dies_under_the_tracer_tries_the_candidate_once_more_without(script):
    seen = []
    script.verdicts = {"tf32": dies_in_its_effect(script, seen, "kept"), "compile": "reverted"}
    script.step_us[("tf32",)] = 800.0
    log, _, _, verdicts = apply(script, "tf32", "compile")
    assert seen == [True, False]
    assert verdicts["tf32"].status == "kept"
    assert any("without a trace" in note and "(collector.py:7 in stop)" in note for note in log.notes)


def test_a_candidate_that_dies_without_the_tracer_too_has_failed(script):
    seen = []
    script.verdicts = {"tf32": dies_in_its_effect(script, seen), "compile": "reverted"}
    _, _, _, verdicts = apply(script, "tf32", "compile")
    assert seen == [True, False]
    assert verdicts["tf32"].status == "failed"
    assert "signal 11 in its effect (collector.py:7 in stop)" in verdicts["tf32"].reason
    assert verdicts["compile"].status == "reverted"


def test_a_script_that_fails_by_itself_is_not_started_for_ever(script, declare):
    for name in "abcdefgh":
        declare(name)
    script.verdicts = dict.fromkeys("abcdefgh", lambda session: Exit(code=1))
    log, _, code, verdicts = apply(script, *"abcdefgh")
    assert len(script.launches) == processes.CRASHES
    assert code == 4
    assert not log.complete
    assert verdicts["h"].status == "skipped"
    assert any("in a row" in note for note in log.notes)


def test_a_failure_outside_any_trial_ends_the_search(script):
    def fails(session):
        records.clear_current(script.run_dir)
        return Exit(code=3)

    script.verdicts = {"tf32": fails}
    log, _, code, verdicts = apply(script, "tf32")
    assert (code, verdicts["tf32"].status, len(script.launches)) == (4, "skipped", 1)
    assert "exit code 3" in log.notes[0]


def test_a_fault_of_our_own_costs_one_candidate(script):
    script.verdicts = {"tf32": lambda session: OFF, "compile": "reverted"}
    log, _, code, _ = apply(script, "tf32", "compile")
    assert [(v.transform, v.status) for v in log.verdicts] == [("tf32", "failed"), ("compile", "reverted")]
    assert "KeyError" in log.verdicts[0].reason
    assert (log.fault, code) == ("", 0)


def test_a_fault_of_our_own_whatever_is_on_trial_ends_the_search(script):
    script.verdicts = dict.fromkeys(("tf32", "compile", "channels_last"), lambda session: OFF)
    log, _, code, verdicts = apply(script, "tf32", "compile", "channels_last")
    assert code == 3
    assert [v.status for v in verdicts.values()] == ["failed", "failed", "skipped"]
    assert wording.trials_headline(log).startswith("A fault in advisor ended the search; the script is not to blame")


@pytest.mark.parametrize(
    ("ended", "reason"),
    [
        (Exit(code=143, reached=WaitStage.PYTHON, fault="ModuleNotFoundError: No module named 'numpy'"), "'numpy'"),
        (Exit(code=0, stopped_by_advisor=True, reached=WaitStage.TORCH, fault="KeyError: 1"), "KeyError: 1"),
        (Exit(code=143, reached=WaitStage.TORCH, gave_up="no training step within 21 seconds"), "21 seconds"),
        (Exit(code=0, reached=WaitStage.TORCH), "came to its end"),
        (Exit(code=0, reached=WaitStage.NOTHING), "advisor found no Python process to enter"),
    ],
)
def test_a_process_that_never_comes_to_a_step_ends_the_search_at_once(script, ended, reason):
    """Neither the script nor a change is blamed, and nothing is started again."""
    launches = []

    def launch(command, session, **more):
        launches.append(session)
        return ended

    profiled = StepProfile(
        script="train.py",
        argv=(),
        created="now",
        environment=Environment(),
        step_kind="optimizer",
        step_us=None,
        wall_us=None,
        start_s=2.0,
    )
    log, plan, code = searches.searched(
        COMMAND,
        [candidate("tf32"), candidate("compile")],
        profiled,
        run_dir=script.run_dir,
        say=lambda text: None,
        launch=launch,
    )
    assert (code, len(launches), len(plan.items)) == (3, 1, 2)
    assert launches[0].first_step_s == patience_s(2.0)
    assert {v.status for v in log.verdicts} == {"skipped"}
    assert all(reason in told for told in (log.fault, log.verdicts[0].reason, wording.trials_headline(log)))
    assert not any("script failed" in told for told in (*log.notes, *(v.reason for v in log.verdicts)))
    shown = terminal_trials.trials_text(log).splitlines()
    assert [line for line in shown if line.strip()][1:3] != []
    assert "fault in advisor" in " ".join(shown[:4])


@pytest.mark.parametrize(("own_us", "wanted"), [(200.0, True), (490.0, False)])
def test_a_plan_that_makes_its_loader_the_bound_is_tried_with_more_workers(script, own_us, wanted):
    """DeepLabV3+: 164 ms on the device, 45 with the plan behind workers that take 130. The trial's short blocks lived of what had been made
    before, so nothing was seen of it until the fresh runs."""
    script.step_us.update({("tf32",): 500.0, ("tf32", "loader_workers"): 250.0})
    script.device_us = {(): 990.0, ("tf32",): own_us, ("tf32", "loader_workers"): 200.0}
    records.save_verdict(script.run_dir, Verdict(transform="tf32", status="kept", reason="as told"))
    begun = search.begin(COMMAND, None, run_dir=script.run_dir, say=lambda text: None, launch=script)
    begun.prove_at_once()
    assert begun.proved.holds
    assert set(begun.proved.items) == {"tf32", *(["loader_workers"] if wanted else [])}


def test_workers_that_are_not_wanted_stay_as_they_are(script):
    script.step_us[("tf32",)], script.device_us = 500.0, {(): 990.0, ("tf32",): 200.0}
    records.save_verdict(script.run_dir, Verdict(transform="tf32", status="kept", reason="as told"))
    without = SearchOptions(skip=("loader_workers",))
    begun = search.begin(COMMAND, None, run_dir=script.run_dir, say=lambda text: None, launch=script, options=without)
    begun.prove_at_once()
    assert begun.proved.items == ("tf32",)


@pytest.mark.parametrize("shared", [True, False])
def test_a_search_beside_another_process_on_the_gpu_says_so(script, shared):
    """A DeepLabV3+ that sets CUDA_VISIBLE_DEVICES itself ran on the GPU of a RepLKNet: steps of 155 and of 290 ms, and nothing said why."""
    told = []
    profiled = StepProfile(
        script="train.py", argv=(), created="now", environment=Environment(device="cuda", shared_gpu=shared),
        step_kind="optimizer", step_us=None, wall_us=None,
    )  # fmt: skip
    log, _, _ = searches.searched(
        COMMAND, [], profiled, run_dir=script.run_dir, say=told.append, launch=lambda *_, **__: Exit(code=0)
    )
    assert any("another process uses this GPU" in line for line in told) is shared
    assert any("CUDA_VISIBLE_DEVICES" in note for note in log.notes) is shared


def test_a_fault_in_the_plain_script_of_the_comparison_ends_it(script):
    script.verdicts = {"tf32": "kept"}
    script.step_us = {(): Exit(code=0, reached=WaitStage.STEPS, fault="KeyError: 1"), ("tf32",): 500.0}
    log, plan, code, _ = apply(script, "tf32")
    assert (code, log.fault) == (3, "advisor switched itself off in the plain script: KeyError: 1")
    assert len([s for s in script.launches if s.mode == "measure"]) == 1
    assert plan.items[0].status == "unconfirmed"  # it was kept in the running loop; its proof is what is missing


def test_a_process_whose_time_was_up_before_a_trial_began_is_not_the_scripts_fault(script):
    script.verdicts = {"tf32": lambda session: records.clear_current(script.run_dir) or Exit(code=143, timed_out=True)}
    log, _, code, verdicts = apply(script, "tf32")
    assert (code, verdicts["tf32"].status) == (4, "skipped")
    assert "for the final comparison" in verdicts["tf32"].reason
    assert not any("script" in note and "failed" in note for note in log.notes)


# -- the stack ------------------------------------------------------------------------------------------------------


def test_a_combination_that_loses_falls_back_to_its_best_part(script):
    script.verdicts = {"tf32": "kept", "channels_last": "kept"}
    script.step_us |= {("tf32",): 600.0, ("tf32", "channels_last"): 1100.0}
    log, plan, code, verdicts = apply(script, "tf32", "channels_last")
    assert code == 0
    assert [i.transform for i in plan.items if i.status == "kept"] == ["tf32"]
    assert verdicts["channels_last"].status == "reverted"
    assert "did not hold in fresh runs" in verdicts["channels_last"].reason
    assert log.stack.passed


@pytest.mark.parametrize(("run_s", "status"), [(10.0, "reverted"), (50.0, "unconfirmed")])
def test_a_comparison_that_has_taken_far_longer_than_foreseen_looks_for_nobody_to_blame(script, run_s, status):
    """A busy machine: of 60 s allowed the first comparison took 100 and more, and two more for each change were to come."""
    measured = script.measure

    def long(session):
        script.clock.sleep(run_s)
        return measured(session)

    script.measure = long
    script.verdicts = {"tf32": "kept", "channels_last": "kept"}
    script.step_us |= {("tf32",): 1200.0, ("tf32", "channels_last"): 1100.0}
    _, _, code, verdicts = apply(script, "tf32", "channels_last", time_s=400.0 if status == "reverted" else 60.0)
    assert {v.status for v in verdicts.values()} == {status}
    assert code == (0 if status == "reverted" else 4)
    if status == "unconfirmed":
        assert len([s for s in script.launches if s.mode == "measure"]) <= 4
        assert "which change is to blame" in verdicts["tf32"].reason


def test_nothing_is_kept_when_no_part_holds(script):
    script.verdicts = {"tf32": "kept", "channels_last": "kept"}
    script.step_us |= {("tf32",): 1200.0, ("tf32", "channels_last"): 1100.0}
    log, plan, code, verdicts = apply(script, "tf32", "channels_last")
    assert not [i for i in plan.items if i.status == "kept"]
    assert {v.status for v in verdicts.values()} == {"reverted"}
    assert log.stack.passed is False
    assert plan.speedup == ""
    assert code == 0


@pytest.mark.parametrize(("high", "status", "code"), [(42.79, "inconclusive", 4), (1.005, "reverted", 0)])
def test_what_noise_hides_in_fresh_runs_is_left_open(script, monkeypatch, high, status, code):
    """A loop on a busy machine: 0.94 times as fast, by 0.02 to 42.79, tells nothing of a change."""
    slower = StackVerdict(passed=False, detail="not faster: 0.94×", speedup=0.94, speedup_low=0.02, speedup_high=high)
    monkeypatch.setattr("advisor.trials.proof.judge", lambda *_, **__: slower)
    script.verdicts = {"tf32": "kept", "channels_last": "kept"}
    log, _, found, verdicts = apply(script, "tf32", "channels_last")
    assert ({v.status for v in verdicts.values()}, found) == ({status}, code)
    assert log.stack.passed is (None if status == "inconclusive" else False)


def test_a_stack_that_trains_otherwise_is_not_kept(script):
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0
    script.loss = lambda kept, step: float("nan") if kept and step > 20 else 2.0 - 0.01 * step
    log, plan, _, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == "reverted"
    assert "NaN" in verdicts["tf32"].reason
    assert log.stack.passed is False
    assert plan.speedup == ""


def test_a_stack_that_crashes_is_not_kept(script):
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = None
    _, plan, _, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == "reverted"
    assert verdicts["tf32"].reason.endswith("gave no measurement in a fresh run: ValueError: cannot decode image 4000")
    assert plan.items[0].status == "reverted"


@pytest.mark.parametrize("steps", [None, 2])
def test_what_the_loop_kept_and_fresh_runs_leave_open_is_unconfirmed(script, monkeypatch, steps):
    """Noise hides it, or too few steps were timed: neither proved nor refuted, and the plan says what to settle."""
    script.verdicts = {"tf32": "kept", "compile": "kept"}
    drift = iter((1.0, 1.05, 0.9, 0.98) * 3)  # from run to run; by turns plain and with the changes
    inner = script.measure

    def measure(session):
        ended = inner(session)
        found = storage.load(script.run_dir / records.MEASURE_FILE, records.Measurement)
        factor = next(drift)
        times = tuple(factor * t for t in found.step_us)[:steps]
        storage.save(script.run_dir / records.MEASURE_FILE, dataclasses.replace(found, step_us=times, every_us=times))
        return ended

    script.measure = measure
    log, plan, code, verdicts = apply(script, "tf32", "compile")
    assert {v.status for v in verdicts.values()} == {item.status for item in plan.items} == {"unconfirmed"}
    assert all(v.reason.startswith("not confirmed in fresh runs: ") for v in verdicts.values())
    assert (code, log.stack.passed, plan.speedup) == (4, None, "")
    assert [item.transform for item in prove.wanted(plan).items if item.status in prove.TO_PROVE] == ["tf32", "compile"]


def test_what_a_fresh_run_cannot_apply_is_not_kept(script):
    script.verdicts = {"tf32": "kept", "compile": "kept"}
    script.step_us |= {("tf32",): 500.0, ("tf32", "compile"): 500.0}
    inner = script.measure

    def measure(session):
        ended = inner(session)
        found = storage.load(script.run_dir / records.MEASURE_FILE, records.Measurement)
        if any(i.transform == "compile" for i in session.kept):
            found = dataclasses.replace(found, left_out={"compile": "no module was seen"})
            storage.save(script.run_dir / records.MEASURE_FILE, found)
        return ended

    script.measure = measure
    _, plan, _, verdicts = apply(script, "tf32", "compile")
    assert [i.transform for i in plan.items if i.status == "kept"] == ["tf32"]
    assert "no module was seen" in verdicts["compile"].reason


# -- on top ---------------------------------------------------------------------------------------------------------

BOTH = ("tf32", "cudnn_benchmark")


def on_top(script, with_it, **more):
    script.verdicts = {"tf32": "kept"}
    script.step_us |= {("tf32",): 500.0, BOTH: with_it}
    return apply(script, "cudnn_benchmark", "tf32", **more)


def test_a_small_change_for_fresh_processes_is_tried_on_top_of_the_stack(script):
    script.step_us[("cudnn_benchmark",)] = 900.0
    log, plan, code, verdicts = on_top(script, 450.0)
    arms = [tuple(i.transform for i in s.kept) for s in script.launches if s.mode == "measure"]
    assert arms[4:6] == [BOTH, BOTH]  # beside the stack's own four
    assert [s.seed for s in script.launches if s.mode == "measure"][4:6] == [fresh.SEED, fresh.SEED + 1]
    assert sum(s.mode == "search" for s in script.launches) == 1
    assert verdicts["cudnn_benchmark"].status == "kept"
    assert 0.08 < verdicts["cudnn_benchmark"].gain.low < 0.1 < verdicts["cudnn_benchmark"].gain.high < 0.12
    assert verdicts["cudnn_benchmark"].numerics.passed
    # The plan's speed-up is that of the runs with it, and leaving it out is measured already.
    assert log.stack.passed
    assert log.stack.speedup == pytest.approx(1000 / 450, rel=0.02)
    assert verdicts["cudnn_benchmark"].left_out_gain == verdicts["cudnn_benchmark"].gain
    assert arms[6:] == [("cudnn_benchmark",)]  # and then the whole without its other item
    assert verdicts["tf32"].left_out_gain.low > 0.45
    assert [i.transform for i in plan.items if i.status == "kept"] == list(BOTH)
    assert code == 0


def test_what_takes_long_on_top_waits_until_the_stack_has_run_without_each_of_its_items(script, monkeypatch):
    monkeypatch.setattr(search, "CHEAP_SHARE", 0.0)
    script.verdicts = {"tf32": "kept", "compile": "kept"}
    script.step_us |= {("tf32",): 700.0, ("compile",): 700.0, ("tf32", "compile"): 500.0}
    script.step_us[("tf32", "compile", "cudnn_benchmark")] = 500.0
    _, _, _, verdicts = apply(script, "tf32", "compile", "cudnn_benchmark")
    arms = [tuple(i.transform for i in s.kept) for s in script.launches if s.mode == "measure"]
    assert sorted(arms[4:6]) == [("compile",), ("tf32",)]
    assert set(arms[6:]) == {("tf32", "compile", "cudnn_benchmark")}
    assert all(verdicts[name].left_out_gain.low > 0.2 for name in ("tf32", "compile"))


def test_on_top_nothing_is_kept_that_gains_nothing_or_trains_otherwise(script, tmp_path):
    log, plan, _, verdicts = on_top(script, 500.0)
    assert verdicts["cudnn_benchmark"].status in ("reverted", "inconclusive")
    assert verdicts["cudnn_benchmark"].left_out_gain is None  # it is no part of the whole
    assert [i.transform for i in plan.items if i.status == "kept"] == ["tf32"]
    assert log.stack.speedup == pytest.approx(2.0, rel=0.02)

    other = Script(tmp_path / "other")
    other.loss = lambda kept, step: 2.0 + (0.2 * step if kept == BOTH else -0.01 * step)
    _, plan, _, verdicts = on_top(other, 300.0)
    assert verdicts["cudnn_benchmark"].status == "reverted"
    assert "changes the training" in verdicts["cudnn_benchmark"].reason
    assert [i.transform for i in plan.items if i.status == "kept"] == ["tf32"]

    slower = Script(tmp_path / "slower")
    assert on_top(slower, 520.0)[3]["cudnn_benchmark"].status == "reverted"
    measured = [s for s in slower.launches if s.mode == "measure"]
    assert sum(tuple(i.transform for i in s.kept) == BOTH for s in measured) == 1  # the first run told

    disturbed = Script(tmp_path / "disturbed")  # by as much it is hardly the change's doing: a second run
    assert on_top(disturbed, 600.0)[3]["cudnn_benchmark"].status == "reverted"
    measured = [s for s in disturbed.launches if s.mode == "measure"]
    assert sum(tuple(i.transform for i in s.kept) == BOTH for s in measured) == 2

    failing = Script(tmp_path / "failing")
    assert on_top(failing, None)[3]["cudnn_benchmark"].status == "failed"


def test_two_runs_that_disagree_on_what_it_gains_on_top_get_two_more(script):
    times = iter((450.0, 530.0, 430.0, 440.0))
    measure = script.measure

    def with_noise(session):
        if tuple(i.transform for i in session.kept) == BOTH:
            script.step_us[BOTH] = next(times)
        return measure(session)

    script.measure = with_noise
    _, _, _, verdicts = on_top(script, 0.0)
    runs = [s for s in script.launches if s.mode == "measure" and tuple(i.transform for i in s.kept) == BOTH]
    assert [s.seed - fresh.SEED for s in runs] == [0, 1, 2, 3]
    assert len(verdicts["cudnn_benchmark"].blocks.on_us) == 4
    assert verdicts["cudnn_benchmark"].status == "inconclusive"  # one of four as slow as that is no proof


def test_on_top_of_nothing_it_has_pairs_of_its_own(script):
    script.verdicts = {"tf32": "reverted"}
    script.step_us[("cudnn_benchmark",)] = 800.0
    log, _, _, verdicts = apply(script, "cudnn_benchmark", "tf32")
    assert verdicts["cudnn_benchmark"].status == "kept"
    assert len(verdicts["cudnn_benchmark"].blocks.off_us) == 3
    assert log.stack.passed


def test_what_tunes_in_its_first_step_needs_the_time_for_it(script, monkeypatch):
    """Two runs fit into the time left, but not with what cuDNN takes to try its algorithms in each."""
    monkeypatch.setitem(budget.TUNING_STEPS, "cudnn_benchmark", 25_000.0)  # 25 s
    log, _, _, verdicts = on_top(script, 450.0, time_s=50.0)
    assert verdicts["cudnn_benchmark"].status == "skipped"
    assert any("with the kept changes" in note for note in log.notes)


def test_no_time_left_for_what_comes_on_top(script, monkeypatch):
    monkeypatch.setattr(fresh.FreshRuns, "measure", slow(fresh.FreshRuns.measure))
    log, _, _, verdicts = on_top(script, 450.0)
    assert verdicts["cudnn_benchmark"].status == "skipped"
    assert any("with the kept changes" in note for note in log.notes)


def slow(measure):
    def measured(self, *args, **more):
        found = measure(self, *args, **more)
        self.last_s = 1e9  # as if each had taken that long
        return found

    return measured


# -- fresh pairs ----------------------------------------------------------------------------------------------------


def test_restart_only_changes_are_tried_in_pairs_of_fresh_processes(script):
    script.restart_only = {"loader_workers"}
    script.verdicts = {"tf32": "kept"}
    script.step_us |= {("tf32",): 600.0, ("tf32", "loader_workers"): 200.0}
    _, plan, code, verdicts = apply(script, "tf32", "loader_workers")
    verdict = verdicts["loader_workers"]
    assert (code, verdict.status) == (0, "kept")
    assert verdict.gain.low > 0.5
    assert len(verdict.blocks.off_us) == 3
    assert verdict.numerics.passed
    assert [i.transform for i in plan.items] == ["tf32", "loader_workers"]
    order = [len(s.kept) for s in script.launches if s.mode == "measure"][:6]
    assert order == [1, 2, 2, 1, 1, 2]


def test_a_restart_only_loser_costs_two_pairs(script):
    script.restart_only = {"loader_workers"}
    script.step_us[("loader_workers",)] = 1300.0
    _, _, code, verdicts = apply(script, "loader_workers")
    assert (code, verdicts["loader_workers"].status) == (0, "reverted")
    assert len([s for s in script.launches if s.mode == "measure"]) == 4


def test_a_restart_only_change_that_fails_or_trains_otherwise(script):
    script.restart_only = {"loader_workers"}
    script.step_us[("loader_workers",)] = None
    verdict = apply(script, "loader_workers")[3]["loader_workers"]
    assert verdict.status == "failed"
    assert verdict.reason.endswith("ValueError: cannot decode image 4000")
    other = Script(script.run_dir / "b")
    other.run_dir.mkdir()
    other.restart_only = {"loader_workers"}
    other.step_us[("loader_workers",)] = 400.0
    other.loss = lambda kept, step: 9.0 if kept else 2.0
    verdict = apply(other, "loader_workers")[3]["loader_workers"]
    assert verdict.status == "reverted"
    assert "changes the training" in verdict.reason


def test_a_script_that_ends_in_a_fresh_run_without_the_change_does_not_make_it_fail(script):
    script.restart_only = {"loader_workers"}
    script.step_us[()] = None
    verdict = apply(script, "loader_workers")[3]["loader_workers"]
    assert verdict.status == "inconclusive"
    assert verdict.reason == (
        "the script gave no measurement in a fresh run without it: ValueError: cannot decode image 4000"
    )


# -- asking, time, interruption -------------------------------------------------------------------------------------


def test_asked_item_by_item(script):
    script.verdicts = {"tf32": "reverted"}
    _, _, _, verdicts = apply(
        script, "tf32", "compile", ask=lambda r: Answer.YES if r.transform == "tf32" else Answer.NO
    )
    assert verdicts["tf32"].status == "reverted"
    assert (verdicts["compile"].status, verdicts["compile"].reason) == ("declined", "you said no")


@pytest.mark.parametrize("answer", [Answer.NO, Answer.QUIT])
def test_what_the_user_declines_is_left_open(script, answer):
    log, plan, code, _ = apply(script, "tf32", "compile", ask=lambda r: answer)
    assert {v.status for v in log.verdicts} == {item.status for item in plan.items} == {"declined"}
    assert (code, script.launches, log.complete) == (4, [], True)
    assert planfile.left_open(plan)
    assert not log.notes


def test_who_thinks_about_an_answer_loses_no_time_of_the_search(script, clock):
    script.verdicts = {"tf32": "reverted", "compile": "reverted"}

    def ask(candidate):
        clock.sleep(3600.0)
        return Answer.YES

    log, *_ = apply(script, "tf32", "compile", ask=ask)
    assert [v.status for v in log.verdicts] == ["reverted", "reverted"]
    assert log.seconds < 3600.0


def test_what_no_child_ever_saw_has_its_title_all_the_same(script):
    _, _, _, verdicts = apply(script, "channels_last", "fused_bn_act", ask=lambda r: Answer.NO)
    assert script.launches == []
    assert verdicts["channels_last"].title == "channels_last (NHWC) memory layout"
    assert verdicts["fused_bn_act"].title == "Fused BatchNorm + add + activation kernels"


def test_recipes_and_long_first_steps_are_not_tried(script):
    script.verdicts = {}
    recipe = candidate("tf32", semantics=Semantics.TRAINING)
    _, _, code, verdicts = apply(script, recipe, "compile_max_autotune")
    assert code == 0
    assert "recipe" in verdicts["tf32"].reason
    assert "--max-time 20m" in verdicts["compile_max_autotune"].reason
    assert script.launches == []
    script.verdicts = {"compile_max_autotune": "reverted"}
    (script.run_dir / "long").mkdir()
    script.run_dir = script.run_dir / "long"
    assert apply(script, "compile_max_autotune", time_s=1200.0)[3]["compile_max_autotune"].status == "reverted"


def test_what_fresh_runs_are_to_decide_is_not_told_as_kept(tmp_path):
    """ "Kept, too noisy to confirm a gain": a reader takes the one for the contrary of the other."""
    said = []
    script = RealScript(COMMAND, tmp_path, lambda *_, **__: Exit(code=0), said.append)
    reason = f"too noisy to confirm a gain of 1.0 %; {records.UNDECIDED}"
    script.told({"event": "verdict", "title": "tf32", "status": "kept", "reason": reason})
    script.told({"event": "verdict", "title": "compile", "status": "kept", "reason": "faster"})
    assert said == [f"tf32: open, {reason}", "compile: kept, faster"]


def test_what_fresh_runs_have_confirmed_is_no_longer_told_as_theirs_to_decide(script):
    def undecided(session):
        reason = f"too noisy to confirm a gain of 1.0 %; {records.UNDECIDED}"
        verdict = Verdict(transform="tf32", status="kept", reason=reason, semantics="exact")
        records.save_verdict(script.run_dir, verdict)
        return script.stops

    script.verdicts = {"tf32": undecided}
    script.step_us[("tf32",)] = 500.0
    log, *_ = apply(script, "tf32")
    assert log.stack.passed
    assert log.verdicts[0].reason == "too noisy to confirm a gain of 1.0 %; fresh runs confirmed it"


def test_what_time_is_kept_for_is_said_before_it_is_missed(script):
    script.verdicts = {"tf32": "reverted"}
    said = []
    searches.searched(
        COMMAND, [candidate("tf32")], None, run_dir=script.run_dir, say=said.append, launch=script, time_s=200.0
    )
    assert said[0].startswith(
        "searching for about 200 s, 50 s of them for the final comparison. Ctrl-C ends the search"
    )


def test_out_of_time(script):
    def slow(session):
        assert session.deadline_unix_s <= time.time() + 10
        storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(out_of_time=True))
        records.clear_current(script.run_dir)
        return script.stops

    script.verdicts = {"tf32": slow}
    log, _, code, verdicts = apply(script, "tf32", "compile", time_s=25.0)
    assert {v.reason for v in verdicts.values()} == {"out of time: the remaining 20 s are for the final comparison"}
    assert code == 4
    assert not log.complete
    (note,) = log.notes
    assert note.startswith("no trial finished: the first profile took 0 of 25 s")
    assert note.endswith("try --max-time 60s")


def test_where_the_first_profile_has_taken_all_the_time_its_process_does_not_go_on(script):
    """It trained for 51 s more on a loaded machine, to come to a trial that no time was left for."""
    said = []
    begun = search.begin(
        COMMAND, None, options=search.SearchOptions(time_s=0.0), run_dir=script.run_dir, say=said.append, launch=script
    )
    begun.profiled_s, begun.before_s, begun.given_s = 100.0, 30.0, 60.0
    assert begun.first_orders((candidate("tf32"),)) is None
    log, _, code = begun.finish((candidate("tf32"),))
    assert (code, script.launches, said) == (4, [], [])
    assert [v.reason for v in log.verdicts] == ["out of time"]
    assert log.notes[-1].startswith("no trial finished: the first profile took 70 of 60 s")


def test_what_the_script_takes_to_its_first_step_is_no_part_of_the_time_that_is_told(script) -> None:
    script.verdicts = {"tf32": lambda session: script.stops}
    log, *_ = apply(script, "tf32", time_s=0.0, profiled_s=40.0, before_s=5.0)
    assert "the first profile took 35 of 35 s" in log.notes[-1]
    assert log.spent[spent.PROFILE] == 35.0
    assert log.spent[spent.BEFORE] == 5.0


def test_with_the_time_that_is_said_to_be_enough_half_is_left_for_trials() -> None:
    for step_s in (0.001, 0.1, 0.5, 4.0, None):
        short = budget.Budget(whole_s=1.0, until=0.0, step_s=step_s)
        whole_s = short.enough_s(0.0)
        assert budget.Budget(whole_s=whole_s, until=0.0, step_s=step_s).stack_s(budget.START_S) <= whole_s / 2 + 1e-6


def test_what_was_tried_leaves_no_word_of_the_time(script) -> None:
    script.verdicts = {"tf32": "reverted"}
    log, *_ = apply(script, "tf32", time_s=25.0)
    assert not any("came to an end" in note for note in log.notes)


@pytest.mark.parametrize(
    ("step_s", "left", "seconds"),
    [
        (0.001, 1.0, 30.0),  # 1.1 * 4 * (5 + 0.012 + 0.7) would do
        (0.02, 0.1, 30.0),
        (
            0.1,
            0.01,
            1.1 * 2 * (5 + 42 * 0.1 + 5 + 12 * 0.001 + 0.7),
        ),  # short steps are timed for longer than thirty take
        (0.2, 1.0, 1.1 * 4 * (5 + 42 * 0.2)),
        (0.4, 1.0, 1.1 * 4 * (5 + (8 + 18) * 0.4)),  # fewer steps where they are long
        (0.4, 0.1, 1.1 * 2 * (5 + (8 + 18) * 0.4 + 5 + (8 + 18) * 0.04)),
        (60.0, 1.0, 100.0),
        (None, 1.0, 50.0),
    ],
)
def test_the_stack_is_left_the_time_its_runs_need_up_to_half(step_s, left, seconds):
    found = budget.Budget(whole_s=200.0, until=0.0, step_s=step_s)
    assert found.stack_s(5.0, left) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("late_us", "workers", "whole_s", "settle_s"),
    [
        (30_000.0, 2, 600.0, 10.0),
        (30_000.0, 2, 100.0, 2.0),
        (30_000.0, 0, 600.0, 0.0),  # the training thread makes its batches
        (100.0, 2, 600.0, 0.0),
    ],
)
def test_runs_of_a_starved_loop_settle_first(late_us, workers, whole_s, settle_s):
    profile = StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="optimizer",
        step_us=Spread(median=50_000.0, p10=50_000.0, p90=50_000.0, n=20), wall_us=None,
        input=InputStats(loader="DataLoader", next_us=late_us, late_us=late_us, workers=workers),
    )  # fmt: skip
    found = budget.Budget.from_now(whole_s, profile)
    assert found.settle_s == settle_s
    # 42 steps of 50 ms, or twelve that are over before it has settled.
    runs_s = [5 + max(12 * 0.05, settle_s) + 30 * 0.05] * 4
    assert found.stack_s(5.0) == pytest.approx(max(20.0, 0.15 * whole_s, min(0.5 * whole_s, 1.1 * sum(runs_s))))


def test_slow_starts_leave_the_candidates_less_time(script, monkeypatch):
    monkeypatch.setattr(budget.Budget, "stack_s", lambda self, start_s, left=1.0, **_: start_s)
    monkeypatch.setattr(records, "spent", lambda run_dir: {spent.START: 20.0})
    script.steps_a_life = 1
    script.verdicts = {"tf32": "reverted", "compile": "reverted"}
    apply(script, "tf32", "compile", time_s=200.0)
    first, second = (s.deadline_unix_s for s in script.launches if s.mode == "search")
    assert first - second == pytest.approx(20.0 - budget.START_S, abs=1.0)


@pytest.mark.parametrize(
    "ended",
    [
        Exit(code=130, signal=int(signal.SIGINT)),
        Exit(code=0, interrupted=True),  # the script catches it, saves, and ends well
        Exit(code=143, signal=int(signal.SIGTERM), interrupted=True),
    ],
)
def test_ctrl_c_writes_what_is_proved_so_far(script, ended):
    script.verdicts = {"tf32": "kept", "compile": lambda session: ended}
    log, plan, code, verdicts = apply(script, "tf32", "compile")
    assert verdicts["tf32"].status == "unconfirmed"
    assert verdicts["tf32"].reason.endswith("interrupted before the comparison with the plain script")
    assert (verdicts["compile"].status, verdicts["compile"].reason) == ("skipped", "interrupted")
    assert code == 130
    assert not log.complete
    assert plan.speedup == ""
    assert not [s for s in script.launches if s.mode == "measure"]

    def interrupted(*args, **more):
        raise KeyboardInterrupt

    (script.run_dir / "again").mkdir()
    log, _, code = searches.searched(
        COMMAND, [candidate("tf32")], None, run_dir=script.run_dir / "again", say=print, launch=interrupted
    )
    assert (log.verdicts[0].status, code) == ("skipped", 130)
    told = wording.trials_headline(log)
    assert told == "Nothing is proved: you ended the search, and no change was settled."


def test_an_interrupted_searchs_plan_is_tied_to_its_model(script):
    """The process that is interrupted writes no record; without the model's hash its plan would fit any model."""

    def launch(command, session, *, on_progress, **more):
        on_progress({"event": "verdict", "transform": "tf32", "status": "kept", "reason": "faster", "model": "abc"})
        raise KeyboardInterrupt

    _, plan, _ = searches.searched(
        COMMAND, [candidate("tf32")], None, run_dir=script.run_dir, say=lambda text: None, launch=launch
    )
    assert plan.hashes.model == "abc"


def test_the_users_files_are_put_back_after_every_child(script, tmp_path_factory):
    users = tmp_path_factory.mktemp("user") / "best.pt"
    users.write_text("mine")
    inner = script.search

    def overwrites(session):
        guard = Guard(script.run_dir)
        users.write_text("theirs")
        guard.stop()
        return inner(session)

    script.search = overwrites
    script.verdicts = {"tf32": "reverted"}
    log = apply(script, "tf32")[0]
    assert users.read_text() == "mine"
    assert log.files_written == (str(users.resolve()),)


def test_no_rank_finds_at_its_start_what_it_has_written_in_the_one_before(script):
    """Rank 0's checkpoint is put back after each start; another rank that resumed from its own would train apart from it."""
    found = []

    def launch(command, session, *, on_progress, **more):
        checkpoint = script.run_dir / "ranks" / "rank-0001" / "files" / "best.pt"
        found.append(checkpoint.exists())
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        checkpoint.write_text("mine")
        return Exit(code=0)

    started = RealScript(COMMAND, script.run_dir, launch, lambda text: None)
    for _ in range(2):
        started.start("measure", timeout_s=1.0)
    assert found == [False, False]


# -- what must not be lost ------------------------------------------------------------------------------------------


def measured_with(script, change):
    """`change(names, turn, found)` alters what fresh runs leave."""
    inner, turns = script.measure, []

    def measure(session):
        ended = inner(session)
        names = tuple(item.transform for item in session.kept)
        turns.append(names)
        path = script.run_dir / records.MEASURE_FILE
        if path.exists():
            storage.save(path, change(names, turns.count(names), storage.load(path, records.Measurement)))
        return ended

    script.measure = measure


def test_a_proof_that_more_fresh_runs_take_back_says_so(script):
    """One run of each kind had it at twice the speed; with two of each it is lost in noise. The user was told of a plan."""
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0

    def later(names, turn, found):
        slow = [us * 9 for us in found.step_us]
        return dataclasses.replace(found, step_us=tuple(slow), every_us=tuple(slow)) if names and turn > 1 else found

    measured_with(script, later)
    log, plan, code, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == "unconfirmed"
    assert "more fresh runs took the proof back: too noisy to confirm" in verdicts["tf32"].reason
    assert "ended before" not in verdicts["tf32"].reason
    assert (log.stack.passed, log.proved_s, plan.speedup, code) == (None, None, "", 4)
    assert log.stack.samples_per_s_stack < log.stack.samples_per_s_plain  # as the step's middle is longer


def test_a_proof_that_noise_hides_in_two_runs_of_each_kind_rests_on_more(script):
    """A CuPy loop on an H200: plain steps of 28 and of 46 ms in two processes, 6 ms with the plan; 7.5 times as fast, then 0.8 to 38 times."""
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 180.0

    def later(names, turn, found):
        slow = [us * (1.0 if turn % 2 else 1.7) for us in found.step_us]
        return found if names else dataclasses.replace(found, step_us=tuple(slow), every_us=tuple(slow))

    measured_with(script, later)
    log, plan, code, verdicts = apply(script, "tf32")
    assert (verdicts["tf32"].status, log.stack.passed, code) == ("kept", True, 0)
    assert len(log.stack.plain_us) > 2
    assert plan.speedup


def without(found, name):
    applied = tuple(n for n in found.applied if n != name)
    return dataclasses.replace(found, applied=applied, left_out={name: "no module was seen"})


def test_nothing_is_lost_where_fresh_runs_can_apply_none_of_what_is_kept(script):
    script.verdicts = {"tf32": "kept", "compile": "reverted"}
    measured_with(script, lambda names, turn, found: without(found, "tf32") if names else found)
    script.step_us[("tf32",)] = 1100.0
    log, _, code, verdicts = apply(script, "tf32", "compile")
    assert verdicts["tf32"].status == "inconclusive"
    assert "no module was seen" in verdicts["tf32"].reason
    assert verdicts["compile"].status == "reverted"
    assert log.stack.passed is None
    assert code == 4


def test_the_stack_is_proved_by_runs_that_had_what_is_kept_and_no_more(script):
    """Planted: the change that one of two runs could not apply is what made the other one fast."""
    script.verdicts = {"tf32": "kept", "compile": "kept"}
    script.step_us |= {("tf32", "compile"): 500.0, ("tf32",): 990.0}

    def change(names, turn, found):
        if "compile" not in names or turn == 1:
            return found
        steps = tuple(1.98 * t for t in found.step_us)
        return without(dataclasses.replace(found, step_us=steps, every_us=steps), "compile")

    measured_with(script, change)
    log, _, _, verdicts = apply(script, "tf32", "compile")
    assert verdicts["compile"].status == "inconclusive"
    assert log.stack.speedup < 1.1
    assert log.stack.stack_us == pytest.approx((990.0,) * len(log.stack.stack_us), rel=0.02)


def test_a_fault_in_a_fresh_run_is_not_the_next_candidates(script):
    script.restart_only = {"loader_workers"}
    script.step_us[("loader_workers",)] = OFF
    script.verdicts = {"tf32": "reverted"}
    log, _, _, _ = apply(script, "loader_workers", "tf32")
    assert [(v.transform, v.status) for v in log.verdicts] == [("tf32", "reverted"), ("loader_workers", "failed")]


def test_of_two_settings_the_one_that_asked_for_fresh_runs_has_them(script):
    few, many = (candidate("loader_workers", parameters={"workers": n}) for n in ("2", "8"))
    tried = []

    def search_process(session):
        for item in session.candidates:
            if item.parameters["workers"] == "2":
                found = Verdict(
                    transform=item.transform,
                    status="not applicable",
                    reason="it has two",
                    parameters=dict(item.parameters),
                )
                records.save_verdict(script.run_dir, found)
                continue
            storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(restart=item.transform))
            records.save_current(
                script.run_dir, records.InTrial(transform=item.transform, parameters=dict(item.parameters))
            )
            return script.stops
        storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(complete=True))
        return script.stops

    def change(names, turn, found):
        tried.append(names)
        return found

    script.search = search_process
    script.step_us[("loader_workers",)] = 1300.0
    measured_with(script, change)
    log, *_ = apply(script, few, many)
    found = {v.parameters["workers"]: v.status for v in log.verdicts}
    assert found == {"2": "not applicable", "8": "reverted"}


def test_ctrl_c_while_the_stack_is_taken_apart_takes_nothing_back(script):
    script.verdicts = {"tf32": "kept", "channels_last": "kept"}
    script.step_us[("tf32", "channels_last")] = 1100.0
    inner = script.measure

    def measure(session):
        if tuple(item.transform for item in session.kept) == ("tf32",):
            return Exit(code=130, signal=int(signal.SIGINT))
        return inner(session)

    script.measure = measure
    log, _, code, verdicts = apply(script, "tf32", "channels_last")
    assert verdicts["channels_last"].status == "reverted"
    assert verdicts["tf32"].status == "unconfirmed"
    assert log.stack.passed is None
    assert "interrupted" in log.stack.detail
    assert code == 130


def half_timed(**more):
    return records.InTrial(transform="tf32", phase="timing", **more)


@pytest.mark.parametrize(
    ("pairs", "status"),
    [
        ({"off_us": (100.0, 101.0, 100.0, 102.0), "on_us": (150.0, 151.0, 149.0, 150.0)}, "reverted"),
        # Steps in bursts: what medians say is not the rate, which hardly differs.
        (
            {
                "off_us": (100.0, 101.0, 100.0, 102.0),
                "on_us": (150.0, 151.0, 149.0, 150.0),
                "off_mean_us": (200.0, 201.0, 199.0, 200.0),
                "on_mean_us": (199.0, 202.0, 198.0, 200.0),
                "bursty": 8,
            },
            "inconclusive",
        ),
    ],
)
def test_pairs_are_not_lost_when_the_process_that_would_go_on_finds_no_time_left(script, pairs, status):
    def half_way(session):
        records.save_current(script.run_dir, half_timed(**pairs))
        script.verdicts["tf32"] = too_late
        return Exit(code=0)

    def too_late(session):
        storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(out_of_time=True))
        return script.stops

    script.verdicts = {"tf32": half_way}
    log, _, _, verdicts = apply(script, "tf32")
    assert verdicts["tf32"].status == status
    assert verdicts["tf32"].reason.startswith("out of time: the remaining 150 s are for the final comparison: ")
    assert verdicts["tf32"].gain is not None
    assert not log.complete


def test_where_a_file_cannot_be_put_back_the_script_is_not_started_again(script, monkeypatch):
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0
    monkeypatch.setattr(restore, "restore", lambda run_dir: ("best.pt: Permission denied",))
    log, _, code, _ = apply(script, "tf32", "compile")
    assert len(script.launches) == 1
    assert any("best.pt: Permission denied" in note for note in log.notes)
    assert log.stack is None or log.stack.passed is None
    assert code == 4


def test_an_error_in_between_leaves_what_is_proved(script):
    script.verdicts = {"tf32": "kept"}
    script.step_us[("tf32",)] = 500.0
    inner = script.measure

    def measure(session):
        if session.kept:
            raise OSError("no space left on device")
        return inner(session)

    script.measure = measure
    with pytest.raises(OSError, match="no space left"):
        apply(script, "tf32")
    log = storage.load(script.run_dir / "trials.json", TrialLog)
    assert [(v.transform, v.status) for v in log.verdicts] == [("tf32", "unconfirmed")]
    assert not log.complete
    assert any("no space left" in note for note in log.notes)
    assert [i.status for i in planfile.read(script.run_dir / "plan.yaml").items] == ["unconfirmed"]


# -- the whole first --------------------------------------------------------------------------------------------------

WHOLE = ("tf32", "channels_last")
NO_BLOCKS = Blocks()


def whole_kept(script, *, on_top=(), then=None, gain=None, blocks=NO_BLOCKS):
    """The first search process keeps these as one and ends; later ones go on as told, or with `then`."""
    inner = script.search

    def search_process(session):
        if any(s.mode == "search" for s in script.launches[:-1]):
            return (then or inner)(session)
        for name in WHOLE:
            item = next(c for c in session.candidates if c.transform == name)
            others = tuple(other for other in WHOLE if other != name)
            verdict = Verdict(
                transform=name,
                status="kept",
                reason="as one",
                semantics=item.semantics,
                together=others,
                gain=gain,
                blocks=blocks,
            )
            records.save_verdict(script.run_dir, verdict)
        storage.save(script.run_dir / records.SEARCH_FILE, records.SearchRecord(whole_kept=True, on_top=on_top))
        return script.stops

    script.search = search_process


def modes(script):
    return [(s.mode, tuple(i.transform for i in s.kept)) for s in script.launches]


def test_the_whole_is_proved_and_written_before_anything_else_is_tried(script):
    script.step_us[WHOLE] = 500.0
    script.verdicts = {"set_to_none": "reverted"}
    plans = []

    def later(session):
        plans.append(planfile.read(script.run_dir / "plan.yaml"))
        return Exit(code=130, signal=int(signal.SIGINT))

    whole_kept(script, then=later)
    log, plan, code, _ = apply(script, *WHOLE, "set_to_none")
    assert modes(script)[:4] == [("search", ()), ("measure", ()), ("measure", WHOLE), ("search", WHOLE)]
    assert plans[0].speedup.startswith(("2.0", "1.9"))  # what an end at any time leaves
    assert code == 0
    assert log.interrupted
    assert plan.speedup == plans[0].speedup
    assert {v.transform: v.status for v in log.verdicts} == {
        "tf32": "kept",
        "channels_last": "kept",
        "set_to_none": "skipped",
    }


@pytest.mark.parametrize(("high", "gain", "tried"), [(0.004, 0.5, False), (0.006, 0.5, True), (0.004, None, True)])
def test_what_promises_too_little_of_the_step_that_is_left_has_no_trial_behind_a_proof(script, high, gain, tried):
    """By predictions for the plain step, of which half is left: 0.6 % are 1.2 then. A trial of 0.1 % took 44 s on an H200, of the 61 there were."""
    script.step_us[WHOLE] = 500.0
    script.verdicts = {"set_to_none": "inconclusive"}
    whole_kept(script, gain=Interval(low=gain, high=gain) if gain else None)
    small = dataclasses.replace(candidate("set_to_none"), predicted=Interval(low=0.0, high=high))
    *_, verdicts = apply(script, *WHOLE, small)
    assert verdicts["set_to_none"].status == ("inconclusive" if tried else "skipped")
    assert ("too small for a trial" in verdicts["set_to_none"].reason) is not tried


def test_what_comes_later_and_does_not_hold_leaves_what_is_proved(script):
    script.step_us |= {WHOLE: 500.0, (*WHOLE, "set_to_none"): 700.0}
    script.verdicts = {"set_to_none": "kept"}
    script.step_us |= {("tf32",): 600.0, ("channels_last",): 600.0}
    whole_kept(script)
    _, plan, code, verdicts = apply(script, *WHOLE, "set_to_none")
    # The whole and what came on top of it is faster than the plain script, and is kept for that; without it faster still.
    assert code == 0
    assert verdicts["set_to_none"].status == "reverted"
    assert plan.speedup.startswith(("2.0", "1.9"))
    script.step_us[(*WHOLE, "set_to_none")] = 1500.0
    for path in (script.run_dir / "trials").glob("*.json"):
        path.unlink()
    script.launches.clear()
    _, plan, code, verdicts = apply(script, *WHOLE, "set_to_none")
    assert (code, verdicts["set_to_none"].status) == (0, "reverted")
    assert {name: verdicts[name].status for name in WHOLE} == {"tf32": "kept", "channels_last": "kept"}
    # The plain script's four runs of the first proof, two of each kind, served again.
    plain = [kept for mode, kept in modes(script) if mode == "measure" and not kept]
    assert len(plain) == 2


def test_the_loader_is_tried_on_top_of_the_whole_as_soon_as_that_is_proved(script):
    script.step_us |= {WHOLE: 500.0, (*WHOLE, "loader_workers"): 200.0}
    script.step_us |= {("tf32", "loader_workers"): 250.0, ("channels_last", "loader_workers"): 250.0}
    script.verdicts = {"set_to_none": "reverted"}
    whole_kept(script, on_top=("loader_workers",))
    _, plan, _, verdicts = apply(script, *WHOLE, "loader_workers", "set_to_none")
    assert verdicts["loader_workers"].status == "kept"
    first_later_search = [mode for mode, _ in modes(script)].index("search", 1)
    before = modes(script)[:first_later_search]
    assert sum("loader_workers" in kept for _, kept in before) == 2  # runs that serve as the whole's as well
    assert plan.speedup.startswith(("5.0", "4.9"))


FED = (*WHOLE, "loader_workers")
STARVED = Blocks(off_us=(1000.0,) * 3, on_us=(500.0,) * 3, device_off_us=(990.0,) * 3, device_on_us=(200.0,) * 3)
FED_WELL = dataclasses.replace(STARVED, device_on_us=(490.0,) * 3)


@pytest.mark.parametrize(
    ("blocks", "skip", "tried"),
    [(STARVED, (), True), (STARVED, ("loader_workers",), False), (FED_WELL, (), False), (Blocks(), (), False)],
)
def test_a_whole_that_makes_the_step_wait_for_its_loader_is_proved_with_more_workers(script, blocks, skip, tried):
    """No rule asks for them: the plain step has its batches in time."""
    script.step_us |= {WHOLE: 500.0, FED: 200.0}
    whole_kept(script, blocks=blocks)
    _, plan, _, verdicts = apply(script, *WHOLE, skip=skip)
    first = next(kept for mode, kept in modes(script) if mode == "measure" and kept)
    assert first == (FED if tried else WHOLE)
    assert ("loader_workers" in verdicts) is tried
    assert plan.speedup.startswith(("5.0", "4.9") if tried else ("2.0", "1.9"))


def test_what_does_not_hold_with_more_workers_is_proved_without_them(script):
    script.step_us |= {WHOLE: 500.0, FED: 1500.0}
    whole_kept(script, blocks=STARVED)
    _, plan, code, verdicts = apply(script, *WHOLE)
    assert code == 0
    assert {name: verdicts[name].status for name in FED} == dict.fromkeys(WHOLE, "kept") | {
        "loader_workers": "reverted"
    }
    assert plan.speedup.startswith(("2.0", "1.9"))


def test_of_a_whole_that_trains_otherwise_half_precision_is_dropped_first(script):
    script.step_us |= {WHOLE: 500.0, ("channels_last",): 700.0}
    script.losses = {WHOLE: 5.0}
    inner = script.loss
    script.loss = lambda names, i: inner(names, i) + (5.0 if "tf32" in names else 0.0)
    whole_kept(script)
    _, _, code, verdicts = apply(script, *WHOLE)
    assert (verdicts["tf32"].status, verdicts["channels_last"].status) == ("reverted", "kept")
    assert "did not hold in fresh runs" in verdicts["tf32"].reason
    assert code == 0


def test_one_run_of_each_kind_does_where_it_is_clear_and_the_end_adds_the_others(script):
    script.step_us[WHOLE] = 500.0
    script.step_us |= {("tf32",): 600.0, ("channels_last",): 600.0}
    script.verdicts = {"set_to_none": "reverted"}
    plans = []
    inner = script.search

    def later(session):
        plans.append(planfile.read(script.run_dir / "plan.yaml"))
        return inner(session)

    whole_kept(script, then=later)
    log, _, _, _ = apply(script, *WHOLE, "set_to_none")
    low, high = map(float, re.search(r"\((.*) to (.*)\)", plans[0].speedup).groups())
    assert low < 1.95 < 2.05 < high  # wider than two of each would have it
    assert len(log.stack.plain_us) == len(log.stack.stack_us) == 2
    assert log.stack.speedup_low > low


def test_a_whole_that_is_hardly_faster_has_two_runs_of_each_kind_at_once(script):
    script.step_us[WHOLE] = 950.0
    script.verdicts = {"set_to_none": lambda session: Exit(code=130, signal=int(signal.SIGINT))}
    whole_kept(script)
    apply(script, *WHOLE, "set_to_none")
    assert [mode for mode, _ in modes(script)][:6] == ["search", *["measure"] * 4, "search"]


def test_what_does_not_hold_together_is_not_taken_apart_beyond_the_time_allowed(script, clock):
    """Each fresh run takes 30 s of 120, and no part of five changes is faster: a proof that goes on as long as it likes takes 400 s."""
    names = ("tf32", "channels_last", "conv_bias", "fused_optimizer", "compile")
    script.verdicts = dict.fromkeys(names, "kept")
    slower = (itertools.permutations(names, count) for count in range(1, len(names) + 1))
    script.step_us |= dict.fromkeys(itertools.chain.from_iterable(slower), 1500.0)
    measure = script.measure

    def slowly(session):
        clock.sleep(30.0)
        return measure(session)

    script.measure = slowly
    began = clock.time()
    log, plan, code, verdicts = apply(script, *names, time_s=120.0)
    assert clock.time() - began <= (1 + budget.OVERRUN_SHARE) * 120.0 + 30.0
    assert code == 4
    assert log.stack.passed is not True
    assert not any(item.status == "kept" for item in plan.items)
    assert {v.status for v in verdicts.values()} <= {"unconfirmed", "reverted", "inconclusive"}
