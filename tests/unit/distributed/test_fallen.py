"""Who of several ranks has ended the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from advisor.core import storage
from advisor.distributed import agent, place
from advisor.distributed.fallen import Fallen
from advisor.loop.session import SESSION_VARIABLE, Session

CLOSED = "RuntimeError: [pair.cc:553] Connection closed by peer [127.0.0.1]:12482. This is typically caused by a remote worker crashing"
NCCL = "DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:3384, remote process exited or there was a network error"
OOM = "OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (train.py:14)"


def raised(rank: int, error: str) -> dict[str, Any]:
    return {"event": place.FAILED, "rank": rank, "error": error}


def codes(**by_rank: int) -> dict[str, Any]:
    return {"event": place.ENDED, "codes": {name[1:]: code for name, code in by_rank.items()}}


@pytest.mark.parametrize(
    ("events", "told"),
    [
        ([raised(0, CLOSED), codes(r0=-15, r1=-9)], "rank 1 was ended by SIGKILL"),
        ([raised(0, NCCL), raised(2, CLOSED), codes(r0=1, r1=-11, r2=1)], "rank 1 was ended by SIGSEGV"),
        ([raised(0, CLOSED), raised(1, OOM), codes(r0=-15, r1=1)], f"rank 1: {OOM}"),
        ([raised(0, CLOSED), codes(r0=1, r1=7)], "rank 1 ended with exit code 7"),
        ([raised(1, OOM), codes(r0=-9, r1=1)], f"rank 1: {OOM}"),  # rank 0 did not listen to SIGTERM
        ([codes(r0=-15, r1=-15)], "rank 0 was ended by SIGTERM"),  # from outside
        ([raised(0, CLOSED)], f"rank 0: {CLOSED}"),  # nobody else has told
        ([{"event": "applied"}], ""),
    ],
    ids=["killed", "segmentation fault", "out of memory", "left", "killed by the agent", "all", "one alone", "none"],
)
def test_the_rank_that_began_is_named_and_not_who_waited_for_it(events: list[dict[str, Any]], told: str) -> None:
    fallen = Fallen()
    for event in json.loads(json.dumps(events)):
        fallen.note(event)
    assert fallen.told == told


def test_the_agent_tells_codes_and_leaves_with_the_first_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def failure(rank: int, code: int, when: int) -> ProcessFailure:
        found = ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        found.timestamp = when
        return found

    def ends(words: list[str]) -> None:
        raise ChildFailedError("train.py", {0: failure(0, -15, 20), 1: failure(1, -9, 10)})

    storage.save(tmp_path / "session.json", Session(mode="run", run_dir=str(tmp_path), script="train.py"))
    monkeypatch.setenv(SESSION_VARIABLE, str(tmp_path / "session.json"))
    monkeypatch.setattr(run, "main", ends)
    assert agent.main(["--nproc-per-node", "2", "train.py"]) == 128 + 9
    event = json.loads((tmp_path / "progress.jsonl").read_text())
    assert (event["event"], event["codes"]) == (place.ENDED, {"0": -15, "1": -9})
    monkeypatch.setattr(run, "main", lambda words: None)
    assert agent.main([]) == 0


def test_the_agent_that_is_asked_to_end_says_nothing_more(monkeypatch: pytest.MonkeyPatch) -> None:
    def asked(words: list[str]) -> None:
        raise SignalException("got signal", 2)

    monkeypatch.setattr(run, "main", asked)
    assert agent.main([]) == 130
