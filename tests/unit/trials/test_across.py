"""Changes tried in all ranks at once: what each rank does is the same, whatever its own clock says."""

from __future__ import annotations

import itertools
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from advisor.core.findings import Recommendation
from advisor.core.verdict import Check, Status
from advisor.distributed.board import Board
from advisor.loop.session import Session
from advisor.loop.stop import StopTraining, forget
from advisor.loop.training import RootModule, StepEvent, Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.trials import across, in_ranks, records
from advisor.trials.across_gate import GateFailed, worst

GAINS = {"ddp_bucket_views": 0.8, "ddp_static_graph": 1.3}


class Planted(Transform):
    """A change that makes a step of rank 1, the slower one, take so many times as long."""

    def __init__(self, name: str, clock: Clock, fails: str = "") -> None:
        self.name, self.clock, self.fails = name, clock, fails

    @property
    def id(self) -> str:
        return self.name

    def match(self, training: Training, parameters: Any) -> Match:
        return Match(applies=self.fails != "match", reason="not here")

    def apply(self, training: Training, parameters: Any) -> Undo:
        if self.fails == "apply":
            raise ValueError("no")
        self.clock.step_s *= GAINS[self.name]
        return Undo([lambda: setattr(self.clock, "step_s", self.clock.step_s / GAINS[self.name])])


class Gate:
    """No step is replayed here: tests/integration/test_searched_in_ranks.py. `wrong`: the rank that finds the change wrong."""

    wrong = -1

    def __init__(self, training: Training, watcher: Any, board: Board) -> None:
        self.board = board

    def capture(self, transform: Transform) -> Any:
        yield
        return True

    def judge_sent(self, transform: Transform, switch: Any) -> Check:
        if why := switch(True):
            raise GateFailed(why)
        own = self.board.rank != self.wrong
        return worst(self.board.exchange([own, "off by all of it" if not own else "right", {}, ""]))

    def release(self) -> None:
        pass


class Clock:
    def __init__(self, step_s: float) -> None:
        self.step_s, self.now, self.noise = step_s, 0.0, itertools.cycle((1.0, 1.001, 0.999))

    def step(self) -> None:
        self.now += self.step_s * next(self.noise)


def searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: dict[int, str], *, unclean: int = 0
) -> list[list[bool]]:
    """Each rank in a thread; what was on at each of its steps. Rank 1 evaluates in one of so many steps, which takes it long."""
    store, seen = distributed.HashStore(), [[], []]
    candidates = tuple(Recommendation(transform=name) for name in GAINS)

    def rank(number: int) -> None:
        clock = Clock(0.1 * (1 + number))
        plain = clock.step_s
        net = nn.Linear(2, 2)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        monkeypatch.setattr(across, "AcrossGate", Gate)
        training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Linear")])
        session = Session(mode="across", run_dir=str(tmp_path), script="train.py", warmup=2, candidates=candidates)
        own = Board(store, number, 2, patience_s=60.0)
        driver = across.AcrossDriver(
            training, session, own, lambda name: Planted(name or "ddp_bucket_views", clock, fails.get(number, ""))
        )
        try:
            for index in range(10_000):
                clock.step()
                odd = bool(number and unclean and index % unclean == 0)
                clock.now += 50.0 * odd
                driver.on_step(StepEvent(index=index, host_ns=round(clock.now * 1e9), event=None, clean=not odd))
                seen[number].append(abs(clock.step_s - plain) > 1e-9)
        except (StopTraining, SystemExit):
            pass

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(2)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        forget()
    return seen


def test_all_ranks_switch_at_the_same_steps_and_the_slowest_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = searched(tmp_path, monkeypatch, {})
    assert seen[0] == seen[1]
    verdicts = records.verdicts(tmp_path)
    assert [v.status for v in verdicts] == [Status.KEPT, Status.REVERTED]
    assert verdicts[0].blocks.off_us[0] == pytest.approx(2e5, rel=0.01)  # rank 1's
    assert [item.transform for item in in_ranks.found_kept(verdicts)] == ["ddp_bucket_views"]


@pytest.mark.parametrize(("fails", "status"), [("match", Status.NOT_APPLICABLE), ("apply", Status.FAILED)])
def test_what_one_rank_cannot_make_is_made_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, status: str
) -> None:
    seen = searched(tmp_path, monkeypatch, {1: fails})
    assert not any(seen[0][-1:] + seen[1][-1:])
    assert [(v.status, v.reason[:6]) for v in records.verdicts(tmp_path)] == [(status, "rank 1")] * 2


def test_what_one_rank_finds_wrong_is_made_by_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Gate, "wrong", 1)
    seen = searched(tmp_path, monkeypatch, {})
    assert not any(seen[0][-1:] + seen[1][-1:])
    verdicts = records.verdicts(tmp_path)
    assert [v.status for v in verdicts] == [Status.REVERTED] * 2
    assert "rank 1: off by all of it" in verdicts[0].reason


def test_a_block_in_which_a_rank_evaluates_does_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    searched(tmp_path, monkeypatch, {}, unclean=37)
    verdicts = records.verdicts(tmp_path)
    assert [v.status for v in verdicts] == [Status.KEPT, Status.REVERTED]
    assert max(verdicts[0].blocks.off_us) < 3e5
