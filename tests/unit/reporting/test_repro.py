"""A script that repeats one operator: it runs, with the shapes, dtype and strides of the trace."""

from __future__ import annotations

import dataclasses
import runpy

import pytest
import samples

from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.core.profile import KernelRow
from advisor.core.trace import OpTable, Trace
from advisor.reporting import repro

SHAPES = "[[2, 4, 9, 9], [8, 4, 3, 3], [], [], [], [], [], [], []]"


def conv_trace(arguments="[null, null, null, [1, 1], [0, 0], [1, 1], false, [0, 0], 1]"):
    table = OpTable(
        name=["aten::other", "aten::convolution"],
        start_ns=[0, 1],
        end_ns=[1, 2],
        shapes=["", SHAPES],
        dtypes=["", "float,float,,ScalarList,ScalarList,ScalarList,Scalar,ScalarList,Scalar"],
        strides=["", "[[324, 1, 36, 4], [36, 9, 3, 1], [], [], [], [], [], [], []]"],
        arguments=["", arguments],
    )
    return Trace(device="cpu", step_bounds_ns=[0, 2], ops=table)


def profile(*rows):
    return dataclasses.replace(samples.resnet50(), environment=Environment(), kernels=rows)


CONV = KernelRow(name="conv", kind="conv", op="aten::convolution", module="layer1.0", shapes=SHAPES, time_us=90.0)


def test_the_script_runs_the_operator_as_it_was_called(tmp_path, capsys):
    shorter = dataclasses.replace(CONV, time_us=3.0)
    text = repro.script(profile(shorter, CONV), conv_trace(), 1)
    assert "layer1.0" in text
    (tmp_path / "op.py").write_text(text)
    module = runpy.run_path(str(tmp_path / "op.py"), run_name="repro")
    image = module["ARGUMENTS"][0]
    assert (tuple(image.shape), image.stride()) == ((2, 4, 9, 9), (324, 1, 36, 4))
    assert tuple(module["call"]().shape) == (2, 8, 7, 7)


def test_operators_are_numbered_by_their_time_and_each_once():
    pool = KernelRow(name="pool", kind="pool", op="aten::max_pool2d", shapes="[[1, 2]]", time_us=100.0)
    trace = conv_trace()
    for values, value in zip(
        (trace.ops.name, trace.ops.shapes, trace.ops.dtypes, trace.ops.strides, trace.ops.arguments),
        ("aten::max_pool2d", "[[1, 2]]", "float", "[[2, 1]]", ""),
        strict=True,
    ):
        values.append(value)
    rows = CONV, dataclasses.replace(CONV, time_us=80.0), pool, KernelRow(name="k", kind="other")
    found = repro.operators(profile(*rows), trace)
    assert [row.op for row, _ in found] == ["aten::max_pool2d", "aten::convolution"]
    assert [
        row.op for row, _ in repro.operators(profile(*rows), conv_trace(""))
    ] == []  # what would be refused is not listed
    assert repro.shown(SHAPES) == "2×4×9×9, 8×4×3×3"


@pytest.mark.parametrize(
    ("number", "trace", "says"),
    [
        (2, conv_trace(), "expected 1 to 1"),
        (1, conv_trace(""), "holds the arguments of none"),
        (1, Trace(device="cpu", step_bounds_ns=[]), "no operator of this run can be repeated"),
    ],
)
def test_what_cannot_be_repeated_is_one_clear_line(number, trace, says):
    with pytest.raises(AdvisorError, match=says):
        repro.script(profile(CONV), trace, number)
