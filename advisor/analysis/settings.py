"""Which settings of torch, of the environment and of the host keep the machine from what it can do."""

from __future__ import annotations

from collections.abc import Mapping

from advisor.analysis import rows
from advisor.analysis.rows import HALF, MATRIX, is_own
from advisor.analysis.view import View
from advisor.analysis.whatif import Change, Saving, Step
from advisor.core.metrics import MetricTable
from advisor.core.provenance import Provenance

# Share of its roofline limit that cuDNN's fp32 and TF32 convolutions reach at worst and at best, and its batch norms. On one H200, whole
# trainings in NCHW: convolutions 16 to 30 %, norms 10 to 20 %; in NHWC up to 60 and 70 %.
CONV_WORST, CONV_BEST, NORM_BEST = 0.1, 0.6, 0.7
# Variables that slow a training down, with the values that do.
_SLOWING: Mapping[str, frozenset[str]] = {
    "PYTORCH_NO_CUDA_MEMORY_CACHING": frozenset({"1"}),
    "TORCH_CUDNN_V8_API_DISABLED": frozenset({"1"}),
    "CUDNN_LOGLEVEL_DBG": frozenset({"2", "3"}),
    "NVIDIA_TF32_OVERRIDE": frozenset({"0"}),
    # 128 KiB and nothing, where cuBLAS takes 32 MiB on Hopper; ":4096:8" is as deterministic.
    "CUBLAS_WORKSPACE_CONFIG": frozenset({":16:8", ":0:0"}),
}
_SLOWING_IN_GROUPS: Mapping[str, frozenset[str]] = {
    "NCCL_P2P_DISABLE": frozenset({"1"}),
    "NCCL_IB_DISABLE": frozenset({"1"}),
    "NCCL_DEBUG": frozenset({"TRACE", "INFO"}),
}
# Of the device's memory, in tensors: what the allocator only keeps it gives back for a workspace.
FULL = 0.93


def fill(view: View, table: MetricTable) -> None:
    """Set flags, threads, the half precision in use with its rate here, and what limits workspaces."""
    facts, machine = view.profile.model, view.profile.environment
    if "cudnn_enabled" in facts.flags:
        table.set("cudnn_enabled", facts.flags["cudnn_enabled"])
    else:
        table.miss("cudnn_enabled", "the script's backend flags were not read")
    if facts.cpu_threads:
        table.set("cpu_threads", facts.cpu_threads)
        if machine.core_count:
            table.set("threads_per_core", facts.cpu_threads / machine.core_count)
    slowing = {**_SLOWING, **(_SLOWING_IN_GROUPS if facts.world_size > 1 else {})}
    table.set("slowing_variables", ", ".join(n for n, values in slowing.items() if facts.env.get(n) in values))
    table.set("workspace_limit", _workspace_limit(view))
    _half(view, table)
    if view.on_gpu:
        _without_cudnn(view, table)


def _half(view: View, table: MetricTable) -> None:
    half = [row for row in view.rows if row.kind in MATRIX and row.dtype in HALF]
    if not half:
        facts = view.profile.model
        asked = facts.autocast or facts.parameter_dtype
        table.set("half_dtype", asked if asked in HALF else "")
        table.miss("half_speed", "no product runs in half precision")
        return
    time = {dtype: sum(row.time_us for row in half if row.dtype == dtype) for dtype in HALF}
    dtype = max(time, key=lambda name: time[name])
    table.set("half_dtype", dtype)
    rates, flags = view.profile.environment.matrix_tflops, view.profile.model.flags
    single = max(rates.get("fp32", 0.0), rates.get("tf32", 0.0) if flags.get("tf32_conv") else 0.0)
    if rates.get(dtype, 0.0) > 0 and single > 0:
        table.set("half_speed", rates[dtype] / single, Provenance.MODELLED, "rates of large products, measured here")
    else:
        table.miss("half_speed", f"needs measured {dtype} and fp32 matrix rates")


def _without_cudnn(view: View, table: MetricTable) -> None:
    names = ("cudnn_off_saved_low", "cudnn_off_saved_high")
    step = Step.of(view)
    if view.profile.model.flags.get("cudnn_enabled", True) or step is None:
        for name in names:
            table.miss(name, "cuDNN is not switched off" if step is not None else "no step was timed, or none traced")
        return
    # What is computed for a convolution without cuDNN: its matrix products, and the copies of patches around them.
    convs = [row for row in view.rows if not is_own(row) and (row.kind == "conv" or "convolution" in row.op)]
    norms = [row for row in view.rows if rows.is_batchnorm(row) and not is_own(row)]
    spent, limit = sum(row.time_us for row in convs), sum(row.limit_us for row in convs)
    # Without cuDNN a convolution is a product or two a sample: nearly all of the host's launches are theirs.
    host = rows.launches(convs) / max(1.0, view.profile.launches)
    normed, norms_limit = sum(row.time_us for row in norms), sum(row.limit_us for row in norms)
    gain = step.gain(
        Change(
            worst=Saving(
                device_us=max(0.0, spent - limit / CONV_WORST),
                host_us=host * step.host_high_us,
                host_closes_gaps=False,
            ),
            best=Saving(
                device_us=max(0.0, spent - limit / CONV_BEST) + max(0.0, normed - norms_limit / NORM_BEST),
                gaps_us=step.gaps_us,
                host_us=host * step.host_low_us,
            ),
            basis="",
        )
    )
    for name, value in zip(names, (max(0.0, gain.low), gain.high), strict=True):
        table.set(name, value, Provenance.MODELLED, "convolutions at what cuDNN reaches of their limit elsewhere")


def _workspace_limit(view: View) -> str:
    facts, memory = view.profile.model, view.profile.memory
    if facts.env.get("CUDNN_CONV_WSCAP_DBG"):
        return f"CUDNN_CONV_WSCAP_DBG={facts.env['CUDNN_CONV_WSCAP_DBG']} caps cuDNN's workspace"
    if memory.retries:
        return "the allocator had to give memory back to make room"
    if memory.total_bytes and memory.peak_allocated_bytes > FULL * memory.total_bytes:
        return "the GPU's memory is full"
    return ""
