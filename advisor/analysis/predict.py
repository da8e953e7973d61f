"""What a transform would save of this step: measured rows shrunk, merged or removed, on the step model of `whatif`.

Every constant is an efficiency or a ratio that was measured somewhere and says where. Intervals are meant to hold the
outcome, so they are wide where shapes decide; the live trial gives the number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from advisor.analysis.conv import bias_row, pointwise_before_norm
from advisor.analysis.memory import BYTES, STATES
from advisor.analysis.sync import is_scalar_read
from advisor.analysis.view import (
    HALF,
    MATRIX,
    SINGLE,
    View,
    is_batchnorm,
    is_groupnorm,
    is_layernorm,
    is_own,
    is_strict_fp32,
    launches,
    parent,
    shapes_of,
)
from advisor.analysis.whatif import OP_HIGH_US, OP_LOW_US, Change, Saving, Step
from advisor.core import roofline
from advisor.core.findings import Interval
from advisor.core.profile import KernelRow, StepProfile
from advisor.core.units import percent_text

# Share of the measured matrix rate that convolutions reach. Measured on one H200 with cuDNN 9.19: bf16 NHWC 3x3 450 to 713
# of about 790 TFLOP/s forward; TF32 backward down to 140 of about 400.
MATRIX_BEST, MATRIX_WORST = 0.9, 0.35
# Share of copy bandwidth that elementwise kernels reach: 0.291 ms needed, 0.395 ms taken by a bf16 GELU on one H200.
POINTWISE_BEST, POINTWISE_WORST = 0.9, 0.74
# The bundled batch-norm kernels' passes on one H200: 1,850 to 3,916 of 4,244 GB/s.
FUSED_BEST, FUSED_WORST = 0.92, 0.44
# Passes that become one, measured on one H200 in bf16: scale, drop path and add took a quarter of their time; squeeze-and-
# excite blocks took half forward and a quarter backward; a pooling read what the norm before it had at hand.
BIAS_ACT_MERGED, SQUEEZE_EXCITE_MERGED, POOL_MERGED = 0.75, 0.7, 0.5
# Copies and sums of growing concatenations took 15.3 ms of DenseNet-121's step on one H200; without them it was 17.4 ms shorter.
CONCAT_MERGED = 1.0
# The 7x7 stem on one H200 in bf16: 7 times as fast forward, 2 to 3 times backward.
FIRST_CONV_BEST = 0.7
# A 1x1 convolution's kernel that leaves the batch norm behind it its statistics takes about what cuDNN's takes, by its bytes; the
# norm's pass over the result, which falls away, takes as long as the convolution less its input: at 64 -> 256 channels 0.7 of it.
POINTWISE_MERGED = 0.7
# A compiled batch norm reads at 88 % of DRAM bandwidth (KernelBench's H100 timings, 64x64x512x512 fp32).
COMPILED_BEST = 0.88
# Depthwise 3x3 NHWC forward on one H200: 0.291 ms needed, 0.513 ms taken.
DEPTHWISE_BEST = 0.57
# Half precision in NCHW made MobileNetV3-Large slower on one H200: 87.4 ms in fp32, 101 ms in bf16.
DEPTHWISE_HALF_NCHW_LOSS = 0.16
# Grouped convolutions in NHWC made RegNetY-8GF 3.2 times slower (timm's benchmark, RTX 3090); on one H200 they gained.
GROUPED_NHWC_WORST = 3.2
# Depthwise 27x27 to 31x31 in NHWC on one H200: 97 ms became 138 ms.
LARGE_DEPTHWISE_NHWC, LARGE_KERNEL = 1.42, 13
# Share of a convolution's time that NHWC saves on a CPU. Measured on 2 cores of an x86 server (torch 2.13, medians of 5
# steps): ResNet-18 at 32x32 saved 22 % of its step, at 96x96 lost 6 %; MobileNetV2 at half width saved 39 %.
CPU_NHWC_WORST, CPU_NHWC_BEST, CPU_DEPTHWISE_NHWC_BEST = -0.1, 0.4, 0.75
# The same machine, share of an operator's time forward and backward: windows of pools 60 to 79 %, bilinear upsampling 48 to
# 80 %; batch norm lost 23 % to gained 35 %, with 8 channels took 2.5 times as long; group norm took 1.6 to 5 times as long.
CPU_POOL_NHWC, CPU_UPSAMPLE_NHWC = (0.6, 0.8), (0.45, 0.8)
CPU_BATCHNORM_NHWC, CPU_THIN_BATCHNORM_NHWC, CPU_GROUPNORM_NHWC = (-0.25, 0.35), (-1.5, 0.35), (-4.0, -0.6)
CPU_THIN_CHANNELS = 16
# cudnn.benchmark with the fused optimizer gave MobileNetV3-Large 13.5 % on one H200, ResNet-50 0.4 %.
BENCHMARK_BEST = 0.15
# A node of a replayed graph costs 1 to 2 us (published replay timings; 3.03 ms for ResNet-18 on one H200), and more where
# kernels are long and the host runs ahead: of 4.1 us idle at each of ConvNeXt-T's 642 kernels on one H200, graphs left 2.2 to
# 3.2. There the device itself takes that long from kernel to kernel.
GRAPH_NODE_US, GRAPH_NODE_WORST_US = 2.0, 3.2
# torch.compile made ResNet-18 at 32x32 slower on one H200, where the host was the limit: 10.6 ms became 11.6 ms.
COMPILE_HOST_LOSS = 0.1
# Its convolutions and matrix products are laid out anew and may lose what fusing gains: on one H200 ResNet-50 lost 1 to 10 %
# of its step, MobileNetV3-Large up to 21 %, each beside the bundled batch-norm kernels.
COMPILE_DEVICE_LOSS = 0.1
# Operators registered through torch.library.custom_op took 45 us of host time on one H200 machine, torch's own 11 us.
CUSTOM_OP_EXTRA_US = 34.0
# Multi-tensor kernels take tens of tensors a launch: a handful of launches for any model.
FUSED_OPTIMIZER_LAUNCHES = 2
# Source: aten/src/ATen/native/cuda/MultiTensorApply.cuh, depth 2.
TENSORS_A_LAUNCH = 64
# Casts put together, on one H200 in bf16: 11 M weights forward in 27 us and back in 23, 26 M in 54 and 50, 28.6 M in 74 and
# 65, 138 M in 252 and 259, against 4.2 TB/s.
CASTS_BEST, CASTS_WORST = 0.8, 0.55
FUSED_OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad")  # torch.optim documentation: `fused`

# Of a batch's bytes, those that it has in uint8.
UINT8_BYTES = 1 / BYTES["fp32"]

# Kinds whose kernels move their tensors once and compute little, so that half the bytes take half the time.
_STREAMING = ("activation", "elementwise", "pool", "upsample", "concat", "dropout", "copy", "layout")
# What PyTorch runs slower in NCHW: cuDNN's batch norm transposes (cudnn-frontend issue 134), bilinear upsampling's backward adds
# atomically. A UNet on one H200 saved 43 % of its step, of which convolutions and layout kernels were 46 % together.
_NHWC_FASTER = ("norm", "upsample", "pool")
_POINTWISE = ("activation", "elementwise", "dropout", "copy", "loss")
_GPU_ONLY = "needs a CUDA GPU"

_Predictor = Callable[[View, Step, Mapping[str, str]], Change | None]


def predict(profile: StepProfile, transform_id: str, parameters: Mapping[str, str]) -> Interval | None:
    """The share of this step that a transform would save, as an interval with its basis; None when that cannot be told.

    `high` never exceeds the share of what the transform touches (Amdahl's bound); `low` may be negative where the change
    can lose. An interval of zero says that the transform finds nothing to do.
    """
    predictor = _PREDICTORS.get(transform_id)
    if predictor is None:
        return None
    view = View.of(profile)
    step = Step.of(view)
    if step is None:
        return None
    if not view.on_gpu and transform_id in _NEEDS_GPU:
        return Interval(low=0.0, high=0.0, basis=_GPU_ONLY)
    change = predictor(view, step, parameters)
    return step.gain(change) if change is not None else None


def _nothing(basis: str) -> Change:
    return Change(worst=Saving(), best=Saving(), basis=basis)


def _share(view: View, chosen: Iterable[KernelRow], step: Step) -> str:
    chosen = list(chosen)
    time = sum(row.time_us for row in chosen) * step.scale
    return f"{launches(chosen):.0f} {'kernels' if view.on_gpu else 'operators'} that take {percent_text(time / step.step_us)} of the step"


def _limit(view: View, row: KernelRow, *, dtype: str, byte_factor: float = 1.0) -> float:
    return roofline.limit_us(
        view.profile.environment, nbytes=row.modelled_bytes * byte_factor, flops=row.flops, dtype=dtype
    )


def _own_dtype(row: KernelRow) -> str:
    return "tf32" if row.dtype == "fp32" and row.tensor_core else row.dtype


def _is_nhwc(view: View, row: KernelRow) -> bool:
    return row.layout == "nhwc" or (not row.layout and view.profile.model.channels_last)


def _bytes_us(view: View, nbytes: float) -> float:
    bandwidth = view.profile.environment.copy_gbps
    return nbytes / (bandwidth * 1e3) if bandwidth > 0 else 0.0


def _gain_to(time: float, target: float) -> float:
    """Time saved by reaching a target that is known (above zero) and shorter."""
    return max(0.0, time - target) if target > 0 else 0.0


# -- precision ---------------------------------------------------------------------------------------------------------


def _autocast(dtype: str) -> _Predictor:
    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        facts = view.profile.model
        if facts.autocast or facts.parameter_dtype in HALF:
            return _nothing("the script already computes in half precision")
        single = [row for row in view.rows if row.dtype in (*SINGLE, "") and _trained(row)]
        matrix = [row for row in single if row.kind in MATRIX and not _without_tensor_cores(view, row)]
        if not matrix:
            return _nothing("no fp32 convolution or matrix product in the step")
        rates = view.profile.environment.matrix_tflops
        if rates.get(dtype, 0.0) <= 0 or rates.get("fp32", 0.0) <= 0:
            return None
        ratio = rates[dtype] / rates["fp32"]
        streamed = [row for row in single if row.kind in (*_STREAMING, "norm") or _without_tensor_cores(view, row)]
        best = worst = 0.0
        for row in matrix:
            saved = _half_matrix(view, row, dtype, ratio)
            worst, best = worst + saved[0], best + saved[1]
        for row in streamed:
            best += row.time_us / 2
            # bf16 batch norm runs kernels of its own, which may be no faster than fp32's (cuDNN serves fp16 in NHWC:
            # ResNet-50 took 41.5 ms in fp16 and 54.8 in bf16 on one H200); layout kernels may multiply.
            slow = row.kind in ("layout", "conv") or (
                row.kind == "norm" and not (dtype == "fp16" and _is_nhwc(view, row))
            )
            if view.on_gpu and not slow:
                worst += row.time_us * max(0.0, 1 - 0.5 * POINTWISE_BEST / POINTWISE_WORST)
        weights = facts.parameters * BYTES["fp32"]
        cast = _bytes_us(view, weights * 3)  # a weight read as 4 and written as 2 bytes, its gradient the other way
        if dtype == "fp16":
            worst -= _bytes_us(view, weights * 2)  # GradScaler reads and writes all gradients once more
        if view.on_gpu and not facts.channels_last and view.share(view.conv(lambda g: g.depthwise)) > 0:
            worst -= DEPTHWISE_HALF_NCHW_LOSS * view.device_us
        casts = 2 * sum(row.calls for row in matrix if row.phase == "forward")
        host = casts * OP_HIGH_US if view.on_gpu else 0.0
        basis = (
            f"{_share(view, matrix, step)} at the measured {dtype} rate of {rates[dtype]:.3g} TFLOP/s; "
            f"half the bytes for {_share(view, streamed, step)}; casts of {facts.parameters / 1e6:.1f} M parameters added"
        )
        return Change(
            worst=Saving(device_us=worst - cast, host_us=-host),
            best=Saving(device_us=best - cast),
            basis=basis,
        )

    return predictor


def _without_tensor_cores(view: View, row: KernelRow) -> bool:
    """A depthwise convolution on a GPU: PyTorch's kernels multiply it channel by channel in every precision."""
    geometry = view.geometry(row) if view.on_gpu else None
    return geometry is not None and geometry.depthwise


def _trained(row: KernelRow) -> bool:
    return row.phase != "optimizer"


def _half_matrix(view: View, row: KernelRow, dtype: str, ratio: float) -> tuple[float, float]:
    """Worst and best saving of one fp32 convolution or product in half precision."""
    if not view.on_gpu:
        # Without tensor cores the measured rates say it all: a slower rate is a loss.
        change = row.time_us * (1 - 1 / ratio)
        return (min(0.0, change), max(0.0, change))
    limit = _limit(view, row, dtype=dtype, byte_factor=0.5)
    if limit <= 0:
        return (0.0, row.time_us * max(0.0, 1 - 1 / ratio))
    if row.kind != "conv" or _is_nhwc(view, row):
        return (_gain_to(row.time_us, limit / MATRIX_WORST), _gain_to(row.time_us, limit / MATRIX_BEST))
    # In NCHW cuDNN converts half-precision tensors around its NHWC kernels: what the convolution reads and writes is read
    # and written once more at least, and at worst that costs all that was gained.
    converted = _bytes_us(view, row.modelled_bytes) / POINTWISE_BEST
    return (0.0, _gain_to(row.time_us, limit / MATRIX_BEST + converted))


def _tf32(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    chosen = [
        row
        for row in view.rows
        if row.kind in MATRIX and is_strict_fp32(row) and _trained(row) and not _without_tensor_cores(view, row)
    ]
    if not chosen:
        return _nothing("no convolution or product computes in strict fp32")
    rate = view.profile.environment.matrix_tflops.get("tf32", 0.0)
    if rate <= 0:
        return None
    worst = best = 0.0
    for row in chosen:
        limit = _limit(view, row, dtype="tf32")
        best += _gain_to(row.time_us, limit / MATRIX_BEST)
        converted = 0.0 if row.kind != "conv" or _is_nhwc(view, row) else 2 * _bytes_us(view, row.modelled_bytes)
        worst += _gain_to(row.time_us, limit / MATRIX_WORST + converted) if limit > 0 else 0.0
    basis = f"{_share(view, chosen, step)} in strict fp32, at the measured TF32 rate of {rate:.3g} TFLOP/s"
    return Change(worst=Saving(device_us=worst), best=Saving(device_us=best), basis=basis)


# -- layout and convolutions ---------------------------------------------------------------------------------------------


def _channels_last(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    convs = [row for row in view.rows if row.kind == "conv"]
    if view.profile.model.channels_last or (convs and all(row.layout == "nhwc" for row in convs)):
        return _nothing("convolutions already run in channels_last")
    if not convs:
        return _nothing("no convolution in the step")
    worst = best = 0.0
    for row in view.rows:
        limit = _limit(view, row, dtype=_own_dtype(row))
        if row.kind == "layout":
            # Its share of the convolution's limit stays: the work is then the convolution's alone.
            best += max(0.0, row.time_us - limit / MATRIX_BEST)
            worst += max(0.0, row.time_us - limit / MATRIX_WORST) if view.on_gpu else 0.0
        elif row.kind in _NHWC_FASTER and view.on_gpu:
            best += _gain_to(row.time_us, limit / POINTWISE_BEST)
        elif row.kind == "conv":
            saved = _nhwc_conv(view, row, limit)
            worst, best = worst + saved[0], best + saved[1]
        elif not view.on_gpu and (shares := _nhwc_on_cpu(row)):
            worst, best = worst + shares[0] * row.time_us, best + shares[1] * row.time_us
    moved = 2 * _bytes_us(view, view.profile.input.batch_bytes)  # the batch is read and written once in the new layout
    layout = [row for row in view.rows if row.kind == "layout"]
    told = "at their limits at best; grouped and large depthwise ones may lose"
    if not view.on_gpu:
        told = f"of which NHWC saves {percent_text(CPU_NHWC_WORST)} to {percent_text(CPU_NHWC_BEST)}, of depthwise ones up to {percent_text(CPU_DEPTHWISE_NHWC_BEST)}"
        others = [row for row in view.rows if _nhwc_on_cpu(row)]
        told += f"; {_share(view, others, step)} pool, upsample and normalise, each in another way" if others else ""
    basis = f"{_share(view, layout, step)} convert layouts; {_share(view, convs, step)} are convolutions, {told}"
    return Change(worst=Saving(device_us=worst - moved), best=Saving(device_us=best - moved), basis=basis)


def _nhwc_conv(view: View, row: KernelRow, limit: float) -> tuple[float, float]:
    geometry = view.geometry(row)
    if not view.on_gpu:
        depthwise = geometry is not None and geometry.depthwise
        return (row.time_us * CPU_NHWC_WORST, row.time_us * (CPU_DEPTHWISE_NHWC_BEST if depthwise else CPU_NHWC_BEST))
    if geometry is not None and geometry.grouped:
        return (row.time_us * (1 - GROUPED_NHWC_WORST), _gain_to(row.time_us, limit / MATRIX_BEST))
    if geometry is not None and geometry.depthwise:
        large = max(geometry.kernel, default=0) >= LARGE_KERNEL
        worst = row.time_us * (1 - LARGE_DEPTHWISE_NHWC) if large else 0.0
        return (worst, 0.0 if large else _gain_to(row.time_us, limit / DEPTHWISE_BEST))
    return (0.0, _gain_to(row.time_us, limit / MATRIX_BEST))


def _nhwc_on_cpu(row: KernelRow) -> tuple[float, float] | None:
    """Worst and best share of its time that NHWC saves of what is no convolution, on a CPU; None for what it leaves alone."""
    if row.kind == "upsample":
        return CPU_UPSAMPLE_NHWC
    if row.kind == "pool":
        return None if "adaptive" in row.op else CPU_POOL_NHWC
    if is_batchnorm(row):
        thin = any(len(shape) == 4 and shape[1] < CPU_THIN_CHANNELS for shape in shapes_of(row))
        return CPU_THIN_BATCHNORM_NHWC if thin else CPU_BATCHNORM_NHWC
    return CPU_GROUPNORM_NHWC if is_groupnorm(row) else None


def _cudnn_benchmark(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    facts = view.profile.model
    if facts.flags.get("cudnn_benchmark"):
        return _nothing("cudnn.benchmark is already on")
    if not facts.fixed_shapes:
        return _nothing("input shapes change, so each would be tuned anew")
    convs = [row for row in view.rows if row.kind == "conv"]
    if not convs:
        return _nothing("no convolution in the step")
    gap = sum(_gain_to(row.time_us, _limit(view, row, dtype=_own_dtype(row)) / MATRIX_BEST) for row in convs)
    basis = f"distance of {_share(view, convs, step)} from their limit, of which other algorithms rarely close much"
    return Change(
        worst=Saving(),
        best=Saving(device_us=min(gap, BENCHMARK_BEST * step.step_us / max(step.scale, 1e-9))),
        basis=basis,
    )


def _conv_bias(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    normalised = {fact.module for fact in view.profile.model.convs if fact.bias and fact.followed_by_bn}

    def wanted(row: KernelRow) -> bool:
        fact = view.fact(row)
        return fact is not None and fact.module in normalised and bias_row(view, row)

    chosen = [row for row in view.rows if wanted(row)]
    if not chosen:
        return _nothing("no kernel of a bias before a batch norm stands alone")
    forward = [row for row in chosen if row.phase == "forward"]
    return Change(
        worst=Saving(device_us=sum(row.time_us for row in forward)),
        best=Saving(device_us=sum(row.time_us for row in chosen), host_us=launches(forward) * OP_LOW_US),
        basis=f"{_share(view, chosen, step)} add biases before batch norms or sum their gradients",
    )


# -- optimizer -----------------------------------------------------------------------------------------------------------


def _fused_optimizer(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    facts = view.profile.model
    if facts.optimizer_fused:
        return _nothing("the optimizer is already fused")
    chosen = [row for row in view.rows if row.phase == "optimizer"]
    if not chosen:
        return _nothing("no optimizer kernel in the step")
    kind = facts.optimizers[0] if facts.optimizers else ""
    if kind and kind not in FUSED_OPTIMIZERS:
        return _nothing(f"torch has no fused {kind}")
    time = sum(row.time_us for row in chosen)
    # Parameter read and written, gradient read, each state read and written: once each in a fused kernel.
    passes = 3 + 2 * STATES.get(kind, 1)
    least = _bytes_us(view, facts.parameters * BYTES.get(facts.parameter_dtype, 4) * passes)
    host = 0.0
    if view.on_gpu:
        # Grouping tensors and Python around them cost more than the launches; what was measured bounds what can be saved.
        removed = max(0.0, launches(chosen) - FUSED_OPTIMIZER_LAUNCHES) * OP_LOW_US
        host = view.profile.optimizer_host_us / (1.0 + max(0.0, view.profile.cost.overhead_frac)) or removed
    told = f", {host / 1e3:.2f} ms of host time" if host else ""
    return Change(
        worst=Saving(),
        best=Saving(device_us=_gain_to(time, least / POINTWISE_BEST), host_us=host),
        basis=f"{_share(view, chosen, step)}{told} update parameters; "
        f"{passes} passes over {facts.parameters / 1e6:.1f} M remain",
    )


def _fused_casts(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    if view.profile.model.compiled:
        return _nothing("the script compiles its model, which fuses casts")
    chosen = [row for row in view.rows if view.is_weight_cast(row)]
    if not chosen:
        return _nothing("no weight is cast by itself")
    time = sum(row.time_us for row in chosen)
    least = sum(_bytes_us(view, row.modelled_bytes) for row in chosen)
    # Together they are at least as many launches as torch's multi-tensor kernel needs for 64 tensors each.
    fewer = launches(chosen) * (1 - 1 / TENSORS_A_LAUNCH)
    return Change(
        worst=Saving(device_us=_gain_to(time, least / CASTS_WORST)),
        best=Saving(device_us=_gain_to(time, least / CASTS_BEST), host_us=fewer * OP_LOW_US),
        basis=(
            f"{_share(view, chosen, step)} cast weights or their gradients; their bytes take {least:.0f} us, together they "
            f"run at {percent_text(CASTS_WORST)} to {percent_text(CASTS_BEST)} of copy bandwidth"
        ),
    )


def _set_to_none(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    facts = view.profile.model
    if facts.zero_grad_to_none:
        return _nothing("gradients are already set to None")
    zeroed = [row for row in view.rows if "zero" in row.op and row.phase != "forward"]
    if not zeroed:
        return _nothing("no kernel zeroes gradients")
    # A first gradient is then kept as it is, not added to zeros: one read of the old one and one write less.
    added = _bytes_us(view, facts.parameters * BYTES.get(facts.parameter_dtype, 4) * 2)
    sums = sum(row.time_us for row in view.rows if row.phase == "backward" and row.op.startswith("aten::add_"))
    time = sum(row.time_us for row in zeroed)
    return Change(
        worst=Saving(device_us=time),
        best=Saving(device_us=time + min(added, sums), host_us=launches(zeroed) * OP_LOW_US if view.on_gpu else 0.0),
        basis=f"{_share(view, zeroed, step)} zero gradients that backward then adds to",
    )


# -- input and synchronisation -------------------------------------------------------------------------------------------


def _prefetch(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    copies = [copy for copy in view.profile.copies if copy.kind == "h2d"]
    if not copies:
        return _nothing("nothing is copied to the device in a step")
    if not view.profile.input.moved_unchanged:
        return _nothing("batches are changed before they are copied, so they cannot be copied ahead")
    alone = sum(copy.time_us * (1 - copy.overlapped_frac) for copy in copies)
    best = min(step.copy_us, max(alone, step.copy_us))
    # A pageable batch must be copied into pinned memory by the host first, which may take as long as it saves.
    worst = 0.0 if any(copy.pageable for copy in copies) else min(alone, step.copy_us)
    return Change(
        worst=Saving(copy_us=worst),
        best=Saving(copy_us=best),
        basis=f"copies to the device run {alone:.0f} us a step beside no kernel; {step.copy_us:.0f} us of idle are theirs",
    )


def _loader_workers(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    stats, machine = view.profile.input, view.profile.environment
    if not stats.loader:
        return _nothing("no DataLoader was used")
    cores = machine.cpu_count or stats.workers + 1
    if not view.on_gpu:
        quantity = view.profile.utilization.get("cpu_util_frac")
        used = quantity.value if quantity is not None and quantity.value is not None else 0.0
        spare = min(1.0, max(0.0, cores * (1 - used)))
        return Change(
            worst=Saving(),
            best=Saving(data_us=step.data_us * spare if stats.workers < cores else 0.0),
            basis=f"{step.data_us:.0f} us a step wait for the loader; {spare:.1f} of {cores} cores are free for it",
        )
    wanted = parameters.get("workers", "")
    most = (
        int(wanted) if wanted.isdigit() and int(wanted) > 0 else max(1, cores // max(1, view.profile.model.world_size))
    )
    # One batch of loading: seen whole without workers; with w starved workers, each makes one batch in w steps.
    batch = stats.next_us if stats.workers == 0 else stats.workers * step.step_us

    def saved(workers: int) -> float:
        return max(0.0, min(step.data_us, step.step_us - batch / workers))

    return Change(
        worst=Saving(data_us=saved(max(1, most // 2))),
        best=Saving(data_us=saved(most)),
        basis=(
            f"the device waits {step.data_us:.0f} us a step for data; a batch takes {batch:.0f} us of one worker, "
            f"shared by {max(1, most // 2)} to {most} of {cores} cores"
        ),
    )


def _uint8_batches(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    stats = view.profile.input
    if not stats.normalise:
        return _nothing("no transforms that normalise images were recognised")
    if not stats.workers or stats.batch_dtype != "fp32":
        return _nothing("no workers make fp32 batches")
    if not stats.moved_unchanged:
        return _nothing("batches are changed before they are copied, so their values are needed on the host")
    # Each of w starved workers makes one batch in w steps. What batches of a quarter of the bytes save between processes and in
    # pinned memory comes on top, and at best takes what is left of the wait.
    saved = stats.normalise_us / stats.workers
    return Change(
        worst=Saving(),
        best=Saving(data_us=step.data_us, copy_us=(1 - UINT8_BYTES) * step.copy_us),
        basis=(
            f"{stats.normalise} takes a worker {stats.normalise_us:.0f} us a batch, {saved:.0f} us a step with {stats.workers} "
            f"workers; the device waits {step.data_us:.0f} us a step for data and {step.copy_us:.0f} us for copies, of "
            f"{stats.batch_bytes / 1e6:.0f} MB that become {stats.batch_bytes * UINT8_BYTES / 1e6:.0f}"
        ),
    )


def _defer_sync(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    sites = view.profile.syncs
    scalar = [site for site in sites if is_scalar_read(site)]
    if not scalar:
        return _nothing("no scalar is read from the device in a step")
    waited = sum(site.time_us for site in sites)
    share = sum(site.time_us for site in scalar) / waited if waited > 0 else 0.0
    return Change(
        worst=Saving(sync_us=step.sync_us * share),
        # A host that never waits runs ahead, which also closes gaps, as far as it is fast enough.
        best=Saving(sync_us=step.sync_us, gaps_us=step.gaps_us),
        basis=(
            f"{sum(site.calls for site in scalar):.0f} scalar reads a step, {percent_text(share)} of the host's waiting; the device "
            f"is idle {step.sync_us:.0f} us after waits and {step.gaps_us:.0f} us between launches"
        ),
    )


# -- fusion and launches -------------------------------------------------------------------------------------------------


def _fused_bn_act(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    containers = view.normalised_containers()
    norms = [row for row in view.rows if is_batchnorm(row)]
    after = [row for row in view.rows if view.is_after_norm(row, containers)]
    if not norms:
        return _nothing("no batch normalisation in the step")
    if view.profile.environment.copy_gbps <= 0 or not any(row.modelled_bytes > 0 for row in norms):
        return None
    touched = best = worst = 0.0
    for row in (*norms, *after):
        if row.modelled_bytes <= 0:
            continue
        touched += row.time_us
        nbytes = _fused_bytes(row, view.profile.environment.l2_bytes)
        best += _bytes_us(view, nbytes) / FUSED_BEST
        worst += _bytes_us(view, nbytes) / FUSED_WORST
    merged = launches(row for row in after if row.phase == "forward")
    # The kernels are for NHWC: without it nothing is put in place.
    nhwc = view.profile.model.channels_last or all(row.layout == "nhwc" for row in norms)
    forward = launches(row for row in norms if row.phase == "forward")
    slow = merged * OP_LOW_US - forward * CUSTOM_OP_EXTRA_US
    return Change(
        worst=Saving(device_us=touched - worst, host_us=slow) if nhwc else Saving(),
        best=Saving(device_us=_gain_to(touched, best), host_us=merged * OP_LOW_US),
        basis=(
            f"{_share(view, (*norms, *after), step)} normalise, add and activate; in one kernel a pass they move "
            f"{_fused_total(view, norms, after) / 1e9:.3g} GB at {percent_text(FUSED_WORST)} to {percent_text(FUSED_BEST)} of copy bandwidth"
        ),
    )


def _fused_bytes(row: KernelRow, cache: int) -> float:
    """Bytes that remain of a row when batch norm, add and activation are one operator a direction.

    Batch norm forward moves x and y (2 of 2 passes), and x again for the statistics unless it stays in the cache; backward
    x, dy and dx (3 of 3), x and dy again. An add keeps the read of its other operand in forward; an activation nothing.
    """
    if row.kind == "activation":
        return 0.0
    if row.kind == "elementwise":
        return row.modelled_bytes / 3
    cached = row.calls > 0 and 0 < row.modelled_bytes / row.calls <= cache
    if cached:
        return row.modelled_bytes
    return row.modelled_bytes * (5 / 3 if row.phase == "backward" else 3 / 2)


def _fused_total(view: View, norms: list[KernelRow], after: list[KernelRow]) -> float:
    return sum(_fused_bytes(row, view.profile.environment.l2_bytes) for row in (*norms, *after))


def _kernel_family(
    chosen: Callable[[View], list[KernelRow]], what: str, *, merged: float = 0.0, most: float = 1.0
) -> _Predictor:
    """For bundled kernels that are dispatched only where they are measured to win: from nothing gained down to the limit.

    Args:
        merged: share of the time that goes where passes become one, however near its own limit each of them is.
        most: share of the time that goes at best, where that was measured.
    """

    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        rows = chosen(view)
        if not rows:
            return _nothing(f"no {what} in the step")
        told = f"they run at {percent_text(FUSED_BEST)} of copy bandwidth"
        told += f" or, merged, save {percent_text(merged)} of their time" if merged else ""
        told += f", and save {percent_text(most)} of their time" if most < 1.0 else ""
        best = sum(
            min(
                max(_gain_to(row.time_us, _bytes_us(view, row.modelled_bytes) / FUSED_BEST), merged * row.time_us),
                most * row.time_us,
            )
            for row in rows
        )
        return Change(
            worst=Saving(),
            best=Saving(device_us=best, host_us=launches(rows) * OP_LOW_US),
            basis=f"{_share(view, rows, step)} are {what}; at best {told}",
        )

    return predictor


def _of(wanted: Callable[[KernelRow], bool]) -> Callable[[View], list[KernelRow]]:
    return lambda view: [row for row in view.rows if _trained(row) and not is_own(row) and wanted(row)]


def _concatenations(view: View) -> list[KernelRow]:
    """Concatenations and, where there are any, the additions that sum up the gradients of their parts."""
    found = _of(lambda row: row.kind == "concat")(view)
    sums = _of(lambda row: row.phase == "backward" and row.kind == "elementwise" and row.op.startswith("aten::add"))(
        view
    )
    return [*found, *sums] if found else []


def _fused_bn_concat(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """The concatenations go; the norms over them are the bundled kernels' too, unless `fused_bn_act` has them already."""
    found = _concatenations(view)
    if not found:
        return _nothing("no concatenations and sums of gradients in the step")
    containers = {row.module for row in found if row.kind == "concat" and row.module}
    norms = [row for row in view.rows if is_batchnorm(row) and parent(row.module) in containers]
    after = [row for row in view.rows if row.kind == "activation" and view.is_after_norm(row, containers)]
    cache = view.profile.environment.l2_bytes
    known = [row for row in (*norms, *after) if row.modelled_bytes > 0]
    normalised = _gain_to(
        sum(row.time_us for row in known),
        sum(_bytes_us(view, _fused_bytes(row, cache)) for row in known) / FUSED_BEST,
    )
    told = f", and {_share(view, known, step)} normalise them, where no bundled kernel does so yet" if known else ""
    return Change(
        worst=Saving(),
        best=Saving(
            device_us=CONCAT_MERGED * sum(row.time_us for row in found) + normalised,
            host_us=launches(found) * OP_LOW_US,
        ),
        basis=f"{_share(view, found, step)} are concatenations and sums of gradients, which go{told}",
    )


def _squeeze_excite(view: View) -> list[KernelRow]:
    blocks = view.squeeze_excite_blocks()
    return [row for row in view.rows if row.module in blocks or parent(row.module) in blocks]


def _depthwise(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.depthwise), view.rows))


def _first_convolution(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.in_channels == 3), view.rows))


def _grouped(view: View) -> list[KernelRow]:
    return list(filter(view.conv(lambda g: g.grouped), view.rows))


def _pointwise(view: View) -> list[KernelRow]:
    return list(filter(pointwise_before_norm(view), view.rows))


def _bias_and_activation(view: View) -> list[KernelRow]:
    containers = view.normalised_containers()
    return [row for row in view.rows if view.is_unnormed(row, containers)]


def _compile(graphs: bool) -> _Predictor:
    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        if view.profile.model.compiled:
            return _nothing("the script already compiles its model")
        containers = view.normalised_containers()
        chosen = [row for row in view.rows if row.kind in ("norm", "reduce", "layout", *_POINTWISE) and _trained(row)]
        best = 0.0
        for row in chosen:
            merged = row.kind == "layout" or view.is_after_norm(row, containers)
            limit = _limit(view, row, dtype=_own_dtype(row)) / COMPILED_BEST
            # What one loop has in a CPU's cache the next one reads there, whatever memory's bandwidth is.
            best += row.time_us if merged or not view.on_gpu else _gain_to(row.time_us, limit)
        # Fused groups keep about one kernel in three: normalise, add and activate become one.
        fewer = launches(chosen) * 2 / 3 * OP_LOW_US if view.on_gpu else 0.0
        replayed = graphs and view.on_gpu
        bound = (
            f"at {percent_text(COMPILED_BEST)} of bandwidth at best"
            if view.on_gpu
            else "all of it in the caches at best"
        )
        basis = f"{_share(view, chosen, step)} normalise, activate or convert, {bound}"
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
            basis=f"{basis}; {step.gaps_us:.0f} us of launch gaps replayed as a graph" if replayed else basis,
        )

    return predictor


def _cuda_graphs(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    facts = view.profile.model
    if facts.graphed:
        return _nothing("the script already replays CUDA graphs")
    if not facts.fixed_shapes:
        return _nothing("input shapes change, so no one graph fits")
    # Forward and backward of the model are captured; loss, metrics and optimizer are launched one by one as before.
    captured = launches(
        row for row in view.rows if row.phase != "optimizer" and (row.module or row.phase == "backward")
    )
    every = launches(view.rows)
    if captured <= 0:
        return _nothing("no kernel of a module was traced")
    # At worst the host is spared no more than issuing the captured operators takes; what else it does in a step (the loop, the
    # loader's hand-over, metrics, the optimizer) stays. Two small nets on one H200, idle for 67 % of the step, saved 25 %.
    least = max(0.0, captured * (OP_LOW_US - GRAPH_NODE_US))
    return Change(
        worst=Saving(
            gaps_us=min(least, max(0.0, step.gaps_us * captured / every - captured * GRAPH_NODE_WORST_US)),
            host_us=min(least, step.host_high_us),
            host_closes_gaps=False,
        ),
        # One launch after a wait instead of hundreds: the idle after a wait goes as well.
        best=Saving(gaps_us=step.gaps_us, sync_us=step.sync_us, host_us=step.host_low_us),
        basis=(
            f"the device is idle {step.gaps_us:.0f} us a step between launches and {step.sync_us:.0f} us after waits; "
            f"{captured:.0f} of {every:.0f} kernels are replayed, at up to {GRAPH_NODE_WORST_US:.2g} us each"
        ),
    )


_PREDICTORS: dict[str, _Predictor] = {
    "amp_bf16": _autocast("bf16"),
    "amp_fp16": _autocast("fp16"),
    "tf32": _tf32,
    "channels_last": _channels_last,
    "cudnn_benchmark": _cudnn_benchmark,
    "fused_optimizer": _fused_optimizer,
    "fused_casts": _fused_casts,
    "set_to_none": _set_to_none,
    "conv_bias": _conv_bias,
    "prefetch": _prefetch,
    "loader_workers": _loader_workers,
    "uint8_batches": _uint8_batches,
    "defer_sync": _defer_sync,
    "fused_bn_act": _fused_bn_act,
    "fused_bn_concat": _fused_bn_concat,
    "fused_bn_max_pool": _kernel_family(_of(lambda row: row.kind == "pool"), "pooling", merged=POOL_MERGED),
    "fused_pooling": _kernel_family(_of(lambda row: row.kind == "pool"), "pooling"),
    "fused_upsample": _kernel_family(_of(lambda row: row.kind in ("upsample", "concat")), "upsampling and its concat"),
    "fused_layer_norm": _kernel_family(_of(is_layernorm), "layer normalisation"),
    "fused_group_norm": _kernel_family(_of(is_groupnorm), "group normalisation"),
    "fused_squeeze_excite": _kernel_family(_squeeze_excite, "squeeze-and-excite", merged=SQUEEZE_EXCITE_MERGED),
    "fused_bias_act": _kernel_family(
        _bias_and_activation, "activation and addition outside of norms", merged=BIAS_ACT_MERGED
    ),
    "depthwise_conv": _kernel_family(_depthwise, "depthwise convolutions"),
    "first_conv": _kernel_family(_first_convolution, "convolutions of three channels", most=FIRST_CONV_BEST),
    "grouped_conv": _kernel_family(_grouped, "grouped convolutions"),
    "pointwise_conv": _kernel_family(_pointwise, "1x1 convolutions before batch norms", merged=POINTWISE_MERGED),
    "compile": _compile(graphs=False),
    "compile_max_autotune": _compile(graphs=True),
    "cuda_graphs": _cuda_graphs,
}
_NEEDS_GPU = frozenset(
    (
        *("amp_fp16", "tf32", "cudnn_benchmark", "fused_casts", "prefetch", "defer_sync", "cuda_graphs"),
        *("fused_bn_act", "fused_bn_concat", "fused_bn_max_pool", "fused_pooling", "fused_upsample"),
        *("fused_layer_norm", "fused_group_norm", "uint8_batches"),
        *("fused_squeeze_excite", "fused_bias_act", "depthwise_conv", "first_conv", "grouped_conv"),
        "pointwise_conv",
    )
)
