"""The table of convolutions: algorithm, direction, reasons, alternatives."""

from __future__ import annotations

import json
from dataclasses import replace

import profiles
import pytest
from profiles import conv, row

from advisor.analysis.convolutions import DATA, FORWARD, GRADIENTS, WEIGHT, algorithm, direction, products, settings
from advisor.core.profile import KernelRow, ModelFacts, StepProfile

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
    assert weight.alternative is not None
    assert weight.alternative.transform == "amp_bf16"
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
    assert product.alternative is None


def test_bundled_kernels_with_another_algorithm_are_alternatives() -> None:
    row = kernel("void conv_depthwise2d_forward_kernel", dtype="bf16", time_us=9000.0)
    model = ModelFacts(convs=(conv("layer1.conv", 31, (64, 64), groups=64),))
    (product,) = products(replace(profile(row), model=model))
    assert product.alternative is not None
    assert product.alternative.transform == "large_depthwise_conv"
    (product,) = products(profile(kernel("implicit_convolve_sgemm", time_us=600.0), tf32_conv=False))
    told = {product.alternative.transform for product in (product,) if product.alternative}
    assert told == {"amp_bf16"}  # the least time of all; in fp32 the parts are the best
    machine = replace(profile().environment, matrix_tflops={"fp32": 50.0, "fp16": 800.0})
    (product,) = products(replace(profile(kernel("implicit_convolve_sgemm", time_us=600.0)), environment=machine))
    assert product.alternative is not None
    assert (product.alternative.transform, product.alternative.error) == ("exact_conv", "fp32's own")
    assert product.alternative.time_us == pytest.approx(3 * FLOPS / 800e6)
