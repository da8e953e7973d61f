"""channels_last that something on the way undoes: told by what undoes it, with its cost, and not by asking for channels_last."""

from __future__ import annotations

from dataclasses import replace

import profiles
import pytest

from advisor import rules
from advisor.analysis import metrics
from advisor.analysis.predict import predict
from advisor.core.findings import Finding, Outcome
from advisor.core.profile import LayoutBreak, StepProfile

RULES = rules.load()
NORM, PAD = "Segmenter.stage.body.1", "Segmenter.stage"


def fired(profile: StepProfile) -> dict[str, Finding]:
    table = metrics(profile)
    found = rules.evaluate(RULES, table, profile, lambda transform, given: predict(profile, transform, given))
    return {finding.rule: finding for finding in found if finding.outcome is Outcome.FIRED}


def undone(module: str, module_type: str, what: str, *, weights: bool = True, dims: int = 2) -> StepProfile:
    """A net of 16.4 ms a step on an H200, of which conversions take 6.4: 1.0 in the norms, the rest in front of convolutions."""
    conv = profiles.conv("Segmenter.stage.body.0", 3, (48, 48), layout="nchw", input_shape=(16, 48, *([96] * dims)))
    common = {"phase": "forward", "source": "net.py:26"}
    rows = [
        profiles.row(name="xmma_bf16", kind="conv", op="aten::convolution", module="Segmenter.stage.body.0", dtype="bf16",
                     module_type="Conv2d", time_us=4_000, flops=1e11, layout="nchw", **common),
        profiles.row(name="copy_kernel", kind="layout", op="aten::contiguous", module="Segmenter.stage.body.0",
                     module_type="Conv2d", time_us=5_400, **common),
        profiles.row(name="copy_kernel", kind="layout", op="aten::contiguous", module=module, module_type=module_type,
                     time_us=1_000, **common),
        profiles.row(name="batch_norm_kernel", kind="norm", op="aten::native_batch_norm", module=NORM,
                     module_type=f"InstanceNorm{dims}d", time_us=1_900, **common),
        profiles.row(name="elementwise_kernel", kind="elementwise", op="aten::add", module="Segmenter", time_us=3_700, **common),
    ]  # fmt: skip
    base = profiles.profile(rows, step_us=16_400)
    breaks = (LayoutBreak(module=module, module_type=module_type, what=what),) if weights else ()
    flags = {"cudnn_enabled": True}
    model = replace(base.model, convs=(conv,), weights_channels_last=weights, layout_breaks=breaks, flags=flags)
    return replace(base, model=model)


@pytest.mark.parametrize(
    ("module", "module_type", "what", "told"),
    [
        (NORM, "InstanceNorm2d", "InstanceNorm2d", f"net.py:26 {NORM}: InstanceNorm2d returns NCHW (1.00 ms)"),
        (PAD, "UpBlock", "ReflectionPad2D", f"net.py:26 {PAD}: ReflectionPad2D in UpBlock returns NCHW (1.00 ms)"),
    ],
)
def test_what_returns_nchw_is_named_with_its_cost(module, module_type, what, told) -> None:
    found = fired(undone(module, module_type, what))
    finding = found["channels-last-lost"]
    assert finding.severity == "high"
    assert what in finding.message
    assert finding.sites[0] == told
    assert finding.gain is not None
    assert finding.gain.low == pytest.approx(0.5 * 1_000 / 16_400)
    assert finding.gain.high >= 6_400 / 16_400 - 1e-9
    assert not {"convolutions-in-nchw", "layout-converted-around-convolutions"} & set(found)
    assert rules.cards(found.values())[0].rule == "channels-last-lost"


def test_in_three_dimensions_too() -> None:
    found = fired(undone(NORM, "InstanceNorm3d", "InstanceNorm3d", dims=3))
    assert "InstanceNorm3d" in found["channels-last-lost"].message


def test_a_script_that_has_not_asked_for_it_is_told_of_channels_last() -> None:
    found = fired(undone(NORM, "InstanceNorm2d", "InstanceNorm2d", weights=False))
    assert "channels-last-lost" not in found
    assert {"convolutions-in-nchw", "layout-converted-around-convolutions"} <= set(found)


def test_what_the_script_has_done_already_is_not_predicted_to_help() -> None:
    gain = predict(undone(NORM, "InstanceNorm2d", "InstanceNorm2d"), "channels_last", {})
    assert gain is not None
    assert (gain.low, gain.high) == (0.0, 0.0)


def test_the_interval_of_channels_last_holds_what_nchw_costs() -> None:
    """Planted on an H200: NCHW cost 56 % of the step of a net with biases, where 50 % was the most that was predicted."""
    place = {"module": "Net.body.0", "module_type": "Conv2d", "phase": "forward"}
    rows = [
        profiles.row(name="sm90_xmma", kind="conv", op="aten::convolution", time_us=3_100, flops=2e11, layout="nchw",
                     dtype="bf16", tensor_core=True, **place),
        profiles.row(name="nchwToNhwcKernel", kind="layout", op="aten::convolution", time_us=2_000, **place),
        profiles.row(name="bn_fw_tr_1C11", kind="norm", op="aten::cudnn_batch_norm", module="Net.body.1", phase="forward",
                     module_type="BatchNorm2d", time_us=3_000, modelled_bytes=1.6e9),
        profiles.row(name="elementwise_kernel", kind="elementwise", op="aten::add_", time_us=1_000, modelled_bytes=1e9, **place),
        profiles.row(name="relu", kind="activation", op="aten::relu", module="Net.body.2", phase="forward", time_us=900,
                     modelled_bytes=3.2e9),
    ]  # fmt: skip
    base = profiles.profile(rows, step_us=10_000, launches=200, launch_us=1_000.0)
    fact = profiles.conv("Net.body.0", 3, (64, 64), bias=True, layout="nchw", input_shape=(64, 64, 96, 96))
    gain = predict(replace(base, model=replace(base.model, convs=(fact,))), "channels_last", {})
    assert gain is not None
    assert 0.1 < gain.low < 0.56 < gain.high < 0.85
