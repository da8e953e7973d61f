"""Findings name the user's own lines, modules and kernels."""

from __future__ import annotations

import dataclasses

import pytest

from advisor.core.environment import Environment
from advisor.core.profile import (
    ConvFact,
    CopyRow,
    IdleCause,
    InputStats,
    KernelRow,
    ModelFacts,
    Site,
    StepProfile,
)
from advisor.rules.sites import LIMIT, SELECTORS, select

ROWS = (
    KernelRow(name="k1", kind="conv", op="aten::convolution", module="net.conv", module_type="Conv2d", phase="forward", source="train.py:9", calls=2, time_us=300, limit_us=100, dtype="fp32"),
    KernelRow(name="k2", kind="conv", op="aten::convolution", module="net.conv", module_type="Conv2d", phase="forward", source="train.py:9", calls=1, time_us=100, limit_us=90, dtype="fp32"),
    KernelRow(name="k3", kind="norm", op="aten::batch_norm", module="net.bn", module_type="BatchNorm2d", shapes="[[2, 8, 4, 4], []]", phase="backward", calls=1, time_us=900, limit_us=890),
    KernelRow(name="my_raw_kernel", kind="other", calls=3, time_us=6),
    KernelRow(name="k4", kind="elementwise", op="aten::div", module="net.out.norm", module_type="RMSNorm", phase="forward", source="rms.py:4", calls=1, time_us=5),
)  # fmt: skip
PROFILE = StepProfile(
    script="train.py", argv=(), created="", environment=Environment(), step_kind="optimizer", step_us=None, wall_us=None, kernels=ROWS,
    idle=(IdleCause(cause="launch", time_us=50, sites=(Site(source="train.py:12", what="aten::add", calls=4, time_us=40),)),),
    syncs=(
        Site(source="train.py:20", what="cudaStreamSynchronize from aten::item", calls=1, time_us=70),
        Site(source="train.py:21", what="cudaDeviceSynchronize", calls=1, time_us=80),
    ),
    copies=(CopyRow(kind="h2d", bytes=1048576, time_us=30, calls=2, pageable=True, source="train.py:5"),),
    input=InputStats(loader="DataLoader", next_us=4000, workers=0, source="train.py:3"),
    model=ModelFacts(
        convs=(
            ConvFact(module="net.conv", in_channels=3, out_channels=30, kernel=(3, 3), stride=(1, 1), padding=(1, 1), dilation=(1, 1), groups=1, bias=True, followed_by_bn=True),
            ConvFact(module="net.dw", in_channels=32, out_channels=32, kernel=(7, 7), stride=(1, 1), padding=(3, 3), dilation=(1, 1), groups=32, bias=False),
        ),
        optimizers=("SGD",), env={"CUDA_LAUNCH_BLOCKING": "1"},
    ),
)  # fmt: skip


@pytest.mark.parametrize(
    ("selector", "expected"),
    [
        ("convolutions", ("train.py:9 net.conv (Conv2d 3→30, 3×3): aten::convolution (forward, 400 µs, 3×)",)),
        (
            "largest_gaps",
            (
                "train.py:9 net.conv (Conv2d 3→30, 3×3): aten::convolution (forward, 210 µs, 3×)",
                "net.bn (BatchNorm2d 8): aten::batch_norm (backward, 10 µs)",
            ),
        ),
        ("unattributed_kernels", ("my_raw_kernel (other, 6 µs, 3×)",)),
        ("written_norms", ("rms.py:4 net.out.norm (RMSNorm): aten::div (forward, 5 µs)",)),
        ("launch_gaps", ("train.py:12: aten::add (80 % of it, 4×)",)),
        ("item_syncs", ("train.py:20: cudaStreamSynchronize from aten::item (70 µs)",)),
        ("explicit_syncs", ("train.py:21: cudaDeviceSynchronize (80 µs)",)),
        ("h2d_copies", ("train.py:5: 1.00 MiB pageable (30 µs, 2×)",)),
        ("loader", ("train.py:3: DataLoader, 0 workers (4.00 ms)",)),
        ("biased_convolutions", ("train.py:9 net.conv: 3×3 3→30 (400 µs)",)),
        ("depthwise_convolutions", ("net.dw: 7×7 32→32, 32 groups",)),
        ("unaligned_convolutions", ("train.py:9 net.conv: 3×3 3→30 (400 µs)",)),
        ("environment_variables", ("CUDA_LAUNCH_BLOCKING=1",)),
        ("optimizers", ("SGD",)),
    ],
)
def test_selected_places(selector, expected):
    assert select(selector, PROFILE) == expected


@pytest.mark.parametrize("selector", SELECTORS)
def test_every_selector_takes_an_empty_profile(selector):
    empty = StepProfile(
        script="", argv=(), created="", environment=Environment(), step_kind="none", step_us=None, wall_us=None
    )
    assert all(isinstance(text, str) for text in select(selector, empty))
    assert select(selector, None) == ()


def test_at_most_five_places_are_named():
    rows = tuple(KernelRow(name=f"k{i}", kind="pool", op=f"aten::pool{i}", time_us=float(i)) for i in range(20))
    found = select("pools", dataclasses.replace(PROFILE, kernels=rows))
    assert len(found) == LIMIT
    assert found[0].startswith("aten::pool19")


def test_places_of_indexing_are_of_the_rows_that_its_share_counts():
    """aten::_batch_norm_impl_index has the word in its name, and aten::masked_fill has not."""
    rows = (
        KernelRow(name="a", kind="norm", op="aten::_batch_norm_impl_index", time_us=3.0),
        KernelRow(name="b", kind="elementwise", op="aten::masked_fill", time_us=2.0),
        KernelRow(name="c", kind="other", op="aten::index", time_us=1.0),
    )
    found = select("indexing", dataclasses.replace(PROFILE, kernels=rows))
    assert found == ("aten::masked_fill (other, 2 µs)", "aten::index (other, 1 µs)")


def test_operators_inside_one_are_no_more_calls_of_it():
    """A CPU's rows: aten::convolution runs _convolution, which runs mkldnn_convolution."""
    rows = [
        KernelRow(name=f"aten::{name}", kind="conv", op="aten::convolution", phase="forward", calls=4, time_us=time)
        for name, time in (("mkldnn_convolution", 300), ("convolution", 20), ("_convolution", 10))
    ]
    again = dataclasses.replace(rows[1], time_us=30, calls=2, shapes="[[3]]")  # of another weight
    for kernels, told in ((rows, "330 µs, 4×"), ([*rows, again], "360 µs, 6×"), (rows[:1], "300 µs, 4×")):
        found = select("convolutions", dataclasses.replace(PROFILE, kernels=tuple(kernels)))
        assert found == (f"aten::convolution (forward, {told})",)


def test_the_same_layer_of_repeated_blocks_is_one_place():
    """Five places of one line would hide the other lines."""
    conv = KernelRow(name="k", kind="conv", op="aten::convolution", module_type="Conv2d", phase="forward", source="net.py:7", shapes="[[2, 64, 8, 8], [64, 64, 3, 3]]")  # fmt: skip
    blocks = tuple(dataclasses.replace(conv, module=f"net.blocks.{i}.conv", calls=2.0, time_us=100.0) for i in range(3))
    other = dataclasses.replace(conv, module="net.stem", source="net.py:3", time_us=10.0)
    places = select("convolutions", dataclasses.replace(PROFILE, kernels=(*blocks, other)))
    assert places == (
        "net.py:7 net.blocks.*.conv ×3 (Conv2d 64→64, 3×3): aten::convolution (forward, 300 µs, 6×)",
        "net.py:3 net.stem (Conv2d 64→64, 3×3): aten::convolution (forward, 10 µs)",
    )


def test_like_convolutions_of_repeated_blocks_are_one_place():
    fact = dataclasses.replace(PROFILE.model.convs[0], in_channels=64, out_channels=64)
    facts = tuple(dataclasses.replace(fact, module=f"net.blocks.{i}.conv") for i in range(3))
    wide = dataclasses.replace(fact, module="net.blocks.3.conv", out_channels=96)
    model = dataclasses.replace(PROFILE.model, convs=(*facts, wide))
    rows = [dataclasses.replace(ROWS[0], module=f.module, source="net.py:7", time_us=50.0) for f in facts]
    places = select("biased_convolutions", dataclasses.replace(PROFILE, model=model, kernels=tuple(rows)))
    assert places == ("net.py:7 net.blocks.*.conv ×3: 3×3 64→64 (150 µs)", "net.blocks.3.conv: 3×3 64→96")
