"""What a profile that is thrown away does with files of the user's that cannot be put back."""

from __future__ import annotations

import dataclasses

import pytest

from advisor import pipeline
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.loop.session import Session
from advisor.pipeline import profiling
from advisor.profiling.beside import launcher, relay
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.launcher import Exit
from advisor.profiling.machine import environment
from advisor.userfiles import journal, restore


def test_a_script_whose_files_could_not_be_put_back_is_not_started_again(tmp_path, monkeypatch) -> None:
    launches, said = [], []
    monkeypatch.setattr(environment, "probe", lambda: Environment(device="cpu"))
    monkeypatch.setattr(launcher, "launch", lambda command, session, **more: launches.append(session) or Exit(code=0))
    monkeypatch.setattr(profiling, "shorter_session", lambda session, code: dataclasses.replace(session, steps=1))
    monkeypatch.setattr(restore, "restore", lambda run_dir: ("best.pt: Permission denied",))

    def profile() -> None:
        profiling.profile_script(
            ScriptCommand(argv=("python", "train.py"), name="train.py"),
            Session(mode="profile", run_dir=str(tmp_path), script="train.py", warmup=1, steps=1, detail_steps=1),
            rules_dirs=(),
            say=said.append,
        )

    with pytest.raises(AdvisorError, match="could not be put back"):
        profile()
    assert len(launches) == 1
    assert any("best.pt: Permission denied" in text for text in said)


def test_a_script_that_another_run_stops_is_not_blamed(tmp_path, monkeypatch) -> None:
    """Seen: `profile` and `apply` in one folder at once: "the script ended with exit code 1", and the reason in a log."""
    held = "/project/log.csv: the run in /project/advisor-runs/one, process 7, has set it aside"

    def launch(command, session, **more):
        (session.folder / "files").mkdir(exist_ok=True)
        (session.folder / "files" / journal.HELD).write_text(held)
        return Exit(code=1)

    monkeypatch.setattr(environment, "probe", lambda: Environment(device="cpu"))
    monkeypatch.setattr(launcher, "launch", launch)
    monkeypatch.setattr(relay, "launch", launch)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    for command in (pipeline.profile, pipeline.apply):
        with pytest.raises(AdvisorError) as caught:
            command(["train.py"], say=print)
        assert str(caught.value) == (
            f"the script failed because another run of advisor keeps its file: {held}. Try again when that run has ended."
        )


def test_a_script_that_makes_a_good_end_of_an_interrupt_is_not_started_again(tmp_path, monkeypatch) -> None:
    launches = []

    def launch(command, session, **more):
        launches.append(session)
        return Exit(code=0, interrupted=True)

    monkeypatch.setattr(environment, "probe", lambda: Environment(device="cpu"))
    monkeypatch.setattr(relay, "launch", launch)
    monkeypatch.setattr(profiling, "shorter_session", lambda session, code: dataclasses.replace(session, steps=1))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    with pytest.raises(KeyboardInterrupt):
        pipeline.apply(["train.py"], say=print)
    assert [session.mode for session in launches] == ["profile"]
