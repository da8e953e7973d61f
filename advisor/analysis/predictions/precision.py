"""Half precision and TF32."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from advisor.analysis.memory import BYTES
from advisor.analysis.predictions.basis import (
    MATRIX_BEST,
    MATRIX_WORST,
    POINTWISE_BEST,
    POINTWISE_WORST,
    Predictor,
    bytes_us,
    gain_to,
    is_nhwc,
    issued,
    limit_us,
    nothing,
    share,
    trained,
    without_tensor_cores,
)
from advisor.analysis.rows import HALF, MATRIX, SINGLE, is_strict_fp32
from advisor.analysis.view import View
from advisor.analysis.whatif import OP_HIGH_US, Change, Saving, Step
from advisor.core.profile import KernelRow

# On a CPU, of a call of a convolution or product, µs: what no shorter multiplication saves (its preparation, weights in another order), and
# what autocast adds at most (casts of weights, activations and gradients, calls that are slower in bf16). By turns on four cores of a
# Xeon that multiplies bf16 three times as fast as fp32: 14 trainings with calls of 0.14 to 0.8 ms lost up to 106 µs a call, or gained 46 %
# of the step where calls are long. Depthwise ones lose half their time more.
CPU_CALL_US, CPU_CAST_US = 100.0, 100.0
CPU_DEPTHWISE_LOSS = 0.5
# Half precision in NCHW made MobileNetV3-Large slower on one H200: 87.4 ms in fp32, 101 ms in bf16.
DEPTHWISE_HALF_NCHW_LOSS = 0.16
# Kinds whose kernels move their tensors once and compute little, so that half the bytes take half the time.
_STREAMING = ("activation", "elementwise", "pool", "upsample", "concat", "dropout", "copy", "layout")


def autocast(dtype: str) -> Predictor:
    """Matrix products at the rate of `dtype`, half the bytes for the rest, and the casts that come with it."""

    def predictor(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
        facts = view.profile.model
        if facts.autocast or facts.parameter_dtype in HALF:
            return nothing("the script already computes in half precision")
        single = [row for row in view.rows if row.dtype in (*SINGLE, "") and trained(row)]
        matrix = [row for row in single if row.kind in MATRIX and not without_tensor_cores(view, row)]
        if not matrix:
            return nothing("no fp32 convolution or matrix product in the step")
        rates = view.profile.environment.matrix_tflops
        if rates.get(dtype, 0.0) <= 0 or rates.get("fp32", 0.0) <= 0:
            return None
        ratio = rates[dtype] / rates["fp32"]
        streamed = [row for row in single if row.kind in (*_STREAMING, "norm") or without_tensor_cores(view, row)]
        best = worst = 0.0
        if view.on_gpu:
            for row in matrix:
                saved = _half_matrix(view, row, dtype, ratio)
                worst, best = worst + saved[0], best + saved[1]
        else:
            worst, best = _half_on_cpu(view, matrix, ratio, step.scale)
        for row in streamed:
            best += row.time_us / 2
            # bf16 batch norm runs kernels of its own, which may be no faster than fp32's (cuDNN serves fp16 in NHWC:
            # ResNet-50 took 41.5 ms in fp16 and 54.8 in bf16 on one H200); layout kernels may multiply.
            slow = row.kind in ("layout", "conv") or (
                row.kind == "norm" and not (dtype == "fp16" and is_nhwc(view, row))
            )
            if view.on_gpu and not slow:
                worst += row.time_us * max(0.0, 1 - 0.5 * POINTWISE_BEST / POINTWISE_WORST)
        weights = facts.parameters * BYTES["fp32"]
        cast = bytes_us(view, weights * 3)  # a weight read as 4 and written as 2 bytes, its gradient the other way
        if dtype == "fp16":
            worst -= bytes_us(view, weights * 2)  # GradScaler reads and writes all gradients once more
        if view.on_gpu and not facts.channels_last and view.share(view.conv(lambda g: g.depthwise)) > 0:
            worst -= DEPTHWISE_HALF_NCHW_LOSS * view.device_us
        casts = 2 * issued(view, [row for row in matrix if row.phase == "forward"])
        host = casts * OP_HIGH_US if view.on_gpu else 0.0
        basis = (
            f"{share(view, matrix, step)} at the measured {dtype} rate of {rates[dtype]:.3g} TFLOP/s; "
            f"half the bytes for {share(view, streamed, step)}"
        )
        if weights:
            basis += f"; casts of {facts.parameters / 1e6:.1f} M parameters added"
        return Change(
            worst=Saving(device_us=worst - cast, host_us=-host),
            best=Saving(device_us=best - cast),
            basis=basis,
        )

    return predictor


amp_bf16, amp_fp16 = autocast("bf16"), autocast("fp16")


def guides_bf16(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """As `amp_bf16` in NHWC, of the models that run without gradients."""
    facts = replace(view.profile.model, autocast="", channels_last=True, parameters=0)
    rows = (replace(row, layout="nhwc") if row.kind == "conv" else row for row in view.of_guides().rows)
    silent = replace(view, profile=replace(view.profile, model=facts), rows=tuple(rows))
    return amp_bf16(silent, step, parameters)


def _half_matrix(view: View, row: KernelRow, dtype: str, ratio: float) -> tuple[float, float]:
    """Worst and best saving of one fp32 convolution or product in half precision."""
    limit = limit_us(view, row, dtype=dtype, byte_factor=0.5)
    if limit <= 0:
        return (0.0, row.time_us * max(0.0, 1 - 1 / ratio))
    if row.kind != "conv" or is_nhwc(view, row):
        return (gain_to(row.time_us, limit / MATRIX_WORST), gain_to(row.time_us, limit / MATRIX_BEST))
    # In NCHW cuDNN converts half-precision tensors around its NHWC kernels: what the convolution reads and writes is read
    # and written once more at least, and at worst that costs all that was gained.
    converted = bytes_us(view, row.modelled_bytes) / POINTWISE_BEST
    return (0.0, gain_to(row.time_us, limit / MATRIX_BEST + converted))


def _half_on_cpu(view: View, matrix: Sequence[KernelRow], ratio: float, scale: float) -> tuple[float, float]:
    """Worst and best saving of all of them on a CPU, in traced time. A slower rate is a loss; a faster one helps in long calls alone."""
    calls: dict[tuple[str, str, str], float] = {}
    times: dict[tuple[str, str, str], float] = {}
    for row in matrix:  # one call may be rows of several operators
        key = (row.module, row.phase, "" if row.module else row.source)
        calls[key] = max(calls.get(key, 0.0), row.calls)
        times[key] = times.get(key, 0.0) + row.time_us
    faster = 1 - 1 / ratio
    if faster <= 0:
        return faster * sum(times.values()), 0.0
    shrinking = sum(max(0.0, time - calls[key] * CPU_CALL_US / scale) for key, time in times.items())
    depthwise = sum(row.time_us for row in matrix if (found := view.geometry(row)) is not None and found.depthwise)
    lost = sum(calls.values()) * CPU_CAST_US / scale + CPU_DEPTHWISE_LOSS * depthwise
    return -lost, faster * shrinking


def tf32(view: View, step: Step, parameters: Mapping[str, str]) -> Change | None:
    """Matrix products in strict fp32 at the rate of TF32."""
    chosen = [
        row
        for row in view.rows
        if row.kind in MATRIX and is_strict_fp32(row) and trained(row) and not without_tensor_cores(view, row)
    ]
    if not chosen:
        return nothing("no convolution or product computes in strict fp32")
    rate = view.profile.environment.matrix_tflops.get("tf32", 0.0)
    if rate <= 0:
        return None
    worst = best = 0.0
    for row in chosen:
        limit = limit_us(view, row, dtype="tf32")
        best += gain_to(row.time_us, limit / MATRIX_BEST)
        converted = 0.0 if row.kind != "conv" or is_nhwc(view, row) else 2 * bytes_us(view, row.modelled_bytes)
        worst += gain_to(row.time_us, limit / MATRIX_WORST + converted) if limit > 0 else 0.0
    basis = f"{share(view, chosen, step)} in strict fp32, at the measured TF32 rate of {rate:.3g} TFLOP/s"
    return Change(worst=Saving(device_us=worst), best=Saving(device_us=best), basis=basis)
