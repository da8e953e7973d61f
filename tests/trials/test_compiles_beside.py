"""torch.compile waits for a process beside that compiles, and others have their turn meanwhile."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
import torch
from searched_loop import Net, Waits, candidates, find, train

from advisor.core.findings import Recommendation
from advisor.core.verdict import Check
from advisor.loop.session import Session
from advisor.loop.training import RootModule, Training
from advisor.trials import records
from advisor.trials.live import beside, driver
from advisor.trials.live.beside import LEAST_CORES, CompiledBeside
from advisor.trials.live.driver import SearchDriver

COMPILE = Recommendation(transform="compile")


class Compiles(Waits):
    id, factor, title = "compile", 0.5, "torch.compile"

    def effect(self, training, before, after):
        return Check(passed=True, detail="")


class Process:
    """In place of a process beside: it has ended when `others` verdicts are on disk."""

    def __init__(self, loop, others=0):
        self.loop, self.others, self.began, self.asked = loop, others, 0, 0

    def wanted(self, candidate):
        return candidate.transform == "compile" and not self.began

    @property
    def running(self):
        self.asked += 1
        return len(self.loop.verdicts()) < self.others or self.asked < 6

    def begin(self, candidate):
        self.began += 1
        yield

    wait = CompiledBeside.wait


def search(tmp_path, others):
    class Driver(SearchDriver):
        def __init__(self, training, session, watcher, find):
            def look_up(name):
                return Compiles() if name == "compile" else find(name)

            made = driver.CompiledBeside
            driver.CompiledBeside = lambda loop: Process(loop, others)
            try:
                super().__init__(training, session, watcher, look_up)
            finally:
                driver.CompiledBeside = made

    orders = Session(
        mode="search", run_dir=str(tmp_path), script="train.py", warmup=3, max_pairs=12,
        candidates=(COMPILE, *candidates("slower", "nothing")),
    )  # fmt: skip
    _, reason = train(orders, Driver, find)
    return [(v.transform, v.status) for v in records.verdicts(tmp_path)], reason


@pytest.mark.parametrize("others", [1, 2])
def test_others_have_their_turn_while_it_compiles(tmp_path, others):
    verdicts, reason = search(tmp_path, others)
    assert reason == "search done"
    assert [name for name, _ in verdicts][-1] == "compile"
    assert dict(verdicts) == {"slower": "reverted", "nothing": "reverted", "compile": "kept"}


def training():
    net = Net(0.0)
    return Training(device=torch.device("cpu"), roots=[RootModule(name="Net", module=net)])


def loop_of(tmp_path, standing=()):
    return types.SimpleNamespace(
        training=training(), standing=standing, notes=[], note=lambda current: None, session=None
    )


def test_it_is_wanted_once_for_what_is_on_and_where_there_are_cores(tmp_path, monkeypatch):
    monkeypatch.setattr(CompiledBeside, "start", lambda self: None)
    loop = loop_of(tmp_path)
    assert not CompiledBeside(loop, cores=LEAST_CORES - 1).wanted(COMPILE)
    ours = CompiledBeside(loop, cores=LEAST_CORES)
    assert ours.wanted(COMPILE)
    assert not ours.wanted(Recommendation(transform="channels_last"))
    assert not ours.wanted(Recommendation(transform="compile_max_autotune"))
    steps = ours.begin(COMPILE)
    for step in steps:
        assert step is None
        assert "forward" in vars(loop.training.roots[0].module)  # the layer is on
    assert "forward" not in vars(loop.training.roots[0].module)
    assert not ours.wanted(COMPILE)
    loop.standing = ("amp_bf16",)  # kept since: the graphs are others
    assert ours.wanted(COMPILE)
    ours.end()


def test_the_process_gets_the_graphs_and_ends_with_the_search(tmp_path, monkeypatch):
    monkeypatch.setattr(beside, "START", "import sys, time; time.sleep(600)")
    loop = loop_of(tmp_path)
    ours = CompiledBeside(loop, cores=LEAST_CORES)
    steps = ours.begin(COMPILE)
    next(steps)
    net = loop.training.roots[0].module
    net(torch.randn(2, 3, 8, 8)).sum().backward()
    for _ in steps:
        pass
    assert ours.running
    process = ours._process
    assert any("graph-0.json" in word for word in process.args)
    waiting = ours.wait(until_unix_s=1.0)  # that time is over
    assert next(waiting, None) is None
    assert ours.running
    ours.end()
    assert process.returncode is not None
    assert not ours.running
    ours.end()
    assert subprocess.list2cmdline(process.args).startswith(sys.executable)
