"""What sort of work a row is: by the operator it belongs to; by the kernel's name only where there is no operator.

Names of kernels lie (a backward convolution is a plain `gemm` to cuBLAS), names of operators do not. The exceptions are
properties that only the kernel's name tells: a layout conversion that cuDNN put around a convolution, and whether
tensor cores were used. Both are read from names, not measured.
"""

from __future__ import annotations

import re
from functools import lru_cache

from advisor.profiling.trace.cupy_names import torch_name

_TABLE: dict[str, str] = {
    "conv": """conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution _convolution
        convolution_overrideable convolution_backward convolution_backward_overrideable cudnn_convolution
        cudnn_convolution_transpose cudnn_convolution_relu cudnn_convolution_add_relu mkldnn_convolution
        mkldnn_convolution_backward thnn_conv2d _slow_conv2d_forward _slow_conv2d_backward slow_conv3d
        slow_conv_transpose2d slow_conv_dilated2d _conv_depthwise2d conv_depthwise3d _convolution_mode
        _nnpack_spatial_convolution miopen_convolution im2col col2im""",
    "gemm": """mm addmm bmm baddbmm addbmm matmul linear linear_backward addmv mv dot vdot addr _scaled_mm mkldnn_linear
        mkldnn_linear_backward _addmm_activation einsum inner _int_mm chain_matmul
        _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_cudnn_attention _scaled_dot_product_flash_attention_backward
        _scaled_dot_product_efficient_attention_backward scaled_dot_product_attention""",
    "norm": """batch_norm _batch_norm_impl_index _batch_norm_impl_index_backward native_batch_norm
        native_batch_norm_backward cudnn_batch_norm cudnn_batch_norm_backward _native_batch_norm_legit
        _batch_norm_with_update batch_norm_backward batch_norm_stats batch_norm_elemt batch_norm_backward_reduce
        batch_norm_backward_elemt batch_norm_gather_stats_with_counts batch_norm_update_stats layer_norm
        native_layer_norm native_layer_norm_backward group_norm native_group_norm native_group_norm_backward
        instance_norm rms_norm _fused_rms_norm _fused_rms_norm_backward local_response_norm _weight_norm_interface""",
    "activation": """relu relu6 clamp_min threshold threshold_backward gelu gelu_backward silu silu_backward sigmoid
        sigmoid_backward tanh tanh_backward hardswish hardswish_backward hardsigmoid hardsigmoid_backward leaky_relu
        leaky_relu_backward elu elu_backward selu celu softplus softplus_backward mish mish_backward prelu
        _prelu_kernel _prelu_kernel_backward hardtanh hardtanh_backward glu glu_backward log_sigmoid
        log_sigmoid_forward log_sigmoid_backward softshrink hardshrink rrelu rrelu_with_noise""",
    "pool": """max_pool1d max_pool2d max_pool3d max_pool2d_with_indices max_pool2d_with_indices_backward
        max_pool3d_with_indices max_pool3d_with_indices_backward mkldnn_max_pool2d mkldnn_max_pool2d_backward avg_pool1d
        avg_pool2d avg_pool2d_backward avg_pool3d avg_pool3d_backward adaptive_avg_pool2d _adaptive_avg_pool2d
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d _adaptive_avg_pool3d_backward mkldnn_adaptive_avg_pool2d
        mkldnn_adaptive_avg_pool2d_backward adaptive_max_pool2d adaptive_max_pool2d_backward fractional_max_pool2d
        max_unpool2d lp_pool2d max_pool2d_backward""",
    "reduce": """sum mean max min amax amin aminmax argmax argmin norm linalg_vector_norm linalg_norm var std var_mean
        std_mean prod all any cumsum cumprod sort topk logsumexp count_nonzero median mode nansum unique unique2
        _unique2 histc bincount _foreach_norm _foreach_max softmax _softmax _softmax_backward_data""",
    "upsample": """upsample_nearest1d upsample_nearest2d upsample_nearest2d_backward upsample_nearest3d
        upsample_nearest3d_backward upsample_bilinear2d upsample_bilinear2d_backward upsample_bicubic2d
        upsample_bicubic2d_backward upsample_trilinear3d upsample_trilinear3d_backward _upsample_nearest_exact2d
        _upsample_nearest_exact2d_backward _upsample_bilinear2d_aa _upsample_bilinear2d_aa_backward grid_sampler
        grid_sampler_2d grid_sampler_2d_backward pixel_shuffle pixel_unshuffle interpolate""",
    "concat": "cat _cat concat stack hstack vstack split_with_sizes_copy",
    "dropout": """dropout native_dropout native_dropout_backward _fused_dropout feature_dropout alpha_dropout bernoulli
        rand randn rand_like randn_like randint normal uniform random randperm exponential multinomial""",
    "loss": """log_softmax _log_softmax _log_softmax_backward_data nll_loss nll_loss_nd nll_loss_forward nll_loss_backward
        nll_loss2d nll_loss2d_forward nll_loss2d_backward cross_entropy_loss mse_loss mse_loss_backward l1_loss smooth_l1_loss
        smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy binary_cross_entropy_backward
        binary_cross_entropy_with_logits kl_div soft_margin_loss _ctc_loss _ctc_loss_backward ctc_loss
        margin_ranking_loss triplet_margin_loss cosine_embedding_loss multi_margin_loss""",
    "layout": "contiguous permute_copy transpose_copy channel_shuffle to_mkldnn to_dense mkldnn_reorder_conv2d_weight",
    "copy": "copy _foreach_copy clone to _to_copy _copy_from item _local_scalar_dense _pin_memory pin_memory cpu cuda",
    "memset": """fill zero zeros ones full zeros_like ones_like full_like new_zeros new_ones new_full empty_strided
        _foreach_zero""",
    "elementwise": """add sub rsub mul div true_divide neg reciprocal pow exp expm1 log log1p log2 sqrt rsqrt abs sign floor
        ceil round clamp clamp_max maximum minimum where lerp addcmul addcdiv square erf sin cos atan2 fmod remainder
        eq ne lt le gt ge logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not isnan isfinite isinf
        masked_fill masked_fill_ nan_to_num tril triu sigmoid_cross floor_divide _conj dequantize flip roll""",
    "comm": "record_param_comms",
}
_BY_OP: dict[str, str] = {name: kind for kind, names in _TABLE.items() for name in names.split()}

# Read in this order: the first that matches names the kind. Patterns are those of cuDNN, cuBLAS, ATen, Inductor, NCCL.
_BY_KERNEL: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (kind, re.compile(pattern, re.IGNORECASE))
    for kind, pattern in (
        ("comm", r"nccl|allreduce|all_reduce|reduce_scatter|all_gather"),
        ("copy", r"^memcpy|direct_copy_kernel|copy_kernel"),
        ("memset", r"^memset|fillfunctor"),
        ("layout", r"nchwtonhwc|nhwctonchw|tensortransform|nhwcslicec|nchw2nhwc|nhwc2nchw|\btranspose|convert_layout"),
        ("norm", r"batch_?norm|bn_(fw|bw|act|stat)|\bbn_|layer_?norm|group_?norm|rms_?norm|_bn_"),
        ("conv", r"conv|fprop|dgrad|wgrad|implicit_gemm|winograd|im2col|col2im"),
        ("gemm", r"gemm|nvjet|cublas|cutlass|gemv|splitkreduce|flash_|fmha"),
        ("pool", r"pool"),
        ("upsample", r"upsample|grid_sampl"),
        ("concat", r"catarray|triton_\w*_cat_"),
        ("loss", r"softmax|nll_?loss|cross_entropy"),
        ("optimizer", r"multi_tensor_apply|fused_?(adam|sgd|lamb)|foreach"),
        ("dropout", r"dropout|philox|distribution_nullary"),
        ("reduce", r"reduce|^triton_(red|per)_"),
        ("elementwise", r"elementwise|vectorized|^triton_poi_|unrolled"),
    )
)

_NO_TENSOR_CORE = re.compile(r"simt|ffma|sgemm_\d|_sgemm|scudnn|fmha_cutlassF_f32_notaligned", re.IGNORECASE)
_TENSOR_CORE = re.compile(
    r"tensorop|[hibd]mma|wgmma|gmma|nvjet|s16816|s1688|s884|h16816|h1688|h884|d884|i16832|tf32|tcgen05"
    r"|sm(70|75|80|86|89|90|100|103|120)_xmma|xmma_(fprop|dgrad|wgrad|gemm)|cudnn_generated\w*(f16|bf16)",
    re.IGNORECASE,
)
_FILL = re.compile(r"fill|memset", re.IGNORECASE)
_LAYOUT_KERNEL = next(pattern for kind, pattern in _BY_KERNEL if kind == "layout")

# Operators that start no work on a device or, on a CPU, only make a tensor that shows the same memory.
VIEWS = frozenset(
    "aten::" + name
    for name in [
        "empty",
        "empty_like",
        "empty_strided",
        "new_empty",
        "new_empty_strided",
        "as_strided",
        "as_strided_",
        "view",
        "_unsafe_view",
        "_reshape_alias",
        "reshape",
        "flatten",
        "unflatten",
        "squeeze",
        "squeeze_",
        "unsqueeze",
        "unsqueeze_",
        "expand",
        "expand_as",
        "permute",
        "transpose",
        "t",
        "numpy_T",
        "select",
        "slice",
        "narrow",
        "chunk",
        "split",
        "split_with_sizes",
        "unbind",
        "detach",
        "detach_",
        "alias",
        "resize_",
        "resize_as_",
        "set_",
        "size",
        "result_type",
        "is_nonzero",
        "lift_fresh",
        "view_as",
        "requires_grad_",
        "unfold",
        "diagonal",
        "movedim",
        "moveaxis",
        "swapaxes",
        "swapdims",
        "broadcast_to",
        "broadcast_tensors",
        "resolve_conj",
        "resolve_neg",
        "to",  # _to_copy where there is something to do
    ]
)


def _stem(op: str) -> tuple[str, str]:
    namespace, _, name = op.rpartition("::")
    return namespace, name


@lru_cache(maxsize=65536)
def kind_of_op(op: str) -> str:
    """The kind that the operator's name tells, or "" when it tells none."""
    namespace, name = _stem(torch_name(op))
    if namespace in ("c10d", "nccl", "_c10d_functional", "c10d_functional") or op.startswith("nccl:"):
        return "comm"
    for candidate in (name, name.removesuffix("_"), name.removesuffix("_").removesuffix("_out")):
        kind = _BY_OP.get(candidate)
        if kind:
            return kind
    if name.startswith(("_foreach_", "_fused_adam", "_fused_sgd", "_fused_adagrad", "_amp_")):
        return "optimizer"
    if name.removesuffix("_backward") in _BY_OP:
        return _BY_OP[name.removesuffix("_backward")]
    if namespace in ("aten", "prims", ""):
        return ""
    # Operators of other libraries (torchvision, apex, advisor itself) have no table: their names are read like kernels'.
    return kind_of_kernel(name)


@lru_cache(maxsize=65536)
def kind_of_kernel(kernel: str) -> str:
    """The kind that a kernel's name suggests; "other" when it suggests none."""
    for kind, pattern in _BY_KERNEL:
        if pattern.search(kernel):
            return kind
    return "other"


def kind(op: str, kernel: str, *, phase: str = "", inside_conv: bool = False) -> str:
    """The kind of a row (see core.profile.KernelRow).

    Args:
        op: the operator the work belongs to; "" when there is none.
        kernel: the kernel's name, or the operator's again on a CPU.
        phase: "optimizer" and "average" make arithmetic rows of theirs.
        inside_conv: the operator runs inside a convolution, so that its copies are changes of layout.
    """
    found = kind_of_op(op) if op else ""
    if op.startswith(("aten::empty", "aten::resize_")) and _FILL.search(kernel):
        return "memset"
    if found == "conv" and _LAYOUT_KERNEL.search(kernel):
        return "layout"
    if inside_conv and found in ("copy", "layout"):
        return "layout"
    arithmetic = found in ("elementwise", "activation", "reduce", "memset", "copy", "optimizer", "")
    if arithmetic and (phase == "optimizer" or (phase == "average" and op not in VIEWS)):
        return phase
    if found:
        return found
    if op.startswith("aten::"):
        return "other"  # a known operator of no listed kind; its kernels' names would mislead
    return kind_of_kernel(kernel)


@lru_cache(maxsize=65536)
def tensor_core(kernel: str) -> bool:
    """True when the kernel's name is one of a tensor-core kernel. Read from the name, not measured.

    Sources: names of cuBLAS, cuDNN and CUTLASS kernels: `tensorop`, matrix shapes (`s16816`), `hmma`/`wgmma`/`gmma`,
    `xmma`, `nvjet`; `simt`, `ffma` and `sgemm` mark kernels that use the ordinary units.
    """
    return _TENSOR_CORE.search(kernel) is not None and _NO_TENSOR_CORE.search(kernel) is None


def matrix(kind_: str) -> bool:
    """True for kinds whose flops run at the matrix rate."""
    return kind_ in ("conv", "gemm")
