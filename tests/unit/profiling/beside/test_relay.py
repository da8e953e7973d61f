"""Processes that are started ahead of their orders: real ones, of scripts that import torch."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from clocks import until

from advisor.loop.session import TIMING_FILE, Session
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.relay import Relay, Standby
from advisor.userfiles import journal
from advisor.userfiles.guard import UNFIT
from advisor.userfiles.restore import restore

SCRIPT = """
import os
print("begun by", os.getpid(), flush=True)
{before}
import torch
import sys
print(os.getpid(), "has", os.environ["ADVISOR_SESSION"], "torch._dynamo" in sys.modules, flush=True)
open("result.txt", "w").write("done")
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def command(before: str = "") -> ScriptCommand:
    Path("train.py").write_text(SCRIPT.format(before=before))
    return ScriptCommand.parse(["train.py"])


def session(run_dir: Path, **orders: object) -> Session:
    return Session(mode="measure", script="train.py", run_dir=str(run_dir), protect_files=True, **orders)


def told(output: Path) -> list[list[str]]:
    """Of each process that got there: pid, "has", its orders, whether it had imported what is imported ahead."""
    return [line.split() for line in output.read_text().splitlines() if " has " in line]


def test_the_next_process_waits_for_its_orders(here: Path) -> None:
    relay, train, run_dir, output = Relay(cores=8), command(), here / "run", here / "output.log"
    try:
        assert relay(train, session(run_dir), output=output).code == 0
        assert relay._next is not None
        ahead = relay._next.child
        assert restore(run_dir) == ()
        assert not Path("result.txt").exists()
        until(lambda: f"begun by {ahead.pid}" in output.read_text())
        time.sleep(0.5)  # enough, most of the time, for one that does not wait to be seen; one that does waits for ever
        assert ahead.poll() is None
        assert len(told(output)) == 1, "it did not wait"
        later = run_dir / "round-2"
        assert relay(train, session(later, files_dir=str(run_dir)), output=output).code == 0
        first, second = told(output)
        assert first[2:] == [str(run_dir / "session.json"), "False"]
        assert second == [str(ahead.pid), "has", str(later / "session.json"), "True"]
        # What it changes is set aside as ever, though what was set aside before its turn was put back in the meantime.
        entries = journal.entries(journal.root_of(run_dir))
        assert ("created", str(here / "result.txt")) in {(entry["action"], entry["path"]) for entry in entries}
        assert relay._next is not None
        last = relay._next.child
    finally:
        relay.close()
    assert last.poll() is not None
    assert relay._next is None


@pytest.mark.parametrize(
    "before",
    [
        pytest.param("open('log.txt', 'w').write('x')", marks=pytest.mark.long),
        pytest.param("os.mkdir('logs')", marks=pytest.mark.long),
        "import subprocess; subprocess.run(['true'])",
    ],
)
def test_what_changes_something_before_its_turn_does_not_come_to_it(here: Path, before: str) -> None:
    relay, train, run_dir, output = Relay(cores=8), command(before), here / "run", here / "output.log"
    try:
        relay._next = Standby(train, session(run_dir), {}, output)
        assert relay._next.child.wait() == UNFIT
        assert sorted(path.name for path in here.iterdir()) == ["output.log", "run", "train.py"]
        relay._next = Standby(train, session(run_dir), {}, output)
        assert relay(train, session(run_dir), output=output).code == 0
        assert len(told(output)) == 1
        assert relay._next is None, "one that is not fit to be started ahead was started ahead again"
    finally:
        relay.close()


def test_nothing_is_imported_beside_steps_that_are_timed(here: Path) -> None:
    train, run_dir, output = command(), here / "run", here / "output.log"
    run_dir.mkdir()
    (run_dir / TIMING_FILE).touch()
    ahead = Standby(train, session(run_dir), {}, output)
    maps = Path(f"/proc/{ahead.child.pid}/maps")
    try:
        until(lambda: "begun by" in output.read_text())
        time.sleep(1.0)  # as above
        assert "libtorch" not in maps.read_text()
        (run_dir / TIMING_FILE).unlink()
        until(lambda: "libtorch" in maps.read_text())
    finally:
        ahead.end()


def test_a_file_that_a_killed_process_left_holds_nobody_up(here: Path) -> None:
    relay, run_dir, output = Relay(cores=8), here / "run", here / "output.log"
    left = run_dir / TIMING_FILE
    train = command(before=f"open({str(left)!r}, 'w'); os._exit(9)")
    try:
        assert relay(train, session(run_dir), output=output).code == 9
        assert not left.exists()
        left.touch()
        assert relay(train, session(run_dir), output=output).code == 9  # orders have come: it goes on
    finally:
        relay.close()


def test_it_ends_with_whoever_would_have_given_the_orders(here: Path) -> None:
    command()
    killed = """
import os, signal, time
from pathlib import Path
from advisor.profiling.beside.command import ScriptCommand
from advisor.profiling.beside.relay import Standby
from advisor.loop.session import Session
session = Session(mode="measure", script="train.py", run_dir="run", protect_files=True)
ahead = Standby(ScriptCommand.parse(["train.py"]), session, {}, Path("output.log"))
print(ahead.child.pid, flush=True)
while "begun by" not in Path("output.log").read_text():
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
    root = Path(__file__).parents[4]
    done = subprocess.run([sys.executable, "-c", killed], env={"PYTHONPATH": str(root)}, capture_output=True, text=True)
    state = Path(f"/proc/{int(done.stdout)}/stat")
    until(lambda: not state.exists() or " Z " in state.read_text())
    assert not told(here / "output.log")


def test_a_process_that_has_ended_before_its_turn_is_started_again(here: Path) -> None:
    train, run_dir = command(before="os._exit(7)"), here / "run"
    relay = Relay(cores=8)
    try:
        relay._next = Standby(train, session(run_dir), {}, here / "output.log")
        assert relay._next.child.wait() == 7
        assert relay(train, session(run_dir), output=here / "output.log").code == 7
    finally:
        relay.close()


@pytest.mark.parametrize(("cores", "program"), [(2, "train.py"), (8, "true")])
def test_where_none_is_started_ahead(here: Path, cores: int, program: str) -> None:
    command()
    Path("train.py").write_text("")
    relay = Relay(cores=cores)
    assert relay(ScriptCommand.parse([program]), session(here / "run"), output=here / "output.log").code == 0
    assert relay._next is None
    relay.close()
