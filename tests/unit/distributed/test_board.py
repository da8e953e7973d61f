"""What ranks tell each other beside the script's own traffic."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch import distributed

from advisor.distributed import board
from advisor.distributed.board import Board, Lost


def test_each_rank_reads_what_all_have_written() -> None:
    store, found = distributed.HashStore(), {}

    def rank(number: int) -> None:
        own = Board(store, number, 3, patience_s=60.0)
        found[number] = [own.exchange(number), own.exchange({"at": number})]

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: [[0, 1, 2], [{"at": 0}, {"at": 1}, {"at": 2}]] for number in range(3)}


class Store:
    """A store in which nobody else writes, and waiting is over at once."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def set(self, key: str, value: str) -> None:
        self.values[key] = value

    def get(self, key: str) -> str:
        return str(self.values[key])

    def check(self, keys: list[str]) -> bool:
        return set(keys) <= self.values.keys()

    def wait(self, keys: list[str], timeout: object) -> None:
        if not self.check(keys):
            raise distributed.DistStoreError("wait timeout")


def test_who_does_not_come_is_known_by_name() -> None:
    store = Store()
    store.set("advisor/1/2", "0")
    with pytest.raises(Lost, match="rank 1 did not come") as lost:
        Board(store, 0, 3, patience_s=1.0).exchange(0)
    assert lost.value.ranks == [1]


def test_who_holds_the_others_up_is_told_by_any_rank_that_still_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 is gone, rank 2 stands two steps behind: rank 1 tells."""
    store, told = Store(), []
    store.set("advisor/at/0", '[7, "train.py:9", true]')
    store.set("advisor/at/2", '[5, "data.py:3", false]')
    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr(board, "time", SimpleNamespace(sleep=lambda s: None, monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(board.threading, "Thread", lambda **how: SimpleNamespace(start=lambda: None))
    watch = board.Watch(store, 1, 3, patience_s=60.0, lost=told.append)
    watch.steps = 7
    watch._run()
    (lost,) = told
    assert lost.ranks == [2]
    assert "rank 2 held the others up" in str(lost)
    assert "rank 2 is at data.py:3 (step 5)" in str(lost)


def test_while_a_change_is_judged_no_step_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    store, told, waited = Store(), [], []

    def sleep(seconds: float) -> None:
        waited.append(seconds)
        if len(waited) > 200:
            raise KeyboardInterrupt

    clock = iter(range(0, 10_000, 5))
    monkeypatch.setattr(board, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(board.threading, "Thread", lambda **how: SimpleNamespace(start=lambda: None))
    watch = board.Watch(store, 0, 2, patience_s=60.0, lost=told.append)
    watch.steps, watch.resting = 7, True
    with pytest.raises(KeyboardInterrupt):
        watch._run()
    assert not told


def test_a_training_that_goes_on_is_watched_on_and_an_evaluation_is_no_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both at work: nothing is told. Then rank 1 waits for rank 0: each time that patience ends."""
    store, told, slept = Store(), [], []

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        store.set("advisor/at/0", '[9, "data.py:3", false]')
        store.set("advisor/at/1", f'[9, "train.py:9", {"true" if len(slept) > 100 else "false"}]')
        if len(slept) > 200:
            raise KeyboardInterrupt

    clock = iter(range(0, 100_000, 15))
    monkeypatch.setattr(board, "time", SimpleNamespace(sleep=sleep, monotonic=lambda: float(next(clock))))
    monkeypatch.setattr(board.threading, "Thread", lambda **how: SimpleNamespace(start=lambda: None))
    watch = board.Watch(
        store, 0, 2, patience_s=300.0, lost=lambda lost: told.append((len(slept), lost.ranks)), again=True
    )
    watch.steps = 9
    monkeypatch.setattr(watch, "_place", lambda: ("data.py:3", False))
    with pytest.raises(KeyboardInterrupt):
        watch._run()
    assert len(told) > 1
    assert all(at > 100 and ranks == [0] for at, ranks in told)


def test_a_training_that_ends_while_its_rank_is_written_down_ends_well(tmp_path: Path) -> None:
    """A rank looked every two seconds: a training that ended at such a moment was aborted, with all its work done."""
    script = f"""
from torch import distributed
from advisor.distributed import board
board.EVERY_S = 0.0
store = distributed.FileStore({str(tmp_path / "board")!r})
class Busy:  # it always is such a moment
    def set(self, key, value):
        for _ in range(200):
            store.set(key, value)
for rank in range(4):
    board.Watch(Busy(), rank, 4, patience_s=0.0, lost=print)
for rank in range(4):
    while not store.check([f"advisor/at/{{rank}}"]):
        pass
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
