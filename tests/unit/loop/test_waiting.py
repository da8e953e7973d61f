"""What a process is waited for, and when no more: by a clock that the test turns."""

from __future__ import annotations

import pytest

from advisor.loop import waiting
from advisor.loop.session import Session
from advisor.loop.waiting import Waiting, WaitStage


class Process:
    """A process of the script, as the launcher's `Waiting` sees it."""

    def __init__(self, mode: str = "search", *, watched: bool = True, **orders: object) -> None:
        self.now = 100.0
        session = Session(mode=mode, run_dir="run", script="train.py", **orders)
        self.waiting = Waiting(session, watched=watched, clock=lambda: self.now)

    def told(self, *events: str, **fields: object) -> Process:
        for event in events:
            self.waiting.told({"event": event, **fields})
        return self

    def after(self, seconds: float) -> Waiting:
        self.now += seconds
        return self.waiting


def test_a_process_that_was_never_attached_ends_at_once() -> None:
    process = Process().told(waiting.STARTED).told(waiting.FAULT, error="ModuleNotFoundError: No module named 'numpy'")
    assert process.after(0.0).over() == "ModuleNotFoundError: No module named 'numpy'"
    assert process.waiting.stage is WaitStage.PYTHON


def test_one_that_had_measured_something_has_seconds_to_write_it() -> None:
    process = Process().told(waiting.STARTED, waiting.ATTACHED, waiting.STEP).told(waiting.FAULT, error="KeyError: 1")
    assert process.after(waiting.FAULT_S - 0.1).over() == ""
    assert process.after(0.2).over() == "KeyError: 1"
    process.told(waiting.FAULT, error="a second one")
    assert process.waiting.fault == "KeyError: 1"


@pytest.mark.parametrize(
    "process",
    [Process("run"), Process("profile", keep_running=True), Process("profile", watched=False)],
    ids=["run", "keep-running", "ADVISOR_DISABLE"],
)
def test_a_training_that_is_the_users_own_is_never_ended(process: Process) -> None:
    process.told(waiting.STARTED, waiting.IMPORTED).told(waiting.FAULT, error="KeyError: 1")
    assert process.after(1e6).over() == ""


@pytest.mark.parametrize("told", [(), (waiting.STARTED,), (waiting.STARTED, waiting.ATTACHED)])
def test_where_a_first_step_was_seen_before_it_is_not_waited_for_in_vain(told: tuple[str, ...]) -> None:
    limit_s = waiting.patience_s(4.0)
    process = Process(first_step_s=limit_s).told(*told)
    assert process.after(limit_s - 1).over() == ""
    assert f"no training step within {limit_s:.0f} seconds" in process.after(1).over()
    assert process.waiting.gave_up


def test_a_step_in_time_ends_the_waiting() -> None:
    process = Process(first_step_s=10.0).told(waiting.STARTED, waiting.ATTACHED)
    process.now += 9.0
    process.told(waiting.STEP)
    assert process.waiting.first_step_s == 9.0
    later = process.after(1e6)
    assert (later.over(), later.line()) == ("", "")


def test_a_script_that_may_still_train_is_let_be_and_told_of() -> None:
    """Data may take an hour to be made ready; a command may stand in the queue of a cluster."""
    for told, missing in (((), "advisor found no Python"), ((waiting.STARTED, waiting.ATTACHED), "no training step")):
        process = Process("profile").told(*told)
        lines = [line for _ in range(3600) if (line := process.after(1.0).line())]
        assert process.waiting.over() == ""
        assert len(lines) == 8  # after 15 s, then twice as long each time
        assert lines[0].startswith(f"15 s: {missing}")


@pytest.mark.parametrize(("search", "told"), [(False, ""), (True, waiting.SEARCHES)])
def test_a_first_step_that_takes_long_is_told_as_one(search: bool, told: str) -> None:
    """cuDNN's search took 30 s of a 3-D ResNet's first step, and the user read that no step was seen for want of an optimizer."""
    process = Process("profile").told(waiting.STARTED, waiting.ATTACHED).told(waiting.CALLED, search=search)
    assert f"the script has called its model, and no training step has ended yet{told};" in process.after(15.0).line()


def test_one_that_does_not_hear_of_the_interrupt_is_ended() -> None:
    """A first backward in cuDNN's search hears of Ctrl-C when that is over; what it trains is for nobody."""
    process, own = (
        Process(mode).told(waiting.STARTED, waiting.ATTACHED, waiting.CALLED) for mode in ("measure", "run")
    )
    for each in (process, own):
        each.waiting.asked()
        assert each.after(waiting.ASKED_S - 0.1).over() == ""
        each.waiting.asked()  # asked again and again: the first time counts
    assert (process.after(0.1).over(), own.after(0.1).over()) == (waiting.INTERRUPTED, "")


def test_a_script_that_never_imports_torch_is_told_and_ended() -> None:
    process = Process("profile").told(waiting.STARTED)
    assert "has imported neither torch nor CuPy" in process.after(waiting.TELL_S).line()
    assert process.after(waiting.TORCH_S - waiting.TELL_S - 1).over() == ""
    assert "so it has no training steps yet" in process.after(1).over()


def test_cupy_alone_is_told_at_once_and_ended() -> None:
    process = Process("profile").told(waiting.STARTED)
    process.now += 40.0
    assert process.waiting.line()
    process.told(waiting.IMPORTED)
    assert process.waiting.line() == ""  # torch may be imported next
    assert "the script uses CuPy without torch" in process.after(waiting.CUPY_TOLD_S).line()
    assert process.waiting.line() == ""
    assert process.waiting.over() == ""
    assert "CuPy without torch" in process.after(waiting.CUPY_S).over()


def test_cupy_beside_torch_is_a_pytorch_loop() -> None:
    process = Process("profile").told(waiting.STARTED, waiting.IMPORTED, waiting.ATTACHED)
    assert process.after(2 * waiting.CUPY_S).over() == ""
    assert "CuPy" not in process.waiting.line()


def test_a_longer_first_start_leaves_later_ones_longer() -> None:
    assert waiting.patience_s(None) == 0.0
    assert waiting.patience_s(60.0) > 3 * 60.0
