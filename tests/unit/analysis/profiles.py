"""Hand-built StepProfiles with numbers like those measured on one H200, small enough to be checked by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from advisor.core import roofline
from advisor.core.environment import Environment
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

H200 = Environment(
    device="cuda",
    gpu_name="NVIDIA H200",
    gpu_count=1,
    sm_arch=90,
    sm_count=132,
    l2_bytes=60 * 2**20,
    gpu_memory_bytes=140 * 2**30,
    copy_gbps=4000.0,
    matrix_tflops={"fp32": 50.0, "tf32": 400.0, "fp16": 800.0, "bf16": 800.0},
    vector_tflops=60.0,
    rates_provenance="measured",
    cupy="14.2.0",
    cpu_count=16,
    torch_compile=True,
)
LAPTOP = Environment(
    device="cpu",
    copy_gbps=20.0,
    matrix_tflops={"fp32": 0.2, "bf16": 0.1},
    rates_provenance="measured",
    cpu_count=2,
)


def spread(median: float, n: int = 5) -> Spread:
    raw = tuple(median * (1 + 0.01 * (i - n // 2)) for i in range(n))
    return Spread(median=median, p10=raw[0], p90=raw[-1], n=n, raw=raw)


def row(environment: Environment = H200, **fields: Any) -> KernelRow:
    """A row whose limit follows from its bytes and flops, as the aggregation makes it."""
    fields.setdefault("dtype", "fp32")
    rate = "tf32" if fields["dtype"] == "fp32" and fields.get("tensor_core") else fields["dtype"]
    limit = roofline.limit_us(
        environment, nbytes=fields.get("modelled_bytes", 0.0), flops=fields.get("flops", 0.0), dtype=rate
    )
    return KernelRow(limit_us=limit, **fields)


def conv(
    module: str, kernel: int, channels: tuple[int, int], *, stride: int = 1, groups: int = 1, **more: Any
) -> ConvFact:
    pair = (kernel, kernel)
    return ConvFact(
        module=module,
        in_channels=channels[0],
        out_channels=channels[1],
        kernel=pair,
        stride=(stride, stride),
        padding=(kernel // 2, kernel // 2),
        dilation=(1, 1),
        groups=groups,
        bias=more.pop("bias", False),
        **more,
    )


def profile(
    rows: Sequence[KernelRow], *, step_us: float, environment: Environment = H200, **fields: Any
) -> StepProfile:
    fields.setdefault("busy_us", sum(r.time_us for r in rows) if environment.device == "cuda" else 0.0)
    fields.setdefault(
        "cost", ProfilerCost(traced_step_us=step_us * 1.1, overhead_frac=0.1, traced_steps=3, events=1000)
    )
    return StepProfile(
        script="train.py",
        argv=(),
        created="2026-11-21T00:00:00Z",
        environment=environment,
        step_kind="optimizer",
        step_us=spread(step_us),
        wall_us=spread(step_us),
        kernels=tuple(rows),
        limit_us=sum(r.limit_us for r in rows),
        **fields,
    )


MB = 1e6
BLOCK = "ResNet.layer1.0"


def resnet50() -> StepProfile:
    """ResNet-50 b256 fp32 NCHW with TF32 convolutions: 116,600 us a step, 113,000 us of kernels, bound by the device."""
    conv3x3 = json.dumps([[256, 64, 56, 56], [64, 64, 3, 3], []])
    rows = [
        row(name="xmma_tf32", kind="conv", op="aten::convolution", module="ResNet.conv1", module_type="Conv2d",
            phase="forward", time_us=2000, tensor_core=True, flops=60e9, modelled_bytes=976 * MB,
            grid="1000x1x1", block="256x1x1"),
        row(name="xmma_fprop_tf32", kind="conv", op="aten::convolution", module=f"{BLOCK}.conv2", module_type="Conv2d",
            phase="forward", calls=16, time_us=14000, tensor_core=True, flops=2e12, modelled_bytes=4000 * MB,
            shapes=conv3x3, grid="2000x1x1", block="256x1x1"),
        row(name="xmma_wgrad_tf32", kind="conv", op="aten::convolution_backward", module=f"{BLOCK}.conv2",
            module_type="Conv2d", phase="backward", calls=32, time_us=30000, tensor_core=True, flops=4e12,
            modelled_bytes=8000 * MB, grid="2000x1x1", block="256x1x1"),
        row(name="xmma_fprop_tf32_1x1", kind="conv", op="aten::convolution", module=f"{BLOCK}.conv1",
            module_type="Conv2d", phase="forward", calls=36, time_us=6000, tensor_core=True, flops=1e12,
            modelled_bytes=12000 * MB),
        row(name="xmma_dgrad_tf32_1x1", kind="conv", op="aten::convolution_backward", module=f"{BLOCK}.conv1",
            module_type="Conv2d", phase="backward", calls=72, time_us=12000, tensor_core=True, flops=2e12,
            modelled_bytes=24000 * MB),
        row(name="nchwToNhwcKernel", kind="layout", op="aten::convolution", module=f"{BLOCK}.conv2",
            module_type="Conv2d", phase="forward", calls=100, time_us=8000, modelled_bytes=0.0),
        row(name="bn_fw_tr_1C11", kind="norm", op="aten::cudnn_batch_norm", module=f"{BLOCK}.bn1",
            module_type="BatchNorm2d", phase="forward", calls=53, time_us=10000, modelled_bytes=22000 * MB),
        row(name="bn_bw_1C11", kind="norm", op="aten::cudnn_batch_norm_backward", module=f"{BLOCK}.bn1",
            module_type="BatchNorm2d", phase="backward", calls=53, time_us=15000, modelled_bytes=33000 * MB),
        row(name="clamp_min", kind="activation", op="aten::clamp_min_", module=f"{BLOCK}.relu", module_type="ReLU",
            phase="forward", calls=49, time_us=3000, modelled_bytes=10000 * MB),
        row(name="threshold_backward", kind="activation", op="aten::threshold_backward", module=f"{BLOCK}.relu",
            module_type="ReLU", phase="backward", calls=49, time_us=4500, modelled_bytes=15000 * MB),
        row(name="add", kind="elementwise", op="aten::add_", module=BLOCK, module_type="Bottleneck", phase="forward",
            calls=16, time_us=2500, modelled_bytes=8000 * MB),
        row(name="max_pool_forward_nhwc", kind="pool", op="aten::max_pool2d_with_indices", module="ResNet.maxpool",
            module_type="MaxPool2d", phase="forward", time_us=1500, modelled_bytes=1400 * MB),
        row(name="max_pool_backward_nhwc", kind="pool", op="aten::max_pool2d_with_indices_backward",
            module="ResNet.maxpool", module_type="MaxPool2d", phase="backward", time_us=3000, modelled_bytes=1600 * MB),
        row(name="sgemm", kind="gemm", op="aten::addmm", module="ResNet.fc", module_type="Linear", phase="forward",
            calls=3, time_us=500, flops=3e9, modelled_bytes=20 * MB),
        row(name="softmax", kind="loss", op="aten::_log_softmax", phase="forward", time_us=100, modelled_bytes=2 * MB,
            grid="64x1x1", block="128x1x1"),
        row(name="multi_tensor_apply", kind="optimizer", op="aten::_foreach_add_", phase="optimizer", calls=12,
            time_us=900, modelled_bytes=820 * MB, grid="320x1x1", block="512x1x1"),
    ]  # fmt: skip
    return profile(
        rows,
        step_us=116600.0,
        idle=(IdleCause(cause="launch", time_us=3000.0), IdleCause(cause="sync", time_us=1000.0)),
        syncs=(Site(source="train.py:42", what="cudaStreamSynchronize from aten::item", calls=1.0, time_us=90000.0),),
        launches=450.0,
        launch_us=2500.0,
        memory=MemoryStats(
            peak_allocated_bytes=40 * 2**30, peak_reserved_bytes=42 * 2**30, total_bytes=140 * 2**30, allocations=900.0
        ),
        model=ModelFacts(
            roots=("ResNet",),
            parameters=25_557_032,
            module_counts={"Conv2d": 53, "BatchNorm2d": 53, "ReLU": 17, "Linear": 1},
            convs=(
                conv("ResNet.conv1", 7, (3, 64), stride=2, followed_by_bn=True),
                conv(f"{BLOCK}.conv1", 1, (64, 64), followed_by_bn=True),
                conv(f"{BLOCK}.conv2", 3, (64, 64), followed_by_bn=True),
            ),
            optimizers=("SGD",),
            optimizer_foreach=True,
            batch_size=256,
            flags={"cudnn_benchmark": False, "tf32_conv": True, "tf32_matmul": False, "anomaly": False},
        ),
        utilization={
            "sm_active_frac": Quantity(value=0.81, provenance=Provenance.MEASURED),
            "gpu_temperature": Quantity(value=None, provenance=Provenance.UNAVAILABLE, reason="NVML was refused"),
        },
    )


def cifar() -> StepProfile:
    """CIFAR ResNet-18 b128: 13,600 us a step, 5,000 us of kernels, the host is the limit."""
    rows = [
        row(name="sm80_xmma_tf32", kind="conv", op="aten::convolution", module="ResNet.layer1.0.conv1",
            module_type="Conv2d", phase="forward", calls=20, time_us=1000, tensor_core=True, flops=0.14e12,
            modelled_bytes=300 * MB),
        row(name="sm80_xmma_tf32_wgrad", kind="conv", op="aten::convolution_backward", module="ResNet.layer1.0.conv1",
            module_type="Conv2d", phase="backward", calls=40, time_us=2000, tensor_core=True, flops=0.28e12,
            modelled_bytes=600 * MB),
        row(name="bn_fw", kind="norm", op="aten::cudnn_batch_norm", module="ResNet.layer1.0.bn1",
            module_type="BatchNorm2d", phase="forward", calls=20, time_us=600, modelled_bytes=800 * MB),
        row(name="bn_bw", kind="norm", op="aten::cudnn_batch_norm_backward", module="ResNet.layer1.0.bn1",
            module_type="BatchNorm2d", phase="backward", calls=20, time_us=800, modelled_bytes=1200 * MB),
        row(name="relu", kind="activation", op="aten::relu", module="ResNet.layer1.0", module_type="BasicBlock",
            phase="forward", calls=17, time_us=150, modelled_bytes=300 * MB),
        row(name="threshold", kind="activation", op="aten::threshold_backward", module="ResNet.layer1.0",
            module_type="BasicBlock", phase="backward", calls=17, time_us=200, modelled_bytes=450 * MB),
        row(name="foreach", kind="optimizer", op="aten::_foreach_add_", phase="optimizer", calls=40, time_us=250,
            modelled_bytes=360 * MB),
    ]  # fmt: skip
    return profile(
        rows,
        step_us=13600.0,
        idle=(
            IdleCause(cause="launch", time_us=9000.0),
            IdleCause(cause="sync", time_us=1500.0),
            IdleCause(cause="copy", time_us=500.0),
        ),
        syncs=(
            Site(source="cifar.py:180", what="cudaStreamSynchronize from aten::item", calls=2.0, time_us=600.0),
            Site(source="cifar.py:170", what="cudaStreamSynchronize from aten::copy_", calls=2.0, time_us=300.0),
            Site(source="cifar.py:190", what="cudaDeviceSynchronize", calls=1.0, time_us=50.0),
            Site(source="cifar.py:191", what="cudaStreamSynchronize from aten::nonzero", calls=1.0, time_us=50.0),
        ),
        copies=(
            CopyRow(kind="h2d", bytes=1.5e6, time_us=300.0, calls=2.0, pageable=True, overlapped_frac=0.0),
            CopyRow(kind="d2h", bytes=8.0, time_us=4.0, calls=2.0, pageable=True),
        ),
        launches=620.0,
        launch_us=3000.0,
        input=InputStats(
            loader="DataLoader", next_us=500.0, workers=2, batch_size=128, batch_bytes=1_572_864, batch_dtype="fp32",
            moved_unchanged=True, prefetch_factor=2,
        ),
        model=ModelFacts(
            roots=("ResNet",),
            parameters=11_173_962,
            module_counts={"Conv2d": 20, "BatchNorm2d": 20},
            convs=(conv("layer1.0.conv1", 3, (64, 64), followed_by_bn=True),),
            optimizers=("SGD",),
            data_parallel=True,
            data_parallel_us=260.0,
            zero_grad_to_none=True,
            flags={"cudnn_benchmark": False, "tf32_conv": True},
        ),
    )  # fmt: skip


def starved() -> StepProfile:
    """A step that waits for its loader: 50,000 us, 10,000 us of kernels."""
    rows = [
        row(name="conv", kind="conv", op="aten::convolution", module="Net.conv", module_type="Conv2d", phase="forward",
            time_us=10000, calls=10, flops=1e11, modelled_bytes=1000 * MB)
    ]  # fmt: skip
    return profile(
        rows,
        step_us=50000.0,
        idle=(
            IdleCause(cause="data", time_us=38000.0),
            IdleCause(cause="copy", time_us=1500.0),
            IdleCause(cause="other", time_us=500.0),
        ),
        copies=(CopyRow(kind="h2d", bytes=154e6, time_us=8000.0, calls=1.0, overlapped_frac=0.75),),
        launches=300.0,
        launch_us=1500.0,
        input=InputStats(
            loader="DataLoader", next_us=38500.0, late_us=38500.0, workers=2, batch_size=256, pin_memory=True, moved_unchanged=True,
            batch_bytes=154_000_000, batch_dtype="fp32", normalise="ToTensor + Normalize", normalise_us=60_000.0,
        ),
        model=ModelFacts(roots=("Net",), convs=(conv("Net.conv", 3, (64, 64)),), optimizers=("SGD",), parameters=1000),
    )  # fmt: skip


def laptop() -> StepProfile:
    """A CPU step of 150,000 us with 140,000 us of operators."""
    rows = [
        row(LAPTOP, name="aten::mkldnn_convolution", kind="conv", op="aten::mkldnn_convolution", module="Net.conv1",
            module_type="Conv2d", phase="forward", calls=20, time_us=40000, flops=2e9, modelled_bytes=50 * MB),
        row(LAPTOP, name="aten::convolution_backward", kind="conv", op="aten::convolution_backward",
            module="Net.conv1", module_type="Conv2d", phase="backward", calls=20, time_us=60000, flops=4e9,
            modelled_bytes=100 * MB),
        row(LAPTOP, name="aten::native_batch_norm", kind="norm", op="aten::native_batch_norm", module="Net.bn1",
            module_type="BatchNorm2d", phase="forward", calls=20, time_us=15000, modelled_bytes=60 * MB),
        row(LAPTOP, name="aten::clamp_min", kind="activation", op="aten::clamp_min", module="Net",
            module_type="Net", phase="forward", calls=17, time_us=10000, modelled_bytes=60 * MB),
        row(LAPTOP, name="aten::_foreach_add_", kind="optimizer", op="aten::_foreach_add_", phase="optimizer",
            calls=4, time_us=15000, modelled_bytes=20 * MB),
    ]  # fmt: skip
    return profile(
        rows,
        step_us=150000.0,
        environment=LAPTOP,
        idle=(IdleCause(cause="data", time_us=5000.0),),
        input=InputStats(loader="DataLoader", next_us=5000.0, workers=0, batch_size=64),
        model=ModelFacts(
            roots=("Net",), convs=(conv("Net.conv1", 3, (16, 16), followed_by_bn=True),), optimizers=("SGD",),
            parameters=700_000, batch_size=64, flags={"cudnn_benchmark": False},
        ),
        utilization={"cpu_util_frac": Quantity(value=0.9, provenance=Provenance.MEASURED)},
    )  # fmt: skip


ALL = {"resnet50": resnet50, "cifar": cifar, "starved": starved, "laptop": laptop}


def with_rows(base: StepProfile, *rows: KernelRow) -> StepProfile:
    """The profile with other rows; busy time follows."""
    return replace(base, kernels=rows, busy_us=sum(r.time_us for r in rows))
