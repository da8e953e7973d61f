"""A process bound to the cores beside its GPU: real threads and a real child, on a planted machine."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from advisor.loop.training import Training
from advisor.profiling.machine import cores
from advisor.transforms import cpu_affinity, registry
from advisor.transforms.loader_workers import workers_wanted

ADDRESS = "0000:17:00.0"

pytestmark = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores to choose from"
)


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The cores this process may use; the last of them is no neighbour of the planted GPU."""
    before = os.sched_getaffinity(0)
    device = tmp_path / "bus/pci/devices" / ADDRESS
    device.mkdir(parents=True)
    given = sorted(before)
    near = ",".join(map(str, given[:-1]))
    for name, value in {"vendor": "0x10de", "class": "0x030200", "local_cpulist": near}.items():
        (device / name).write_text(value)
    monkeypatch.setattr(cpu_affinity, "address_of", lambda device: ADDRESS)
    monkeypatch.setattr(cpu_affinity, "LEAST_CORES", 1)
    of_node, of_share = cores.of_node, cores.of_share
    monkeypatch.setattr(cores, "of_node", lambda address, allowed: of_node(address, allowed, tmp_path))
    monkeypatch.setattr(cores, "of_share", lambda address, allowed: of_share(address, allowed, tmp_path))
    yield given
    assert os.sched_getaffinity(0) == before


def test_all_threads_and_children_move_and_come_back(given: list[int]) -> None:
    training, change = Training(device=torch.device("cuda", 0)), registry.get("cpu_affinity")
    near, every = set(given[:-1]), set(given)
    done, begun, seen = threading.Event(), [threading.Event(), threading.Event()], []
    bound_by_the_script = {given[-1]}

    def thread(own: bool) -> None:
        if own:
            os.sched_setaffinity(0, bound_by_the_script)
        seen.append(threading.get_native_id())
        begun[own].set()
        done.wait()

    threads = [threading.Thread(target=thread, args=(own,)) for own in (False, True)]
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        for one, its in zip(threads, begun, strict=True):
            one.start()
            its.wait()
        assert change.match(training, {"cores": "node"}).applies
        workers = workers_wanted({})
        undo = change.apply(training, {"cores": "node"})
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == os.sched_getaffinity(seen[0]) == near
        assert os.sched_getaffinity(seen[1]) == bound_by_the_script
        assert change.effect(training, None, None).passed
        assert not change.match(training, {"cores": "node"}).applies  # it is on
        assert workers_wanted({}) == workers  # by what the process was given
        undo.run()
        assert os.sched_getaffinity(0) == os.sched_getaffinity(child.pid) == os.sched_getaffinity(seen[0]) == every
        assert os.sched_getaffinity(seen[1]) == bound_by_the_script
        assert change.effect(training, None, None).passed is False
    finally:
        done.set()
        child.communicate(b"\n")
        for one in threads:
            one.join()


def test_a_process_that_may_not_move_is_left_where_it_was(given: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    plain, moved = os.sched_setaffinity, []

    def refuses(thread: int, to: set[int]) -> None:
        if to == set(given[:-1]) and moved:
            raise PermissionError("planted")
        moved.append(thread)
        plain(thread, to)

    other = threading.Event()
    beside = threading.Thread(target=other.wait)
    beside.start()
    try:
        monkeypatch.setattr(os, "sched_setaffinity", refuses)
        with pytest.raises(PermissionError):
            registry.get("cpu_affinity").apply(Training(device=torch.device("cuda", 0)), {"cores": "node"})
    finally:
        other.set()
        beside.join()
    assert moved  # one was, and is back: see the fixture
    assert not cpu_affinity.BoundCores.before


@pytest.mark.parametrize(
    ("device", "near", "told"),
    [
        ("cpu", "", "there is no GPU"),
        ("cuda", "", "does not tell"),
        ("cuda", "all", "on no other cores already"),
    ],
)
def test_where_there_is_nothing_to_choose_it_says_why(
    given: list[int], monkeypatch: pytest.MonkeyPatch, device: str, near: str, told: str
) -> None:
    monkeypatch.setattr(cores, "of_node", lambda address, allowed: set(allowed) if near else set())
    found = registry.get("cpu_affinity").match(Training(device=torch.device(device)), {"cores": "node"})
    assert not found.applies
    assert told in found.reason
