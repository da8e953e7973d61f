"""A step of several GPUs, foretold from the profile of one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from advisor.analysis import scaling
from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.loading import LoaderWork
from advisor.core.profile import ConvFact, InputStats, KernelRow, ModelFacts, Spread, StepProfile
from advisor.pipeline import scaling as pipeline_scaling
from advisor.reporting import scaling as page

FREE = scaling.Link(name="free", latency_us=0.0, gbps=1e12, basis="none")


def conv(name: str, channels: int) -> ConvFact:
    return ConvFact(
        module=name, in_channels=channels, out_channels=channels, kernel=(3, 3), stride=(1, 1), padding=(1, 1),
        dilation=(1, 1), groups=1, bias=False,
    )  # fmt: skip


def profile(**facts: object) -> StepProfile:
    """10 ms a step, 6 of them backward: 1 ms of the late layer's, which holds most weights, 5 of the early one's."""
    convs = (conv("early", 64), conv("late", 1024))
    parameters = sum(9 * c.in_channels * c.out_channels for c in convs)
    model = ModelFacts(**{"convs": convs, "parameters": parameters, "batch_size": 32, **facts})
    rows = [
        KernelRow(name="dgrad", kind="conv", module=name, phase="backward", time_us=us)
        for name, us in (("early", 5e3), ("late", 1e3))
    ]
    spread = Spread(n=3, median=1e4, p10=1e4, p90=1e4, raw=(1e4, 1e4, 1e4))
    return StepProfile(
        script="train.py", argv=(), created="", environment=Environment(), step_kind="optimizer", step_us=spread, wall_us=None,
        kernels=tuple(rows), model=model, phase_us={"forward": 3e3, "backward": 6e3, "optimizer": 1e3},
    )  # fmt: skip


def one(link: scaling.Link, ranks: int = 2, **facts: object) -> scaling.Foretold:
    return scaling.foretell(profile(**facts), [ranks], inside=link, between=link)[0]


def test_communication_that_costs_nothing_leaves_the_step_as_it_is() -> None:
    found = one(FREE)
    assert found.step_us == pytest.approx((1e4, 1e4))
    assert found.efficiency == pytest.approx((1.0, 1.0))
    assert found.samples_per_s[0] == pytest.approx(6400, rel=1e-3)


@pytest.mark.parametrize(
    ("supply", "ranks", "limit_us"),
    [
        (scaling.Supply(), 4, 48e3 / 8),  # 8 cores a GPU, as profiled
        (scaling.Supply(cores=16), 4, 4 * 48e3 / 16),
        (scaling.Supply(cores=16), 8, 8 * 48e3 / 16),
        (scaling.Supply(cores=16), 64, 8 * 48e3 / 16),  # eight hosts
        (scaling.Supply(cores=1000, sample_bytes=1e5, gbps=2.0), 64, 64 * 32 * 1e5 / 2e3),
    ],
)
def test_no_step_is_shorter_than_what_feeds_it(supply: scaling.Supply, ranks: int, limit_us: float) -> None:
    """A loader's process makes a batch in 48 ms."""
    loaded = dataclasses.replace(
        profile(),
        environment=Environment(cpu_count=16, gpu_count=2),
        input=InputStats(work=LoaderWork(each_us=(47e3, 49e3))),
    )
    (found,) = scaling.foretell(loaded, [ranks], inside=FREE, between=FREE, host=8, supply=supply)
    assert found.supply_us == pytest.approx(limit_us)
    assert found.step_us == pytest.approx((max(1e4, limit_us),) * 2)


def test_what_is_sent_early_is_hidden_behind_the_rest_of_the_backward() -> None:
    # 37.7 MB of the late layer are ready after 1 ms: over 10 GB/s they take 3.8 ms, and 5 ms are left.
    late = one(scaling.Link(name="", latency_us=0.0, gbps=10.0, basis=""))
    assert late.communication_us == pytest.approx(3790, rel=0.01)
    assert late.exposed_us == pytest.approx(14.7, rel=0.1)  # the last, small bucket
    slow = one(scaling.Link(name="", latency_us=0.0, gbps=5.0, basis=""))
    assert slow.exposed_us == pytest.approx(1e3 + 7.57e3 - 6e3, rel=0.02)


def test_synchronised_norms_cost_their_latency_and_stragglers_their_deviations() -> None:
    link = scaling.Link(name="", latency_us=10.0, gbps=1e6, basis="")
    assert one(link, module_counts={"BatchNorm2d": 50}).norms_us == pytest.approx(50 * 2 * 20, rel=0.01)
    assert one(link, 4, module_counts={"BatchNorm2d": 50}).norms_us == pytest.approx(50 * 2 * 60, rel=0.01)


def test_more_ranks_are_never_foretold_to_be_more_efficient() -> None:
    link = scaling.LINKS["nvlink"]
    rows = scaling.foretell(profile(), [2, 4, 8, 64, 1024], inside=link, between=scaling.LINKS["ib400"])
    shares = [row.efficiency[1] for row in rows]
    assert shares == sorted(shares, reverse=True)
    assert "1024" in page.text(rows, one_us=1e4, links=("a link",), samples=1e6)
    assert rows[0].gpu_hours(3600 * rows[0].samples_per_s[1])[0] == pytest.approx(2.0)


def test_what_does_not_serve_is_told() -> None:
    with pytest.raises(AdvisorError, match="of 4 processes"):
        one(FREE, world_size=4)
    with pytest.raises(AdvisorError, match="no link 'string'"):
        scaling.link("string")
    assert scaling.link("2,50").gbps == 50.0


def test_a_divided_batch_takes_an_nth_at_best_and_what_nothing_hides() -> None:
    assert scaling.least_divided_us(profile(), 4, FREE) == pytest.approx(2500)
    norms = {"module_counts": {"BatchNorm2d": 18}, "parameters": 0}
    link = scaling.Link(name="", latency_us=100.0, gbps=1e6, basis="")  # 18 norms, two messages of two hops each
    assert scaling.least_divided_us(profile(**norms), 2, link) == pytest.approx(
        5000 + 18 * 2 * 200 + 200, rel=0.01, abs=210
    )
    assert scaling.least_divided_us(profile(**norms), 2, link, synchronised=False) == pytest.approx(5000)
    slow = scaling.Link(name="", latency_us=0.0, gbps=1.0, basis="")
    sent = 4.0 * profile().model.parameters / 1e3
    assert scaling.least_divided_us(profile(), 2, slow) == pytest.approx(5000 + sent - 5000 * 2 / 3)


def test_ranks_that_must_lose_are_told_of_by_the_newest_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "advisor-runs" / "one"
    folder.mkdir(parents=True)
    slow = scaling.Link(name="", latency_us=1e4, gbps=1.0, basis="")
    monkeypatch.setattr(pipeline_scaling, "link_of", lambda name, ranks: slow)
    assert pipeline_scaling.loses("train.py", 2, synchronised=True) == ""
    storage.save(folder / "profile.json", profile())
    assert "2 ranks will lose" in pipeline_scaling.loses("train.py", 2, synchronised=True)
    assert pipeline_scaling.loses("other.py", 2, synchronised=True) == ""
    monkeypatch.setattr(pipeline_scaling, "link_of", lambda name, ranks: FREE)
    assert pipeline_scaling.loses("train.py", 2, synchronised=True) == ""


def test_a_batch_that_pays_is_the_least_with_work_enough() -> None:
    """18 norms take 7.2 ms of a step of two ranks whatever the batch: 5 ms of computing become 40 with one eight times as large."""
    norms = {"module_counts": {"BatchNorm2d": 18}, "parameters": 0}
    link = scaling.Link(name="", latency_us=100.0, gbps=1e6, basis="")
    assert scaling.batch_that_pays(profile(**norms), 2, link) == (8 * 32, pytest.approx(40 / 47.2, rel=0.01))
    assert scaling.batch_that_pays(profile(**norms), 2, FREE) == (32, pytest.approx(1.0))
    never = scaling.Link(name="", latency_us=1e6, gbps=1.0, basis="")
    assert scaling.batch_that_pays(profile(**norms), 2, never) == (0, 0.0)
    told = pipeline_scaling.too_little(profile(**norms), 2, link, synchronised=True)
    assert told.startswith("2 ranks will lose: a step of 10.0 ms cannot be shorter than 12.2 ms")
    assert "batches of 256: then they compute for 85 % of a step" in told
    assert "No batch" in pipeline_scaling.too_little(profile(**norms), 2, never, synchronised=True)
    assert "gain little" in pipeline_scaling.too_little(profile(**norms), 8, FREE_BUT_NORMS, synchronised=True)


FREE_BUT_NORMS = scaling.Link(name="", latency_us=10.0, gbps=1e6, basis="")
