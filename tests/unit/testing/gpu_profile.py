"""A hand-built profile of one training step on a GPU, with one thing wrong of each kind and its source line."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from advisor.core.environment import Environment
from advisor.core.profile import (
    CopyRow,
    IdleCause,
    KernelRow,
    MemoryStats,
    ModelFacts,
    ProfilerCost,
    Site,
    Spread,
    StepProfile,
)
from advisor.core.provenance import Provenance

MEASURED = Provenance.MEASURED
H200 = Environment(
    device="cuda",
    gpu_name="NVIDIA H200",
    gpu_uuid="GPU-1",
    gpu_count=1,
    sm_arch=90,
    sm_count=132,
    gpu_memory_bytes=140 * 2**30,
    copy_gbps=4000.0,
    matrix_tflops={"bf16": 800.0, "fp32": 50.0},
    rates_provenance="measured",
    torch="2.11.0",
)


def row(name: str, op: str, kind: str, **fields: Any) -> KernelRow:
    fields.setdefault("dram_provenance", MEASURED if "dram_bytes" in fields else Provenance.UNAVAILABLE)
    return KernelRow(name=name, op=op, kind=kind, **fields)


CONV = row("sm90_xmma_fprop_tensorop", "aten::convolution", "conv", module="ResNet.layer1.0.conv1", phase="forward",
           source="model.py:10", calls=20.0, time_us=600.0, dtype="bf16", flops=9e9, dram_bytes=6e8, tensor_core=True,
           limit_us=400.0)  # fmt: skip
FP32_CONV = row("implicit_convolve_sgemm", "aten::convolution", "conv", module="ResNet.layer2.0.conv1", phase="forward",
                source="model.py:22", calls=1.0, time_us=200.0, dtype="fp32", flops=1e9, dram_bytes=1e8, limit_us=100.0)  # fmt: skip
ADD = row("vectorized_elementwise_kernel", "aten::add_", "elementwise", module="ResNet.layer1.0", phase="forward",
          source="model.py:31", calls=16.0, time_us=100.0, dtype="bf16", dram_bytes=3e8)  # fmt: skip
LAYOUT = row("nchwToNhwcKernel", "aten::convolution", "layout", module="ResNet.layer3.0.conv1", phase="forward",
             source="model.py:44", calls=3.0, time_us=50.0, dtype="bf16", dram_bytes=1e8)  # fmt: skip

PROFILE = StepProfile(
    script="step",
    argv=(),
    created="2026-01-01T00:00:00Z",
    environment=H200,
    step_kind="marker",
    step_us=Spread(median=1000.0, p10=990.0, p90=1010.0, n=20),
    wall_us=Spread(median=1000.0, p10=990.0, p90=1010.0, n=20),
    kernels=(CONV, FP32_CONV, ADD, LAYOUT),
    busy_us=900.0,
    idle=(
        IdleCause(cause="sync", time_us=100.0, sites=(Site(source="train.py:7", what="x", calls=1, time_us=100.0),)),
    ),
    syncs=(
        Site(source="train.py:7", what="cudaStreamSynchronize from aten::item", calls=1.0, time_us=90.0),
        Site(source="boxes.py:12", what="cudaStreamSynchronize from aten::nonzero", calls=2.0, time_us=9.0),
    ),
    copies=(
        CopyRow(kind="h2d", bytes=4e6, time_us=30.0, calls=2.0, pageable=True, source="train.py:3"),
        CopyRow(kind="d2h", bytes=4.0, time_us=1.0, calls=1.0, source="train.py:7"),
    ),
    launches=40.0,
    limit_us=500.0,
    memory=MemoryStats(peak_allocated_bytes=3 * 2**30, total_bytes=140 * 2**30, allocations=50.0, growth_bytes=2**20),
    model=ModelFacts(roots=("ResNet",), parameters=10),
    cost=ProfilerCost(traced_step_us=1000.0, traced_steps=3),
)


def changed(**fields: Any) -> StepProfile:
    return replace(PROFILE, **fields)
