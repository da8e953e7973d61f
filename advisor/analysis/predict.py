"""What a transform would save of this step: measured rows shrunk, merged or removed, on the step model of `whatif`.

Every constant is an efficiency or a ratio that was measured somewhere and says where. Intervals are meant to hold the
outcome, so they are wide where shapes decide; the live trial gives the number.
"""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis.predictions import batches, convolution, kernels, launch, optimizer, precision
from advisor.analysis.predictions.basis import Predictor
from advisor.analysis.view import View
from advisor.analysis.whatif import Step
from advisor.core.findings import Interval
from advisor.core.profile import StepProfile

_GPU_ONLY = "needs a CUDA GPU"


def predict(profile: StepProfile, transform_id: str, parameters: Mapping[str, str]) -> Interval | None:
    """The share of this step that a transform would save, as an interval with its basis; None when that cannot be told.

    `high` never exceeds the share of what the transform touches (Amdahl's bound); `low` may be negative where the change
    can lose. An interval of zero says that the transform finds nothing to do.
    """
    predictor = _PREDICTORS.get(transform_id)
    if predictor is None:
        return None
    view = View.of(profile)
    step = Step.of(view) or (Step.untraced(view) if transform_id in _BY_TIMED_STEPS else None)
    if step is None:
        return None
    if not view.on_gpu and transform_id in _NEEDS_GPU:
        return Interval(low=0.0, high=0.0, basis=_GPU_ONLY)
    change = predictor(view if transform_id in _EVERYWHERE else view.without_guides(), step, parameters)
    return step.gain(change) if change is not None else None


_PREDICTORS: dict[str, Predictor] = {
    "amp_bf16": precision.autocast("bf16"),
    "amp_fp16": precision.autocast("fp16"),
    "guides_bf16": precision.guides,
    "tf32": precision.tf32,
    "channels_last": convolution.channels_last,
    "cudnn_benchmark": convolution.cudnn_benchmark,
    "fused_optimizer": optimizer.fused_optimizer,
    "fused_casts": optimizer.fused_casts,
    "set_to_none": optimizer.set_to_none,
    "conv_bias": convolution.conv_bias,
    "prefetch": batches.prefetch,
    "loader_workers": batches.loader_workers,
    "uint8_batches": batches.uint8_batches,
    "defer_sync": launch.defer_sync,
    "single_device": launch.single_device,
    "fused_bn_act": kernels.fused_bn_act,
    "fused_bn_concat": kernels.fused_bn_concat,
    **kernels.FAMILIES,
    "compile": launch.compiled(graphs=False),
    "compile_max_autotune": launch.compiled(graphs=True),
    "cuda_graphs": launch.cuda_graphs,
    "gradient_stream": launch.gradient_stream,
}
# What reaches models that run without gradients: flags of the process, and what is for them.
_EVERYWHERE = frozenset(("tf32", "cudnn_benchmark", "guides_bf16"))
# What the timed steps tell by themselves, where the run ended before any was traced.
_BY_TIMED_STEPS = frozenset(("loader_workers",))
_NEEDS_GPU = frozenset(
    (
        *(
            "amp_fp16",
            "tf32",
            "cudnn_benchmark",
            "fused_casts",
            "prefetch",
            "uint8_batches",
            "defer_sync",
            "single_device",
            "cuda_graphs",
            "gradient_stream",
        ),
        *("fused_bn_act", "fused_bn_concat", *kernels.FAMILIES),
    )
)
