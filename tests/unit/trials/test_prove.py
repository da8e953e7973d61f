"""`apply --plan`: a plan proved again, with children that are told how long their steps take."""

import dataclasses
import random

import pytest

from advisor.core import storage, transform_table
from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.core.verdict import TrialLog
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.transforms import registry
from advisor.trials import planfile, planner, prove, records

COMMAND = ScriptCommand(argv=("python", "train.py", "--lr", "0.1"), name="train.py", arguments=("--lr", "0.1"))

PLAN = Plan(
    script="elsewhere.py",
    argv=(),
    created="then",
    items=(
        PlanItem(transform="channels_last", status="kept", semantics="reassociated", reason="faster", measured="30 %"),
        PlanItem(transform="compile", status="reverted", reason="slower"),
        PlanItem(transform="amp_bf16", status="kept", semantics="precision", reason="faster"),
    ),
    hashes=PlanHashes(environment="an older machine", kernels="others", model="m"),
    speedup="9.00× (8.00 to 10.00)",
    run="then/run",
)


class Script:
    """Stands for the launcher: what each process measures is by the changes that it has on."""

    def __init__(self, run_dir, step_us):
        self.run_dir, self.step_us, self.sessions = run_dir, step_us, []
        self.left_out, self.ranks = {}, 1
        self.loss = lambda names, step: 2.0 - 0.01 * step
        self.ends = Exit(code=0, stopped_by_advisor=True)

    def __call__(self, command, session, **_):
        self.sessions.append(session)
        assert (session.mode, session.protect_files) == ("measure", True)
        names = tuple(item.transform for item in session.kept)
        r = random.Random(len(self.sessions))
        steps = tuple(self.step_us[names] * (1 + r.gauss(0, 0.01)) for _ in range(session.steps))
        measured = records.Measurement(
            step_us=steps,
            every_us=steps,
            losses=tuple(self.loss(names, i) for i in range(session.warmup + session.steps)),
            batch_size=32,
            model_hash="m now",
            applied=tuple(name for name in names if name not in self.left_out),
            left_out={name: why for name, why in self.left_out.items() if name in names},
            ranks=self.ranks,
            complete=True,
        )
        storage.save(self.run_dir / records.MEASURE_FILE, measured)
        return self.ends


def proved(script, plan=PLAN):
    return proved_by(script, script, plan)


def proved_by(script, launch, plan=PLAN):
    log, found, code = prove.prove_plan(
        COMMAND, plan, environment="this machine", max_time_s=60.0, run_dir=script.run_dir, say=lambda _: None, launch=launch
    )  # fmt: skip
    assert storage.load(script.run_dir / "trials.json", TrialLog) == log
    assert planfile.read(script.run_dir / "plan.yaml") == found
    return log, found, code


BOTH = ("channels_last", "amp_bf16")


def test_a_plan_that_still_holds_is_tied_to_what_is_here_now(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 400.0})
    log, plan, code = proved(script)
    assert code == 0
    assert [[i.transform for i in s.kept] for s in script.sessions] == [[], [*BOTH], [*BOTH], []]
    assert log.stack.speedup == pytest.approx(2.5, rel=0.02)
    assert plan.speedup.startswith("2.5")
    assert (plan.hashes.environment, plan.hashes.model, plan.hashes.kernels) == (
        "this machine", "m now", planfile.kernels_hash(),
    )  # fmt: skip
    assert (plan.script, plan.argv, plan.run) == ("train.py", ("--lr", "0.1"), str(tmp_path))
    assert plan.items == PLAN.items  # what the search said of each stays


def test_of_what_no_longer_holds_the_last_is_dropped(tmp_path):
    log, plan, code = proved(Script(tmp_path, {(): 1000.0, BOTH: 1300.0, ("channels_last",): 700.0}))
    assert code == 0
    assert [(i.transform, i.status) for i in plan.items] == [
        ("channels_last", "kept"), ("compile", "reverted"), ("amp_bf16", "reverted"),
    ]  # fmt: skip
    assert "did not hold" in plan.items[2].reason
    assert log.stack.passed


def test_a_plan_that_trains_otherwise_is_not_kept(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 400.0, ("channels_last",): 700.0})
    script.loss = lambda names, step: 2.0 - (-0.05 if names else 0.01) * step
    _, plan, code = proved(script)
    assert [i.status for i in plan.items] == ["reverted"] * 3
    assert plan.speedup == ""
    assert code == 0  # settled: nothing of it holds


def test_what_does_not_fit_here_is_left_out_and_named(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 700.0, ("channels_last",): 700.0})
    script.left_out = {"amp_bf16": "the model has no such thing"}
    _, plan, code = proved(script)
    assert plan.items[2].status == "inconclusive"
    assert "no such thing" in plan.items[2].reason
    assert (plan.items[0].status, code) == ("kept", 0)


def test_an_interrupted_proof_proves_nothing(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 400.0})
    script.ends = Exit(code=130, interrupted=True)
    log, plan, code = proved(script)
    assert code == 130
    assert len(script.sessions) == 1
    assert {i.status for i in plan.items} == {"unconfirmed", "reverted"}
    assert any("not proved here" in note for note in log.notes)


def test_several_processes_that_train_together_are_told(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 400.0})
    script.ranks = 2
    log, _, code = proved(script)
    assert code == 0
    assert any("proved in 2 processes" in note for note in log.notes)


def test_a_script_that_fails_is_told_by_its_last_line_and_its_exit_code(tmp_path):
    script = Script(tmp_path, {})

    def launch(command, session, *, output, **_):
        with output.open("a") as stream:
            stream.write("Traceback\nModuleNotFoundError: No module named 'lightning'\n")
        return Exit(code=7)

    log, plan, code = proved_by(script, launch)
    assert (code, plan.items[0].status) == (7, "unconfirmed")
    assert any("No module named 'lightning'" in note for note in log.notes)


def test_a_script_that_advisor_has_to_end_leaves_it_open(tmp_path):
    log, _, code = proved_by(Script(tmp_path, {}), lambda *_, **__: Exit(code=143, signal=15, timed_out=True))
    assert code == 4
    assert log.stack is None or not log.stack.plain_us


def test_a_loader_is_given_time_to_settle_and_judged_by_the_whole_flow(tmp_path):
    item = PlanItem(transform="loader_workers", status="kept", parameters={"workers": "4"})
    script = Script(tmp_path, {(): 1000.0, ("loader_workers",): 600.0})
    _, plan, _ = proved(script, dataclasses.replace(PLAN, items=(item,)))
    assert plan.items[0].parameters == {"workers": "4"}
    assert {s.settle_s for s in script.sessions} == {10.0}


def test_restarted_are_the_changes_that_no_running_loop_can_take():
    of_torch = (name for name, row in transform_table.ROWS.items() if not row.cupy)
    not_live = {name for name in of_torch if not registry.get(name).live}
    assert not_live <= planner.ON_TOP
    assert {name for name, row in transform_table.ROWS.items() if row.cupy} <= planner.ON_TOP
    assert not_live >= planner.RESTARTED


def test_only_and_skip_choose_among_what_is_kept():
    left = prove.wanted(PLAN, only=("amp_bf16",))
    assert [(i.status, i.reason) for i in left.items] == [
        ("skipped", "left out by --only or --skip"), ("reverted", "slower"), ("kept", "faster"),
    ]  # fmt: skip
    with pytest.raises(AdvisorError, match="no change to prove"):
        prove.wanted(PLAN, skip=BOTH)


def test_what_a_search_left_unconfirmed_is_proved_as_what_it_kept(tmp_path):
    script = Script(tmp_path, {(): 1000.0, BOTH: 400.0})
    items = tuple(
        dataclasses.replace(item, status="unconfirmed") if item.status == "kept" else item for item in PLAN.items
    )
    _, plan, code = proved(script, dataclasses.replace(PLAN, items=items))
    assert (code, [item.status for item in plan.items]) == (0, [item.status for item in PLAN.items])
