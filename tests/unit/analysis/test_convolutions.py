"""The table of convolutions: algorithm, direction, reasons, alternatives."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import profiles
import pytest
from profiles import conv, row

from advisor.analysis import measured_convs
from advisor.analysis.convolutions import (
    DATA,
    FORWARD,
    GRADIENTS,
    WEIGHT,
    Product,
    algorithm,
    direction,
    products,
    settings,
)
from advisor.analysis.measured_convs import MeasuredConv
from advisor.bench import conv_rows
from advisor.core.errors import AdvisorError
from advisor.core.profile import ConvFact, KernelRow, ModelFacts, StepProfile
from advisor.core.provenance import Provenance
from advisor.ops import catalog
from advisor.reporting import layertable

SHAPES = [[32, 64, 56, 56], [64, 64, 3, 3]]
FLOPS = 2.0 * 32 * 56 * 56 * 64 * 64 * 9
NBYTES = 2.0 * 32 * 56 * 56 * 64 * 4


def kernel(name: str, phase: str = "forward", **more: object) -> KernelRow:
    operator = "aten::cudnn_convolution" if phase == "forward" else "aten::convolution_backward"
    shapes = SHAPES if phase == "forward" else [[32, 64, 56, 56], *SHAPES]
    given = {"kind": "conv", "op": operator, "module": "layer1.conv", "module_type": "Conv2d", "layout": "nchw"}
    given |= {"time_us": 500.0, "flops": FLOPS, "modelled_bytes": NBYTES, "shapes": json.dumps(shapes)} | more
    return row(name=name, phase=phase, **given)


def profile(*rows: KernelRow, **flags: bool) -> StepProfile:
    model = ModelFacts(convs=(conv("layer1.conv", 3, (64, 64)),), flags=flags)
    return profiles.profile(rows, step_us=2000.0, model=model)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("void cudnn::winograd_nonfused::winogradForwardData4x4<float, float>", "Winograd"),
        ("void fft2d_r2c_32x32<float, false, 0u, false>", "FFT"),
        ("void at::native::conv_depthwise2d_forward_kernel<3, float, int>", "depthwise"),
        ("void cudnn::cnn::conv2d_grouped_direct_kernel<float>", "direct"),
        ("void implicit_convolve_sgemm<float, float, 128, 6, 7>", "implicit GEMM"),
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc", "implicit GEMM"),
        ("nvjet_tst_128x64_64x8_1x2_h_bz_coopB_TNT", "matrix product"),
        ("conv3x3", "advisor's own"),
        ("unheard_of", "other"),
    ],
)
def test_an_algorithm_is_read_from_the_name(name: str, expected: str) -> None:
    assert algorithm(kernel(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sm80_xmma_dgrad_implicit_gemm", DATA),
        ("void cudnn::cnn::wgrad2d_c1_k1_nhwc_kernel<__half>", WEIGHT),
        ("void at::native::conv_depthwise2d_backward_kernel<3>", DATA),
        ("void at::native::conv_depthwise2d_grad_weight_kernel<float>", WEIGHT),
        ("conv3x3_backward_weight", WEIGHT),
        ("void cutlass__5x_cudnn::Kernel<cutlass__5x_cudnn::reduction::kernel::ReduceSplitK", WEIGHT),
        ("some_gemm", GRADIENTS),
    ],
)
def test_a_direction_is_read_from_the_name(name: str, expected: str) -> None:
    assert direction(kernel(name, "backward")) == expected
    assert direction(kernel(name)) == FORWARD


def test_products_with_conversions_reasons_and_alternatives() -> None:
    convert = kernel("nchwToNhwcKernel<float>", kind="layout", time_us=40.0, flops=0.0)
    measured = profile(
        kernel("sm80_xmma_fprop_implicit_gemm_tf32", dtype="tf32", tensor_core=True),
        convert,
        kernel("implicit_convolve_sgemm_wgrad", "backward", time_us=900.0, flops=1.0),
        tf32_conv=False,
        cudnn_benchmark=False,
    )
    weight, forward = products(measured)
    assert settings(measured) == ("cudnn.benchmark is off: cuDNN's heuristics chose the algorithms",)
    assert (weight.direction, weight.units, weight.time_us) == (WEIGHT, "fp32 pipes", 900.0)
    assert weight.shape == (32, 64, 56, 56)
    assert weight.flops == pytest.approx(FLOPS)  # the forward's: those of a backward are shared out among its kernels
    assert weight.reasons[0] == "fp32 with TF32 off: no tensor cores"
    assert [(other.transform, other.provenance) for other in weight.alternatives] == [
        ("channels_last + amp_bf16 + conv3x3", Provenance.MEASURED),
        ("tf32", Provenance.MODELLED),
    ]
    assert weight.of_limit == pytest.approx(FLOPS / 50e6 / 900, rel=1e-6)
    assert forward.conversions == ("nchwToNhwcKernel<float>",)
    assert (forward.conversion_us, forward.total_us) == (40.0, 540.0)
    assert forward.units == "tensor cores, sm_80"
    assert forward.reasons == (
        "a kernel written for sm_80 on sm_90",
        "NCHW is converted around it",
    )


def test_odd_channels_without_tensor_cores_are_named() -> None:
    rows = kernel("implicit_convolve_sgemm", dtype="fp16")
    model = ModelFacts(convs=(conv("layer1.conv", 3, (3, 64)),))
    (product,) = products(replace(profile(rows), model=model))
    assert product.reasons == ("3 channels a group are no multiple of 8",)


def test_no_alternative_is_slower_than_what_runs() -> None:
    (product,) = products(profile(kernel("sm90_xmma_fprop", dtype="bf16", tensor_core=True, time_us=1.0)))
    assert product.alternatives == ()


def alone(row: KernelRow, *facts: ConvFact, gpu: str = "no GPU on file", **rates: float) -> Product:
    """The product of one row, on a GPU without rows unless it is named."""
    model = ModelFacts(convs=facts or (conv("layer1.conv", 3, (64, 64)),))
    machine = replace(profile().environment, gpu_name=gpu)
    machine = replace(machine, matrix_tflops=rates) if rates else machine
    (product,) = products(replace(profile(row), model=model, environment=machine))
    return product


def sizes(shape: tuple[int, ...], weight: tuple[int, ...]) -> str:
    return json.dumps([shape, weight])


HALF = {"dtype": "bf16", "tensor_core": True, "layout": "nhwc", "time_us": 9000.0}
# Transform, taps, channels, groups, stride, and what differs from HALF.
OWN = [
    ("large_depthwise_conv", 31, (64, 64), 64, 1, {}),
    ("depthwise_conv", 3, (64, 64), 64, 1, {}),
    ("grouped_conv", 3, (64, 64), 8, 2, {}),
    ("first_conv", 7, (3, 64), 1, 2, {}),
    ("few_channels_conv", 3, (4, 64), 1, 1, {}),
    ("conv3x3", 3, (64, 64), 1, 1, {}),
    ("conv3x3", 3, (128, 128), 1, 1, {"phase": "backward", "name": "wgrad"}),
    ("winograd_conv", 3, (512, 512), 1, 1, {}),
    ("strided_conv", 1, (64, 128), 1, 2, {}),
    ("fft_conv", 15, (64, 64), 1, 1, {"dtype": "fp32", "tensor_core": False}),
    ("exact_conv", 3, (64, 64), 1, 1, {"dtype": "fp32", "tensor_core": False}),
]


@pytest.mark.parametrize(("transform", "taps", "channels", "groups", "stride", "more"), OWN)
def test_each_family_of_convolutions_is_an_alternative(
    transform: str, taps: int, channels: tuple[int, int], groups: int, stride: int, more: dict[str, object]
) -> None:
    shape, weight = (32, channels[0], 56, 56), (channels[1], channels[0] // groups, taps, taps)
    given = {"name": "fprop", "shapes": sizes(shape, weight), **HALF, **more}
    if given.get("phase") == "backward":
        given["shapes"] = json.dumps([shape, shape, weight])
    fact = conv("layer1.conv", taps, channels, groups=groups, stride=stride)
    product = alone(kernel(str(given.pop("name")), **given), fact, fp32=50.0, fp16=800.0, bf16=0.0)
    (other,) = product.alternatives
    assert (other.transform, other.provenance) == (transform, Provenance.MODELLED)
    assert 0 < other.time_us < 9000


@pytest.mark.parametrize("family", conv_rows.FAMILIES)
def test_no_family_of_convolutions_is_left_out(family: str) -> None:
    assert catalog.get(family).transform in {transform for transform, *_ in OWN}


def test_a_family_is_no_alternative_for_what_it_does_not_take() -> None:
    other_gpu = kernel("fprop", **HALF)
    assert alone(other_gpu, conv("layer1.conv", 3, (64, 96))).alternatives == ()
    image, weight = (32, 512, 56, 56), (512, 512, 3, 3)
    of_weight = kernel("wgrad", "backward", shapes=json.dumps([image, image, weight]), **(HALF | {"dtype": "fp16"}))
    assert alone(of_weight, conv("layer1.conv", 3, (512, 512))).alternatives == ()  # Winograd's is for bf16
    transposed = replace(conv("layer1.conv", 3, (64, 64)), transposed=True)
    assert alone(other_gpu, transposed).alternatives == ()


def measured_conv(**changes: object) -> MeasuredConv:
    given = {
        "transform": "conv3x3", "taken": True, "shape": (32, 64, 56, 56), "weight": (64, 64, 3, 3), "stride": (1, 1),
        "dilation": (1, 1), "groups": 1, "dtype": "bf16", "layout": "nhwc", "forward_us": 30.0, "backward_us": 80.0,
        "library_forward_us": 50.0, "library_backward_us": 120.0, "error": 1e-3, "library_error": 2e-3,
    }  # fmt: skip
    return MeasuredConv(**(given | changes))


def on_file(monkeypatch: pytest.MonkeyPatch, *rows: MeasuredConv) -> None:
    monkeypatch.setattr(measured_convs, "rows", lambda gpu: rows if gpu == "here" else ())


def test_a_measured_row_is_taken_before_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the work of this convolution, and of the nearest row."""
    on_file(monkeypatch, measured_conv(), measured_conv(shape=(16, 64, 56, 56), forward_us=20.0))
    row = kernel("fprop", **HALF, shapes=sizes((64, 64, 56, 56), (64, 64, 3, 3)), calls=2.0)
    (other,) = alone(row, gpu="here").alternatives
    assert (other.transform, other.provenance, other.like) == ("conv3x3", Provenance.MEASURED, "32×64×56×56")
    assert other.time_us == pytest.approx(2 * 2 * 30.0)
    assert other.error == "1.0e-03 against fp64"
    (other,) = alone(row, gpu="another").alternatives
    assert other.provenance is Provenance.MODELLED


@pytest.mark.parametrize(
    "changes",
    [
        {"weight": (64, 64, 5, 5)},
        {"stride": (2, 2)},
        {"dilation": (2, 2)},
        {"groups": 4, "weight": (64, 16, 3, 3)},
        {"shape": (256, 64, 56, 56)},  # eight times the work
        {"shape": (32, 160, 56, 56), "weight": (64, 160, 3, 3)},
        {"dtype": "fp16"},
    ],
)
def test_a_row_of_another_kind_or_far_from_it_says_nothing(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    on_file(monkeypatch, measured_conv(**changes))
    told = alone(kernel("fprop", **HALF), gpu="here").alternatives
    assert [other.provenance for other in told] == [Provenance.MODELLED]


@pytest.mark.parametrize("changes", [{"taken": False}, {"forward_us": 60.0}])
def test_kernels_that_were_measured_to_be_slower_are_not_promised_by_the_model(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object]
) -> None:
    """Seen on an H200: Winograd's for 256 channels at 56 x 56, by its least time, where it had been measured to lose."""
    on_file(monkeypatch, measured_conv(**changes))
    assert alone(kernel("fprop", **HALF), gpu="here").alternatives == ()


def test_a_row_of_the_same_channels_is_nearer_than_one_of_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    twice = measured_conv(shape=(32, 64, 56, 56), weight=(128, 64, 3, 3))
    on_file(monkeypatch, twice, measured_conv(shape=(64, 64, 56, 56), forward_us=64.0, library_forward_us=99.0))
    (other,) = alone(kernel("fprop", **HALF), gpu="here").alternatives
    assert other.time_us == 32.0


def test_rows_speak_for_no_channels_that_the_kernels_are_not_made_for(monkeypatch: pytest.MonkeyPatch) -> None:
    on_file(monkeypatch, measured_conv())
    row = kernel("fprop", **HALF, shapes=sizes((16, 96, 56, 56), (96, 96, 3, 3)))
    assert alone(row, conv("layer1.conv", 3, (96, 96)), gpu="here").alternatives == ()


def test_both_gradients_were_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    on_file(monkeypatch, measured_conv())
    machine = replace(profile().environment, gpu_name="here")
    half = HALF | {"time_us": 300.0}
    rows = [kernel("dgrad", "backward", **half), kernel("wgrad", "backward", **(half | {"time_us": 100.0}))]
    told = products(replace(profile(*rows), environment=machine))
    assert [p.direction for p in told] == [DATA, WEIGHT]
    assert [p.alternatives[0].time_us for p in told] == pytest.approx([60.0, 20.0])


def test_libraries_in_bf16_are_measured_for_a_strict_training(monkeypatch: pytest.MonkeyPatch) -> None:
    on_file(monkeypatch, measured_conv(taken=False))
    first = alone(kernel("fprop", time_us=900.0), gpu="here").alternatives[0]
    assert (first.what, first.transform, first.time_us) == ("NHWC and bf16", "channels_last + amp_bf16", 50.0)
    assert first.error == "2.0e-03 against fp64"


def test_rows_on_file_are_read_and_other_files_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {row.transform for row in measured_convs.rows("NVIDIA H200")} == {transform for transform, *_ in OWN}
    assert measured_convs.rows("NVIDIA A100-SXM4-80GB") == ()
    for content in ("no JSON", '{"schema_version": 99}'):
        file = tmp_path / f"{len(content)}.json"
        file.write_text(content)
        monkeypatch.setattr(measured_convs, "FILE", file)
        with pytest.raises(AdvisorError, match=r"cannot be read|schema 99"):
            measured_convs.rows("NVIDIA H200")


def test_a_time_below_the_speed_of_light_is_an_error() -> None:
    half = HALF | {"modelled_bytes": 400e6}
    product = alone(kernel("fprop", **(half | {"time_us": 50.0})))
    assert product.of_limit == pytest.approx(2.0)
    assert product.error.startswith("50 µs is less than the 100 µs that this machine needs at least")
    assert alone(kernel("fprop", **(half | {"time_us": 97.0}))).error == ""  # rates are not known that well


def test_no_limit_is_told_from_rates_that_are_in_doubt() -> None:
    """Seen beside other programs on a CPU: 158 % of the limit."""
    machine = replace(profile().environment, rates_doubt="other processes took 66 % of the cores")
    row = kernel("fprop", **(HALF | {"modelled_bytes": 400e6, "time_us": 50.0}))
    (product,) = products(replace(profile(row), environment=machine))
    assert (product.of_limit, product.error) == (None, "")


@pytest.mark.parametrize(
    ("name", "nbytes", "flops"),
    [
        ("fprop", 50e6, 0.0),  # L2 holds it
        ("winograd", 0.0, 3 * 800e6 * 50),  # a third of a direct convolution's time
        ("fft2d", 0.0, 9 * 800e6 * 50),
    ],
)
def test_what_is_faster_by_right_is_no_error(name: str, nbytes: float, flops: float) -> None:
    product = alone(kernel(name, **(HALF | {"time_us": 50.0, "modelled_bytes": nbytes, "flops": flops})))
    assert product.error == ""
    assert alone(kernel("fprop", **(HALF | {"time_us": 50.0, "flops": 3 * 800e6 * 50}))).error != ""


def test_advisors_own_kernels_are_held_to_what_they_multiply() -> None:
    """Winograd to a fourth; fp32 in fp16 parts to bytes alone; others as any."""
    thrice = {"time_us": 50.0, "flops": 3 * 800e6 * 50}
    assert alone(kernel("winograd_multiply", **(HALF | thrice))).error == ""
    assert alone(kernel("exact_conv", **(HALF | thrice | {"dtype": "fp32", "tensor_core": False}))).error == ""
    assert alone(kernel("conv3x3", **(HALF | thrice))).error != ""


def test_one_module_called_with_several_shapes_has_a_product_each() -> None:
    """A head that the levels of a pyramid share, and a module that multiplies one input by two weights."""
    large, small = ((32, 64, 56, 56), (64, 64, 3, 3)), ((32, 64, 14, 14), (64, 64, 3, 3))
    fewer = ((32, 64, 56, 56), (32, 64, 3, 3))
    rows = [
        kernel("fprop", shapes=sizes(*call), time_us=time, flops=FLOPS * share)
        for call, time, share in ((large, 500.0, 1.0), (small, 90.0, 1 / 16), (fewer, 300.0, 0.5))
    ]
    rows.append(kernel("wgrad", "backward", shapes=json.dumps([small[0], *small]), time_us=50.0))
    rows.append(kernel("nchwToNhwcKernel", kind="layout", shapes=sizes(*small), time_us=10.0))
    told = products(profile(*rows))
    assert [(p.direction, p.shape[-1], p.time_us, p.conversion_us) for p in told] == [
        (FORWARD, 56, 500.0, 0.0),
        (FORWARD, 56, 300.0, 0.0),
        (FORWARD, 14, 90.0, 10.0),
        (WEIGHT, 14, 50.0, 0.0),
    ]
    assert told[-1].flops == pytest.approx(FLOPS / 16)  # of the forward of its own shape


def test_where_a_kernel_of_a_backward_does_not_tell_its_product_none_does() -> None:
    """What is named may be the helper of the one that is not: its 10 µs were held against the whole gradient's bytes."""
    rows = [kernel("nvjet_tst_128x64", "backward", time_us=250.0), kernel("reduce_wgrad", "backward", time_us=10.0)]
    (product,) = products(profile(*rows))
    assert (product.direction, product.time_us) == (GRADIENTS, 260.0)


def test_a_gradient_has_the_work_of_as_many_forwards_as_it_was_called_for() -> None:
    rows = [kernel("fprop", calls=4.0, time_us=1000.0), kernel("wgrad", "backward", calls=1.0)]
    weight = products(profile(*rows))[1]
    assert weight.flops == pytest.approx(FLOPS / 4)


def test_the_table_of_layers_has_the_same_algorithms() -> None:
    rows = [
        kernel("winograd", time_us=90.0),
        kernel("fprop", shapes=sizes((32, 64, 14, 14), (64, 64, 3, 3))),
        kernel("dgrad", "backward", time_us=100.0),
        kernel("fft2d", module="layer2.conv"),
    ]
    measured = profile(*rows)
    told: dict[str, list[str]] = {}
    for product in products(measured):
        told.setdefault(product.module, []).append(product.algorithm)
    table = layertable.layer_table(measured)
    assert {module: table[module].algorithm.split(", ") for module in told} == {
        module: list(dict.fromkeys(algorithms)) for module, algorithms in told.items()
    }
