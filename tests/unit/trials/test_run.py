"""`advisor run`: a plan that fits is handed to the script, and what no longer fits falls back."""

import dataclasses

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.plan import Plan, PlanHashes, PlanItem
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.trials import planfile, run

FOLDS = """
import os
import torch

if not os.fork():
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(12):
        optimizer.zero_grad()
        model(torch.rand(4, 2)).sum().backward()
        optimizer.step()
    os._exit(0)
os.wait()
"""


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """This machine, and a plan that was proved on it."""
    text = "NVIDIA H200 sm_90 torch 2.11"
    monkeypatch.setattr(run, "environment_text", lambda: text)
    monkeypatch.setattr(planfile, "kernels_hash", lambda: "k0")
    trained = tmp_path / "train.py"
    trained.write_text("pass")
    items = (
        PlanItem(transform="tf32", status="kept"),
        PlanItem(transform="fused_bn_act", status="kept"),
        PlanItem(transform="compile", status="reverted"),
    )
    hashes = PlanHashes(script=planfile.script_hash(trained), model="m0", environment=text, kernels="k0")
    plan = Plan(script=str(trained), argv=(), created="now", items=items, hashes=hashes)
    return ScriptCommand(argv=("python", str(trained)), name=str(trained)), plan


def run_plan(command, plan, tmp_path, *, code=0, ended=None, events=("applied",), **more):
    sessions, said = [], []

    def launch(command, session, *, on_progress):
        sessions.append(session)
        for event in events:
            on_progress({"event": event})
        return ended or Exit(code=code)

    (tmp_path / "run").mkdir(exist_ok=True)
    code = run.run_plan(
        command, tmp_path / "plan.yaml", plan, run_dir=tmp_path / "run", say=said.append, launch=launch, **more
    )
    return code, sessions[0], said


def test_a_plan_that_fits_is_handed_to_the_script(machine, tmp_path):
    ended, session, said = run_plan(*machine, tmp_path, code=7)
    assert ended == 7
    assert [i.transform for i in session.kept] == ["tf32", "fused_bn_act"]
    assert (session.mode, session.model_hash, session.protect_files) == ("run", "m0", False)
    assert said == []


def test_what_changed_is_named_and_its_items_fall_back(machine, tmp_path):
    command, plan = machine
    elsewhere = dataclasses.replace(
        plan, hashes=dataclasses.replace(plan.hashes, environment="NVIDIA A100 sm_80 torch 2.9")
    )
    _, session, said = run_plan(command, elsewhere, tmp_path)
    assert session.kept == ()
    assert "A100" in said[0]
    assert f"`advisor apply --plan {tmp_path / 'plan.yaml'}`" in said[1]
    kernels = dataclasses.replace(plan, hashes=dataclasses.replace(plan.hashes, kernels="old"))
    _, session, said = run_plan(command, kernels, tmp_path)
    assert [i.transform for i in session.kept] == ["tf32"]
    assert any("fused_bn_act" in text and "`advisor apply --plan" in text for text in said)
    edited = dataclasses.replace(plan, hashes=dataclasses.replace(plan.hashes, script="0" * 64))
    _, session, said = run_plan(command, edited, tmp_path)
    assert len(session.kept) == 2
    assert "script" in said[0]
    with pytest.raises(AdvisorError, match="script's text has changed"):
        run_plan(command, edited, tmp_path, strict=True)


@pytest.mark.parametrize("strict", [False, True])
def test_a_plan_that_was_never_applied_is_told(machine, tmp_path, strict, monkeypatch):
    ended, _, said = run_plan(*machine, tmp_path, code=3, events=(), strict=strict)
    assert ended == 3
    assert [text for text in said if "too few training steps were seen" in text] == said != []
    off = Exit(code=3, fault="KeyError: 1")
    for events, which in ((), "which has trained without the plan"), (("applied",), "after the plan was on"):
        ended, _, said = run_plan(*machine, tmp_path, ended=off, events=events)
        assert (ended, said) == (3, [f"advisor switched itself off in the script, {which}: KeyError: 1"])
    monkeypatch.setenv("ADVISOR_DISABLE", "1")
    _, _, said = run_plan(*machine, tmp_path, events=())
    assert said == ["ADVISOR_DISABLE is set: the script has trained without the plan"]


@pytest.mark.long
def test_folds_that_train_in_processes_of_their_own_are_told(tmp_path):
    script = tmp_path / "folds.py"
    script.write_text(FOLDS)
    items = (PlanItem(transform="set_to_none", status="kept"),)
    plan = Plan(script=str(script), argv=(), created="now", items=items, hashes=PlanHashes())
    said = []
    command = ScriptCommand.parse((str(script),))
    assert run.run_plan(command, tmp_path / "plan.yaml", plan, run_dir=tmp_path, say=said.append) == 0
    assert sum("too few training steps were seen" in text for text in said) == 1
