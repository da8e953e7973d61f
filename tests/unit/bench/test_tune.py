"""Tuning without a GPU: combinations, constants put in and taken back with their caches, wrong ones last."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest

from advisor.bench import ops, timing, tune
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
    return Family(id="toy", replaces="", transform="toy", modules=())


def test_every_combination_once() -> None:
    assert tune.combinations({"A": (1, 2), "B": (3,)}) == [{"A": 1, "B": 3}, {"A": 2, "B": 3}]
    assert tune.combinations({}) == [{}]


def test_constants_hold_inside_and_caches_follow(family: Family) -> None:
    cuda = family.module("cuda")
    assert cuda.launch() == (128, 8)
    with tune.Setting(family, {"THREADS": 256}):
        assert cuda.launch() == (256, 8)
    assert cuda.launch() == (128, 8)
    with pytest.raises(AdvisorError, match="spec has no WARPS"), tune.Setting(family, {"WARPS": 4}):
        pass


class Clock:
    """Stands in for the GPU: a call takes what the constants of that moment say, in a machine that gets slower with each group."""

    def __init__(self, family: Family) -> None:
        self.family, self.groups = family, 0
        self.turns: list[list[str]] = []

    def contests(self, case: Any, contenders: Any) -> Iterator[Any]:
        yield "forward", contenders, [()]

    def interleaved(self, runs: Any, sets: Any, **_: Any) -> dict[str, Any]:
        self.groups += 1
        self.turns.append(list(runs))
        spreads = {}
        for name, run in runs.items():
            threads, tile = run()
            if (threads, tile) == (512, 8):
                raise MemoryError("no room")
            ms = (1000 / threads + tile) * self.groups
            spreads[name] = SimpleNamespace(median=ms, p10=ms * 0.98, p90=ms * 1.02)
        return spreads


def tuned(family: Family, monkeypatch: pytest.MonkeyPatch, at_once: int, wrong: dict[tuple[int, int], str]) -> Any:
    launch, clock = family.module("cuda").launch, Clock(family)
    monkeypatch.setattr(ops, "contests", clock.contests)
    monkeypatch.setattr(timing, "interleaved", clock.interleaved)
    monkeypatch.setattr(tune, "AT_ONCE", at_once)

    def judged(_: Any, __: Any, setting: tune.Setting) -> str:
        return wrong.get(setting.around(lambda: family.module("cuda").launch())(), "")

    monkeypatch.setattr(tune, "what_is_wrong", judged)
    case = SimpleNamespace(label="toy float32 1x2", ours=lambda: family.module("cuda").launch())
    trials = tune.tune(family, case)
    assert family.module("cuda").launch is launch
    return trials, clock


def test_fastest_first_and_what_is_wrong_last(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    trials, clock = tuned(
        family, monkeypatch, 8, {(128, 16): "output error 1", (256, 16): "RuntimeError: too many resources"}
    )
    assert [trial.constants for trial in trials[:2]] == [{"THREADS": 256, "TILE": 8}, {"THREADS": 128, "TILE": 8}]
    assert [trial.present for trial in trials] == [False, True, False, False]
    assert {trial.wrong for trial in trials[2:]} == {"output error 1", "RuntimeError: too many resources"}
    assert trials[1].line() == " * THREADS=128 TILE=8  forward 15.8125 ms 1.000 x (±4%)"
    assert trials[0].line() == "   THREADS=256 TILE=8  forward 11.9062 ms 0.753 x (±4%)"
    assert "too many resources" in "".join(trial.line() for trial in trials[2:])
    assert len(clock.turns) == 1


def test_each_group_has_the_present_combination_beside_which_it_is_judged(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, clock = tuned(family, monkeypatch, 2, {})
    assert clock.turns == [["0", "1"]] * 3
    by = {(trial.constants["THREADS"], trial.constants["TILE"]): trial for trial in trials}
    assert by[256, 16].share["forward"] == pytest.approx((1000 / 256 + 16) / 15.8125)  # of the third and slowest group
    assert by[256, 16].ms["forward"] == pytest.approx(1000 / 256 + 16)


def test_where_the_present_combination_does_not_run_the_others_are_timed_alone(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials, _ = tuned(family, monkeypatch, 8, {(128, 8): "refused"})
    assert trials[-1].present
    assert trials[0].share == {}
    assert " x " not in trials[0].line()


def test_a_group_without_memory_is_told_and_the_rest_goes_on(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(family.spec.TUNABLE, "THREADS", (128, 256, 512))
    trials, _ = tuned(family, monkeypatch, 2, {})
    assert {trial.wrong for trial in trials if trial.wrong} == {"MemoryError: no room"}
    assert len([trial for trial in trials if not trial.wrong]) == 5


def test_a_setting_finds_again_what_it_has_made(family: Family) -> None:
    setting = tune.Setting(family, {"THREADS": 256})
    for _ in range(2):
        with setting:
            launch = family.module("cuda").launch
            assert launch() == (256, 8)
    assert launch.cache_info().hits == 1
    assert family.module("cuda").launch() == (128, 8)


def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(AdvisorError) as caught:
        tune.run(pattern=catalog.FAMILIES[0].id, out=None, say=print)
    assert caught.value.exit_code == ExitCode.GPU_REQUIRED
