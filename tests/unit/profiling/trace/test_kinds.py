from __future__ import annotations

import pytest

from advisor.profiling.trace import kinds


@pytest.mark.parametrize(
    ("op", "kernel", "expected"),
    [
        ("aten::convolution", "sm90_xmma_gemm_bf16", "conv"),  # the operator decides, not the kernel's name
        ("aten::convolution_backward", "nvjet_tst_128x64", "conv"),
        ("aten::convolution", "void cudnn::ops::nchwToNhwcKernel<float>", "layout"),
        ("aten::addmm", "ampere_sgemm_128x64_tn", "gemm"),
        ("aten::cudnn_batch_norm", "bn_fw_tr_1C11_kernel_NCHW", "norm"),
        ("aten::native_batch_norm_backward", "x", "norm"),
        ("aten::relu_", "vectorized_elementwise_kernel", "activation"),
        ("aten::clamp_min", "vectorized_elementwise_kernel", "activation"),
        ("aten::add_", "vectorized_elementwise_kernel", "elementwise"),
        ("aten::max_pool2d_with_indices_backward", "x", "pool"),
        ("aten::_foreach_add_", "multi_tensor_apply_kernel", "optimizer"),
        ("aten::_fused_sgd_", "multi_tensor_apply_kernel", "optimizer"),
        ("aten::_foreach_copy_", "multi_tensor_apply_kernel", "copy"),
        ("aten::upsample_bilinear2d", "x", "upsample"),
        ("aten::cat", "CatArrayBatchedCopy", "concat"),
        ("aten::native_dropout", "fused_dropout_kernel_vec", "dropout"),
        ("aten::nll_loss_forward", "reduce", "loss"),
        ("aten::fill_", "FillFunctor", "memset"),
        ("aten::contiguous", "direct_copy_kernel_cuda", "layout"),
        ("aten::index", "index_elementwise_kernel", "other"),
        ("c10d::allreduce_", "ncclDevKernel_AllReduce", "comm"),
        ("advisor::bn_act", "bn_act_fwd", "norm"),
        ("", "triton_poi_fused_relu_3", "elementwise"),
        ("", "triton_red_fused_native_batch_norm_1", "norm"),
        ("", "Memset (Device)", "memset"),
        ("", "my_cupy_kernel", "other"),
    ],
)
def test_kind_follows_the_operator_and_falls_back_to_the_kernel(op: str, kernel: str, expected: str) -> None:
    assert kinds.kind(op, kernel) == expected


def test_arithmetic_of_the_optimizer_is_optimizer_work() -> None:
    assert kinds.kind("aten::mul_", "vectorized_elementwise_kernel", phase="optimizer") == "optimizer"
    assert kinds.kind("aten::mm", "gemm", phase="optimizer") == "gemm"


def test_copies_inside_a_convolution_change_the_layout() -> None:
    assert kinds.kind("aten::copy_", "direct_copy_kernel_cuda", inside_conv=True) == "layout"
    assert kinds.kind("aten::copy_", "direct_copy_kernel_cuda") == "copy"


@pytest.mark.parametrize(
    ("kernel", "expected"),
    [
        ("sm80_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x16", True),
        ("cutlass_80_tensorop_s1688gemm_128x128_16x4_nn_align4", True),
        ("ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_nn", True),
        ("nvjet_tst_128x256_64x4_2x1_v_bz_coopA_NNT", True),
        ("void cutlass::device_kernel<sm90_wgmma_gemm>", True),
        ("ampere_sgemm_128x64_nn", False),
        ("ampere_scudnn_128x64_relu_interior_nn_v1", False),
        ("sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize32x32x8_stage3_warpsize1x2x1_ffma_aligna4", False),
        ("cutlass_80_simt_sgemm_128x64_8x5_nn_align1", False),
        ("void at::native::vectorized_elementwise_kernel<4>", False),
    ],
)
def test_tensor_cores_are_read_from_the_name(kernel: str, expected: bool) -> None:
    assert kinds.tensor_core(kernel) is expected
