"""Tuning without a GPU: combinations, constants put in and taken back with their caches, wrong ones last."""

from __future__ import annotations

from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from advisor.bench import ops, tune
from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import catalog
from advisor.ops.family import Family


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    spec = SimpleNamespace(THREADS=128, TILE=8, TUNABLE={"THREADS": (128, 256), "TILE": (8, 16)})

    @lru_cache
    def launch() -> tuple[int, int]:
        return spec.THREADS, spec.TILE

    launch.__module__ = "advisor.ops.toy.cuda"
    modules = {"spec": spec, "cuda": SimpleNamespace(launch=launch), "api": SimpleNamespace()}
    monkeypatch.setattr(Family, "module", lambda self, name: modules[name])
    return Family(id="toy", title="", replaces="", transform="toy", modules=())


def test_every_combination_once() -> None:
    assert tune.combinations({"A": (1, 2), "B": (3,)}) == [{"A": 1, "B": 3}, {"A": 2, "B": 3}]
    assert tune.combinations({}) == [{}]


def test_constants_hold_inside_and_caches_follow(family: Family) -> None:
    launch = family.module("cuda").launch
    assert launch() == (128, 8)
    with tune.constants(family, {"THREADS": 256}):
        assert launch() == (256, 8)
    assert launch() == (128, 8)
    with pytest.raises(AdvisorError, match="spec has no WARPS"), tune.constants(family, {"WARPS": 4}):
        pass


def test_fastest_first_and_what_is_wrong_last(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(case: Any, **_: Any) -> Any:
        threads, tile = family.module("cuda").launch()
        if (threads, tile) == (256, 16):
            raise RuntimeError("too many resources requested for launch")
        spread = SimpleNamespace(median=1000 / threads + tile, p10=1.0, p90=1.0)
        return {"forward": {"advisor": spread}}, {}

    monkeypatch.setattr(ops, "timed", timed)
    monkeypatch.setattr(
        tune, "_wrong", lambda *_: "output error 1" if family.spec.TILE == 16 and family.spec.THREADS == 128 else ""
    )
    trials = tune.tune(family, SimpleNamespace(label="toy float32 1x2"))
    assert [trial.constants for trial in trials[:2]] == [{"THREADS": 256, "TILE": 8}, {"THREADS": 128, "TILE": 8}]
    assert [trial.present for trial in trials] == [False, True, False, False]
    assert {trial.wrong for trial in trials[2:]} == {
        "output error 1",
        "RuntimeError: too many resources requested for launch",
    }
    assert trials[1].line().startswith(" * THREADS=128 TILE=8  forward 15.8125 ms")
    assert "too many resources" in "".join(trial.line() for trial in trials[2:])


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdvisorError) as caught:
        tune.run(pattern=catalog.FAMILIES[0].id, json_out=None, say=print)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED
