from __future__ import annotations

from dataclasses import replace

import pytest
import samples

from advisor.analysis import metrics
from advisor.core.profile import IdleCause, KernelRow, Site, StepProfile
from advisor.core.provenance import Provenance
from advisor.reporting import breakdown


def test_causes_add_up_to_the_step():
    profile = samples.resnet50()
    causes = breakdown.causes(profile)
    assert sum(c.frac for c in causes) == pytest.approx(1.0)
    assert sum(c.time_us for c in causes) == pytest.approx(profile.step_us.median)
    assert causes[0].key == "conv"
    assert [c.idle for c in causes] == sorted(c.idle for c in causes)  # work first, idle after it
    assert "idle_data" not in {c.key for c in causes}  # no time, no row


def test_gaps_that_tracing_made_longer_are_told_as_in_untraced_steps():
    """A ResNet-18 behind two workers: its traced steps waited for launches, the others for data."""
    profile = samples.resnet50()
    site = Site(source="train.py:9", what="waiting in the loader's next()", calls=1.0, time_us=2000.0)
    idle = (IdleCause(cause="data", time_us=2000.0, sites=(site,)), IdleCause(cause="launch", time_us=90_000.0))
    step = replace(profile.step_us, median=profile.busy_us + 30_000.0)
    starved = replace(
        profile,
        step_us=step,
        idle=idle,
        input=replace(profile.input, next_us=20_000.0),
        cost=replace(profile.cost, traced_next_us=4000.0),
    )
    data, launch = (
        next(c for c in breakdown.causes(starved) if c.key == f"idle_{name}") for name in ("data", "launch")
    )
    assert (data.time_us, launch.time_us) == (pytest.approx(10_000.0), pytest.approx(20_000.0))
    assert data.sites[0].time_us == pytest.approx(10_000.0)
    assert breakdown.division(starved).untraced
    on_cpu = replace(starved, environment=replace(profile.environment, device="cpu"))
    assert breakdown.division(on_cpu).total_us == pytest.approx(step.median)
    assert not breakdown.division(replace(starved, step_us=None, wall_us=None)).untraced


def test_small_kinds_are_shown_together_and_not_lost():
    profile = samples.resnet50()
    keys = {c.key for c in breakdown.causes(profile)}
    assert "loss" not in keys
    small = sum(r.time_us for r in profile.kernels if r.kind in ("loss", "gemm", "reduce", "optimizer"))
    other = next(c for c in breakdown.causes(profile) if c.key == "other")
    assert other.time_us == pytest.approx(small)


def test_a_cpus_step_is_the_untraced_one_too():
    """Traced it took 1.5 times as long, while its loader caught up."""
    profile = samples.cpu_run()
    slowed = replace(
        profile,
        kernels=tuple(replace(r, time_us=1.5 * r.time_us) for r in profile.kernels),
        busy_us=1.5 * profile.busy_us,
    )
    waits = replace(slowed, input=replace(profile.input, next_us=9000.0))
    causes = {c.key: c for c in breakdown.causes(waits)}
    step = profile.step_us.median
    assert sum(c.time_us for c in causes.values()) == pytest.approx(step)
    assert causes["idle_data"].time_us == pytest.approx(9000.0)
    assert causes["idle_data"].sites[0].time_us == pytest.approx(9000.0)
    conv = sum(r.time_us for r in slowed.kernels if r.kind == "conv")
    stretch = (step - 9000.0) / (slowed.busy_us + 1200.0)
    assert causes["conv"].time_us == pytest.approx(conv * stretch)
    (gap,) = (g for g in breakdown.gaps(waits, 9) if g.op == "aten::convolution_backward")
    assert gap.time_us == pytest.approx(1.5 * (9800.0 + 21700.0) * stretch)
    assert sum(m.time_us for m in breakdown.modules(waits) if m.depth == 0) == pytest.approx(
        stretch * sum(r.time_us for r in slowed.kernels if r.module)
    )


@pytest.mark.parametrize("slower", [0.5, 0.9, 1.0, 1.3, 3.0])
def test_a_cpus_table_and_its_messages_have_one_denominator(slower):
    """ "Convolutions take 55 % of the step" stood under a table in which they took 43 %: tracing had slowed the loop."""
    profile = samples.cpu_run()
    slowed = replace(
        profile,
        kernels=tuple(replace(r, time_us=slower * r.time_us) for r in profile.kernels),
        busy_us=slower * profile.busy_us,
        idle=(IdleCause(cause="other", time_us=slower * 4000.0),),
        cost=replace(profile.cost, overhead_frac=slower - 1.0),
    )
    table = metrics(slowed)
    conv = next(c.frac for c in breakdown.causes(slowed) if c.key == "conv")
    assert conv == pytest.approx(table.number("conv_frac") * table.number("work_frac"))
    assert sum(c.frac for c in breakdown.causes(slowed)) == pytest.approx(1.0)


def test_overlapping_kernels_do_not_fill_more_than_the_step():
    profile = samples.resnet50()
    overlapped = replace(profile, busy_us=profile.busy_us / 2)
    causes = breakdown.causes(overlapped)
    assert sum(c.time_us for c in causes if not c.idle) == pytest.approx(profile.busy_us / 2)
    assert sum(c.frac for c in causes) == pytest.approx(1.0)


def test_gaps_join_the_same_module_of_repeated_blocks():
    gap = next(g for g in breakdown.gaps(samples.resnet50(), 50) if g.module == "layer1.*.bn3")
    assert (gap.modules, gap.kind) == (3, "norm")
    assert gap.source == "train_imagenet.py:57"  # the forward line, which is the one to look at
    assert gap.gap_us == pytest.approx(gap.time_us - gap.limit_us)


def test_a_row_without_a_limit_has_no_gap():
    rows = (KernelRow(name="k", kind="other", op="aten::x", time_us=100.0, limit_us=0.0),)
    assert breakdown.gaps(replace(samples.resnet50(), kernels=rows), 5) == ()


def test_a_gaps_module_is_told_with_its_layers_kind_and_channels():
    found = {gap.module: gap.layer for gap in breakdown.gaps(samples.resnet50(), 50)}
    assert found["conv1"] == "Conv2d 3→64, 7×7"
    assert found["layer1.*.bn3"] == "BatchNorm2d 256"
    assert found["layer3.*.conv2"] == "Conv2d 256→256, 3×3"


def test_modules_hold_their_children():
    modules = {m.path: m for m in breakdown.modules(samples.resnet50())}
    children = [m for p, m in modules.items() if p.startswith("layer1.") and p.count(".") == 1]
    assert modules["layer1"].time_us == pytest.approx(sum(c.time_us for c in children))
    assert modules["layer1.0.conv1"].type == "Conv2d"
    order = [m.path for m in breakdown.modules(samples.resnet50()) if m.depth == 0]
    assert order == sorted(order, key=lambda p: -modules[p].time_us)


def test_bytes_keep_their_provenance():
    assert breakdown.dram_bytes(samples.resnet50())[1] is Provenance.MEASURED
    assert breakdown.dram_bytes(samples.cpu_run())[1] is Provenance.MODELLED
    rows = samples.resnet50().kernels
    mixed = replace(samples.resnet50(), kernels=(replace(rows[0], dram_bytes=None), *rows[1:]))
    assert breakdown.dram_bytes(mixed)[1] is Provenance.MODELLED


def test_an_empty_run_has_no_views():
    empty = StepProfile(
        script="x.py", argv=(), created="", environment=samples.LAPTOP, step_kind="none", step_us=None, wall_us=None
    )
    assert breakdown.causes(empty) == breakdown.gaps(empty, 5) == breakdown.modules(empty) == ()
    assert breakdown.limit_frac(empty) is None
    assert breakdown.samples_per_s(empty) is None


def test_every_kind_of_work_says_where_most_of_it_comes_from():
    profile = samples.resnet50()
    for cause in breakdown.causes(profile):
        if not cause.idle:
            assert cause.sites, cause.label
            assert all(site.what for site in cause.sites)
            assert sum(site.time_us for site in cause.sites) <= cause.time_us * 1.0001
            assert list(cause.sites) == sorted(cause.sites, key=lambda site: -site.time_us)
