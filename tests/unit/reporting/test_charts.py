from __future__ import annotations

from dataclasses import replace

import pytest
import samples

from advisor.core.verdict import Blocks
from advisor.reporting import charts


def test_segments_fill_the_bar():
    bar = charts.stacked([("a", "A", 30.0, False), ("b", "B", 70.0, True), ("c", "C", 0.0, False)])
    assert [s.key for s in bar] == ["a", "b"]
    assert bar[-1].x + bar[-1].width == pytest.approx(1000)
    assert charts.stacked([]) == ()


@pytest.mark.parametrize("profile", [samples.resnet50(), samples.cpu_run()], ids=["gpu", "cpu"])
def test_roofline_dots_lie_in_the_chart_and_under_the_roof(profile):
    chart = charts.roofline(profile)
    slope = next(c for c in chart.ceilings if c.slope and c.text)
    for dot in chart.dots:
        assert chart.left <= dot.x <= chart.right
        assert chart.top <= dot.y <= chart.bottom
        if slope.x1 <= dot.x <= slope.x2:
            roof = slope.y1 + (slope.y2 - slope.y1) * (dot.x - slope.x1) / (slope.x2 - slope.x1)
            assert dot.y >= roof - 1  # y grows downwards: no sample is faster than the machine


def test_work_without_flops_is_in_the_strip_as_far_from_the_roof_as_its_bandwidth():
    profile = samples.resnet50()
    row = next(r for r in profile.kernels if r.kind == "pool" and r.phase == "forward")
    full = replace(row, time_us=row.dram_bytes / (profile.environment.copy_gbps * 1e3))  # at the measured bandwidth
    chart = charts.roofline(replace(profile, kernels=(full,)))
    (dot,) = chart.dots
    assert chart.left < dot.x < chart.strip
    assert dot.y == pytest.approx(next(c for c in chart.ceilings if c.slope).y1, abs=0.01)


def test_no_roofline_without_a_measured_bandwidth():
    profile = samples.resnet50()
    assert charts.roofline(replace(profile, environment=replace(profile.environment, copy_gbps=0.0))) is None
    assert charts.roofline(replace(profile, kernels=())) is None


def test_gain_axis_holds_every_interval_in_order():
    axis = charts.gain_axis(samples.trials())
    assert axis.ticks[0].text == "−20 %"
    for bar in axis.bars:
        for span in (bar.predicted, bar.measured):
            if span:
                assert 0 <= span[0] <= span[1] <= 1000
    lost = axis.bars[4].measured  # torch.compile, slower
    assert lost[1] < axis.zero
    assert charts.gain_axis(replace(samples.trials(), verdicts=())) is None


def test_block_plot_puts_the_faster_block_lower():
    plot = charts.block_plot(Blocks(off_us=(100.0, 101.0), on_us=(50.0, 120.0), steps_per_block=8))
    (_, off, on), (_, off2, on2) = plot.pairs
    assert on > off
    assert on2 < off2
    assert charts.block_plot(Blocks()) is None


def test_loss_plot_needs_finite_losses():
    assert charts.loss_plot((1.0, 0.9), (1.0, 0.8)) is not None
    assert charts.loss_plot((1.0, float("nan")), (1.0, 0.8)) is None
    assert charts.loss_plot((), (1.0, 0.8)) is None
