"""Sample runs with realistic numbers: a ResNet-50 training step, batch 256, fp32 NCHW with TF32 convolutions, on an H200.

The whole-step numbers (116.6 ms, 2,196 img/s, 4,244 GB/s) are those measured for this configuration; the split over
layers is modelled from the layers' shapes. Everything here is deterministic.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace

from advisor.core.attempt import Attempt
from advisor.core.environment import Environment
from advisor.core.findings import Evidence, Finding, Findings, Interval, Outcome, Recommendation, Semantics
from advisor.core.profile import (
    ConvFact,
    CopyRow,
    IdleCause,
    InputStats,
    KernelRow,
    MemoryStats,
    ModelFacts,
    ProfilerCost,
    Quantity,
    Site,
    Spread,
    StepProfile,
)
from advisor.core.provenance import Provenance
from advisor.core.roofline import limit_us
from advisor.core.verdict import Blocks, Check, StackVerdict, TrialLog, Verdict
from advisor.rules import cards

BATCH = 256
H200 = Environment(
    device="cuda",
    gpu_name="NVIDIA H200",
    gpu_uuid="GPU-3a1f",
    gpu_count=1,
    sm_arch=90,
    sm_count=132,
    l2_bytes=60 << 20,
    gpu_memory_bytes=139 << 30,
    copy_gbps=4244.0,
    matrix_tflops={"fp32": 51.0, "tf32": 402.0, "fp16": 742.0, "bf16": 768.0},
    vector_tflops=60.0,
    rates_provenance="measured",
    driver="580.95.05",
    cuda="13.0",
    cudnn="9.19",
    torch="2.11.0+cu130",
    cupy="14.2.0",
    python="3.12.11",
    cpu_name="Intel(R) Xeon(R) Platinum 8480C",
    cpu_count=16,
    host_memory_bytes=128 << 30,
    platform="Linux-6.8-x86_64",
)
LAPTOP = Environment(
    device="cpu",
    copy_gbps=21.0,
    matrix_tflops={"fp32": 0.14},
    rates_provenance="measured",
    torch="2.13.0",
    python="3.11.9",
    cpu_name="AMD EPYC 7R13",
    cpu_count=2,
    host_memory_bytes=8 << 30,
    platform="Linux-6.8-x86_64",
    notes=("no NVIDIA driver was found",),
)


def _row(
    name: str, kind: str, op: str, module: str, module_type: str, phase: str, source: str, efficiency: float,
    nbytes: float, flops: float, shapes: object, calls: float = 1.0,
) -> KernelRow:  # fmt: skip
    dtype = "tf32" if kind == "conv" else "fp32"
    flop_dtype = dtype if kind in ("conv", "gemm") else ""
    least = limit_us(H200, nbytes=nbytes, flops=flops, dtype=flop_dtype)
    return KernelRow(
        name=name,
        kind=kind,
        op=op,
        module=module,
        module_type=module_type,
        phase=phase,
        source=source,
        calls=calls,
        time_us=least / (0.84 * efficiency),  # 0.84 brings the whole step to the measured 116.6 ms
        grid="3136x4x1",
        block="256x1x1",
        stream=7,
        dtype=dtype,
        layout="nchw",
        shapes=json.dumps(shapes),
        flops=flops,
        dram_bytes=nbytes * 1.12,
        dram_provenance=Provenance.MEASURED,
        modelled_bytes=nbytes,
        limit_us=least,
        tensor_core=kind == "conv",
    )


def _resnet50_rows() -> tuple[KernelRow, ...]:
    rows: list[KernelRow] = []
    src = "train_imagenet.py"

    def conv(path: str, cin: int, cout: int, k: int, size_in: int, stride: int, line: int) -> None:
        size = size_in // stride
        flops = 2.0 * BATCH * cout * size * size * cin * k * k
        inp, out, weight = 4.0 * BATCH * cin * size_in**2, 4.0 * BATCH * cout * size**2, 4.0 * cin * cout * k * k
        shapes = [[BATCH, cin, size_in, size_in], [cout, cin, k, k]]
        where = (path, "Conv2d")
        kernel = (
            "sm90_xmma_fprop_implicit_gemm_tf32f32_tf32f32_f32_nhwckrsc_nhwc_tilesize128x128x32_warpgroupsize1x1x1_"
            "g1_execute_segment_k_off_kernel__5x_cudnn"
        )
        rows.append(
            _row(
                kernel,
                "conv",
                "aten::cudnn_convolution",
                *where,
                "forward",
                f"{src}:{line}",
                0.62,
                inp + out + weight,
                flops,
                shapes,
            )
        )
        for grad, eff in (("dgrad", 0.47), ("wgrad", 0.36)):
            if cin == 3 and grad == "dgrad":
                continue
            rows.append(
                _row(
                    kernel.replace("fprop", grad),
                    "conv",
                    "aten::convolution_backward",
                    *where,
                    "backward",
                    f"{src}:88",
                    eff,
                    inp + out + weight,
                    flops,
                    shapes,
                )
            )
        rows.append(
            _row(
                "void cudnn::engines_precompiled::nchwToNhwcKernel<float, float, float, false, true, (cudnnKernelDataType_t)2>(cudnn::tensor_params)",
                "layout",
                "aten::cudnn_convolution",
                *where,
                "forward",
                f"{src}:{line}",
                0.7,
                inp * 1.1,
                0.0,
                shapes,
                3.0,
            )
        )

    def bn(path: str, c: int, size: int, line: int) -> None:
        nbytes = 4.0 * BATCH * c * size**2
        shapes = [[BATCH, c, size, size], [c]]
        rows.append(
            _row(
                "void cudnn::bn_fw_tr_1C11_kernel_NCHW<float, float, int, 512, true, 1, true>(cudnn::bnFwTr1C11Params)",
                "norm",
                "aten::cudnn_batch_norm",
                path,
                "BatchNorm2d",
                "forward",
                f"{src}:{line}",
                0.44,
                2 * nbytes,
                8.0 * nbytes / 4,
                shapes,
            )
        )
        rows.append(
            _row(
                "void cudnn::bn_bw_1C11_singleread<float, 512, true, 1, 2, 0>(float, float, float, float, float const*)",
                "norm",
                "aten::cudnn_batch_norm_backward",
                path,
                "BatchNorm2d",
                "backward",
                f"{src}:88",
                0.5,
                3 * nbytes,
                10.0 * nbytes / 4,
                shapes,
            )
        )

    def relu(path: str, c: int, size: int, line: int) -> None:
        nbytes = 4.0 * BATCH * c * size**2
        functor = "at::native::(anonymous namespace)::launch_clamp_scalar(at::TensorIteratorBase&, c10::Scalar, c10::Scalar, at::native::detail::ClampLimits)::{lambda()#1}"
        rows.append(
            _row(
                f"void at::native::vectorized_elementwise_kernel<4, {functor}, std::array<char*, 2ul> >(int, std::array<char*, 2ul>)",
                "activation",
                "aten::clamp_min_",
                path,
                "ReLU",
                "forward",
                f"{src}:{line}",
                0.9,
                2 * nbytes,
                nbytes / 4,
                [[BATCH, c, size, size]],
            )
        )
        rows.append(
            _row(
                "void at::native::vectorized_elementwise_kernel<4, threshold_kernel_impl<float>, std::array<char*, 3ul> >(int)",
                "activation",
                "aten::threshold_backward",
                path,
                "ReLU",
                "backward",
                f"{src}:88",
                0.88,
                3 * nbytes,
                nbytes / 4,
                [[BATCH, c, size, size]],
            )
        )

    conv("conv1", 3, 64, 7, 224, 2, 31)
    bn("bn1", 64, 112, 31)
    relu("relu", 64, 112, 31)
    rows.append(
        _row(
            "void at::native::(anonymous namespace)::max_pool_forward_nchw<float, long>(int, float const*, long)",
            "pool",
            "aten::max_pool2d_with_indices",
            "maxpool",
            "MaxPool2d",
            "forward",
            f"{src}:32",
            0.5,
            4.0 * BATCH * 64 * (112**2 + 3 * 56**2),
            0.0,
            [[BATCH, 64, 112, 112]],
        )
    )
    rows.append(
        _row(
            "void at::native::(anonymous namespace)::max_pool_backward_nchw<float, float>(float const*, long const*)",
            "pool",
            "aten::max_pool2d_with_indices_backward",
            "maxpool",
            "MaxPool2d",
            "backward",
            f"{src}:88",
            0.25,
            4.0 * BATCH * 64 * (112**2 + 3 * 56**2),
            0.0,
            [[BATCH, 64, 112, 112]],
        )
    )
    cin, size = 64, 56
    for stage, (width, blocks) in enumerate(((64, 3), (128, 4), (256, 6), (512, 3)), 1):
        for index in range(blocks):
            stride = 2 if index == 0 and stage > 1 else 1
            path, out = f"layer{stage}.{index}", size // stride
            conv(f"{path}.conv1", cin, width, 1, size, 1, 52)
            bn(f"{path}.bn1", width, size, 53)
            conv(f"{path}.conv2", width, width, 3, size, stride, 54)
            bn(f"{path}.bn2", width, out, 55)
            conv(f"{path}.conv3", width, width * 4, 1, out, 1, 56)
            bn(f"{path}.bn3", width * 4, out, 57)
            if index == 0:
                conv(f"{path}.downsample.0", cin, width * 4, 1, size, stride, 59)
                bn(f"{path}.downsample.1", width * 4, out, 59)
            nbytes = 4.0 * BATCH * width * 4 * out**2
            rows.append(
                _row(
                    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul> >(int)",
                    "elementwise",
                    "aten::add_",
                    path,
                    "Bottleneck",
                    "forward",
                    f"{src}:61",
                    0.92,
                    3 * nbytes,
                    nbytes / 4,
                    [[BATCH, width * 4, out, out]],
                )
            )
            relu(f"{path}.relu", width * 4, out, 62)
            cin, size = width * 4, out
    rows.append(
        _row(
            "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float, float, float>, unsigned int, float, 4, 4> >(at::native::ReduceOp)",
            "reduce",
            "aten::mean",
            "avgpool",
            "AdaptiveAvgPool2d",
            "forward",
            f"{src}:34",
            0.5,
            4.0 * BATCH * 2048 * 49,
            0.0,
            [[BATCH, 2048, 7, 7]],
        )
    )
    rows.append(
        _row(
            "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_aligna4_alignc4_execute_kernel__51_cublas",
            "gemm",
            "aten::addmm",
            "fc",
            "Linear",
            "forward",
            f"{src}:35",
            0.6,
            4.0 * (BATCH * 2048 + 2048 * 1000 + BATCH * 1000),
            2.0 * BATCH * 2048 * 1000,
            [[BATCH, 2048], [2048, 1000]],
        )
    )
    rows.append(
        _row(
            "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>(float*, float const*, int, int, int)",
            "loss",
            "aten::_log_softmax",
            "",
            "CrossEntropyLoss",
            "forward",
            f"{src}:86",
            0.2,
            4.0 * BATCH * 2000,
            0.0,
            [[BATCH, 1000]],
        )
    )
    rows.append(
        _row(
            "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::TensorListMetadata<3>, at::native::(anonymous namespace)::FusedSgdMathFunctor<float, 3> >",
            "optimizer",
            "aten::_foreach_add_",
            "",
            "",
            "optimizer",
            f"{src}:90",
            0.45,
            4.0 * 25.6e6 * 5,
            0.0,
            [],
            24.0,
        )
    )
    return tuple(rows)


def resnet50(*, scale: float = 1.0, environment: Environment = H200, steps: int = 20) -> StepProfile:
    """A complete GPU run. `scale` multiplies the measured step times (not the kernel rows)."""
    rows = _resnet50_rows()
    busy = sum(r.time_us for r in rows)
    idle = (
        IdleCause(cause="sync", time_us=1450.0, sites=(Site(source="train_imagenet.py:94", what="cudaStreamSynchronize from aten::item", calls=2, time_us=1450.0),)),
        IdleCause(cause="launch", time_us=610.0),
        IdleCause(cause="copy", time_us=2930.0, sites=(Site(source="train_imagenet.py:81", what="pageable host-to-device copy", calls=1, time_us=2930.0),)),
        IdleCause(cause="data", time_us=0.0),
        IdleCause(cause="other", time_us=120.0),
    )  # fmt: skip
    step = busy + sum(i.time_us for i in idle)
    raw = tuple(scale * step * (1 + 0.004 * ((i * 7) % 11 - 5) / 5) for i in range(steps))
    ordered = sorted(raw)
    spread = Spread(
        median=ordered[len(ordered) // 2],
        p10=ordered[len(raw) // 10],
        p90=ordered[len(raw) * 9 // 10],
        n=len(raw),
        raw=raw,
    )
    phases = {p: sum(r.time_us for r in rows if r.phase == p) for p in ("forward", "backward", "optimizer")}
    measured, modelled = Provenance.MEASURED, Provenance.MODELLED
    return StepProfile(
        script="train_imagenet.py",
        argv=("--arch", "resnet50", "--batch-size", "256"),
        created="2026-11-20T22:14:05Z",
        environment=environment,
        step_kind="optimizer",
        step_us=spread,
        wall_us=spread,
        steps_seen=34,
        excluded={"warm-up": 10, "smaller last batch": 1},
        kernels=rows,
        busy_us=busy,
        idle=idle,
        syncs=(Site(source="train_imagenet.py:94", what="cudaStreamSynchronize from aten::item", calls=2, time_us=31200.0),),
        copies=(
            CopyRow(kind="h2d", bytes=4.0 * BATCH * 3 * 224 * 224, time_us=12900.0, calls=1, pageable=True, overlapped_frac=0.0, source="train_imagenet.py:81"),
            CopyRow(kind="d2h", bytes=8, time_us=3.1, calls=2, pageable=True, overlapped_frac=0.0, source="train_imagenet.py:94"),
        ),
        launches=float(sum(r.calls for r in rows)),
        launch_us=5900.0,
        limit_us=sum(r.limit_us for r in rows) * 0.86,
        phase_us=phases,
        memory=MemoryStats(peak_allocated_bytes=int(44.2 * 2**30), peak_reserved_bytes=int(46.8 * 2**30), total_bytes=139 << 30, allocations=1421, device_allocations=0.0, growth_bytes=0.0),
        input=InputStats(loader="DataLoader", next_us=480.0, workers=4, batch_size=BATCH, pin_memory=False, persistent_workers=False, prefetch_factor=2, batch_bytes=4 * BATCH * 3 * 224 * 224, batch_dtype="fp32", moved_unchanged=True, source="train_imagenet.py:79"),
        model=ModelFacts(roots=("ResNet",), parameters=25_557_032, module_counts={"Conv2d": 53, "BatchNorm2d": 53, "ReLU": 17, "Bottleneck": 16}, convs=(ConvFact(module="conv1", in_channels=3, out_channels=64, kernel=(7, 7), stride=(2, 2), padding=(3, 3), dilation=(1, 1), groups=1, bias=False, followed_by_bn=True),), optimizers=("SGD",), batch_size=BATCH, flags={"cudnn_benchmark": False, "tf32_conv": True, "tf32_matmul": False}),
        utilization={
            "gpu_busy_nvml_frac": Quantity(value=0.99, provenance=measured),
            "sm_active_frac": Quantity(value=0.93, provenance=measured),
            "tensor_active_frac": Quantity(value=0.142, provenance=measured),
            "dram_frac": Quantity(value=0.34, provenance=measured, reason="hardware counters, 20 µs samples"),
            "power_w": Quantity(value=548.0, provenance=measured),
            "clock_frac": Quantity(value=0.97, provenance=measured),
            "pcie_rx_gbps": Quantity(value=1.3, provenance=measured),
            "cpu_util_frac": Quantity(value=0.21, provenance=modelled, reason="from /proc, children included"),
            "throttled_frac": Quantity(value=None, provenance=Provenance.UNAVAILABLE, reason="NVML refused throttle reasons (not supported)"),
        },
        losses=tuple(6.98 - 0.004 * i for i in range(20)),
        cost=ProfilerCost(traced_step_us=step * 1.021, overhead_frac=0.021, coverage_frac=0.998, traced_steps=3, events=5210, analyse_s=0.42),
        exit_code=0,
        notes=("the script was stopped after 34 steps; --keep-running lets it finish",),
    )  # fmt: skip


def cpu_run() -> StepProfile:
    """A run without a GPU: operators instead of kernels, modelled bytes, fewer metrics."""
    rows = tuple(
        KernelRow(name=op, kind=kind, op=op, module=module, module_type=type_, phase=phase, source="mnist.py:24", calls=calls, time_us=time, dtype="fp32", layout="nchw", flops=flops, modelled_bytes=nbytes, dram_provenance=Provenance.UNAVAILABLE, limit_us=limit)
        for op, kind, module, type_, phase, calls, time, flops, nbytes, limit in (
            ("aten::mkldnn_convolution", "conv", "conv2", "Conv2d", "forward", 1, 9800.0, 7.5e8, 1.1e7, 5357.0),
            ("aten::convolution_backward", "conv", "conv2", "Conv2d", "backward", 1, 21700.0, 1.5e9, 2.2e7, 10714.0),
            ("aten::max_pool2d_with_indices", "pool", "", "", "forward", 1, 2300.0, 0.0, 4.6e6, 219.0),
            ("aten::relu", "activation", "", "", "forward", 3, 1900.0, 0.0, 9.4e6, 447.0),
            ("aten::addmm", "gemm", "fc1", "Linear", "forward", 1, 1200.0, 1.5e8, 5.1e6, 1071.0),
            ("aten::_foreach_add_", "optimizer", "", "", "optimizer", 4, 700.0, 0.0, 9.6e6, 457.0),
        )
    )  # fmt: skip
    busy = sum(r.time_us for r in rows)
    raw = tuple((busy + 4100.0) * (1 + 0.03 * ((i * 5) % 7 - 3) / 3) for i in range(20))
    return StepProfile(
        script="mnist.py", argv=(), created="2026-11-20T22:14:05Z", environment=LAPTOP, step_kind="optimizer",
        step_us=Spread(median=sorted(raw)[10], p10=sorted(raw)[2], p90=sorted(raw)[18], n=20, raw=raw), wall_us=None, steps_seen=33, kernels=rows, busy_us=busy,
        idle=(IdleCause(cause="data", time_us=2900.0, sites=(Site(source="mnist.py:41", what="next() of DataLoader", calls=1, time_us=2900.0),)), IdleCause(cause="other", time_us=1200.0)),
        limit_us=sum(r.limit_us for r in rows), phase_us={"forward": 15200.0, "backward": 21700.0, "optimizer": 700.0},
        memory=MemoryStats(peak_allocated_bytes=412 << 20, total_bytes=8 << 30),
        input=InputStats(loader="DataLoader", next_us=2900.0, workers=0, batch_size=64, batch_bytes=64 * 784 * 4, source="mnist.py:41"),
        model=ModelFacts(roots=("Net",), parameters=1_199_882, optimizers=("Adadelta",), batch_size=64),
        utilization={"cpu_util_frac": Quantity(value=0.94, provenance=Provenance.MEASURED)},
        cost=ProfilerCost(traced_step_us=(busy + 4100.0) * 1.06, overhead_frac=0.06, traced_steps=3, events=930, analyse_s=0.05), exit_code=0,
    )  # fmt: skip


def _finding(
    rule: str,
    title: str,
    area: str,
    severity: str,
    message: str,
    gain: tuple[float, float] | None,
    transform: str,
    semantics: Semantics,
    evidence: tuple[Evidence, ...],
    sites: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        rule=rule, title=title, area=area, severity=severity, outcome=Outcome.FIRED, message=message, evidence=evidence, sites=sites,
        gain=Interval(low=gain[0], high=gain[1], basis="each row's time above its limit") if gain else None, transform=transform, semantics=semantics,
        rationale="Tensor cores give sixteen times the fp32 rate; activations of half the size halve the traffic of every memory-bound kernel.",
        references=("https://docs.pytorch.org/docs/stable/amp.html",),
    )  # fmt: skip


def findings() -> Findings:
    """Fired, quiet and not-evaluated outcomes, and the recommendations that follow."""
    fired = (
        _finding("fp32-convolutions", "Convolutions run in fp32 where bf16 is faster", "precision", "high", "53 % of device time is convolution in TF32; this GPU's bf16 rate is 1.9 times higher and activations would halve.", (0.24, 0.58), "amp_bf16", Semantics.PRECISION, (Evidence(metric="fp32_conv_frac", value=0.53, unit="frac", provenance="measured", threshold="> 0.2"), Evidence(metric="bf16_supported", value=True, unit="", provenance="measured", threshold="is true")), ("layer1.0.conv2", "layer2.0.conv2")),
        _finding("layout-conversion", "Convolutions convert layout on every call", "layout", "high", "9.4 % of device time converts NCHW to NHWC and back.", (0.08, 0.16), "channels_last", Semantics.REASSOCIATED, (Evidence(metric="layout_frac", value=0.094, unit="frac", provenance="measured", threshold="> 0.03"),), ("train_imagenet.py:52",)),
        _finding("unfused-bn-act", "Batch norm, add and activation run as separate kernels", "fusion", "medium", "38 % of device time is batch norm with the add and ReLU after it, at 47 % of the bandwidth limit.", (0.11, 0.22), "fused_bn_act", Semantics.REASSOCIATED, (Evidence(metric="bn_act_frac", value=0.38, unit="frac", provenance="modelled", threshold="> 0.05"),)),
        _finding("pageable-batches", "Batches are copied from pageable memory", "input", "medium", "The GPU waits 2.9 ms a step for a pageable copy at train_imagenet.py:81.", (0.01, 0.025), "prefetch", Semantics.EXACT, (Evidence(metric="h2d_pageable_frac", value=1.0, unit="frac", provenance="measured", threshold="> 0.5"),), ("train_imagenet.py:81",)),
        _finding("scalar-read-each-step", "The loss is read back in every step", "sync", "low", "`.item()` waits for the GPU twice a step at train_imagenet.py:94.", (0.0, 0.012), "defer_sync", Semantics.EXACT, (Evidence(metric="item_syncs", value=2.0, unit="count", provenance="measured", threshold=">= 1"),), ("train_imagenet.py:94",)),
        _finding("small-batch-headroom", "Two thirds of the GPU's memory is free", "memory", "info", "Peak reserved memory is 34 % of the device; a larger batch may use the GPU better.", None, "", Semantics.TRAINING, (Evidence(metric="peak_memory_frac", value=0.34, unit="frac", provenance="measured", threshold="< 0.5"),)),
    )  # fmt: skip
    quiet = tuple(
        Finding(rule=f"quiet-rule-{i:02d}", title=title, area="launch", severity="medium", outcome=Outcome.QUIET, evidence=(Evidence(metric="idle_launch_frac", value=0.005, unit="frac", provenance="measured", threshold="> 0.1"),))
        for i, title in enumerate(("The GPU waits for launches", "The loader starves the GPU", "The optimizer launches one kernel a tensor", "fp64 kernels in the step", "Anomaly detection is on"))
    )  # fmt: skip
    unknown = tuple(
        Finding(rule=rule, title=title, area="machine", severity="low", outcome=Outcome.UNKNOWN, missing=(missing,))
        for rule, title, missing in (
            (
                "clocks-throttled",
                "Clocks are held down",
                "throttled_frac: NVML refused throttle reasons (not supported)",
            ),
            ("exposed-communication", "Communication is not hidden", "comm_exposed_frac: needs more than one process"),
        )
    )
    recommendations = tuple(
        Recommendation(
            transform=f.transform,
            title=f.title,
            rules=(f.rule,),
            semantics=f.semantics,
            predicted=f.gain,
            reason=f.message,
        )
        for f in fired
        if f.transform
    )
    return Findings(run="advisor-runs/train_imagenet-20261120-221405-3f9a", findings=fired + quiet + unknown, cards=cards(fired), recommendations=recommendations)  # fmt: skip


def _blocks(off: float, gain: float, n: int = 6) -> Blocks:
    wobble = (0.0, 0.004, -0.003, 0.002, -0.004, 0.001, 0.003, -0.002, 0.0, 0.002, -0.001, 0.001)
    return Blocks(
        off_us=tuple(off * (1 + wobble[i % 12]) for i in range(n)),
        on_us=tuple(off * (1 - gain) * (1 + wobble[(i * 5 + 3) % 12]) for i in range(n)),
        steps_per_block=8,
        dropped=1,
    )


def trials() -> TrialLog:
    """Kept, reverted, inconclusive, failed, not applicable and skipped items, and a stack that passed."""
    ok = Check(passed=True, detail="53 of 53 convolutions ran NHWC kernels", numbers={"sites": 53.0})
    numerics = Check(
        passed=True,
        detail="gradients within 1.4 times the run's own noise (limit 3)",
        numbers={"grad_rel_err": 0.0041, "noise_rel_err": 0.0029},
    )
    timing = Check(passed=True, detail="lower bound of the gain is above 1 %", numbers={"pairs": 6.0})
    step = 116_600.0
    verdicts = (
        Verdict(transform="amp_bf16", title="bf16 autocast", status="kept", reason="41 % faster, gate passed", semantics=Semantics.PRECISION, predicted=Interval(low=0.24, high=0.58), gain=Interval(low=0.086, high=0.093), effect=Check(passed=True, detail="bf16 tensor-core kernels in 52 of 53 convolutions"), numerics=numerics, timing=timing, blocks=_blocks(step, 0.09), first_step_us=1.9e6, break_even_steps=181, memory_delta_bytes=-(18 << 30), matched=("ResNet",)),
        Verdict(transform="channels_last", title="channels_last layout", status="kept", reason="faster beyond noise", semantics=Semantics.REASSOCIATED, predicted=Interval(low=0.08, high=0.52), gain=Interval(low=0.479, high=0.487), effect=ok, numerics=numerics, timing=timing, blocks=_blocks(step * 0.91, 0.483), first_step_us=0.8e6, break_even_steps=16, memory_delta_bytes=0, matched=("ResNet",)),
        Verdict(transform="fused_bn_act", title="fused batch norm, add and ReLU", status="kept", reason="faster beyond noise", semantics=Semantics.REASSOCIATED, predicted=Interval(low=0.11, high=0.32), gain=Interval(low=0.27, high=0.288), left_out_gain=Interval(low=0.25, high=0.27), effect=Check(passed=True, detail="49 patterns matched; kernel advisor_bn_act_fwd_nhwc seen"), numerics=numerics, timing=timing, blocks=_blocks(step * 0.47, 0.28), first_step_us=4.1e6, break_even_steps=270, matched=("layer1.0.bn1", "layer1.0.bn2"), unmatched=("layer1.0.downsample.1: no activation follows",)),
        Verdict(transform="cudnn_benchmark", title="cuDNN algorithm search", status="inconclusive", reason="interval −0.4 to 1.6 % straddles the threshold of 1 % after 20 pairs", semantics=Semantics.REASSOCIATED, predicted=Interval(low=0.0, high=0.05), gain=Interval(low=-0.004, high=0.016), effect=Check(passed=True, detail="3 convolutions changed their algorithm"), numerics=numerics, timing=Check(passed=None, detail="20 pairs do not decide"), blocks=_blocks(step * 0.34, 0.006, 20)),
        Verdict(transform="compile", title="torch.compile", status="reverted", reason="slower than the bundled kernels it would replace", semantics=Semantics.REASSOCIATED, predicted=Interval(low=0.0, high=0.12), gain=Interval(low=-0.031, high=-0.024), effect=Check(passed=True, detail="1 graph, 0 breaks"), numerics=numerics, timing=Check(passed=False, detail="2.7 % slower"), blocks=_blocks(step * 0.34, -0.027), first_step_us=5.2e7),
        Verdict(transform="amp_fp16", title="fp16 autocast with GradScaler", status="reverted", reason="numeric gate: loss envelope left after 14 steps", semantics=Semantics.PRECISION, predicted=Interval(low=0.02, high=0.2), effect=ok, numerics=Check(passed=False, detail="loss 7.31 at step 14, envelope 6.86 to 6.99", numbers={"loss": 7.31})),
        Verdict(transform="cuda_graphs", title="CUDA graphs", status="failed", reason="capture failed: operation not permitted when stream is capturing (aten::item at train_imagenet.py:94)", semantics=Semantics.EXACT, predicted=Interval(low=0.005, high=0.02)),
        Verdict(transform="conv_bias", title="convolution bias before batch norm", status="not applicable", reason="no convolution with a bias stands before a batch norm", semantics=Semantics.REASSOCIATED),
        Verdict(transform="loader_workers", title="more loader workers", status="skipped", reason="the loader is not what the GPU waits for", semantics=Semantics.EXACT),
    )  # fmt: skip
    return TrialLog(
        script="train_imagenet.py",
        argv=("--arch", "resnet50", "--batch-size", "256"),
        verdicts=verdicts,
        stack=StackVerdict(
            passed=True,
            detail="losses of both arms agree within the plain script's own spread",
            plain_us=(116_420.0, 116_710.0, 116_590.0),
            stack_us=(37_480.0, 37_660.0, 37_590.0),
            speedup=3.101,
            speedup_low=3.05,
            speedup_high=3.14,
            samples_per_s_plain=2196.0,
            samples_per_s_stack=6809.0,
            losses_plain=tuple(6.98 - 0.004 * i for i in range(20)),
            losses_stack=tuple(6.981 - 0.0041 * i for i in range(20)),
        ),
        files_written=("advisor-runs/…/trials/checkpoint.pth (diverted from checkpoint.pth)",),
        seconds=248.0,
        complete=True,
        notes=(),
    )


def many_places(matched: int = 250, unmatched: int = 120) -> TrialLog:
    """The sample's trials, with the kernels of a deep network: two patterns, and four reasons, the rarest recorded first."""
    log = trials()
    norms = [f"stages.{i // 40}.blocks.{i % 40}.norm" for i in range(matched)]
    convs = [f"stages.{i // 40}.blocks.{i % 40}.conv" for i in range(unmatched)]
    reasons = (
        *['left to <Inductor> & "others" {0}'] * 5,
        *["no measurement on file"] * 20,
        *(f"{64 << i % 3} channels in, 32 out: cuDNN is faster" for i in range(35)),
    )
    named = [f"{p}: {reasons[i] if i < 60 else 'the norm behind it has no use for it'}" for i, p in enumerate(convs)]
    patterns = tuple(f"{p}: bn{'+add' if i % 3 == 2 else ''}+relu" for i, p in enumerate(norms))
    deep = [
        replace(v, matched=patterns, unmatched=tuple(named)) if v.transform == "fused_bn_act" else v
        for v in log.verdicts
    ]
    return replace(log, verdicts=tuple(deep))


HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'\x1b[2J\u2028"


def hostile() -> tuple[StepProfile, Findings, TrialLog]:
    """The sample run with names that try to break out of every format, and one of ten thousand characters."""
    profile, found, log = resnet50(), findings(), trials()
    long = "void k<" + "std::tuple<int, " * 700 + "x" + ">" * 700 + ">()"
    rows = [
        replace(r, name=HOSTILE + r.name, module=HOSTILE, module_type=HOSTILE, op=HOSTILE, source=HOSTILE, kind=HOSTILE, phase=HOSTILE, dtype=HOSTILE, grid=HOSTILE, shapes=HOSTILE, layout=HOSTILE)
        for r in profile.kernels[:5]
    ]  # fmt: skip
    rows.append(replace(profile.kernels[0], name=long, module="m" * 10_000, source="s" * 10_000, op="o" * 10_000))
    site = Site(source=HOSTILE, what=HOSTILE, calls=1, time_us=5.0)
    bad_profile = replace(
        profile, script=HOSTILE, argv=(HOSTILE,), kernels=tuple(rows), notes=(HOSTILE,), syncs=(site,),
        idle=(IdleCause(cause=HOSTILE, time_us=9.0, sites=(site,)),), phase_us={HOSTILE: 1.0},
        environment=replace(H200, gpu_name=HOSTILE, notes=(HOSTILE,), matrix_tflops={HOSTILE: 3.0}),
        utilization={HOSTILE: Quantity(value=1.0, provenance=Provenance.MEASURED, reason=HOSTILE)},
        model=replace(profile.model, roots=(HOSTILE,), flags={HOSTILE: True}), input=replace(profile.input, loader=HOSTILE),
    )  # fmt: skip
    evil = [
        replace(f, title=HOSTILE, message=HOSTILE, rule=HOSTILE, severity=HOSTILE, sites=(HOSTILE,), transform=HOSTILE, rationale=f"`{HOSTILE}`", references=(f"javascript:alert(3)//{HOSTILE}", f"https://x/{HOSTILE}"), missing=(HOSTILE,), evidence=(Evidence(metric=HOSTILE, value=HOSTILE, unit=HOSTILE, provenance=HOSTILE, threshold=HOSTILE),))
        for f in found.findings
    ]  # fmt: skip
    verdicts = [
        replace(v, title=HOSTILE, reason=HOSTILE, status=HOSTILE, matched=(HOSTILE,), unmatched=(HOSTILE,), parameters={HOSTILE: HOSTILE}, effect=Check(passed=False, detail=HOSTILE, numbers={HOSTILE: 1.0}))
        for v in log.verdicts
    ]  # fmt: skip
    bad_log = replace(log, script=HOSTILE, verdicts=tuple(verdicts), files_written=(HOSTILE,), notes=(HOSTILE,))
    return bad_profile, replace(found, findings=tuple(evil), cards=cards(evil)), bad_log


def attempt() -> Attempt:
    """A patch that is kept."""
    return Attempt(
        kind="patch",
        name="idea.patch",
        verdict="kept",
        reason="2.00× (1.96 to 2.04) in 2 pairs of fresh runs",
        script="train.py",
        effect=Check(passed=None, detail="not seen", numbers={"files": float("nan")}),
        numerics=Check(passed=True, detail="losses of 43 steps at 5.1 % of the envelope"),
        timing=Check(passed=True, detail="2.00× (1.96 to 2.04) in 2 pairs of fresh runs"),
        speedup=2.0,
        speedup_low=1.96,
        speedup_high=2.04,
        plain_us=(1000.0, 1010.0),
        changed_us=(500.0, 505.0),
        files=("model.py",),
        run="advisor-runs/train-1",
    )


def whole(page):
    """The report's page with its commands in one piece: their words are marked, so that a line breaks between them alone."""
    return re.sub(r'<span class="word">([^<]*)</span>', r"\1", page)
