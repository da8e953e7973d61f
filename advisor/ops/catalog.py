"""All kernel families: the only list of them. Listed without torch, CuPy or a GPU; verified on one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.core.errors import AdvisorError, ExitCode
from advisor.ops import sources
from advisor.ops.family import Family


def _averages_cumulatively(norm: Any) -> bool:
    """A batch norm that reads its counter back in every step, which ends Dynamo's graph."""
    return norm.momentum is None and norm.track_running_stats


LARGE_TAPS = 11  # as in the specs of large_depthwise and fft_conv, which are not read for a model without such a module


def _filters_channels(*arguments: Any, **named: Any) -> bool:
    """A convolution of each channel by itself: written as a function where its filter is no parameter, as that of a blur before sampling."""
    given = {**dict(zip(("input", "weight"), arguments, strict=False)), **named}
    x, weight = given["input"], given["weight"]
    return bool(x.dim() == 4 and 1 < x.shape[1] == weight.shape[0] and weight.shape[1] == 1)


def _pads_with_its_own(*arguments: Any, **named: Any) -> bool:
    """Padding with values of the image, not with a constant."""
    given = {**dict(zip(("input", "pad", "mode"), arguments, strict=False)), **named}
    return bool(given.get("mode", "constant") != "constant")


# In the order in which their rewrites see a captured graph: a family whose pattern contains another's stands before it.
FAMILIES: tuple[Family, ...] = (
    Family(
        id="batchnorm_max_pool",
        replaces="native_batch_norm + activation + max_pool2d_with_indices, training, channels_last",
        transform="fused_bn_max_pool",
        modules=("MaxPool2d",),
        functions=("max_pool2d",),
    ),
    Family(
        id="batchnorm_concat",
        replaces="cat + native_batch_norm + activation where each cat continues the one before, training, channels_last",
        transform="fused_bn_concat",
        modules=(),
        functions=("cat",),
    ),
    Family(
        id="batchnorm_act",
        replaces="native_batch_norm + add + activation, training, channels_last",
        transform="fused_bn_act",
        modules=("BatchNorm2d", "BatchNorm3d"),
        restated=_averages_cumulatively,
        functions=("batch_norm",),
    ),
    Family(
        id="squeeze_excite",
        replaces="mean + two 1x1 convolutions + activation + gate + product, channels_last",
        transform="fused_squeeze_excite",
        modules=(
            "SqueezeExcitation",
            "SqueezeExcite",
            "SqueezeAndExcitation",
            "SqueezeAndExcite",
            "SEModule",
            "SELayer",
            "SEBlock",
            "SE",
        ),
    ),
    Family(
        id="pooling",
        replaces="max_pool2d_with_indices, avg_pool2d, mean over (2, 3), channels_last",
        transform="fused_pooling",
        modules=("MaxPool2d", "AvgPool2d", "AdaptiveAvgPool2d"),
        functions=("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d"),
    ),
    Family(
        id="volume_pooling",
        replaces="max_pool3d_with_indices, avg_pool3d, channels_last_3d",
        transform="fused_volume_pooling",
        modules=("MaxPool3d", "AvgPool3d"),
        functions=("max_pool3d", "avg_pool3d"),
    ),
    Family(
        id="upsample",
        replaces="upsample_bilinear2d, upsample_nearest2d + cat, channels_last",
        transform="fused_upsample",
        modules=("Upsample", "UpsamplingBilinear2d", "UpsamplingNearest2d"),
        functions=("interpolate",),
    ),
    Family(
        id="padding",
        replaces="reflection_pad2d, replication_pad2d, circular padding, channels_last",
        transform="fused_padding",
        modules=("ReflectionPad2d", "ReplicationPad2d", "CircularPad2d"),
        functions=("pad",),
        taking=_pads_with_its_own,
    ),
    Family(
        id="layer_norm",
        replaces="native_layer_norm over the channels, with its permutes and casts",
        transform="fused_layer_norm",
        modules=("LayerNorm",),
        functions=("layer_norm",),
    ),
    Family(
        id="group_norm",
        replaces="native_group_norm or instance_norm + activation, channels_last",
        transform="fused_group_norm",
        modules=("GroupNorm", "InstanceNorm2d", "InstanceNorm3d"),
        functions=("group_norm", "instance_norm"),
    ),
    Family(
        id="large_depthwise",
        replaces="conv2d with as many groups as channels and 11 to 63 taps, stride 1",
        transform="large_depthwise_conv",
        modules=("Conv2d",),
        having=lambda conv: conv.groups > 1 and max(conv.kernel_size) >= LARGE_TAPS,
        holds="in channels_last a copy of each tensor as planes",
    ),
    Family(
        id="depthwise",
        replaces="conv2d with as many groups as channels, channels_last",
        transform="depthwise_conv",
        modules=("Conv2d",),
        having=lambda conv: conv.groups > 1 and conv.groups == conv.in_channels == conv.out_channels,
        functions=("conv2d",),
        taking=_filters_channels,
    ),
    Family(
        id="grouped",
        replaces="conv2d 3x3 with 4 to 64 channels a group, channels_last",
        transform="grouped_conv",
        modules=("Conv2d",),
        having=lambda conv: 1 < conv.groups < conv.in_channels == conv.out_channels,
    ),
    Family(
        id="fft_conv",
        replaces="conv2d of one group with 11 taps or more along either side, stride 1, fp32",
        transform="fft_conv",
        modules=("Conv2d",),
        having=lambda conv: conv.groups == 1 and max(conv.kernel_size) >= LARGE_TAPS,
        holds="transforms of its operands, two to four times as large as these",
    ),
    Family(
        id="bias_act",
        replaces="bias, add, activation of a convolution or Linear layer; layer scale, drop path, add; channels_last",
        transform="fused_bias_act",
        modules=("Conv2d", "ConvTranspose2d", "Conv3d", "ConvTranspose3d"),
        functions=("conv2d", "conv_transpose2d", "conv3d", "conv_transpose3d"),
    ),
    Family(
        id="first_conv",
        replaces="conv2d with 3 input channels, under autocast with its casts, channels_last",
        transform="first_conv",
        modules=("Conv2d",),
        having=lambda conv: conv.groups == 1 and conv.in_channels == 3,
    ),
    Family(
        id="few_channels",
        replaces="conv2d and conv3d with fewer than 8 input channels in half precision, and the input's cast",
        transform="few_channels_conv",
        holds="the input, padded to eight channels",
        modules=("Conv2d", "Conv3d"),
        having=lambda conv: conv.groups == 1 and conv.in_channels < 8,
    ),
    Family(
        id="prelu",
        replaces="prelu with a slope a channel, and its weight's gradient, channels_last",
        transform="fused_prelu",
        modules=("PReLU",),
        having=lambda module: module.num_parameters > 1,
    ),
    Family(
        id="bias_add",
        replaces="bias of a convolution, with the sum behind it, and the bias's gradient, channels_last",
        transform="fused_bias_add",
        modules=("Conv2d", "ConvTranspose2d", "Conv3d", "ConvTranspose3d"),
        having=lambda conv: conv.bias is not None,
    ),
    Family(
        id="conv3x3",
        replaces="conv2d 3x3 of stride 1 between 32 to 128 channels, on Hopper, channels_last",
        transform="conv3x3",
        modules=("Conv2d",),
        having=lambda conv: conv.groups == 1 and conv.kernel_size == (3, 3) and conv.stride == (1, 1),
    ),
    Family(
        id="winograd",
        replaces="conv2d 3x3 of stride 1 between 192 to 1024 channels in bf16, channels_last",
        transform="winograd_conv",
        modules=("Conv2d",),
        having=lambda conv: (
            conv.groups == 1 and conv.kernel_size == (3, 3) and conv.stride == (1, 1) and conv.in_channels >= 192
        ),
        holds="transformed pixels and results, 2.25 times as large as these",
    ),
    Family(
        id="exact_conv",
        replaces="conv2d and linear in fp32 with TF32 off; of convolutions channels_last",
        transform="exact_conv",
        modules=("Conv2d", "Linear"),
        having=lambda layer: not hasattr(layer, "groups") or layer.groups == 1 or layer.groups < layer.in_channels,
        holds="fp16 parts of its operands, as large as these",
    ),
    Family(
        id="pointwise",
        replaces="conv2d 1x1 of stride 1 before a batch norm of ours, or behind one, with that one's pass over its result or "
        "its gradient, channels_last",
        transform="pointwise_conv",
        modules=("Conv2d",),
        having=lambda conv: conv.groups == 1 and conv.kernel_size == (1, 1) and conv.bias is None,
    ),
    Family(
        id="strided_pointwise",
        replaces="conv2d 1x1 of stride 2 between few channels, as on the shortcuts of ResNets, channels_last",
        transform="strided_conv",
        modules=("Conv2d",),
        having=lambda conv: (
            conv.groups == 1 and conv.kernel_size == (1, 1) and conv.stride == (2, 2) and conv.bias is None
        ),
    ),
    Family(
        id="input",
        replaces="ToTensor and Normalize in loader workers, and the copy of fp32 batches",
        transform="uint8_batches",
        modules=(),
        captured=False,
    ),
    Family(
        id="casts",
        replaces="_foreach_copy_ between fp32 and half precision",
        transform="fused_casts",
        modules=(),
        captured=False,
    ),
)


def get(identifier: str) -> Family:
    """The family with this id.

    Raises:
        AdvisorError: when there is none.
    """
    for family in FAMILIES:
        if family.id == identifier:
            return family
    raise AdvisorError(f"no kernel family {identifier!r}", expected="one of " + ", ".join(f.id for f in FAMILIES))


def listing() -> list[dict[str, object]]:
    """One row a kernel source: family, name, entries, what it replaces, sha256 of source and includes."""
    return [
        {
            "family": family.id,
            "kernel": name,
            "entries": ", ".join(entries),
            "replaces": family.replaces,
            "sha256": sources.sha256(name)[:16],
        }
        for family in FAMILIES
        for name, entries in sorted(family.kernels.items())
    ]


def verify(say: Callable[[str], None], only: str = "") -> list[dict[str, object]]:
    """Compile each kernel for the GPU present and hold it against its fp64 reference on fresh random inputs.

    Args:
        only: a family's id; empty for all.

    Returns:
        One row a case with `passed`, the largest relative errors, and what failed.

    Raises:
        AdvisorError: for an unknown family; without a CUDA GPU of sm_80 or newer and a fitting CuPy, with exit code 5.
    """
    chosen = (get(only),) if only else FAMILIES
    from advisor.ops import nvrtc, verify

    reason = nvrtc.unavailable()
    if reason:
        raise AdvisorError(
            f"kernels cannot be verified here: {reason}",
            expected="an NVIDIA GPU of sm_80 or newer and CuPy",
            exit_code=ExitCode.GPU_REQUIRED,
        )
    say("compiling")
    nvrtc.warm(variant for family in chosen for variant in family.variants(nvrtc.arch(0)))
    return verify.verify(chosen, "cuda", say)
