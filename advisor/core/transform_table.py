"""What each transform is, one row each: the only place that says so. Read without torch, by all that need to know.

A transform is its file in `advisor/transforms` and its row here. Its stage orders the trials (`trials/planner.py`):
what bounds the step comes first, then precision and layout, because they decide which kernels run at all, then kernels,
then whole-graph compilers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum, auto
from typing import Literal

from advisor.core.errors import AdvisorError
from advisor.core.findings import Semantics

TOGETHER = " + "  # between the ids of transforms that were tried as one

# How a change is found and what it is left out with: see `Row`.
Together = Literal["", "bundle", "graph"]
Part = Literal["", "precision", "kernels", "graphs", "layout", "host"]


class Stage(IntEnum):
    """When a transform's turn comes in a step that the GPU's work bounds. Within a stage predicted gains compete."""

    BATCHES = auto()
    HOST = auto()
    TF32 = auto()
    # Layout before precision: in NCHW half precision can lose what it gains in NHWC (MobileNetV3 on an H200: 2,930
    # img/s in fp32, 2,536 in bf16, both NCHW; 12,992 in bf16 NHWC with fused batch norms).
    LAYOUT = auto()
    # Batch norm before precision: PyTorch's bf16 kernels for it in NHWC are no faster than fp32's, and can hide what
    # bf16 gains.
    NORMS = auto()
    HALF = auto()
    GUIDES = auto()
    # Graphs before what gains a few per cent: a short step that the host launches is the noisiest (ResNet-50 in bf16 on
    # an H200: a kernel's gain between −4 and 6 % of the eager step, another's between 5.7 and 7.2 % of the replayed
    # one, six pairs each).
    GRAPHS = auto()
    # The other kernels are dispatched by dtype, and most win in 16-bit storage only: there they are tried once.
    KERNELS = auto()
    CASTS = auto()  # behind the kernels, which read some weights as they are
    OPTIMIZER = auto()
    GRADIENTS = auto()  # of the kernels that the backward has by then
    # Fresh processes, which take longest: behind all that the running loop can tell.
    LOADERS = auto()
    ALGORITHMS = auto()
    COMPILER = auto()
    AUTOTUNING = auto()
    ASKED = auto()  # by `run --background-saves`: what no block of steps shows
    MEMORY = auto()  # for `--goal memory` alone (trials/memory.py)
    RANKS = auto()  # in all ranks of `--gpus N` (trials/across.py), behind what one of them can be searched for


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One transform.

    Attributes:
        title: what people call it.
        code: "module:class" under advisor.transforms; "kernels" makes the class of the kernel family that names this
            transform.
        predictor: "module:function" under advisor.analysis.predictions; "" where nobody can say what it gains.
        stage: when it is tried.
        semantics: what it does to the numbers of the training.
        after: transforms that it is tried behind where its stage leaves that open.
        conflicts: transforms that cannot be on together with it; they say so too.
        waits_for: beside these in a plan it goes on right behind the last of them that fits, and not before: they
            decide what it acts on.
        live: it can be switched between two steps of a running loop. What cannot is tried in fresh processes, on top of
            the proven stack, whose runs it is compared with: two more then suffice, where pairs of its own take six or
            more.
        loaders: it changes how data loaders are made.
        needs_gpu: it finds nothing to do on a CPU.
        everywhere: it reaches models that run without gradients too: a flag of the process, or what is for them.
        untraced: the timed steps tell what it gains, where the run ended before any was traced.
        dear: it takes half a minute and more, and what it gains hangs on what else is kept: beside kernels and graphs
            `compile` lost in every net tried on an H200 (20 to 40 s each). It waits until the step with what is kept
            has been profiled, and is tried if the middle of its prediction for that step is a gain.
        together: "graph": it is put into the one captured graph; "bundle": it is not. Either has results on file that
            it wins wherever it is dispatched: neighbours of these are tried as one, with one capture, one gate and one
            set of blocks, and one by one only where that fails or gains nothing. What gains less than a trial can tell
            by itself is found so too: one cast of all weights and the fused optimizer gained ResNet-50 on an H200 0.7
            and 0.8 %. "": it is tried alone.
        nhwc: what it puts in place runs on NHWC tensors alone: in a model that is in NCHW it is tried with channels_last, or not at all.
        part: what it is left out with where all that is recommended does not hold together; "" for what is not tried
            so. What the host does between the steps is never left out: it is right by itself, and seldom in the way.
        cupy: it is for loops of CuPy alone, its code below advisor.cupy_loops; all others are for PyTorch's.
    """

    id: str
    title: str
    code: str
    stage: Stage
    semantics: Semantics = Semantics.REASSOCIATED
    predictor: str = ""
    after: tuple[str, ...] = ()
    conflicts: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    live: bool = True
    loaders: bool = False
    needs_gpu: bool = True
    everywhere: bool = False
    untraced: bool = False
    dear: bool = False
    together: Together = ""
    nhwc: bool = False
    part: Part = ""
    cupy: bool = False

    @property
    def family(self) -> bool:
        """Whether it puts a kernel family's operations into captured graphs."""
        return self.code == "kernels"


def _family(identifier: str, title: str, *, stage: Stage = Stage.KERNELS, nhwc: bool = True) -> Row:
    return Row(
        id=identifier,
        title=title,
        code="kernels",
        predictor=f"kernels:{identifier}",
        stage=stage,
        together="graph",
        nhwc=nhwc,
        part="kernels",
    )


def _cupy(identifier: str, title: str, stage: Stage, semantics: Semantics, *, part: Part) -> Row:
    return Row(
        id=identifier,
        title=title,
        code="cupy",
        stage=stage,
        semantics=semantics,
        live=False,
        part=part,
        cupy=True,
    )


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
    _family("fused_bn_max_pool", "Fused BatchNorm + activation + max-pool kernels", stage=Stage.NORMS),
    _family("fused_bn_concat", "BatchNorm kernels that read a growing concatenation in place"),
    _family("fused_bn_act", "Fused BatchNorm + add + activation kernels", stage=Stage.NORMS),
    _family("fused_squeeze_excite", "Fused squeeze-and-excite kernels"),
    _family("fused_pooling", "Pooling kernels with 8-bit indices"),
    _family("fused_volume_pooling", "Pooling kernels for volumes"),
    _family("fused_upsample", "Upsampling kernels that write into the concatenation"),
    _family("fused_padding", "Reflection and replication padding kernels"),
    _family("fused_layer_norm", "LayerNorm kernels for channels_last", nhwc=False),
    _family("fused_group_norm", "Fused GroupNorm + activation kernels"),
    _family("large_depthwise_conv", "Depthwise convolution kernels for large taps", nhwc=False),
    _family("depthwise_conv", "Depthwise convolution kernels"),
    _family("grouped_conv", "Grouped convolution kernels on tensor cores"),
    _family("fft_conv", "Convolution with large taps by Fourier transforms", nhwc=False),
    _family("fused_bias_act", "Fused bias + activation and layer scale + add kernels"),
    _family("first_conv", "First convolution kernels"),
    _family("few_channels_conv", "Convolutions of few channels on tensor cores"),
    _family("fused_prelu", "PReLU kernels"),
    _family("fused_bias_add", "Bias kernels, with a bias's gradient"),
    _family("conv3x3", "3x3 convolution kernels for few channels"),
    _family("exact_conv", "Strict fp32 convolutions on tensor cores"),
    _family("pointwise_conv", "1x1 convolution kernels with norm statistics"),
    _family("strided_conv", "1x1 convolution kernels of stride 2"),
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
        id="expandable_segments",
        title="expandable segments of the allocator",
        code="allocator:ExpandableSegments",
        stage=Stage.MEMORY,
        semantics=Semantics.EXACT,
        live=False,
    ),
    Row(
        id="ddp_bucket_views",
        title="gradients as views of DDP's buckets",
        code="ddp:BucketViews",
        stage=Stage.RANKS,
        semantics=Semantics.EXACT,
        needs_gpu=False,
    ),
    Row(
        id="ddp_buckets",
        title="DDP buckets of another size",
        code="ddp:Buckets",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_static_graph",
        title="DDP's static graph",
        code="ddp:StaticGraph",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_no_sync",
        title="gradients sent once a step under accumulation",
        code="ddp:SentOnce",
        stage=Stage.RANKS,
        needs_gpu=False,
    ),
    Row(
        id="ddp_bf16_gradients",
        title="gradients sent as bf16",
        code="ddp:SentAsBf16",
        stage=Stage.RANKS,
        semantics=Semantics.PRECISION,
        conflicts=("ddp_fp16_gradients",),
        needs_gpu=False,
    ),
    Row(
        id="ddp_fp16_gradients",
        title="gradients sent as fp16",
        code="ddp:SentAsFp16",
        stage=Stage.RANKS,
        semantics=Semantics.PRECISION,
        conflicts=("ddp_bf16_gradients",),
        needs_gpu=False,
    ),
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
    _cupy("cupy_kernels_once", "kernel objects made once", Stage.HOST, Semantics.EXACT, part="host"),
    _cupy("cupy_tf32", "TF32 for CuPy's fp32 matrix products", Stage.TF32, Semantics.PRECISION, part="precision"),
    _cupy(
        "cupy_graphs",
        "the step recorded and replayed as CUDA graphs",
        Stage.GRAPHS,
        Semantics.REASSOCIATED,
        part="graphs",
    ),
    _cupy("cupy_single", "fp32 where fp64 came in by accident", Stage.HALF, Semantics.PRECISION, part="precision"),
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
        raise AdvisorError(f"no transform {identifier!r}", expected="one of " + ", ".join(ROWS)) from None


def members(identifier: str) -> tuple[Row, ...]:
    """The rows of the transforms that were tried as one under this name; of a single one its own.

    Raises:
        AdvisorError: when one of them is none.
    """
    return tuple(map(row, identifier.split(TOGETHER)))


def title(identifier: str) -> str:
    """What people call this transform, or these where several were tried as one."""
    return " and ".join(entry.title for entry in members(identifier))


def conflicts(identifier: str) -> tuple[str, ...]:
    """What cannot be on together with this transform, or with one of these."""
    return tuple(other for entry in members(identifier) for other in entry.conflicts)


def having(wanted: Callable[[Row], bool]) -> frozenset[str]:
    """Ids of the transforms for whose row this holds."""
    return frozenset(identifier for identifier, entry in ROWS.items() if wanted(entry))
