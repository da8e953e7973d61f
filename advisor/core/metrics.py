"""The vocabulary that analysis writes and rules read: every metric, its type, unit and meaning, in one list.

A metric without a value is missing with a reason; it is never guessed and never zero by default.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from advisor.core.provenance import Provenance

Scalar = float | str | bool


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`kind` is number, text or flag. `unit` is frac, us, bytes, gbps, count, percent_c, watt, mhz, tflops or ""."""

    name: str
    kind: str
    unit: str
    doc: str
    needs: str = ""  # what a machine must offer for it to be known
    section: str = ""  # what it is about
    gathered: str = ""  # by what means, in words
    provenance: tuple[Provenance, ...] = (Provenance.MEASURED,)  # those that a value of it can have

    @property
    def of_device_time(self) -> bool:
        """It is a share of the time in which the device works, not of the step."""
        return self.doc.startswith(("share of device time", "share of device (CPU: operator) time"))


@dataclass(frozen=True, slots=True)
class _Section:
    """Holds for the metrics listed behind it: what they are about, and how they are gathered."""

    title: str
    gathered: str


def _n(name: str, unit: str, doc: str, needs: str = "") -> MetricSpec:
    return MetricSpec(name, "number", unit, doc, needs)


def _t(name: str, doc: str) -> MetricSpec:
    return MetricSpec(name, "text", "", doc)


def _f(name: str, doc: str, needs: str = "") -> MetricSpec:
    return MetricSpec(name, "flag", "", doc, needs)


def _saved(name: str, what: str) -> tuple[MetricSpec, MetricSpec]:
    return (
        _n(f"{name}_saved_low", "frac", f"share of the step that {what} saves at least"),
        _n(f"{name}_saved_high", "frac", f"share of the step that {what} saves at most"),
    )


_GPU, _GPM, _DRAM = "a CUDA GPU", "NVML GPM (Hopper or newer)", "hardware counters or NVML GPM"

_LISTED: tuple[MetricSpec | _Section, ...] = (
    _Section(
        "the machine",
        "asked of the driver, the libraries and /proc; rates timed once on this machine; clocks, power and temperature sampled every 0.12 s (NVML)",
    ),
    _f("on_gpu", "the training step ran on a CUDA GPU"),
    _n("arch", "count", "compute capability times ten (90 for sm_90)", _GPU),
    _n("gpu_count", "count", "GPUs visible to the script"),
    _n("cpu_count", "count", "CPU cores available"),
    _n("cpu_threads", "count", "threads that torch's operators on a CPU may use"),
    _n("threads_per_core", "count", "these, for each physical core available"),
    _n("cpu_others_frac", "frac", "CPU time of other processes on the cores available, over wall time and cores"),
    _n("cores_free_frac", "frac", "time of the cores available in which neither the script nor others used them"),
    _t("slowing_variables", "environment variables that are set and make a training slower, empty if none"),
    _f("bf16_supported", "this device computes bf16 products faster than fp32 ones (measured; no GPU before Ampere)"),
    _f("torch_compile_available", "a backend compiler for torch.compile is present"),
    _f("cupy_available", "CuPy is installed, so bundled kernels can run"),
    _n("copy_gbps", "gbps", "measured copy bandwidth, read plus written"),
    _f("gpu_shared", "another process used this GPU during the run", "a CUDA GPU"),
    _n("gpu_temperature", "percent_c", "median GPU temperature in degrees Celsius", _GPU),
    _n("throttled_frac", "frac", "share of samples with a thermal or power-brake throttle reason", _GPU),
    _n("power_capped_frac", "frac", "share of samples in which the software power cap held clocks down", _GPU),
    _n("clock_frac", "frac", "median SM clock over the maximum SM clock", _GPU),
    _n("clock_drift_frac", "frac", "SM clock, first to last quarter of the run, relative change", _GPU),
    _n("power_w", "watt", "median board power", _GPU),
    _n("power_frac", "frac", "median board power over its limit", _GPU),
    _n("host_swap_frac", "frac", "swap in use over host memory"),
    _Section(
        "the step",
        "wall clock at step boundaries, on a GPU CUDA events recorded there, with no profiler on; the limit from bytes and flops over measured rates",
    ),
    _n("step_us", "us", "median step time, no profiler on"),
    _n("step_spread_frac", "frac", "(p90 - p10) / median of step time"),
    _n("steps_measured", "count", "steps that entered the median"),
    _n("step_outlier_frac", "frac", "share of steps longer than 1.5 medians"),
    _n("epoch_frac", "frac", "share of timed steps left out as the first of an epoch or behind an evaluation"),
    _n("first_step_ratio", "count", "first step over median step"),
    _n("samples_per_s", "count", "samples per second"),
    _n("batch_size", "count", "samples per step on this rank"),
    _n("limit_us", "us", "speed of light of the step: the least time this machine needs"),
    _n("limit_frac", "frac", "limit_us over step_us: 1 is the limit"),
    _n("coverage_frac", "frac", "kernel launches with a device record in the trace", _GPU),
    _n("traced_overhead_frac", "frac", "how much slower traced steps were"),
    _Section(
        "where the time goes",
        "a short window traced with PyTorch's own tracer (Kineto); gaps in the device's work, by what the host did at that time",
    ),
    _n("work_frac", "frac", "share of the step in which work runs: the GPU's, or on a CPU that of operators"),
    _n("busy_frac", "frac", "share of the step with any device work running", _GPU),
    _n("idle_frac", "frac", "share of the step with the device idle", _GPU),
    _n("idle_data_frac", "frac", "idle while the host waited in the loader", _GPU),
    _n("idle_launch_frac", "frac", "idle while the host prepared launches", _GPU),
    _n("idle_copy_frac", "frac", "idle of compute during host/device copies", _GPU),
    _n("idle_sync_frac", "frac", "idle after the host had waited for the device", _GPU),
    _n("idle_other_frac", "frac", "idle of no known cause", _GPU),
    _n("forward_frac", "frac", "share of device time in forward"),
    _n("backward_frac", "frac", "share of device time in backward"),
    _n("optimizer_frac", "frac", "share of device time in the optimizer"),
    *(
        _n(f"{kind}_frac", "frac", f"share of device time (operator time on a CPU) in {what}")
        for kind, what in (
            ("conv", "convolutions"),
            ("depthwise", "depthwise convolutions"),
            ("grouped_conv", "grouped, not depthwise, convolutions"),
            ("large_conv", "convolutions with a kernel of 7 or more at stride 1"),
            ("first_conv", "convolutions with at most 4 input channels"),
            ("pointwise_bn", "the forward of 1x1 convolutions of stride 1 before batch norms"),
            (
                "strided_1x1",
                "1x1 convolutions of stride 2 in one group, of at most 0.6 GFLOP a launch or between few channels",
            ),
            ("narrow_3x3", "dense 3x3 stride-1 convolutions between 64 channels and 64 or 128, or between 32 and 128"),
            ("conv3x3_fp32", "3x3 stride-1 convolutions in strict fp32"),
            ("gemm", "matrix products that are no convolutions"),
            ("norm", "normalisation"),
            ("batchnorm", "batch normalisation"),
            ("groupnorm", "group or instance normalisation"),
            ("layernorm", "layer normalisation"),
            ("padding", "padding of images with their own values (reflect, replicate, circular)"),
            ("volume_pool", "pooling of volumes by a window"),
            ("prelu", "PReLU"),
            (
                "bias",
                "kernels that add convolutions' biases, and sum their gradients, where no batch or instance norm follows",
            ),
            ("activation", "activations"),
            ("elementwise", "elementwise operations, activations included"),
            ("pool", "pooling"),
            ("reduce", "reductions"),
            ("layout", "layout conversion and transposition"),
            ("cast", "dtype conversion"),
            ("weight_cast", "casts of weights to half precision and of their gradients back, one by one"),
            ("device_copy", "device-to-device copies"),
            ("memset", "fills and memsets"),
            ("upsample", "upsampling"),
            ("concat", "concatenation"),
            ("dropout", "dropout and random numbers"),
            ("loss", "the loss"),
            ("se", "squeeze-and-excite blocks"),
            ("comm", "communication"),
            ("memory_bound", "kernels whose bytes, not flops, set their limit"),
            ("bn_act", "batch normalisation with the add and activation that follow it"),
            ("bias_act", "convolution bias with the activation that follows it"),
            (
                "unnormed_elementwise",
                "activations, additions and products behind no batch norm, outside norms and squeeze-and-excite",
            ),
            ("written_norm", "normalisation written out in single operations"),
            ("index", "indexing, gather and scatter"),
        )
    ),
    _Section("launches", "the traced window: launch calls and the kernels that carry their correlation id"),
    _n("kernels_per_step", "count", "kernels per step"),
    _n("launch_us", "us", "host time in launch calls per step", _GPU),
    _n("mean_kernel_us", "us", "mean kernel duration", _GPU),
    _n("short_kernel_frac", "frac", "share of kernels shorter than 10 us", _GPU),
    _n("short_kernel_time_frac", "frac", "share of device time in kernels shorter than 10 us", _GPU),
    _n("small_grid_frac", "frac", "share of device time in kernels with fewer blocks than SMs", _GPU),
    _n("tail_wave_frac", "frac", "share of device time lost in last, partly filled waves (modelled)", _GPU),
    _n("odd_block_frac", "frac", "share of device time in kernels whose block is no multiple of 32", _GPU),
    _n("streams", "count", "streams with kernels", _GPU),
    _n("kernel_overlap_frac", "frac", "share of device time with two kernels at once", _GPU),
    _n("host_frac", "frac", "host time of the training thread outside waits, over the step"),
    _n("optimizer_host_frac", "frac", "host time in Optimizer.step outside waits, over the traced step", _GPU),
    _Section(
        "memory traffic and rates",
        "hardware counters (CUPTI) or NVML GPM where they may be read; otherwise bytes from shapes, a lower bound; efficiencies against measured rates",
    ),
    _n("dram_gb_per_step", "bytes", "DRAM bytes per step", _DRAM),
    _n("dram_frac", "frac", "DRAM bandwidth over measured copy bandwidth, whole step", _DRAM),
    _n("dram_excess_ratio", "count", "DRAM bytes over modelled minimum bytes", _DRAM),
    _n("memory_bound_efficiency", "frac", "limit over time of memory-bound kernels"),
    _n("conv_efficiency", "frac", "limit over time of convolutions"),
    _n("conv_worst_efficiency", "frac", "limit over time of the worst convolution with 2 % of the step or more"),
    _n("norm_efficiency", "frac", "limit over time of normalisation"),
    _n("depthwise_efficiency", "frac", "limit over time of depthwise convolutions"),
    _n("grouped_efficiency", "frac", "limit over time of grouped convolutions"),
    _n("pool_efficiency", "frac", "limit over time of pooling"),
    _n("upsample_efficiency", "frac", "limit over time of upsampling"),
    _n("l2_fit_frac", "frac", "share of memory-bound time on tensors that fit in L2"),
    _n("sm_active_frac", "frac", "SM activity", _GPM),
    _n("sm_occupancy_frac", "frac", "SM occupancy", _GPM),
    _n("tensor_active_frac", "frac", "tensor-core activity", _GPM),
    _n("dram_active_frac", "frac", "DRAM bandwidth utilisation", _GPM),
    _n("pcie_rx_gbps", "gbps", "PCIe bytes received per second", _GPU),
    _n("pcie_tx_gbps", "gbps", "PCIe bytes sent per second", _GPU),
    _n("gpu_busy_nvml_frac", "frac", "NVML 'utilization': share of time with any kernel running", _GPU),
    _n("cpu_util_frac", "frac", "CPU time of the script's processes over wall time and cores"),
    _Section("precision and layout", "dtypes, layouts and kernel names in the traced window; flags of the live script"),
    _n("tensor_core_frac", "frac", "share of conv and gemm time in tensor-core kernels", _GPU),
    _n("tensor_eligible_frac", "frac", "share of device time in conv and gemm"),
    _n("fp32_conv_frac", "frac", "share of device time in fp32 convolutions and products"),
    _n("guides_frac", "frac", "share of device time in models that run without gradients, such as a teacher"),
    _n("guides_fp32_frac", "frac", "share of device time in these models' fp32 convolutions and products"),
    _n("fp64_frac", "frac", "share of device (CPU: operator) time in fp64"),
    _n(
        "fp64_promotions",
        "count",
        "operations per step that compute in fp64 because one of their tensors is; 0 where the script converts to fp64 itself",
    ),
    _n("half_frac", "frac", "share of conv and gemm time in fp16 or bf16"),
    _n("half_rate_ratio", "count", "measured bf16 (else fp16) matrix rate over that of the precision now in use"),
    _n(
        "unaligned_channel_frac",
        "frac",
        "share of half-precision conv and gemm time with channels not a multiple of 8, those of images left out",
    ),
    _n("weight_casts", "count", "kernels a step that cast one weight or one weight's gradient each"),
    _t("autocast", "dtype of the script's own autocast, empty if none"),
    _f("grad_scaler", "the script uses a GradScaler"),
    _t("half_dtype", "the half precision that products and convolutions run in, empty if none"),
    _n(
        "half_speed",
        "count",
        "measured matrix rate of that half precision over that of fp32, or of TF32 where it is allowed",
    ),
    _t("parameter_dtype", "dtype of most parameters"),
    _f("tf32_conv", "cuDNN may use TF32"),
    _f("tf32_matmul", "cuBLAS may use TF32"),
    _f("channels_last", "convolution inputs are channels_last"),
    _f("weights_channels_last", "convolution weights are channels_last"),
    _n("layout_breaks", "count", "modules that are given NHWC and return NCHW, or in whose forward an operator does"),
    _t("layout_broken_by", "what these are, by class or operator, with how many of each"),
    _n("layout_kept_saved_low", "frac", "share of the step that one layout all through saves at least"),
    _n("layout_kept_saved_high", "frac", "share of the step that one layout all through saves at most"),
    _f("amp_capable_loss", "no operation was seen that autocast refuses"),
    _Section("convolutions", "convolution modules and calls of the live model; times from the traced window"),
    _n("conv_count", "count", "convolutions in a step"),
    _n("conv_bias_bn_count", "count", "convolutions with a bias directly before a batch norm"),
    _n("grouped_conv_share", "frac", "share of convolution modules that are grouped or depthwise"),
    _n("max_conv_kernel", "count", "largest convolution kernel extent"),
    _n(
        "conv_backward_frac",
        "frac",
        "share of device time in libraries' kernels for convolutions' gradients",
        _GPU,
    ),
    _n("conv_backward_us", "us", "mean duration of one of these", _GPU),
    _n("transposed_conv_frac", "frac", "share of device time in transposed convolutions"),
    _f("cudnn_enabled", "torch.backends.cudnn.enabled"),
    _n("cudnn_off_saved_low", "frac", "share of the step that cuDNN would save at least, as it is switched off", _GPU),
    _n("cudnn_off_saved_high", "frac", "share of the step that cuDNN would save at most, as it is switched off", _GPU),
    _t(
        "workspace_limit",
        "what keeps convolutions from algorithms with a large workspace, empty if nothing is known to",
    ),
    _f("cudnn_benchmark", "torch.backends.cudnn.benchmark"),
    _f("cudnn_deterministic", "torch.backends.cudnn.deterministic"),
    _f("fixed_shapes", "input shapes did not change between measured steps"),
    _n("winograd_eligible_frac", "frac", "share of device time in strict-fp32 3x3 stride-1 dense convolutions"),
    _n("fft_eligible_frac", "frac", "share of device time in dense fp32 convolutions with a kernel of 9 or more"),
    _Section("model graph", "the live model's modules, and switches of torch read in the script's process"),
    _n("bn_count", "count", "batch-norm modules"),
    _n("bn_act_count", "count", "batch norms directly followed by (an add and) an activation"),
    _n("sync_bn_count", "count", "SyncBatchNorm modules"),
    _n("se_count", "count", "squeeze-and-excite blocks"),
    _f("dropout", "dropout is active"),
    _f("compiled", "the model, or a part of it, is compiled"),
    _f("graphed", "the script replays CUDA graphs"),
    _f("create_graph", "backward(create_graph=True): gradients in .grad hold the graph they were made by"),
    _f("clips_scaled", "gradients are clipped while they are multiplied by a loss scale"),
    _f("anomaly_mode", "autograd anomaly detection is on"),
    _f("deterministic_algorithms", "torch.use_deterministic_algorithms is on"),
    _f("checkpointing", "activation checkpointing re-runs forward work in backward"),
    _n("graph_breaks", "count", "Dynamo graph breaks per compiled frame"),
    _n("recompiles", "count", "Dynamo recompilations after warm-up"),
    _n(
        "recompile_frac",
        "frac",
        "time in which Dynamo recompiled, over the timed steps (steps that compiled included)",
    ),
    _t("recompiled", "functions that Dynamo recompiled after warm-up, the longest first"),
    _f("optimizer_compiled", "the optimizer's step is inside a compiled function"),
    _Section("optimizer", "the live optimizer, and its kernels and calls in the traced window"),
    _t("optimizer", "class name of the optimizer with most parameters"),
    _f("optimizer_fused", "fused=True"),
    _f("optimizer_foreach", "multi-tensor implementation in use"),
    _f("zero_grad_to_none", "gradients are set to None, not zeroed"),
    _f("grad_clipping", "gradients are clipped"),
    _f("ema", "a moving average of the weights is kept: a second copy, written from them and itself"),
    _n("average_frac", "frac", "share of device (CPU: operator) time in averaging weights"),
    _n("average_calls", "count", "operations per step that average one tensor of the weights each"),
    _n("accumulation", "count", "backward passes per optimizer step"),
    _n("optimizer_kernels", "count", "optimizer kernels per step"),
    _n(
        "own_optimizer_calls",
        "count",
        "operations per step on one tensor each, of an update that is no code of torch.optim's",
    ),
    _Section(
        "input",
        "the live data loader; time in its next() by wall clock with no profiler on; copies from the traced window",
    ),
    _t("loader", "class of the data loader, empty if none"),
    _n("loader_frac", "frac", "time in the loader's next() over the step"),
    _n("loader_us", "us", "time in the loader's next() per step"),
    _n("loader_late_frac", "frac", "time in the loader's next() for batches that were not there yet, over the step"),
    _n(
        "data_wait_frac",
        "frac",
        "share of the step that waits for data: the GPU idle in the loader's next(); of a CPU, or untraced, the time in next()",
    ),
    _n(
        "epoch_start_us",
        "us",
        "time of an epoch's start beyond an ordinary batch: making the iterator, its first batch, its end",
    ),
    _n("epoch_batches", "count", "batches that the training draws from an iterator of its loader"),
    _n("epoch_start_frac", "frac", "these starts, over the steps together with them"),
    _n("epoch_make_frac", "frac", "of that, what is no batch: workers that start and end"),
    _t("workers_restarted_by", "why the loader's workers start again each epoch, empty if they do not"),
    _n("iterators_per_step", "count", "iterators of the loader that are made, a step"),
    _n("workers", "count", "DataLoader workers"),
    _n("workers_per_core", "count", "DataLoader workers for each core available"),
    _f("pin_memory", "batches are pinned"),
    _f("persistent_workers", "workers persist over epochs"),
    _n("prefetch_factor", "count", "batches prefetched per worker"),
    _n("h2d_frac", "frac", "host-to-device copy time over the step", _GPU),
    _n("h2d_overlap_frac", "frac", "share of host-to-device copy time beside kernels", _GPU),
    _n("h2d_pageable_frac", "frac", "share of host-to-device bytes from pageable memory", _GPU),
    _n("h2d_gbps", "gbps", "host-to-device bandwidth while copying", _GPU),
    _n("h2d_copies", "count", "host-to-device copies per step", _GPU),
    _n("d2h_copies", "count", "device-to-host copies per step", _GPU),
    _n("d2h_bytes", "bytes", "bytes copied from device to host per step", _GPU),
    _n("h2d_bytes", "bytes", "bytes copied from host to device per step", _GPU),
    _f("moved_unchanged", "batches are moved to the GPU as the loader yields them"),
    _n("input_fp32_bytes", "bytes", "bytes per batch copied as fp32"),
    _t(
        "normalise",
        "the data set's transforms that turn 8-bit images into normalised fp32, empty if none were recognised",
    ),
    _n("normalise_us", "us", "time that these take one loader worker for a batch, timed on one random image"),
    _n("normalise_frac", "frac", "that time, shared by the workers, over the step"),
    _n(
        "batch_made_us", "us", "time in which one process of the loader makes a batch: a worker, or the training thread"
    ),
    _t("loader_work", "what that process does in this time, by samples of its stack: decode 56 %, resize 36 %"),
    _t("gpu_work", "of that, what a GPU can do for whole batches of 8-bit images, empty if nothing"),
    _n("gpu_work_frac", "frac", "the share of that in the time of a batch"),
    _Section("synchronisation", "the traced window: calls in which the host waits, with the line that made them"),
    _n("syncs_per_step", "count", "host waits for the device per step", _GPU),
    _n("sync_wait_frac", "frac", "host time waiting for the device over the step", _GPU),
    _n("item_syncs", "count", "`.item()` and other scalar reads per step", _GPU),
    _n("pageable_syncs", "count", "pageable copies to the device that block the host, per step", _GPU),
    _n(
        "fetch_idle_frac",
        "frac",
        "share of the step with the device idle while results are fetched and worked on",
        _GPU,
    ),
    _n("fetch_wait_frac", "frac", "host time waiting for results that it fetches, over the step", _GPU),
    _n("fetch_saved_low", "frac", "share of the step that keeping results on the device saves at least", _GPU),
    _n("fetch_saved_high", "frac", "share of the step that keeping results on the device saves at most", _GPU),
    _n("explicit_syncs", "count", "torch.cuda.synchronize calls per step", _GPU),
    _n("nonzero_syncs", "count", "data-dependent shapes (nonzero, masks) per step", _GPU),
    _f("launch_blocking", "CUDA_LAUNCH_BLOCKING is set", "a CUDA GPU"),
    _Section("memory", "PyTorch's allocator; on a CPU the process's resident memory"),
    _n("peak_memory_frac", "frac", "peak reserved memory over the device's memory", _GPU),
    _n("peak_allocated_bytes", "bytes", "peak allocated memory"),
    _n("reserved_ratio", "count", "peak reserved over peak allocated", _GPU),
    _n("device_allocs", "count", "cudaMalloc calls per step after warm-up", _GPU),
    _n("allocs_per_step", "count", "allocator requests per step"),
    _n("parameter_bytes", "bytes", "bytes of parameters"),
    _n("state_bytes", "bytes", "parameters, gradients and optimizer state"),
    _n("activation_bytes", "bytes", "peak allocated minus state"),
    _n(
        "memory_growth_bytes",
        "bytes",
        "growth per step of allocated device memory; on a CPU of the process's own, heap or resident",
    ),
    _f("memory_growth_steady", "it grew all through the timed steps, at about one rate"),
    _n("memory_full_us", "us", "time until that memory is full, at this rate"),
    _n("host_growth_bytes", "bytes", "steady growth per step of the process's host memory; 0 where it does not grow"),
    _n("host_full_us", "us", "time until the host's free memory is taken, at this rate"),
    _n("gc_calls", "count", "full collections of Python's garbage per step"),
    _n("gc_us", "us", "host time in them per step"),
    _n("alloc_retries", "count", "allocator retries after warm-up (cache flushed to make room)", _GPU),
    _n("empty_cache_calls", "count", "torch.cuda.empty_cache calls per step", _GPU),
    _Section("many GPUs", "the process group and wrappers of the live script; communication from the traced window"),
    _n("world_size", "count", "processes in the job"),
    _f("data_parallel", "nn.DataParallel is used"),
    _n(
        "data_parallel_frac",
        "frac",
        "host time in which nn.DataParallel looks where its tensors lie, over the step",
        _GPU,
    ),
    _t("distributed", "ddp, fsdp or empty"),
    _t("dist_backend", "process-group backend"),
    _n("comm_exposed_frac", "frac", "communication not hidden behind kernels, over the step", _GPU),
    _f("find_unused_parameters", "DDP searches for unused parameters"),
    _f("no_sync", "some backward passes of DDP run inside no_sync()"),
    _Section("CuPy and custom kernels", "kernels in the traced window by the library that launched them"),
    _f("uses_cupy", "the script imports CuPy"),
    _f("cupy_alone", "the training loop is CuPy's, without PyTorch"),
    _n("cupy_kernel_frac", "frac", "share of device time in CuPy kernels", _GPU),
    _n("cupy_kernels_made", "count", "kernel objects that a CuPy loop makes per step, whatever their source"),
    _n("cupy_compiles", "count", "modules of compiled kernels that a CuPy loop loads per step", _GPU),
    _f("cupy_pool", "arrays of a CuPy loop come from a memory pool"),
    _n("cupy_columns_frac", "frac", "share of device time in which a CuPy loop turns images into columns or back"),
    _n("cupy_scatter_frac", "frac", "share of device time in a CuPy loop's additions at indices"),
    _n("cupy_sums_frac", "frac", "share of device time in a CuPy loop's sums, means and variances"),
    _n("cupy_raw_frac", "frac", "share of device time in a CuPy loop's own RawKernels"),
    _n(
        "cupy_passes_frac",
        "frac",
        "share of device time in a CuPy loop's elementwise operations, casts and reductions, each a pass of its own",
    ),
    _n("custom_kernel_frac", "frac", "share of device time in kernels that belong to no torch operator", _GPU),
    _n("advisor_kernel_frac", "frac", "share of device time in advisor's own kernels", _GPU),
    _Section(
        "what cures by hand save",
        "from the rows and host times of the traced window, on a model of the step: its device work, its host work and its waits",
    ),
    *_saved("average", "averaging the weights by multi-tensor calls, in place of a loop over tensors"),
    _n(
        "fresh_fill_frac",
        "frac",
        "share of device time in fills of memory that was just allocated, as under deterministic algorithms",
    ),
    _n("untrained_frac", "frac", "share of device time in backward of modules whose parameters no optimizer holds"),
    *_saved("untrained", "computing no gradients for parameters that no optimizer holds"),
    *_saved("anomaly", "switching anomaly detection off"),
    *_saved("deterministic", "letting go of deterministic algorithms, or of what they fill,"),
    *_saved("empty_cache", "taking torch.cuda.empty_cache out of the loop"),
    *_saved("gc", "taking collections of Python's garbage out of the loop"),
    *_saved("fp64", "computing in fp32 what is computed in fp64"),
    *_saved("own_optimizer", "updating weights by multi-tensor calls, in place of the script's own loop over tensors"),
)

# Computed from shapes, dtypes, class names or rates, where all others are read from a clock, a counter or the script's own state.
_MODELLED = frozenset(
    (
        *(
            "limit_us",
            "limit_frac",
            "memory_full_us",
            "host_full_us",
            "half_rate_ratio",
            "tail_wave_frac",
            "host_frac",
            "l2_fit_frac",
            "dram_excess_ratio",
        ),
        *("memory_bound_frac", "weight_cast_frac", "weight_casts", "se_frac", "bn_act_frac", "bias_act_frac"),
        *("unnormed_elementwise_frac", "written_norm_frac", "bn_act_count", "state_bytes", "activation_bytes"),
        *(f"{kind}_efficiency" for kind in ("memory_bound", "conv", "conv_worst", "norm", "depthwise", "grouped")),
        *("pool_efficiency", "upsample_efficiency"),
        *(
            "fetch_saved_low",
            "fetch_saved_high",
            "layout_kept_saved_low",
            "layout_kept_saved_high",
            "half_speed",
            "cudnn_off_saved_low",
            "cudnn_off_saved_high",
        ),
    )
)
# Modelled where this machine does not let them be measured.
_MODELLED_ELSE = frozenset(("data_wait_frac", "copy_gbps", "bf16_supported", "dram_gb_per_step", "dram_frac"))


def _specs() -> Iterator[MetricSpec]:
    """The metrics of `_LISTED`, each with what its section and the two sets above say of it."""
    section = _Section("", "")
    for entry in _LISTED:
        if isinstance(entry, _Section):
            section = entry
            continue
        provenance: tuple[Provenance, ...] = (
            (Provenance.MODELLED,) if entry.name in _MODELLED or "_saved_" in entry.name else (Provenance.MEASURED,)
        )
        if entry.name in _MODELLED_ELSE:
            provenance = (Provenance.MEASURED, Provenance.MODELLED)
        yield replace(entry, section=section.title, gathered=section.gathered, provenance=provenance)


SPECS: tuple[MetricSpec, ...] = tuple(_specs())
BY_NAME: dict[str, MetricSpec] = {spec.name: spec for spec in SPECS}


@dataclass(frozen=True, slots=True)
class Metric:
    """A value with its provenance, or None with the reason it is missing."""

    value: Scalar | None
    provenance: Provenance
    reason: str = ""


class MetricTable:
    """Metric name → Metric. Names outside `BY_NAME` and values of the wrong kind are refused."""

    __slots__ = ("_metrics",)

    def __init__(self) -> None:
        self._metrics: dict[str, Metric] = {}

    def set(self, name: str, value: Scalar, provenance: Provenance = Provenance.MEASURED, reason: str = "") -> None:
        """Record a value. NaN and infinities count as missing.

        Raises:
            KeyError: when `name` is not in the registry.
            TypeError: when the value's kind is not the registry's.
        """
        kind = BY_NAME[name].kind
        fits = (
            isinstance(value, bool)
            if kind == "flag"
            else isinstance(value, str)
            if kind == "text"
            else isinstance(value, (int, float)) and not isinstance(value, bool)
        )
        if not fits:
            raise TypeError(f"metric {name} is a {kind}, got {type(value).__name__}")
        if kind == "number" and not abs(float(value)) < float("inf"):
            self.miss(name, reason or "the measurement gave no finite number")
            return
        self._metrics[name] = Metric(float(value) if kind == "number" else value, provenance, reason)

    def miss(self, name: str, reason: str) -> None:
        """Record that a metric could not be had, and why."""
        BY_NAME[name]
        self._metrics[name] = Metric(None, Provenance.UNAVAILABLE, reason)

    def __getitem__(self, name: str) -> Metric:
        spec = BY_NAME[name]
        missing = f"needs {spec.needs}" if spec.needs else "was not gathered"
        return self._metrics.get(name) or Metric(None, Provenance.UNAVAILABLE, missing)

    def number(self, name: str) -> float | None:
        """The value of a number metric, or None."""
        value = self[name].value
        return value if isinstance(value, float) else None

    def __iter__(self) -> Iterator[tuple[str, Metric]]:
        for spec in SPECS:
            yield spec.name, self[spec.name]
