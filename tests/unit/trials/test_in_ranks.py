"""The supervisor's side of what needs a fresh start of all ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from advisor.core.findings import Interval
from advisor.core.plan import PlanItem
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import in_ranks, records
from advisor.trials.options import SearchOptions

EXPOSED = ["communication-exposed"]
COMMAND = ScriptCommand.parse((__file__,))


def test_settings_of_nccl_are_tried_where_it_is_waited_for() -> None:
    assert in_ranks.from_the_start(EXPOSED, "nccl")
    assert not in_ranks.from_the_start(EXPOSED, "gloo")
    assert not in_ranks.from_the_start(["nchw"], "nccl")


@pytest.mark.parametrize("helps", [1, 2, None])
def test_they_are_tried_on_top_of_what_is_kept_until_one_helps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, helps: int | None
) -> None:
    before = PlanItem(transform="ddp_bucket_views", status="kept")
    tried = []

    def pairs(runs, candidate, kept, **_):
        assert kept == (before,)
        tried.append(candidate.parameters)
        status = "kept" if len(tried) == helps else "reverted"
        return records.verdict_on(candidate, status, "timed", gain=Interval(low=0.1, high=0.2))

    monkeypatch.setattr(in_ranks, "try_in_pairs", pairs)
    candidates = in_ranks.from_the_start(EXPOSED, "nccl")
    found = in_ranks.start_anew(
        COMMAND, candidates, in_ranks.Searched(kept=(before,)), tmp_path, SearchOptions(), say=lambda text: None
    )
    assert tried == [c.parameters for c in candidates][: helps or len(candidates)]
    assert [dict(item.parameters) for item in found.kept] == [{}, *([tried[-1]] if helps else [])]
    statuses = [verdict.status for verdict in records.verdicts(tmp_path)]
    assert len(statuses) == len({verdict.title for verdict in records.verdicts(tmp_path)}) == len(candidates)
    assert statuses.count("skipped") == (len(candidates) - helps if helps else 0)


def test_nothing_is_started_where_the_search_was_ended_by_a_lost_rank(tmp_path: Path) -> None:
    searched = in_ranks.Searched(early="rank 1 was ended by SIGKILL")
    candidates = in_ranks.from_the_start(EXPOSED, "nccl")
    assert (
        in_ranks.start_anew(COMMAND, candidates, searched, tmp_path, SearchOptions(), say=lambda text: None) is searched
    )
    assert not records.verdicts(tmp_path)
