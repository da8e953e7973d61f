"""A process that was profiled goes on as a search, in the same loop."""

from dataclasses import replace
from functools import partial

import pytest
from searched_loop import candidates, find, train

from advisor.core import storage
from advisor.loop.attach import Attached
from advisor.loop.records import NEXT_FILE, STEPS_FILE, StepsRecord
from advisor.loop.session import Session
from advisor.trials import handover, records
from advisor.trials.live import handed
from advisor.trials.live.driver import SearchDriver

PROFILE = Session(
    mode="profile", run_dir="", script="train.py", warmup=4, steps=8, detail_steps=0, hands_over=True, seed=7
)
SEARCH = Session(mode="search", run_dir="", script="train.py", warmup=4, max_pairs=12)


def attach(training, session, watcher, find):
    handed.SearchDriver = partial(SearchDriver, find=find)  # in a process of its own, that ends
    handed.HandedDriver(training, session, watcher, Attached.discovery).attach()


def run(tmp_path, orders):
    if orders is not None:
        storage.save(tmp_path / NEXT_FILE, replace(orders, run_dir=str(tmp_path)))
    _, reason = train(replace(PROFILE, run_dir=str(tmp_path)), attach, find)
    return reason


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(handed, "PATIENCE_S", 0.0)


def test_the_search_has_the_loop_that_was_profiled(tmp_path):
    assert run(tmp_path, replace(SEARCH, candidates=candidates("faster", "slower", "wrong"))) == "search done"
    found = {v.transform: v.status for v in records.verdicts(tmp_path)}
    assert found == {"faster": "kept", "slower": "reverted", "wrong": "reverted"}
    assert storage.load(tmp_path / STEPS_FILE, StepsRecord).complete
    plain = records.load_plain(tmp_path)
    assert len(plain.step_us) >= 6
    assert len(plain.losses) > len(plain.step_us)  # from the first step on
    assert plain.batch_size == 8


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("orders", [None, replace(SEARCH, mode=handover.ENDS)])
def test_one_that_nobody_has_orders_for_ends(tmp_path, orders):
    assert run(tmp_path, orders) == "measured"
    assert not records.verdicts(tmp_path)
