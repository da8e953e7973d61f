"""Do N ranks train as one process does: what their runs say."""

from __future__ import annotations

import math
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from advisor.core.errors import AdvisorError
from advisor.core.verdict import Check
from advisor.distributed import place
from advisor.profiling.beside.command import ScriptCommand
from advisor.trials import ranks
from advisor.trials.records import Measurement
from advisor.trials.script import Script


def measured(*, gradient: float = 0.0, loss: float = 0.0, seed: int = 0) -> Measurement:
    """A run whose gradients and losses are off by these shares, at random."""
    drawn, prints = random.Random(seed), {}
    for step in (1, 2, 3):
        for name in ("gradient Net.weight", "buffer Net.mean"):
            off = [gradient * drawn.gauss(0, 1) for _ in range(8)]
            prints[f"{step} {name}"] = (1.0, *(1.0 + each for each in off))
    losses = tuple((2.0 - 0.01 * i) * (1 + loss * drawn.gauss(0, 1)) for i in range(43))
    return Measurement(prints=prints, losses=losses)


OTHERS = [measured(gradient=1e-6, loss=1e-6, seed=seed) for seed in (1, 2)]


def test_what_differs_as_much_as_the_noise_trains_alike() -> None:
    check = ranks.alike(measured(), OTHERS, measured(gradient=2e-6, loss=2e-6, seed=3))
    assert check.passed
    assert check.numbers["gradient_1"] < 1e-5


@pytest.mark.parametrize("planted", [{"gradient": 1e-2}, {"loss": 1e-2}, {"loss": math.nan}])
def test_what_differs_by_more_does_not(planted: dict[str, float]) -> None:
    assert ranks.alike(measured(), OTHERS, measured(**planted, seed=3)).passed is False


def test_noise_that_would_hide_a_missing_reduction_is_told() -> None:
    loud = [measured(gradient=0.3, loss=1e-6, seed=seed) for seed in (1, 2)]
    assert "gradients tell little" in ranks.alike(measured(), loud, measured(gradient=0.3, loss=1e-6, seed=3)).detail
    assert "gradients tell little" not in ranks.alike(measured(), OTHERS, measured(seed=3)).detail


def test_a_gradient_that_is_missing_is_no_match() -> None:
    other = measured(seed=3)
    prints = {name: value for name, value in other.prints.items() if name != "1 gradient Net.weight"}
    assert ranks.alike(measured(), OTHERS, Measurement(prints=prints, losses=other.losses)).passed is False


def test_nothing_seen_is_no_proof() -> None:
    assert ranks.alike(Measurement(), [Measurement()], Measurement()).passed is None


def test_what_is_known_before_anything_runs_is_said_then(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("z = 1\nlogits = z @ z.t()\n")
    command = ScriptCommand.parse((str(script),))
    with pytest.raises(AdvisorError, match=r"train\.py:2: each sample"):
        ranks.checked(command, 2, gpus=0, allowed=False)
    ranks.checked(command, 2, gpus=2, allowed=True)
    with pytest.raises(AdvisorError, match="--gpus 4 on a machine with 2 GPUs"):
        ranks.checked(command, 4, gpus=2, allowed=True)


def test_ranks_lose_only_beyond_noise() -> None:
    right = Check(passed=True, detail="")
    for bounds, lost in (((0.3, 0.4, 0.5), True), ((0.8, 0.9, 1.1), False), (None, False)):
        assert ranks.RanksProof(ranks=2, check=right, speedup=bounds).loses is lost


def test_six_ranks_are_two_halves() -> None:
    assert ranks.way(False, place.HYBRID, 6).shard == place.HYBRID


@pytest.mark.parametrize("count", [2, 3, 5])
def test_halves_of_too_few_or_an_odd_number_of_ranks_are_refused(count: int) -> None:
    with pytest.raises(AdvisorError, match=f"hybrid on {count} ranks"):
        ranks.way(False, place.HYBRID, count)


@pytest.mark.parametrize("shard", place.OF_WEIGHTS)
def test_shares_of_weights_do_not_go_beside_norms_of_each_ranks_own(shard: str) -> None:
    with pytest.raises(AdvisorError, match="--allow training"):
        ranks.way(True, shard, 4)


@pytest.mark.parametrize(
    ("off", "passes", "runs"),
    [((1e-2, 1e-6), True, 8), ((1e-2, 1e-2), False, 8), ((0.2, 1e-6), False, 4)],
    ids=["one seed alone", "each seed", "more than a turn makes"],
)
def test_a_value_that_a_rounding_has_turned_is_told_from_a_fault_by_another_seed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, off: tuple[float, float], passes: bool, runs: int
) -> None:
    """`off`: how far the ranks' gradients are, from the first seed and from the second."""
    seeds: list[int] = []

    def run(script: Script, seed: int, steps: int, **orders: object) -> Measurement:
        seeds.append(seed)
        together = dict(script.command.variables).get(place.RANKS_VARIABLE) == "2"
        gradient = off[seed - 7] if together else 1e-6 if orders else 0.0
        return measured(gradient=gradient, loss=1e-6 if orders or together else 0.0, seed=len(seeds))

    monkeypatch.setattr(ranks, "one_run", run)
    monkeypatch.setattr(ranks, "ratio", lambda *_, **__: SimpleNamespace(bounds=None))
    (tmp_path / "train.py").write_text("")
    command, said = ScriptCommand.parse((str(tmp_path / "train.py"),)), list[str]()
    script = Script(command, tmp_path, None, said.append)

    def prove() -> ranks.RanksProof:
        return ranks.prove(command, 2, script, seed=7, way=place.RankWay(), launch=None, say=said.append)

    if passes:
        assert prove().check.passed
    else:
        with pytest.raises(AdvisorError, match="do not train as one process does"):
            prove()
    assert len(seeds) == runs
    assert any("another seed" in line for line in said) == (runs == 8)
