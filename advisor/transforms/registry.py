"""All transforms by id. One line each, and one for each kernel family; the import happens when a transform is asked for."""

from __future__ import annotations

from importlib import import_module

from advisor.core.errors import AdvisorError
from advisor.ops import catalog
from advisor.transforms.base import Transform

# id → "module:class" under advisor.transforms; "kernels" makes the class of a kernel family
TRANSFORMS: dict[str, str] = {
    "amp_bf16": "autocast:AutocastBf16",
    "amp_fp16": "autocast:AutocastFp16",
    "tf32": "tf32:Tf32",
    "channels_last": "channels_last:ChannelsLast",
    "cudnn_benchmark": "cudnn_benchmark:CudnnBenchmark",
    "fused_optimizer": "fused_optimizer:FusedOptimizer",
    "set_to_none": "set_to_none:SetToNone",
    "conv_bias": "conv_bias:ConvBiasBeforeNorm",
    "prefetch": "prefetch:DevicePrefetch",
    "loader_workers": "loader_workers:LoaderWorkers",
    "uint8_batches": "uint8_batches:Uint8Batches",
    "defer_sync": "defer_sync:DeferSync",
    **dict.fromkeys(catalog.transforms(), "kernels"),
    "fused_casts": "fused_casts:FusedCasts",
    "compile": "compile:Compile",
    "compile_max_autotune": "compile:CompileMaxAutotune",
    "cuda_graphs": "cuda_graphs:CudaGraphs",
}


def get(identifier: str) -> Transform:
    """The transform with this id.

    Raises:
        AdvisorError: when there is none.
    """
    try:
        module, _, name = TRANSFORMS[identifier].partition(":")
    except KeyError:
        raise AdvisorError(f"no transform {identifier!r}", expected="one of " + ", ".join(TRANSFORMS)) from None
    found = import_module(f"advisor.transforms.{module}")
    transform = getattr(found, name)() if name else found.get(identifier)
    assert isinstance(transform, Transform)  # a line above names a class that is none
    return transform


def title(identifier: str, otherwise: str = "") -> str:
    """The transform's own title; `otherwise` when there is no such transform."""
    return get(identifier).title if identifier in TRANSFORMS else otherwise
