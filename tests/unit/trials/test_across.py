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
from advisor.core.verdict import FAILED, KEPT, NOT_APPLICABLE, REVERTED
from advisor.distributed.board import Board
from advisor.loop.session import Session
from advisor.loop.stop import StopTraining, forget
from advisor.loop.training import RootModule, StepEvent, Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.trials import across, ranks, records

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


class Clock:
    def __init__(self, step_s: float) -> None:
        self.step_s, self.now, self.noise = step_s, 0.0, itertools.cycle((1.0, 1.001, 0.999))

    def step(self) -> None:
        self.now += self.step_s * next(self.noise)


def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: dict[int, str]) -> list[list[bool]]:
    """Each rank in a thread; what was on at each of its steps."""
    store, seen = distributed.HashStore(), [[], []]
    candidates = tuple(Recommendation(transform=name) for name in GAINS)

    def rank(number: int) -> None:
        clock = Clock(0.1 * (1 + number))
        plain = clock.step_s
        monkeypatch.setattr(across.AcrossDriver, "_clock", lambda driver: driver.find("").clock.now)
        net = nn.Linear(2, 2)
        nn.init.ones_(net.weight)
        nn.init.ones_(net.bias)
        training = Training(device=torch.device("cpu"), roots=[RootModule(module=net, name="Linear")])
        session = Session(mode="across", run_dir=str(tmp_path), script="train.py", warmup=2, candidates=candidates)
        own = Board(store, number, 2, patience_s=60.0)
        driver = across.AcrossDriver(
            training, session, own, lambda name: Planted(name or "ddp_bucket_views", clock, fails.get(number, ""))
        )
        try:
            for index in range(10_000):
                clock.step()
                driver.on_step(StepEvent(index=index, host_ns=0, event=None, clean=True))
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
    assert [v.status for v in verdicts] == [KEPT, REVERTED]
    assert verdicts[0].blocks.off_us[0] == pytest.approx(2e5, rel=0.01)  # rank 1's
    assert [item.transform for item in ranks.found_kept(verdicts)] == ["ddp_bucket_views"]


@pytest.mark.parametrize(("fails", "status"), [("match", NOT_APPLICABLE), ("apply", FAILED)])
def test_what_one_rank_cannot_make_is_made_by_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str, status: str
) -> None:
    seen = searched(tmp_path, monkeypatch, {1: fails})
    assert not any(seen[0][-1:] + seen[1][-1:])
    assert [(v.status, v.reason[:6]) for v in records.verdicts(tmp_path)] == [(status, "rank 1")] * 2
