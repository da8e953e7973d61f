"""Sweeps of convolutions: what a cliff is, and that what is timed is what is said."""

from __future__ import annotations

import pytest
import torch

from advisor.bench import sweep
from advisor.core.errors import AdvisorError, ExitCode


def row(value: int, ms: float, flops: float) -> sweep.SweepRow:
    return sweep.SweepRow(
        sweep="channels", value=value, dtype="bfloat16", layout="nhwc", product="forward", ms=ms, flops=flops, tf32=False,
        faster=None, faster_ms=None, cudnn=91900, torch="2.11", date="2026-11-27",
    )  # fmt: skip


def test_a_cliff_is_less_time_for_as_much_work() -> None:
    found = sweep.cliffs([row(28, 1.0, 28.0), row(30, 3.0, 30.0), row(32, 1.1, 32.0), row(40, 1.4, 40.0)])
    assert [(r.faster, r.faster_ms) for r in found] == [(None, None), (32, 1.1), (None, None), (None, None)]
    assert sweep.line(found[1]) == "channels 30 bfloat16 nhwc forward: 3.000 ms; 32 takes 37 % of it"


def test_less_work_in_less_time_is_none() -> None:
    assert sweep.cliffs([row(28, 1.0, 28.0), row(30, 3.0, 30.0)])[1].faster is None


def test_operations_are_those_of_the_convolution() -> None:
    assert sweep.flops(sweep.Shape(batch=1, inputs=2, outputs=3, side=4)) == 2 * 16 * 2 * 3 * 9
    assert sweep.flops(sweep.Shape(batch=1, inputs=4, outputs=4, side=4, groups=2, stride=2)) == 2 * 4 * 4 * 4 * 9 / 2


def test_every_point_can_be_called(monkeypatch: pytest.MonkeyPatch) -> None:
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *sizes, device="", **given: randn(*sizes, **given))
    for name, _, shape in {name: (name, value, shape) for name, value, shape in sweep.points()}.values():
        small = sweep.replace(shape, batch=1, side=9)
        calls = sweep.calls(small, torch.float32, "nhwc")
        assert list(calls) == list(sweep.PRODUCTS), name
        for call in calls.values():
            call()


def test_a_sequence_that_is_right_says_nothing() -> None:
    assert sweep.sequence_errors("cpu") == ""


def test_a_sequence_that_is_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the third call has another gradient."""
    right, calls = sweep.depthwise_products, []

    def stale(x: torch.Tensor, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, dx, dw = right(x, weight, dy)
        calls.append(dx)
        return y, dx * 2 if len(calls) == 3 else dx, dw

    monkeypatch.setattr(sweep, "depthwise_products", stale)
    assert sweep.sequence_errors("cpu") == (
        "data gradient of depthwise 3x3 of 16 channels is wrong by 1.0e+00 in a row of others"
    )


def test_an_interrupted_run_goes_on_with_what_is_missing() -> None:
    there = [{"sweep": "side", "dtype": "bfloat16", "layout": "nhwc"}]
    found = sweep.order(["side", "side", "taps"], there)
    assert found[-1] == ("side", "bfloat16", "nhwc")
    assert len(found) == len(set(found)) == 2 * len(sweep.SETTINGS)


def test_without_a_gpu_it_ends_with_5(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(AdvisorError) as found:
        sweep.run(pattern="", out=None, say=print)
    assert found.value.exit_code is ExitCode.GPU_REQUIRED
