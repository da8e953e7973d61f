"""The copy of a proved plan in the working directory: where people look for it, and nothing of theirs is lost."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from advisor.core.plan import Plan, PlanItem
from advisor.trials import planfile, plans

PLAN = Plan(script="train.py", argv=(), created="now", items=(PlanItem(transform="tf32", status="kept"),))


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def proved(here: Path, name: str, **changes: object) -> tuple[Path, str]:
    run_dir = here.parent / name
    plan = dataclasses.replace(PLAN, run=str(run_dir), created=name, **changes)
    planfile.write(run_dir / "plan.yaml", plan)
    return plans.beside(plan, run_dir, here)


def test_a_proved_plan_lies_where_the_readme_says(here: Path) -> None:
    assert proved(here, "first") == (here / "plan.yaml", "")
    assert planfile.read(here / "plan.yaml").created == "first"
    assert proved(here, "second") == (here / "plan.yaml", "")
    assert planfile.read(here / "plan.yaml").created == "second"


def test_a_plan_that_keeps_nothing_is_not_put_there(here: Path) -> None:
    left_open = (PlanItem(transform="tf32", status="unconfirmed"),)
    assert proved(here, "first", items=left_open) == (here.parent / "first" / "plan.yaml", "")
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("theirs", ["edited", "of another script", "no plan", "of a run that is gone"])
def test_what_is_the_users_stays(here: Path, theirs: str) -> None:
    proved(here, "first", **({"script": "other.py"} if theirs == "of another script" else {}))
    file = here / "plan.yaml"
    if theirs == "edited":
        file.write_text(file.read_text().replace("status: kept", "status: skipped"))
    elif theirs == "no plan":
        file.write_text("epochs: 90\n")
    elif theirs == "of a run that is gone":
        (here.parent / "first" / "plan.yaml").unlink()
    before = file.read_text()
    named, told = proved(here, "second")
    assert file.read_text() == before
    assert named == here.parent / "second" / "plan.yaml"
    assert "plan.yaml here is left as it is" in told
    assert str(named) in told


def test_a_plan_says_whose_it_is(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(here)
    for name in ("train.py", "copy.py"):
        (here / name).write_text("pass")
    (here / "other.py").write_text("1")
    mine = dataclasses.replace(PLAN, hashes=planfile.hashes_here("train.py", environment=""))
    assert planfile.another_script(mine, str(here / "train.py")) == ""
    assert planfile.another_script(mine, "copy.py") == ""  # the same text
    (told,) = planfile.mismatches(mine, "other.py", planfile.hashes_here("other.py", environment=""))
    assert told == "it is the plan of train.py, and this is other.py"
    launched = dataclasses.replace(PLAN, script="torchrun", argv=("--nproc-per-node", "2", "train.py", "--lr", "1"))
    assert planfile.another_script(launched, "train.py") == ""
    module = dataclasses.replace(PLAN, script="-m", argv=("pkg.train",))
    assert planfile.another_script(module, "pkg.train") == ""
    assert "the plan of pkg.train" in planfile.another_script(module, "pkg.eval")
