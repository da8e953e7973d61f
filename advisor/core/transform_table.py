"""What each transform is, one row each: the only place that says so. Read without torch, by all that need to know.

A transform is its file in `advisor/transforms` and its row here. Its stage orders the trials (`trials/planner.py`):
what bounds the step comes first, then precision and layout, which decide what kernels run at all, kernels, whole-graph compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from advisor.core.errors import AdvisorError, unknown
from advisor.core.findings import Semantics
from advisor.core.transform_row import TOGETHER, Row, Stage, family, of_cupy
from advisor.core.transform_rows_of_ranks import RANKS

_ALL = (
    Row(
        id="amp_bf16",
        title="bf16 mixed precision",
        code="autocast:AutocastBf16",
        predictor="precision:amp_bf16",
        stage=Stage.HALF,
        semantics=Semantics.PRECISION,
        conflicts=("amp_fp16",),
        needs_gpu=False,
        part="precision",
    ),
    Row(
        id="amp_fp16",
        title="fp16 mixed precision with loss scaling",
        code="autocast:AutocastFp16",
        predictor="precision:amp_fp16",
        stage=Stage.HALF,
        semantics=Semantics.PRECISION,
        after=("amp_bf16",),
        conflicts=("amp_bf16",),
        part="precision",
    ),
    Row(
        id="guides_bf16",
        title="bf16 and NHWC for models without gradients",
        code="guides:GuidesBf16",
        predictor="precision:guides_bf16",
        stage=Stage.GUIDES,
        semantics=Semantics.PRECISION,
        needs_gpu=False,
        everywhere=True,
    ),
    Row(
        id="tf32",
        title="TF32 for fp32 convolutions and matrix products",
        code="tf32:Tf32",
        predictor="precision:tf32",
        stage=Stage.TF32,
        semantics=Semantics.PRECISION,
        everywhere=True,
        part="precision",
    ),
    Row(
        id="channels_last",
        title="channels_last (NHWC) memory layout",
        code="channels_last:ChannelsLast",
        predictor="convolution:channels_last",
        stage=Stage.LAYOUT,
        needs_gpu=False,
        part="layout",
    ),
    Row(
        id="cudnn_benchmark",
        title="cuDNN algorithm choice by timing",
        code="cudnn_benchmark:CudnnBenchmark",
        predictor="convolution:cudnn_benchmark",
        stage=Stage.ALGORITHMS,
        # Not for tf32: convolutions may use TF32 by default, and where it changes matrix products only, the plain first
        # steps' plans stay.
        waits_for=("channels_last", "amp_bf16", "amp_fp16"),
        conflicts=("conv_choice", "conv_choice_precision"),
        live=False,
        everywhere=True,
    ),
    Row(
        id="conv_choice",
        title="each convolution's algorithm and layout by timing",
        code="conv_choice:ConvChoice",
        predictor="convolution:conv_choice",
        stage=Stage.ALGORITHMS,
        after=("cudnn_benchmark",),
        waits_for=("channels_last", "amp_bf16", "amp_fp16"),
        conflicts=("cudnn_benchmark", "conv_choice_precision"),
        live=False,
        everywhere=True,
    ),
    Row(
        id="conv_choice_precision",
        title="each convolution's algorithm and layout by timing, Winograd's among them",
        code="conv_choice:ConvChoicePrecision",
        predictor="convolution:conv_choice",
        stage=Stage.ALGORITHMS,
        semantics=Semantics.PRECISION,
        after=("conv_choice",),
        waits_for=("channels_last", "amp_bf16", "amp_fp16"),
        conflicts=("cudnn_benchmark", "conv_choice"),
        live=False,
        everywhere=True,
    ),
    Row(
        id="fused_optimizer",
        title="fused optimizer",
        code="fused_optimizer:FusedOptimizer",
        predictor="optimizer:fused_optimizer",
        stage=Stage.OPTIMIZER,
        needs_gpu=False,
        together="bundle",
        part="kernels",
    ),
    Row(
        id="set_to_none",
        title="drop gradients instead of zeroing them",
        code="set_to_none:SetToNone",
        predictor="optimizer:set_to_none",
        stage=Stage.HOST,
        semantics=Semantics.EXACT,
        needs_gpu=False,
        part="host",
    ),
    Row(
        id="conv_bias",
        title="no convolution bias before batch norm",
        code="conv_bias:ConvBiasBeforeNorm",
        predictor="convolution:conv_bias",
        stage=Stage.NORMS,
        after=("amp_bf16", "amp_fp16"),
        needs_gpu=False,
        part="kernels",
        bare=True,
    ),
    Row(
        id="prefetch",
        title="host-to-device prefetch on a side stream",
        code="prefetch:DevicePrefetch",
        predictor="batches:prefetch",
        stage=Stage.BATCHES,
        semantics=Semantics.EXACT,
        part="host",
    ),
    Row(
        id="loader_workers",
        title="data loader workers",
        code="loader_workers:LoaderWorkers",
        predictor="batches:loader_workers",
        stage=Stage.LOADERS,
        live=False,
        loaders=True,
        needs_gpu=False,
        untraced=True,
    ),
    Row(
        id="uint8_batches",
        title="uint8 batches, normalised on the GPU",
        code="uint8_batches:Uint8Batches",
        predictor="batches:uint8_batches",
        stage=Stage.LOADERS,
        semantics=Semantics.EXACT,
        after=("loader_workers",),
        live=False,
        loaders=True,
    ),
    Row(
        id="single_device",
        title="no detour through a wrapper of one device",
        code="single_device:SingleDevice",
        predictor="launch:single_device",
        stage=Stage.OPTIMIZER,
        semantics=Semantics.EXACT,
        after=("cuda_graphs", "fused_optimizer"),
    ),
    Row(
        id="defer_sync",
        title="no wait for scalars that are only accumulated",
        code="defer_sync:DeferSync",
        predictor="launch:defer_sync",
        stage=Stage.HOST,
        semantics=Semantics.EXACT,
        part="host",
    ),
    Row(
        id="cupy_border",
        title="arrays stay on the GPU between CuPy and PyTorch",
        code="cupy_border:CupyBorder",
        stage=Stage.HOST,
        semantics=Semantics.EXACT,
        part="host",
    ),
    Row(
        id="cupy_shared_pool",
        title="CuPy's arrays from PyTorch's memory pool",
        code="cupy_shared_pool:CupySharedPool",
        stage=Stage.HOST,
        semantics=Semantics.EXACT,
        part="host",
    ),
    family("fused_bn_max_pool", "Fused BatchNorm + activation + max-pool kernels", stage=Stage.NORMS),
    family("fused_bn_concat", "BatchNorm kernels that read a growing concatenation in place"),
    family("fused_bn_act", "Fused BatchNorm + add + activation kernels", stage=Stage.NORMS),
    family("fused_squeeze_excite", "Fused squeeze-and-excite kernels"),
    family("fused_pooling", "Pooling kernels with 8-bit indices"),
    family("fused_volume_pooling", "Pooling kernels for volumes"),
    family("fused_upsample", "Upsampling kernels that write into the concatenation"),
    family("fused_padding", "Reflection and replication padding kernels"),
    family("fused_layer_norm", "LayerNorm kernels for channels_last", nhwc=False),
    family("fused_group_norm", "Fused GroupNorm + activation kernels"),
    family("large_depthwise_conv", "Depthwise convolution kernels for large taps", nhwc=False),
    family("depthwise_conv", "Depthwise convolution kernels"),
    family("grouped_conv", "Grouped convolution kernels on tensor cores"),
    family("fft_conv", "Convolution with large taps by Fourier transforms", nhwc=False),
    family("fused_bias_act", "Fused bias + activation and layer scale + add kernels"),
    family("first_conv", "First convolution kernels"),
    family("few_channels_conv", "Convolutions of few channels on tensor cores"),
    family("fused_prelu", "PReLU kernels"),
    family("fused_bias_add", "Bias kernels, with a bias's gradient"),
    family("conv3x3", "3x3 convolution kernels for few channels"),
    family("winograd_conv", "3x3 convolutions by Winograd's transforms", semantics=Semantics.PRECISION),
    family("exact_conv", "Strict fp32 convolutions on tensor cores"),
    family("pointwise_conv", "1x1 convolution kernels with norm statistics"),
    family("strided_conv", "1x1 convolution kernels of stride 2"),
    Row(
        id="fused_casts",
        title="one cast of all weights a step",
        code="fused_casts:FusedCasts",
        predictor="optimizer:fused_casts",
        stage=Stage.CASTS,
        semantics=Semantics.EXACT,
        together="graph",
        part="kernels",
    ),
    Row(
        id="compile",
        title="torch.compile",
        code="compile:Compile",
        predictor="launch:compiled",
        stage=Stage.COMPILER,
        conflicts=("compile_max_autotune",),
        needs_gpu=False,
        dear=True,
    ),
    Row(
        id="compile_max_autotune",
        title="torch.compile, max-autotune",
        code="compile:CompileMaxAutotune",
        predictor="launch:compiled_max_autotune",
        stage=Stage.AUTOTUNING,
        conflicts=("compile",),
        needs_gpu=False,
        dear=True,
    ),
    Row(
        id="cuda_graphs",
        title="CUDA graphs for forward and backward",
        code="cuda_graphs:CudaGraphs",
        predictor="launch:cuda_graphs",
        stage=Stage.GRAPHS,
        part="graphs",
    ),
    Row(
        id="background_saves",
        title="checkpoints written in the background",
        code="background_saves:BackgroundSaves",
        stage=Stage.ASKED,
        semantics=Semantics.EXACT,
        needs_gpu=False,
    ),
    Row(
        id="checkpoint_activations",
        title="activations computed again",
        code="checkpoint:CheckpointActivations",
        stage=Stage.MEMORY,
        semantics=Semantics.EXACT,
        needs_gpu=False,
    ),
    Row(
        id="recompute_norms",
        title="outputs of norms computed again",
        code="norm_outputs:NormOutputs",
        stage=Stage.MEMORY,
        semantics=Semantics.EXACT,
        needs_gpu=False,
    ),
    Row(
        id="expandable_segments",
        title="expandable segments of the allocator",
        code="allocator:ExpandableSegments",
        stage=Stage.MEMORY,
        semantics=Semantics.EXACT,
        live=False,
    ),
    *RANKS,
    Row(
        id="gradient_stream",
        title="weight gradients on a stream of their own",
        code="gradient_stream:GradientStream",
        predictor="launch:gradient_stream",
        stage=Stage.GRADIENTS,
        semantics=Semantics.EXACT,
        after=("cuda_graphs",),
        part="kernels",
    ),
    of_cupy("cupy_kernels_once", "kernel objects made once", Stage.HOST, Semantics.EXACT, part="host"),
    of_cupy("cupy_cub", "CUB for CuPy's reductions", Stage.KERNELS, Semantics.REASSOCIATED, part="kernels"),
    of_cupy("cupy_tf32", "TF32 for CuPy's fp32 matrix products", Stage.TF32, Semantics.PRECISION, part="precision"),
    of_cupy(
        "cupy_graphs",
        "the step recorded and replayed as CUDA graphs",
        Stage.GRAPHS,
        Semantics.REASSOCIATED,
        part="graphs",
    ),
    of_cupy("cupy_single", "fp32 where fp64 came in by accident", Stage.HALF, Semantics.PRECISION, part="precision"),
)


def table(rows: Iterable[Row]) -> dict[str, Row]:
    """The rows by id.

    Raises:
        AdvisorError: for a row that does not fit the others: an id twice, an id that no row has, a conflict that one
            side denies.
    """
    found: dict[str, Row] = {}
    for entry in rows:
        if entry.id in found:
            raise AdvisorError(f"two rows for the transform {entry.id!r}", expected="one")
        found[entry.id] = entry
    for entry in found.values():
        for other in (*entry.after, *entry.conflicts, *entry.waits_for):
            if other not in found or other == entry.id:
                raise AdvisorError(f"the row of {entry.id} names {other!r}", expected="the id of another transform")
        for other in entry.conflicts:
            if entry.id not in found[other].conflicts:
                raise AdvisorError(
                    f"{entry.id} conflicts with {other}, whose row does not say so", expected="either or none"
                )
        if entry.loaders and entry.live:
            raise AdvisorError(f"{entry.id} changes how loaders are made and is live", expected="live=False")
    return found


ROWS = table(_ALL)


def row(identifier: str) -> Row:
    """What this transform is.

    Raises:
        AdvisorError: when there is none.
    """
    try:
        return ROWS[identifier]
    except KeyError:
        raise unknown("transform", identifier, ROWS) from None


def members(identifier: str) -> tuple[Row, ...]:
    """The rows of the transforms that were tried as one under this name; of a single one its own.

    Raises:
        AdvisorError: when one of them is none.
    """
    return tuple(map(row, identifier.split(TOGETHER)))


MOST_TITLES = 2  # of changes tried as one, that are told by their titles


def title(identifier: str) -> str:
    """What people call this transform, or these where several were tried as one."""
    return title_of_several([(entry.id, entry.title) for entry in members(identifier)])


def title_of_several(named: Sequence[tuple[str, str]]) -> str:
    """What people call these, pairs of id and title, as one. Of many the titles would fill four lines: their ids say which they are."""
    if len(named) <= MOST_TITLES:
        return " and ".join(title for _, title in named)
    return f"{len(named)} changes as one ({', '.join(identifier for identifier, _ in named)})"


def conflicts(identifier: str) -> tuple[str, ...]:
    """What cannot be on together with this transform, or with one of these."""
    return tuple(other for entry in members(identifier) for other in entry.conflicts)


def having(wanted: Callable[[Row], bool]) -> frozenset[str]:
    """Ids of the transforms for whose row this holds."""
    return frozenset(identifier for identifier, entry in ROWS.items() if wanted(entry))
