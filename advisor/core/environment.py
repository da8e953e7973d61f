"""The machine a run was recorded on: asked once, stored with the run, never asked again."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """GPU, host and library facts. Rates are measured on this machine, not taken from data sheets.

    `matrix_tflops` maps a dtype class (`fp32`, `tf32`, `fp16`, `bf16`) to the measured dense matrix-product rate in
    TFLOP/s; `copy_gbps` counts bytes read plus bytes written of a large device-to-device copy (host copy on CPU).
    `vector_tflops` is the fp32 FMA rate without matrix units, modelled from the clock and unit count.
    """

    device: str = "cpu"  # "cuda" or "cpu": where the training step ran
    gpu_name: str = ""
    gpu_uuid: str = ""
    gpu_count: int = 0
    sm_arch: int = 0  # 90 for sm_90; 0 without a GPU
    sm_count: int = 0
    l2_bytes: int = 0
    gpu_memory_bytes: int = 0
    copy_gbps: float = 0.0
    matrix_tflops: dict[str, float] = field(default_factory=dict)
    vector_tflops: float = 0.0
    rates_provenance: str = "unavailable"
    rates_doubt: str = ""  # what disturbed them while they were measured: no limit of any step is told from them then
    driver: str = ""
    cuda: str = ""
    cudnn: str = ""
    torch: str = ""
    cupy: str = ""
    python: str = ""
    cpu_name: str = ""
    cpu_count: int = 0
    core_count: int = 0  # of these, physical cores; 0: not asked
    host_memory_bytes: int = 0
    platform: str = ""
    torch_compile: bool | None = None  # torch.compile's default backend finds what it needs; None: not asked
    shared_gpu: bool = False  # another process held memory on this GPU during the run
    notes: tuple[str, ...] = ()
