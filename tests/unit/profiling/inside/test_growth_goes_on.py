"""Memory that grew while steps were timed is watched for some steps more: a pool that fills up stops."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from advisor.core import storage
from advisor.core.profile import MemoryStats
from advisor.loop.records import FACTS_FILE, FactsRecord
from advisor.loop.session import Session
from advisor.profiling.inside import behind, memory
from advisor.profiling.inside.behind import LooksBehind

KIB = 1024
GROWN = MemoryStats(growth_bytes=256.0 * KIB, growth_steady=True, host_growth_bytes=0.0)


class Watched:
    """A session whose timed steps grew; what the device holds behind each further one is planned."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, grown: MemoryStats = GROWN) -> None:
        self.held = 0
        monkeypatch.setattr(memory.MemoryProbe, "statistics", lambda probe: {"allocated_bytes.all.current": self.held})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=1))
        self.file = folder / FACTS_FILE
        storage.save(self.file, FactsRecord(memory=grown))
        session = Session(run_dir=str(folder), mode="profile", script="train.py", course=True)
        training = cast(Any, SimpleNamespace(device=torch.device("cpu")))
        monkeypatch.setattr(behind, "compiled_code_in_use", lambda: True)  # no look at what a step holds
        self.looks = LooksBehind(training, session, [], grown, step_us=1e5, steps=36)

    def run(self, grows_for: int) -> int:
        """The steps that it takes, of which so many add to what is held."""
        steps = 0
        while self.looks.next():
            steps += 1
            self.held += 256 * KIB if steps <= grows_for else 0
        return steps

    @property
    def memory(self) -> MemoryStats:
        return storage.load(self.file, FactsRecord).memory


@pytest.mark.parametrize(("grows_for", "goes_on"), [(14, False), (1000, True)])
def test_a_pool_that_is_full_grows_no_more(
    grows_for: int, goes_on: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CycleGAN keeps 50 images of each kind, and was told that memory grows with every step."""
    watched = Watched(tmp_path, monkeypatch)
    assert watched.run(grows_for) == behind.WATCHED_STEPS
    assert watched.memory.growth_steady is goes_on
    assert watched.memory.growth_bytes == GROWN.growth_bytes


def test_what_did_not_grow_is_not_watched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert Watched(tmp_path, monkeypatch, MemoryStats(growth_bytes=0.0, host_growth_bytes=0.0)).run(0) == 0
