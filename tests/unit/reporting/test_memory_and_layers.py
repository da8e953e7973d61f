"""The page's sections on memory over a step and on layers."""

from __future__ import annotations

import re
from dataclasses import replace

import samples

from advisor.core.held import ACTIVATION, OTHERS, CourseLayer, HeldRow, MemoryCourse, MemoryLook
from advisor.core.profile import ConvFact, KernelRow
from advisor.reporting import layertable
from advisor.reporting.course import BOTTOM, LEFT, RIGHT, TOP, course_plot
from advisor.reporting.html import report_html

MIB = 2**20
COURSE = MemoryCourse(
    at_us=(0.0, 1000.0, 3000.0, 4000.0),
    layers=(
        CourseLayer(name="parameter", kind="parameter", nbytes=(40 * MIB,) * 4),
        CourseLayer(name="gradient", kind="gradient", nbytes=(0, 0, 20 * MIB, 40 * MIB)),
        CourseLayer(name="Net.<b>1", kind=ACTIVATION, nbytes=(0, 50 * MIB, 5 * MIB, 0)),
        CourseLayer(name=OTHERS, kind=ACTIVATION, nbytes=(0, 10 * MIB, 0, 0)),
    ),
    backward_us=1500.0,
    length_us=4000.0,
)
LOOK = MemoryLook(
    rows=(
        HeldRow(kind=ACTIVATION, module="Net.<b>1.conv", source="train.py:42", nbytes=50 * MIB, count=3),
        HeldRow(kind="parameter", nbytes=40 * MIB, count=9),
    ),
    course=COURSE,
)


def test_areas_stand_on_each_other_and_the_fullest_moment_is_the_peak():
    plot = course_plot(LOOK)
    assert plot is not None
    assert (plot.peak, plot.peak_at, plot.on_gpu, plot.allocated) == ("100 MiB", "1.00 ms", False, "")
    assert [(b.label, b.at_peak, b.share) for b in plot.bands] == [
        ("parameters", "40.0 MiB", "40 %"),
        ("gradients", "0 B", "0 %"),
        ("Net.<b>1", "50.0 MiB", "50 %"),
        ("other modules", "10.0 MiB", "10 %"),
    ]
    assert len({b.key for b in plot.bands}) == 4  # no two of one colour
    points = [tuple(map(float, p.split(","))) for b in plot.bands for p in b.outline.split()]
    assert all(LEFT <= x <= RIGHT and TOP <= y <= BOTTOM for x, y in points)
    upper, lower = (plot.bands[i].outline.split() for i in (0, 1))
    assert upper[: len(upper) // 2] == lower[len(lower) // 2 :][::-1]  # one's top is the next one's bottom


def test_a_gpu_shows_what_its_allocator_has_given_out():
    course = replace(COURSE, allocated_bytes=(50 * MIB, 130 * MIB, 90 * MIB, 80 * MIB))
    plot = course_plot(replace(LOOK, device="cuda", course=course))
    assert plot is not None
    assert plot.on_gpu
    assert len(plot.allocated.split()) == 7
    assert plot.y_ticks[-1].text == "130 MiB"


def test_the_page_shows_both_sections_and_nothing_from_a_run_is_markup():
    page = report_html(samples.resnet50(), samples.findings(), None, None, LOOK)
    assert page.count("<polygon") == 4
    assert "Net.&lt;b&gt;1" in page
    assert "Net.<b>" not in page
    assert "No step was watched for its memory" in report_html(samples.resnet50(), None, None)


def test_layers_have_kind_input_type_layout_and_algorithm():
    conv = ConvFact(module="Net.conv", in_channels=3, out_channels=64, kernel=(7, 7), stride=(2, 2), padding=(3, 3),
                    dilation=(1, 1), groups=1, bias=False)  # fmt: skip
    row = KernelRow(name="sm90_xmma_fprop_implicit_gemm_bf16", kind="conv", op="aten::convolution", module="Net.conv",
                    module_type="Conv2d", phase="forward", time_us=50.0, dtype="bf16", layout="nhwc",
                    shapes="[[8, 3, 224, 224], [64, 3, 7, 7]]")  # fmt: skip
    norm = replace(row, name="void at::native::batch_norm<float>(int)", kind="norm", op="aten::native_batch_norm",
                   module="Net.bn", module_type="BatchNorm2d", shapes="[[8, 64, 112, 112], [64]]")  # fmt: skip
    count = replace(norm, name="add", kind="elementwise", time_us=1.0, dtype="int64", layout="", shapes="")
    base = samples.resnet50()
    linear = replace(row, name="gemm", kind="gemm", op="aten::addmm", module="Net.head", module_type="Linear",
                     shapes="[[4], [32, 64], [64, 4]]")  # fmt: skip
    profile = replace(base, kernels=(row, norm, count, linear), model=replace(base.model, convs=(conv,)))
    found = layertable.layer_table(profile)
    assert found["Net.conv"] == layertable.Layer(
        kind="conv", layer="Conv2d 3→64, 7×7", shape="8×3×224×224", numbers="bf16 nhwc", algorithm="implicit GEMM"
    )
    assert found["Net.head"].shape == "32×64"  # the bias, 4, comes first
    assert (found["Net.bn"].numbers, found["Net.bn"].algorithm) == ("bf16 nhwc", "batch_norm<…>")
    page = report_html(profile, None, None)
    table = page[page.index('id="modules-t"') :].split("</table>")[0]
    for text in ("Conv2d 3→64, 7×7", "8×3×224×224", "bf16 nhwc", "implicit GEMM", "normalisation"):
        assert text in table
    assert ">Kept<" not in table


def test_what_modules_keep_is_a_column_of_the_table():
    assert layertable.kept_below(LOOK) == {"Net": 50 * MIB, "Net.<b>1": 50 * MIB, "Net.<b>1.conv": 50 * MIB}
    assert layertable.kept_below(None) == {}
    page = report_html(samples.resnet50(), None, None, None, LOOK)
    assert re.search(r"<button>Kept</button>", page)
