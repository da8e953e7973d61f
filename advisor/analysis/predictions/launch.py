"""The host: its waits, its launches, and what a compiler makes of them."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis.conv import is_gradient
from advisor.analysis.idle import CONTRADICTION
from advisor.analysis.predictions.basis import (
    Predictor,
    gain_to,
    launching_us,
    limit_us,
    nothing,
    own_dtype,
    replayable,
    share,
    trained,
)
from advisor.analysis.rows import launches
from advisor.analysis.sync import is_scalar_read
from advisor.analysis.view import View
from advisor.analysis.whatif import GRAPH_NODE_US, GRAPH_NODE_WORST_US, OP_LOW_US, Change, Saving, Step
from advisor.core.units import bytes_text, counted, percent_text, time_text

# A compiled batch norm reads at 88 % of DRAM bandwidth (KernelBench's H100 timings, 64x64x512x512 fp32).
COMPILED_BEST = 0.88
# torch.compile made ResNet-18 at 32x32 slower on one H200, where the host was the limit: 10.6 ms became 11.6 ms.
COMPILE_HOST_LOSS = 0.1
# Its convolutions and matrix products are laid out anew and may lose what fusing gains: on one H200 ResNet-50 lost 1 to 10 %
# of its step, MobileNetV3-Large up to 21 %, each beside the bundled batch-norm kernels.
COMPILE_DEVICE_LOSS = 0.1
# Weight gradients on a stream of their own, replayed in turn with one stream on one H200: a ResNet-18 on CIFAR saved 5.8 us for each of
# 20, MobileNetV3-Large 7 for each of 33; DenseNet-121 lost 2 % of its backward, ResNet-50 1.7 %.
BESIDE_BEST_US, BESIDE_LOSS = 8.0, 0.02
# nn.DataParallel's walk as profiled, called over and over, took 275 us; a step of a ResNet-18 on CIFAR whose host was the limit got 720 to
# 860 us shorter without it.
WALK_COLD = 3.0
_BUCKET_BYTES = 16  # of a parameter: its fp32 gradient read and written, twice
_POINTWISE = ("activation", "elementwise", "dropout", "copy", "loss")


def defer_sync(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """No waits for scalars: the host runs ahead."""
    sites = view.profile.syncs
    scalar = [site for site in sites if is_scalar_read(site)]
    if not scalar:
        return nothing("no scalar is read from the device in a step")
    waited = sum(site.time_us for site in sites)
    share = sum(site.time_us for site in scalar) / waited if waited > 0 else 0.0
    return Change(
        worst=Saving(sync_us=step.sync_us * share),
        # A host that never waits runs ahead, which also closes gaps, as far as it is fast enough.
        best=Saving(sync_us=step.sync_us, gaps_us=step.gaps_us),
        basis=(
            f"{sum(site.calls for site in scalar):.0f} scalar reads a step, {percent_text(share)} of the host's waiting; the device "
            f"is idle {time_text(step.sync_us)} after waits and {time_text(step.gaps_us)} between launches"
        ),
    )


def single_device(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """No walk through all tensors before each forward."""
    facts = view.profile.model
    walk_us, calls = facts.data_parallel_us, facts.backwards
    if walk_us is None and facts.distributed == "ddp" and facts.world_size == 1:
        return _one_process(view)
    if walk_us is None:
        return nothing(
            "no model is wrapped in nn.DataParallel over one device or DistributedDataParallel of one process"
        )
    return Change(
        worst=Saving(host_us=0.0),
        best=Saving(host_us=calls * walk_us * WALK_COLD),
        basis=(
            f"nn.DataParallel looks for {time_text(walk_us)} where its tensors lie when it is asked over and over, up to {WALK_COLD:.0f} times "
            f"as long within a step; {counted(calls, 'time')} a step"
        ),
    )


def _one_process(view: View) -> Change | None:
    """No gradients copied into buckets and back. What that costs in launches, two a tensor, is not counted."""
    bandwidth = view.profile.environment.copy_gbps
    if not bandwidth:
        return None
    moved = _BUCKET_BYTES * view.profile.model.parameters
    return Change(
        worst=Saving(),
        best=Saving(device_us=moved / bandwidth / 1e3),
        basis=f"DistributedDataParallel of one process copies gradients into its buckets and back: {bytes_text(moved)} a step",
    )


def _compiled(graphs: bool) -> Predictor:
    """Loops that Inductor fuses; with `graphs` replayed as a graph."""

    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        if view.profile.model.compiled:
            return nothing("the script already compiles its model")
        containers = view.normalised_containers()
        chosen = [row for row in view.rows if row.kind in ("norm", "reduce", "layout", *_POINTWISE) and trained(row)]
        best = 0.0
        for row in chosen:
            merged = row.kind == "layout" or view.is_after_norm(row, containers)
            limit = limit_us(view, row, dtype=own_dtype(row)) / COMPILED_BEST
            # What one loop has in a CPU's cache the next one reads there, whatever memory's bandwidth is.
            best += row.time_us if merged or not view.on_gpu else gain_to(row.time_us, limit)
        # Fused groups keep about one kernel in three: normalise, add and activate become one.
        fewer = launching_us(view, chosen) * 2 / 3 if view.on_gpu else 0.0
        replayed = graphs and view.on_gpu
        bound = (
            f"at {percent_text(COMPILED_BEST)} of bandwidth at best"
            if view.on_gpu
            else "all of it in the caches at best"
        )
        basis = f"{share(view, chosen, step)} normalise, activate or convert, {bound}"
        return Change(
            worst=Saving(
                device_us=-COMPILE_DEVICE_LOSS * view.device_us if view.on_gpu else 0.0,
                host_us=-COMPILE_HOST_LOSS * step.host_high_us,
            ),
            best=Saving(
                device_us=best,
                host_us=step.host_low_us if replayed else fewer,
                gaps_us=step.gaps_us if replayed else 0.0,
            ),
            basis=f"{basis}; {time_text(step.gaps_us)} of launch gaps replayed as a graph" if replayed else basis,
        )

    return predictor


compiled, compiled_max_autotune = _compiled(graphs=False), _compiled(graphs=True)


def cuda_graphs(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """One launch for what the model's forward and backward launch one by one."""
    facts = view.profile.model
    if facts.graphed:
        return nothing("the script already replays CUDA graphs")
    if not facts.fixed_shapes:
        return nothing("input shapes change, so no one graph fits")
    # Forward and backward of the model are captured; loss, metrics and optimizer are launched one by one as before.
    captured = launches(filter(replayable, view.rows))
    every = launches(view.rows)
    if captured <= 0:
        return nothing("no kernel of a module was traced")
    # At worst the host is spared half of what issuing the captured operators takes; what else it does in a step (the loop, the
    # loader's hand-over, metrics, the optimizer) stays. A ResNet-18 on CIFAR saved 8 to 34 % of its step in seven searches on H200s.
    # And kernels that are traced, with longer gaps between them, run at higher clocks than others: a VGG-16 in bf16 took 24.2 ms a step, its
    # traced kernels 22.4, and graphs saved 0.2 ms at most of what seemed 1.8 ms of gaps.
    least = max(0.0, captured * (OP_LOW_US - GRAPH_NODE_US) / 2)
    gaps = max(0.0, step.gaps_us - (CONTRADICTION - 1.0) * step.busy_us)
    return Change(
        worst=Saving(
            gaps_us=min(least, max(0.0, gaps * captured / every - captured * GRAPH_NODE_WORST_US)),
            host_us=min(least, step.host_high_us),
            host_closes_gaps=False,
        ),
        # One launch after a wait instead of hundreds: the idle after a wait goes as well. Of a UNet's 88.1 ms in fp32 1.3 were not of kernels,
        # where the traced steps were idle for 3.4; graphs saved 2.6 % at least, behind half precision.
        best=Saving(
            device_us=step.longer_us / max(step.scale, 1e-9),
            gaps_us=step.gaps_us,
            sync_us=step.sync_us,
            host_us=step.host_low_us,
        ),
        basis=(
            f"the device is idle {time_text(step.gaps_us)} a step between launches and {time_text(step.sync_us)} after waits; "
            f"{captured:.0f} of {every:.0f} kernels are replayed, at up to {time_text(GRAPH_NODE_WORST_US)} each"
        ),
    )


def gradient_stream(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """What starts and ends of the gradients' kernels leave idle, filled by each other."""
    chosen = [row for row in view.rows if is_gradient(row)]
    if not chosen:
        return nothing("no library's kernel makes a convolution's gradient")
    backward = sum(row.time_us for row in view.rows if row.phase == "backward")
    pairs = launches(chosen) / 2
    return Change(
        worst=Saving(device_us=-BESIDE_LOSS * backward),
        best=Saving(device_us=min(pairs * BESIDE_BEST_US, sum(row.time_us for row in chosen) / 2)),
        basis=(
            f"{share(view, chosen, step)} make convolutions' gradients; up to {time_text(BESIDE_BEST_US)} for each of {pairs:.0f} "
            f"weight gradients at the same time as the input's, or {percent_text(BESIDE_LOSS)} of the backward lost"
        ),
    )
