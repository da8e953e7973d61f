"""All transforms by id, with what people call them. One line each, and one for each kernel family.

A transform is imported, and torch with it, when it is asked for; titles are known without.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from advisor.core.errors import AdvisorError
from advisor.ops import catalog

if TYPE_CHECKING:
    from advisor.transforms.base import Transform

# id → "module:class" under advisor.transforms, title; "kernels" makes the class of a kernel family
TRANSFORMS: dict[str, tuple[str, str]] = {
    "amp_bf16": ("autocast:AutocastBf16", "bf16 mixed precision"),
    "amp_fp16": ("autocast:AutocastFp16", "fp16 mixed precision with loss scaling"),
    "guides_bf16": ("guides:GuidesBf16", "bf16 and NHWC for models without gradients"),
    "tf32": ("tf32:Tf32", "TF32 for fp32 convolutions and matrix products"),
    "channels_last": ("channels_last:ChannelsLast", "channels_last (NHWC) memory layout"),
    "cudnn_benchmark": ("cudnn_benchmark:CudnnBenchmark", "cuDNN algorithm choice by timing"),
    "fused_optimizer": ("fused_optimizer:FusedOptimizer", "fused optimizer"),
    "set_to_none": ("set_to_none:SetToNone", "drop gradients instead of zeroing them"),
    "conv_bias": ("conv_bias:ConvBiasBeforeNorm", "no convolution bias before batch norm"),
    "prefetch": ("prefetch:DevicePrefetch", "host-to-device prefetch on a side stream"),
    "loader_workers": ("loader_workers:LoaderWorkers", "data loader workers"),
    "uint8_batches": ("uint8_batches:Uint8Batches", "uint8 batches, normalised on the GPU"),
    "single_device": ("single_device:SingleDevice", "no detour through nn.DataParallel"),
    "defer_sync": ("defer_sync:DeferSync", "no wait for scalars that are only accumulated"),
    **{family.transform: ("kernels", family.title) for family in catalog.FAMILIES if family.captured},
    "fused_casts": ("fused_casts:FusedCasts", "one cast of all weights a step"),
    "compile": ("compile:Compile", "torch.compile"),
    "compile_max_autotune": ("compile:CompileMaxAutotune", "torch.compile, max-autotune"),
    "cuda_graphs": ("cuda_graphs:CudaGraphs", "CUDA graphs for forward and backward"),
    "gradient_stream": ("gradient_stream:GradientStream", "weight gradients on a stream of their own"),
}


def get(identifier: str) -> Transform:
    """The transform with this id.

    Raises:
        AdvisorError: when there is none.
    """
    try:
        module, _, name = TRANSFORMS[identifier][0].partition(":")
    except KeyError:
        raise AdvisorError(f"no transform {identifier!r}", expected="one of " + ", ".join(TRANSFORMS)) from None
    found = import_module(f"advisor.transforms.{module}")
    transform: Transform = getattr(found, name)() if name else found.get(identifier)
    return transform


def title(identifier: str) -> str:
    """What people call the transform with this id; the id where there is none."""
    return TRANSFORMS.get(identifier, ("", identifier))[1]
