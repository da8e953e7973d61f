from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import samples

from advisor.core.profile import Quantity, Spread, StepProfile
from advisor.core.provenance import Provenance
from advisor.reporting.compare import (
    Delta,
    Regression,
    compare_markdown,
    compare_profiles,
    equal_blocks,
    ratio_interval,
)


def _spread(raw: list[float]) -> Spread:
    ordered = sorted(raw)
    n = len(raw)
    return Spread(median=ordered[n // 2], p10=ordered[n // 10], p90=ordered[9 * n // 10], n=n, raw=tuple(raw))


def _correlated(seed: int, n: int, scale: float) -> Spread:
    """Step times whose noise drifts slowly, as on real machines."""
    rng, level, raw = random.Random(seed), 0.0, []
    for _ in range(n):
        level = 0.7 * level + rng.gauss(0, 0.007)
        raw.append(scale * math.exp(level))
    return _spread(raw)


def test_interval_covers_the_truth():
    hits = 0
    for seed in range(200):
        low, high = ratio_interval(_correlated(2 * seed, 60, 100.0), _correlated(2 * seed + 1, 60, 103.0))
        hits += low <= 1.03 <= high
    assert hits >= 174  # 95 % nominal; block medians keep some correlation


def test_interval_needs_steps():
    assert equal_blocks((1.0,) * 5) == []
    assert ratio_interval(_spread([1.0] * 20), _spread([1.0, 1.1])) is None
    assert ratio_interval(_spread([2.0] * 20), _spread([1.0] * 20)) == (0.5, 0.5)


def test_faster_slower_and_neither():
    base = samples.resnet50()
    faster = compare_profiles(base, samples.resnet50(scale=0.5))
    assert faster.sentence.startswith("B is 2× faster")
    assert faster.low <= faster.ratio <= faster.high
    assert compare_profiles(base, samples.resnet50(scale=1.05)).sentence.startswith("B is 5.0 % slower")
    assert "No difference beyond noise" in compare_profiles(base, base).sentence


@pytest.mark.parametrize(
    ("scale", "outcome"),
    [(1.0, Regression.NO), (0.8, Regression.NO), (1.1, Regression.YES), (1.03, Regression.UNDECIDED)],
)
def test_regression(scale, outcome):
    comparison = compare_profiles(samples.resnet50(), samples.resnet50(scale=scale))
    assert comparison.regression(0.03).outcome is outcome


def test_other_machines_are_not_compared_by_time():
    other = replace(samples.H200, gpu_uuid="GPU-other")
    comparison = compare_profiles(samples.resnet50(), samples.resnet50(scale=3.0, environment=other))
    assert not comparison.comparable
    assert comparison.low is None
    assert comparison.regression(0.03).outcome is Regression.UNDECIDED
    assert any("board" in d for d in comparison.differences)
    by_label = {d.label: d for d in comparison.totals}
    assert not by_label["step time"].comparable
    assert by_label["kernels per step"].comparable
    assert "not comparable" in compare_markdown(comparison)


def test_what_differs_is_named():
    base = samples.resnet50()
    changed = replace(base, environment=replace(base.environment, torch="2.12.0", shared_gpu=True), argv=("--lr", "1"))
    text = " ".join(compare_profiles(base, changed).differences)
    for part in (
        "Different torch: 2.11.0+cu130 and 2.12.0.",
        "Different arguments",
        "Another process used the GPU during run B",
    ):
        assert part in text
    assert compare_profiles(base, changed).comparable


def test_cores_that_others_took_are_named():
    """Seen: one script, profiled twice on a busy machine, was told as 3.03 times slower, and nothing else."""
    base = samples.cpu_run()
    busy = replace(base, utilization={**base.utilization, "cpu_others_frac": quantity(0.69)})
    assert (
        "Other processes took 69 % of the cores during run B: its times are in doubt."
        in compare_profiles(base, busy).differences
    )
    quiet = replace(base, utilization={**base.utilization, "cpu_others_frac": quantity(0.05)})
    assert not [text for text in compare_profiles(base, quiet).differences if "Other processes" in text]


def quantity(value):
    return Quantity(value=value, provenance=Provenance.MEASURED)


def test_a_run_without_steps():
    base = samples.resnet50()
    comparison = compare_profiles(base, replace(base, step_us=None))
    assert comparison.ratio is None
    assert "cannot be compared" in comparison.sentence
    assert comparison.regression(0.03).outcome is Regression.UNDECIDED


def test_kinds_of_a_run_that_ended_before_its_trace_are_not_known():
    base = samples.resnet50()
    ended = replace(base, step_us=None, kernels=(), copies=(), syncs=(), idle=(), busy_us=0.0)
    for comparison in (compare_profiles(base, ended), compare_profiles(ended, base)):
        assert comparison.kinds
        assert all((d.a is None) != (d.b is None) for d in comparison.kinds)
        assert not any(d.change_text.endswith("%") for d in comparison.kinds)
        rows = [line for line in compare_markdown(comparison).splitlines() if line.startswith("| convolution")]
        assert rows
        assert all("not known" in row for row in rows)


def test_changes_carry_their_sign():
    comparison = compare_profiles(samples.resnet50(), samples.resnet50(scale=0.95))
    texts = {d.label: d.change_text for d in comparison.totals}
    assert texts["step time"] == "−5.0 %"
    assert texts["samples per second"] == "+5.3 %"
    assert texts["kernels per step"] == "same"


def test_a_kind_that_is_small_in_one_run_is_still_compared():
    a = samples.resnet50()
    slow = replace(
        a, kernels=tuple(replace(r, time_us=r.time_us * 30) if r.kind == "optimizer" else r for r in a.kernels)
    )
    busy = sum(r.time_us for r in slow.kernels)
    slow = replace(slow, busy_us=busy, step_us=replace(a.step_us, median=a.step_us.median + busy - a.busy_us))
    delta = next(d for d in compare_profiles(a, slow).kinds if d.label == "optimizer")
    assert delta.ratio == pytest.approx(30)
    assert delta.change_text == "×30"


def test_a_change_that_rounds_to_nothing_left_says_what_is_left():
    def change(b: float) -> str:
        return Delta(label="", unit="us", a=100.0, b=b).change_text

    assert (change(0.3), change(0.01), change(0.0), change(50.0)) == ("−99.7 %", "1/10,000", "−100 %", "−50 %")


def test_other_scripts_and_a_cpus_operators_are_called_so():
    run = samples.cpu_run()
    comparison = compare_profiles(run, replace(run, script="other.py"))
    assert any(text.startswith("Different scripts: ") for text in comparison.differences)
    assert "operators per step" in {d.label for d in comparison.totals}


def _starved(wait_us: float, seed: int) -> StepProfile:
    """Eight workers deliver eight batches at once: every eighth step waits."""
    rng, profile = random.Random(seed), samples.resnet50()
    raw = [(10e3 + (wait_us if i % 8 == 7 else 0.0)) * math.exp(rng.gauss(0, 0.02)) for i in range(40)]
    return replace(profile, step_us=_spread(raw), input=replace(profile.input, workers=8, burst_us=wait_us / 8))


def test_where_batches_come_in_bursts_the_means_are_compared():
    """The median step is the same, and training takes twice as long."""
    comparison = compare_profiles(_starved(20e3, 1), _starved(120e3, 2))
    assert comparison.ratio == pytest.approx(25.0 / 12.5, rel=0.02)
    assert comparison.low < comparison.ratio < comparison.high
    assert comparison.regression(0.05).outcome is Regression.YES
    times, rates = (
        next(d for d in comparison.totals if d.label == label) for label in ("step time", "samples per second")
    )
    assert times.ratio == pytest.approx(1 / rates.ratio)
    alike = compare_profiles(_starved(120e3, 3), _starved(120e3, 4))
    assert alike.low < 1 < alike.high


def test_that_machines_differ_is_said_once():
    found = compare_profiles(samples.resnet50(), samples.resnet50(environment=samples.LAPTOP))
    assert found.sentence == "The machines differ: times are shown, and not compared."
    assert not [text for text in found.differences if "compar" in text]


def test_counted_bytes_are_not_compared_with_modelled_ones():
    base = samples.resnet50()
    counted = replace(base.kernels[0], dram_bytes=1e9, dram_provenance=Provenance.MEASURED)
    measured = replace(base, kernels=(counted,))
    modelled = replace(base, kernels=(replace(counted, dram_bytes=None, dram_provenance=Provenance.UNAVAILABLE),))
    for a, b, alike in ((measured, modelled, False), (measured, measured, True), (modelled, modelled, True)):
        (traffic,) = (d for d in compare_profiles(a, b).totals if d.label == "memory traffic per step")
        assert traffic.comparable is alike
