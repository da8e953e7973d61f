"""Ending the script: once asked, it is asked again, and at last the process is ended."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from advisor.loop import stop
from advisor.loop.session import Session


@pytest.fixture(autouse=True)
def forget() -> Iterator[None]:
    stop.forget()
    yield
    stop.forget()


def test_nothing_is_raised_before_a_stop() -> None:
    stop.insist()
    assert not stop.requested()


def test_a_stop_is_told_once_and_raised_again(tmp_path: Path) -> None:
    session = Session(mode="profile", run_dir=str(tmp_path), script="x")
    with pytest.raises(stop.StopTraining) as caught:
        stop.stop(session, "measured")
    assert caught.value.code == 0
    assert isinstance(caught.value, SystemExit)
    assert stop.requested()
    for _ in range(stop.MAX_RAISES - 1):
        with pytest.raises(stop.StopTraining):
            stop.insist()
    assert (tmp_path / "progress.jsonl").read_text().count('"stopped"') == 1


def test_a_thread_that_trains_ends_in_silence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = Session(mode="profile", run_dir=str(tmp_path), script="x")
    went_on: list[bool] = []

    def train() -> None:
        stop.stop(session, "measured")
        went_on.append(True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(threading, "excepthook", threading.__excepthook__)  # pytest's own tells of SystemExit too
        thread = threading.Thread(target=train)
        thread.start()
        thread.join()
    assert not went_on
    assert stop.requested()
    assert capsys.readouterr().err == ""


def test_a_script_that_swallows_it_for_ever_is_ended(tmp_path: Path) -> None:
    script = f"""
from advisor.loop import stop
from advisor.loop.session import Session
session = Session(mode="profile", run_dir={str(tmp_path)!r}, script="x")
print("begun", end="")
for turn in range(10):
    try:
        if turn == 0:
            stop.stop(session, "measured")
        else:
            stop.insist()
    except BaseException:
        pass
print("not ended")
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout == "begun"


def test_workers_that_do_not_end_hold_nobody_up(tmp_path: Path) -> None:
    """PyTorch alone waits five seconds for each, twelve workers a minute (seen with Accelerate on an H200)."""
    script = f"""
import multiprocessing.process as process
import signal
import torch
from torch.utils.data import DataLoader
from advisor.loop import stop
from advisor.loop.session import Session

class Slow(torch.utils.data.Dataset):
    def __len__(self):
        return 100
    def __getitem__(self, index):
        while index >= 4:
            signal.pause()
        return index

session = Session(mode="profile", run_dir={str(tmp_path)!r}, script="x")
waits = []
join = process.BaseProcess.join
def noted(worker, timeout=None):
    waits.append(timeout)
    join(worker, timeout)
def train():
    for step, batch in enumerate(DataLoader(Slow(), num_workers=4, multiprocessing_context="fork")):
        if step == 3:
            process.BaseProcess.join = noted
            stop.stop(session, "measured")
try:
    train()
except SystemExit:
    pass  # with its traceback goes the loop's frame, and the loader's iterator
print(len(waits), waits[0])  # of all four, before any is ended by force
"""
    root = Path(__file__).parents[3]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    count, first = done.stdout.split()
    assert int(count) >= 4
    assert float(first) == stop.WORKER_S  # 5 s without
