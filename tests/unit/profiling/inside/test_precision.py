"""The precision audit: what ran, by whom, how far from fp64; and what the report makes of it."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from advisor.core import storage
from advisor.core.environment import Environment
from advisor.core.precision import Audited, PrecisionRecord
from advisor.core.profile import KernelRow, StepProfile
from advisor.loop.training import RootModule, Training
from advisor.profiling.inside.precision import Audit
from advisor.reporting.precision import precision_text, priced


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode="reflect"), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )


def audited(model: nn.Module, *, autocast: bool) -> PrecisionRecord:
    audit = Audit(Training(torch.device("cpu"), roots=[RootModule(model, "Sequential")]))
    audit.begin()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(torch.randn(5, 3, 6, 6)).float().square().mean()
    loss.backward()
    with torch.no_grad():  # the step ends with an update, before the audit does
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return audit.end()


def test_fp32_is_told_from_autocast_and_errors_are_of_the_step() -> None:
    for autocast, ran, by, least, most in (
        (False, "fp32", "fp32 throughout", 0.0, 1e-6),
        (True, "bf16", "autocast", 1e-4, 1e-2),
    ):
        record = audited(net(), autocast=autocast)
        assert not record.notes
        assert [row.module for row in record.rows] == ["Sequential.0"] * 2 + ["Sequential.3"] * 3
        for row in record.rows:
            assert (row.ran, row.by) == (ran, by)
            assert row.error is not None
            assert least <= row.error <= most, row
            assert row.errors["fp32"] < row.errors["bf16"]
            assert "tf32" not in row.errors  # a CPU has none


def test_products_that_the_step_does_not_make_have_no_row() -> None:
    """The gradient of images, and of frozen weights."""
    model = net()
    model[3].weight.requires_grad_(False)
    assert [(row.module, row.product) for row in audited(model, autocast=False).rows] == [
        ("Sequential.0", "forward"),
        ("Sequential.0", "weight gradient"),
        ("Sequential.3", "forward"),
        ("Sequential.3", "data gradient"),
    ]


def test_a_wrong_layer_would_be_seen() -> None:
    model = net()
    forward = model[0].forward
    model[0].forward = lambda x: forward(x) * 1.01
    first = audited(model, autocast=False).rows[0]
    assert first.error == pytest.approx(0.01, rel=1e-3)


def test_no_hook_is_left() -> None:
    model = net()
    audited(model, autocast=False)
    assert not any(module._forward_hooks for module in model.modules())


def test_a_record_is_kept_and_the_dearest_comes_first(tmp_path) -> None:
    rows = [
        Audited(
            module=path, product="forward", ran="fp32", by="the script", error=1e-7, errors={"fp32": 1e-7, "tf32": 3e-4}
        )
        for path in ("small", "large")
    ]
    record = PrecisionRecord(rows=tuple(rows), samples=2)
    storage.save(tmp_path / "precision.json", record)
    assert storage.load(tmp_path / "precision.json", PrecisionRecord) == record
    machine = Environment(device="cuda", copy_gbps=4000.0, matrix_tflops={"fp32": 50.0, "tf32": 400.0})
    kernels = tuple(
        KernelRow(
            name="implicit_convolve_sgemm",
            kind="conv",
            op="aten::cudnn_convolution",
            module=path,
            phase="forward",
            time_us=time,
            dtype="fp32",
            flops=4e9,
            modelled_bytes=1e6,
            shapes=json.dumps([[8, 64, 8, 8], [64, 64, 3, 3]]),
        )
        for path, time in (("small", 100.0), ("large", 900.0))
    )
    profile = StepProfile(
        script="t.py",
        argv=(),
        created="",
        environment=machine,
        step_kind="optimizer",
        step_us=None,
        wall_us=None,
        kernels=kernels,
    )
    found = priced(record, profile)
    assert [one.row.module for one in found] == ["large", "small"]
    assert found[0].saves_us == pytest.approx(900 - 10)  # 4 GFLOP at 400 TFLOP/s
    text = precision_text(record, profile, 100)
    assert "fp32 (the script)" in text
    assert "≤ 890 µs" in text
