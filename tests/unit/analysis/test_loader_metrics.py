"""What a loader costs, by the timed steps: epochs' starts, waits on a CPU and in runs that ended before any step was traced."""

from __future__ import annotations

from dataclasses import replace

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.core.findings import Finding, Outcome
from advisor.core.loading import LoaderWork, WorkLine
from advisor.core.profile import IdleCause, InputStats, ProfilerCost, Quantity, StepProfile
from advisor.core.provenance import Provenance

RULES = rules.load()


def fired(profile: StepProfile) -> dict[str, Finding]:
    table = metrics(profile)
    found = rules.evaluate(RULES, table, profile, lambda transform, given: predict(profile, transform, given))
    return {finding.rule: finding for finding in found if finding.outcome is Outcome.FIRED}


def loading(base: StepProfile, **stats: object) -> StepProfile:
    """With this loader, at `step_us` of 10 ms."""
    known = {"loader": "DataLoader", "workers": 4, "batch_bytes": 4_000_000, "source": "train.py:51", **stats}
    return replace(
        base, step_us=profiles.spread(10_000.0), wall_us=profiles.spread(10_000.0), input=InputStats(**known)
    )


# Making the iterator and ending its workers 60 ms, the first batch 100 ms beyond another, 16 batches an epoch of 10 ms each.
STARTS = {"epoch_make_us": 60_000.0, "epoch_first_us": 100_000.0, "epoch_batches": 16.0, "iterators": 3}


@pytest.mark.parametrize(
    ("stats", "because"),
    [
        ({"loaders": 3}, "a new DataLoader each epoch"),
        ({"loaders": 3, "persistent_workers": True}, "a new DataLoader each epoch"),
        ({"loaders": 1, "workers": 1}, "persistent_workers=False"),
    ],
)
@pytest.mark.parametrize("base", [profiles.resnet50, profiles.laptop])
def test_workers_that_start_anew_are_told_with_what_a_start_costs(base, stats, because) -> None:
    profile = loading(base(), **STARTS, **stats)
    finding = fired(profile)["workers-restart"]
    assert because in finding.message
    assert finding.sites[0].startswith("train.py:51")
    assert finding.gain is not None
    # With workers that stay an epoch takes 160 ms and the wait for at most one batch, not 320.
    assert 160 / 320 < finding.gain.high < 0.8
    assert 60 / 320 / 2 <= finding.gain.low < 160 / 320


@pytest.mark.parametrize(
    "stats",
    [
        {"loaders": 1, "persistent_workers": True},  # they stay
        {"loaders": 3, "workers": 0},  # there are none
        {"loaders": 1, "iterators": 1},  # an epoch has not come to its end yet
        {"loaders": 1, "epoch_batches": 5_000.0},  # seldom enough
    ],
)
def test_workers_that_stay_or_start_seldom_are_not_told(stats) -> None:
    assert "workers-restart" not in fired(loading(profiles.resnet50(), **{**STARTS, **stats}))


def test_an_iterator_for_every_step_is_part_of_the_step() -> None:
    stats = {**STARTS, "epoch_make_us": 6_000.0, "epoch_first_us": 3_000.0, "epoch_batches": 1.0, "loaders": 1}
    found = fired(loading(profiles.resnet50(), **stats, iterators_per_step=1.0))
    gain = found["iterator-each-step"].gain
    assert gain is not None
    assert (gain.low, gain.high) == (pytest.approx(0.8 * 0.6), pytest.approx(0.9))
    assert "workers-restart" not in found


def test_accumulation_draws_several_batches_a_step() -> None:
    base = profiles.resnet50()
    stacked = replace(base, model=replace(base.model, accumulation=4))
    table = metrics(loading(stacked, **STARTS, loaders=3))
    assert table["epoch_start_frac"].value == pytest.approx(160 / (4 * 10 + 160))


@pytest.mark.parametrize(("workers", "rule"), [(0, "input-starved"), (2, "few-loader-workers")])
def test_a_run_that_ended_before_any_step_was_traced_is_told_by_its_timed_steps(workers: int, rule: str) -> None:
    """20 timed steps that spent 97 % of their time in next(), and nothing fired."""
    base = profiles.starved()
    cut = replace(base, kernels=(), busy_us=0.0, idle=(), syncs=(), copies=(), launches=0.0, cost=ProfilerCost())
    used = {"cpu_util_frac": Quantity(value=0.1, provenance=Provenance.MEASURED)}
    cut = replace(loading(cut, workers=workers, next_us=9_700.0, late_us=9_700.0), utilization=used, complete=False)
    table = metrics(cut)
    assert table["data_wait_frac"].value == pytest.approx(0.97)
    assert table["data_wait_frac"].provenance is Provenance.MODELLED
    finding = fired(cut)[rule]
    assert finding.gain is not None
    assert 0.4 < finding.gain.high <= 0.97


@pytest.mark.parametrize("cores", [2, 4, 16])
def test_a_loader_in_the_training_thread_is_told_on_any_machine_with_a_second_core(cores: int) -> None:
    base = profiles.laptop()
    used = {"cpu_util_frac": Quantity(value=1 / cores, provenance=Provenance.MEASURED)}
    profile = replace(
        loading(base, workers=0, next_us=9_700.0, late_us=9_700.0, batch_bytes=100_000),
        utilization=used,
        environment=replace(base.environment, cpu_count=cores),
    )
    finding = fired(profile)["loader-blocks-cpu-training"]
    assert finding.gain is not None
    assert finding.gain.low > 0
    # Two workers share 9.7 ms of loading; the cores share all of it, 10 ms of one.
    assert finding.gain.high == pytest.approx(1 - max(9.7 / 2, 10 / cores) / 10)


def test_cores_that_others_have_are_none_for_workers() -> None:
    base = loading(profiles.starved(), workers=2, next_us=9_700.0, late_us=9_700.0)
    shares = {"cpu_util_frac": 0.1, "cpu_others_frac": 0.85}
    used = {name: Quantity(value=value, provenance=Provenance.MEASURED) for name, value in shares.items()}
    assert "few-loader-workers" not in fired(replace(base, utilization=used))

    alone = loading(profiles.laptop(), workers=0, next_us=9_700.0, late_us=9_700.0, batch_bytes=100_000)
    alone = replace(alone, utilization=used, environment=replace(alone.environment, cpu_count=4))
    beside = predict(alone, "loader_workers", {"workers": "2"})
    assert beside is not None
    # A tenth of the cores' time is two thirds of what others leave: so much of the step stays.
    assert beside.high == pytest.approx(1 - 0.1 / 0.15)


def test_a_batch_that_is_cheaper_made_than_handed_over_may_lose_by_workers() -> None:
    used = {"cpu_util_frac": Quantity(value=0.5, provenance=Provenance.MEASURED)}
    profile = replace(
        loading(profiles.laptop(), workers=0, next_us=2_000.0, late_us=2_000.0, batch_bytes=4_000_000), utilization=used
    )
    gain = predict(profile, "loader_workers", {"workers": "2"})
    assert gain is not None
    # One of two threads is left for 8 ms of computing: at worst they take 16.
    assert gain.low == pytest.approx(1 - 16 / 10)


@pytest.mark.parametrize(("threads", "high"), [(4, 0.66), (2, 0.66)])
def test_threads_that_look_busy_and_leave_cores_to_workers_are_no_bound(threads: int, high: float) -> None:
    """By turns on four cores, 17 ms of 25 in the loader: two workers beside two threads left 40 % of the step."""
    base = profiles.laptop()
    used = {"cpu_util_frac": Quantity(value=0.65, provenance=Provenance.MEASURED)}
    profile = replace(
        loading(base, workers=0, next_us=17_000.0, late_us=17_000.0, batch_bytes=50_000),
        utilization=used,
        environment=replace(base.environment, cpu_count=4),
        step_us=profiles.spread(25_000.0),
        wall_us=profiles.spread(25_000.0),
        model=replace(base.model, cpu_threads=threads),
    )
    gain = predict(profile, "loader_workers", {"workers": "2"})
    assert gain is not None
    assert 0 < gain.low < 0.6 < gain.high == pytest.approx(high, abs=0.01)
    assert ("2 threads of 4 left" in gain.basis) is (threads == 4)


@pytest.mark.parametrize(
    ("make_us", "first_us", "step_us", "measured"),
    # On two cores of an x86 server, two workers and 16 batches an epoch, with persistent workers of one loader beside new ones.
    # The last by turns: 53 ms an epoch, where its start took 43.
    [
        (72_225, 26_955, 8_880, 0.42),
        (54_351, 5_525_922, 9_590, 0.979),
        (1_541_374, 4_507_727, 5_722, 0.982),
        (30_602, 12_602, 11_600, 0.22),
    ],
    ids=["fork", "forkserver", "spawn", "fork by turns"],
)
def test_the_interval_holds_what_was_measured_when_the_loader_was_kept(make_us, first_us, step_us, measured) -> None:
    stats = {"epoch_make_us": make_us, "epoch_first_us": first_us, "epoch_batches": 16.0, "iterators": 6, "loaders": 6}
    profile = loading(profiles.laptop(), workers=2, **stats)
    profile = replace(profile, step_us=profiles.spread(step_us), wall_us=profiles.spread(step_us))
    gain = fired(profile)["workers-restart"].gain
    assert gain is not None
    assert gain.low <= measured <= gain.high
    assert gain.low > 0.06


@pytest.mark.parametrize(("stats", "told"), [({"epochs_in_loop": True}, True), ({}, False)])
def test_one_epoch_in_a_loop_of_the_script_is_enough_to_know_that_workers_start_again(stats, told) -> None:
    profile = loading(profiles.laptop(), **{**STARTS, "iterators": 1, "loaders": 1, **stats})
    assert ("workers-restart" in fired(profile)) is told


SPARE = {"cpu_util_frac": Quantity(value=0.2, provenance=Provenance.MEASURED)}


def starving(lines: tuple[WorkLine, ...], samples: int = 100) -> StepProfile:
    """A step that waits for nearly half of its time for workers that make a batch in 40 ms."""
    kinds: dict[str, float] = {}
    for line in lines:
        kinds[line.kind] = kinds.get(line.kind, 0.0) + line.time_us
    work = LoaderWork(each_us=(38_000.0, 42_000.0), samples=samples, kinds=kinds, lines=lines)
    base = profiles.resnet50()
    waiting = (IdleCause(cause="data", time_us=4_500.0),)
    stats = {"next_us": 4_500.0, "late_us": 4_500.0, "work": work}
    return loading(replace(base, busy_us=5_000.0, idle=waiting, utilization=SPARE), **stats)


DECODES = WorkLine(source="data.py:30", what="imread", kind="decode", time_us=24_000.0)
FLIPS = WorkLine(source="data.py:31", what="flip", kind="flip", time_us=16_000.0)


def test_what_a_worker_does_stands_on_the_loaders_card_by_line() -> None:
    profile = starving((DECODES, FLIPS))
    table = metrics(profile)
    assert (table["batch_made_us"].value, table["loader_work"].value) == (40_000.0, "decode 60 %, flip 40 %")
    found = fired(profile)
    sites = found["few-loader-workers"].sites
    assert sites[0].startswith("train.py:51: DataLoader")
    assert sites[1] == "data.py:30: imread, decode (24.0 ms of 40.0 ms a batch)"
    assert found["augmented-by-workers"].sites == ("data.py:31: flip (16.0 ms of 40.0 ms a batch)",)
    assert "flip take 40 %" in found["augmented-by-workers"].message


def test_a_loader_that_decodes_and_one_that_hardly_anybody_has_sampled_have_nothing_for_the_gpu() -> None:
    assert "augmented-by-workers" not in fired(starving((DECODES,)))
    few = starving((DECODES, FLIPS), samples=5)
    assert "augmented-by-workers" not in fired(few)
    assert "only 5 samples" in metrics(few)["loader_work"].reason


def test_batches_that_the_training_thread_makes_by_itself_are_told_where_nothing_hides_them() -> None:
    work = LoaderWork(worker=False, each_us=(4_000.0,), samples=50, kinds={"decode": 4_000.0}, lines=(DECODES,))
    alone = {"loader": "", "workers": 0, "work": work}
    found = fired(loading(profiles.laptop(), **alone))["starved-without-loader"]
    assert "in 4.00 ms, 40 % of each step" in found.message
    assert found.sites == ("data.py:30: imread, decode (24.0 ms of 4.00 ms a batch)",)
    assert "starved-without-loader" not in fired(loading(profiles.laptop(), work=work))  # a DataLoader makes them
    few = replace(work, samples=3)
    assert "starved-without-loader" not in fired(loading(profiles.laptop(), **{**alone, "work": few}))


def test_workers_take_an_even_share_of_the_cores_from_a_training_on_a_cpu() -> None:
    """Eight workers beside four threads on four cores: a step took three times as long."""
    base = profiles.laptop()
    base = replace(base, environment=replace(base.environment, cpu_count=4), model=replace(base.model, cpu_threads=4))
    assert fired(loading(base, workers=8))["more-workers-than-cores"].gain.high == pytest.approx(1 - 4 / 12)
    on_gpu = profiles.resnet50()
    on_gpu = replace(on_gpu, environment=replace(on_gpu.environment, cpu_count=4))
    late = fired(loading(on_gpu, workers=8, late_us=2_000.0))
    assert late["more-workers-than-cores"].gain.high == pytest.approx(0.2)
