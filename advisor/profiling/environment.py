"""Facts and measured rates of this machine, as the script will see it.

Measured in a process of its own, before the script starts, so that neither disturbs the other; the result is kept per
machine, GPU, driver and library versions, since rates do not change between two runs.

Rates: copies and dense matrix products of random data, medians of several runs. Random data matters: with zeros a GPU
draws less power and clocks higher than in training.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

from advisor.core import storage
from advisor.core.cache import cache_dir
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.profiling import hostload, nvml
from advisor.profiling.ownprocess import last_words, run_module

if TYPE_CHECKING:
    import torch

Clock = Callable[[Callable[[], object]], float]  # runs the work and returns the seconds it took

TIMEOUT_S = 120.0  # importing torch on a cold network disk is the slow part
GPU_COPY_BYTES = 1 << 30  # far above any L2
CPU_COPY_BYTES = 256 << 20  # far above any last-level cache
GPU_MATRIX = 8192
CPU_MATRIX = 1024
REPEATS = 7
LEAST_S = 0.02  # per rate: short runs are repeated for this long, so that clocks have settled
BUSY_LOAD = 0.75  # runnable processes per core above which a CPU's rates are not its own
BUDGET_S = 0.4  # per rate; a slow device gets fewer repeats
MEASURED = "measured"
BUSY_NOTE = "other processes were busy on the CPU while its rates were measured"
# fp32 lanes per SM by compute capability (CUDA C++ programming guide, "Arithmetic Instructions"); 128 elsewhere.
_FP32_LANES = {60: 64, 70: 64, 72: 64, 75: 64, 80: 64}
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def probe(*, python: str = sys.executable, use_cache: bool = True, timeout_s: float = TIMEOUT_S) -> Environment:
    """The environment as a script started with `python` and these environment variables sees it.

    Takes a few seconds the first time on a machine and milliseconds after that. Rates measured while another process
    held the GPU, or kept the CPU busy, are marked in `notes` and not kept.

    Raises:
        AdvisorError: torch cannot be imported there, or the probe did not end in time.
    """
    cacheable = python == sys.executable  # the library versions of another interpreter are not known here
    if use_cache and cacheable and (known := kept()) is not None:
        return known
    try:
        child = run_module("advisor.profiling.environment", "--json", timeout_s=timeout_s, python=python)
        found = storage.from_plain(Environment, json.loads(child.stdout.splitlines()[-1]))
    except subprocess.TimeoutExpired:
        raise AdvisorError(
            f"measuring this machine took more than {timeout_s:.0f} s",
            fix="Run `advisor doctor` to see where it hangs.",
        ) from None
    except OSError as error:
        raise AdvisorError(f"{python} does not start ({error})") from None
    except (IndexError, ValueError):
        raise AdvisorError(
            f"measuring this machine failed ({last_words(child)})",
            fix=f"Check that `{python} -c 'import torch'` works.",
        ) from None
    quiet = not found.shared_gpu and BUSY_NOTE not in found.notes
    if cacheable and quiet and found.rates_provenance == MEASURED:
        with contextlib.suppress(AdvisorError):
            storage.save(_kept_at(), found)
    return found


def kept() -> Environment | None:
    """What an earlier `probe` has measured of this machine with these libraries; None before the first."""
    try:
        return storage.load(_kept_at(), Environment)
    except AdvisorError:
        return None


def _kept_at() -> Path:
    return cache_dir() / f"environment-{_key()}.json"


def measure() -> Environment:
    """Facts and rates measured now, in this process. Imports torch."""
    import torch

    return _measure_gpu(host_facts()) if torch.cuda.is_available() else _measure_cpu(host_facts())


def host_facts() -> Environment:
    """What is known without measuring: the host and the libraries, and no rates. Imports torch."""
    import torch

    return Environment(
        torch=str(torch.__version__),
        cupy=_version("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy"),
        python=platform.python_version(),
        cpu_name=hostload.cpu_name() or platform.processor(),
        cpu_count=hostload.cpu_count(),
        core_count=hostload.core_count(),
        host_memory_bytes=hostload.memory_bytes(),
        platform=platform.platform(),
        torch_compile=_can_compile(),
    )


def _measure_gpu(facts: Environment) -> Environment:
    import torch

    properties = torch.cuda.get_device_properties(0)
    uuid = str(getattr(properties, "uuid", ""))
    notes: list[str] = []
    driver, max_clock_mhz, shared = "", float(getattr(properties, "clock_rate", 0)) / 1e3, False
    try:
        reader = nvml.GpuReader(uuid or None)
        others = (reader.processes() or set()) - {os.getpid()}
        # Ids that /proc does not know come from another namespace; one of them is this process.
        shared = any((hostload.PROC / str(pid)).exists() for pid in others)
        identity = reader.identity()
        uuid, driver = identity.get("uuid", uuid), identity.get("driver", "")
        max_clock_mhz = reader.constants.get("sm_clock_max_mhz", max_clock_mhz)
        reader.close()
    except AdvisorError as error:
        notes.append(f"NVML: {error}")
    if shared:
        notes.append("another process was on the GPU while its rates were measured")
    arch = properties.major * 10 + properties.minor
    lanes = _FP32_LANES.get(arch, 128)
    facts = replace(
        facts,
        device="cuda",
        gpu_name=properties.name,
        gpu_uuid=uuid,
        gpu_count=torch.cuda.device_count(),
        sm_arch=arch,
        sm_count=properties.multi_processor_count,
        l2_bytes=int(getattr(properties, "L2_cache_size", 0)),
        gpu_memory_bytes=properties.total_memory,
        vector_tflops=properties.multi_processor_count * lanes * 2 * max_clock_mhz / 1e6,
        driver=driver,
        cuda=str(torch.version.cuda or ""),
        cudnn=_cudnn(),
        shared_gpu=shared,
    )
    try:
        copy_gbps, rates = _gpu_rates(torch.device("cuda", 0), arch)
    except RuntimeError as error:  # out of memory on a GPU in use, or a device that has failed
        return replace(facts, notes=(*notes, f"rates not measured: {str(error).splitlines()[0]}"))
    return replace(facts, copy_gbps=copy_gbps, matrix_tflops=rates, rates_provenance=MEASURED, notes=tuple(notes))


def _measure_cpu(facts: Environment) -> Environment:
    import torch

    notes = []
    if torch.version.cuda is not None:
        notes.append("torch is a CUDA build, but no GPU is usable here")
    if _load_per_core() > BUSY_LOAD:
        notes.append(BUSY_NOTE)
    rates = {}
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with contextlib.suppress(RuntimeError):  # a torch without products of this type on a CPU
            rates[name] = _matrix_tflops(dtype, torch.device("cpu"), _wall)
    return replace(
        facts,
        device="cpu",
        copy_gbps=_copy_gbps(CPU_COPY_BYTES, torch.device("cpu"), _wall),
        matrix_tflops=rates,
        rates_provenance=MEASURED,
        notes=tuple(notes),
    )


def _gpu_rates(device: torch.device, arch: int) -> tuple[float, dict[str, float]]:
    """Copy bandwidth in GB/s (read plus written) and dense matrix rates in TFLOP/s by dtype class."""
    import torch

    free, _ = torch.cuda.mem_get_info(device)
    kinds = [("fp32", torch.float32, "highest")]
    if arch >= 70:
        kinds.append(("fp16", torch.float16, "highest"))
    if arch >= 80:
        kinds += [("tf32", torch.float32, "high"), ("bf16", torch.bfloat16, "highest")]
    rates = {}
    for name, dtype, precision in kinds:
        torch.set_float32_matmul_precision(precision)
        rates[name] = _matrix_tflops(dtype, device, _events)
    return _copy_gbps(min(GPU_COPY_BYTES, free // 4), device, _events), rates


def _copy_gbps(nbytes: int, device: torch.device, clock: Clock) -> float:
    """Bytes read plus bytes written per second of a copy within the device's memory, in GB/s."""
    import torch

    source = torch.randint(0, 255, (nbytes,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _median_seconds(lambda: target.copy_(source), clock) / 1e9


def _matrix_tflops(dtype: torch.dtype, device: torch.device, clock: Clock) -> float:
    """Rate of an n × n × n product: the device's full size, halved until one product fits into the budget."""
    import torch

    size = 512 if device.type == "cuda" else 128
    largest = GPU_MATRIX if device.type == "cuda" else CPU_MATRIX
    while True:
        factors = [torch.randn(size, size, device=device).to(dtype) for _ in range(2)]
        product = functools.partial(torch.mm, *factors)
        once = _median_seconds(product, clock, budget_s=0.0)
        if size >= largest or once * 8 > BUDGET_S:  # the next size would take eight times as long
            return 2 * size**3 / _median_seconds(product, clock) / 1e12
        size *= 2


def _median_seconds(work: Callable[[], object], clock: Clock, budget_s: float = BUDGET_S) -> float:
    """Median time of `work` after one warm-up: at least REPEATS runs over LEAST_S, but no more once over the budget."""
    work()
    times: list[float] = [clock(work)]
    while sum(times) < budget_s and (len(times) < REPEATS or sum(times) < LEAST_S):
        times.append(clock(work))
    return max(statistics.median(times), 1e-9)


def _load_per_core() -> float:
    """Runnable processes per core over the last minute; 0 where the system does not tell."""
    try:
        return os.getloadavg()[0] / (os.cpu_count() or 1)
    except (OSError, AttributeError):
        return 0.0


def _wall(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _events(work: Callable[[], object]) -> float:
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3


def _can_compile() -> bool:
    """Whether Inductor finds what it generates code for: Triton on a GPU of Volta or later, and a C++ compiler.

    Triton, too, has the compiler build its launchers. Sources: torch.compile's documentation, "Requirements"; torch's
    `torch.utils._triton.has_triton` asks for compute capability 7.0.
    """
    import torch
    from torch._dynamo.eval_frame import is_dynamo_supported

    if not (is_dynamo_supported() and any(map(shutil.which, _compilers()))):
        return False
    if not torch.cuda.is_available():
        return True
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability()[0] >= 7


def _compilers() -> tuple[str, ...]:
    named = os.environ.get("CXX", "").split()[:1]
    return (*named, "c++", "g++", "clang++", "cl")


def _cudnn() -> str:
    import torch

    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None  # type: ignore[no-untyped-call]
    if not version:
        return ""
    major = version // (10000 if version >= 90000 else 1000)
    rest = version % (10000 if version >= 90000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _version(*names: str) -> str:
    """Version of the first of these distributions that is installed, without importing it; "" when none is."""
    for name in names:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return ""


def _key() -> str:
    """Names everything that a measured rate depends on and that can be told without importing torch."""
    parts = {
        "schema": storage.SCHEMA_VERSION,
        "facts": [field.name for field in fields(Environment)],  # what an older advisor did not ask is asked again
        "node": platform.node(),
        "kernel": platform.release(),
        "cpu": hostload.cpu_name(),
        "cores": hostload.cpu_count(),
        "python": sys.executable,
        "versions": {name: _version(name) for name in ("torch", "cupy-cuda12x", "cupy-cuda13x", "cupy")},
        "variables": {name: os.environ.get(name) for name in _VARIABLES},
        "gpu": _gpu_identity(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _gpu_identity() -> dict[str, str]:
    try:
        reader = nvml.GpuReader()
    except AdvisorError as error:
        return {"none": str(error)}
    identity = reader.identity() | {name: str(value) for name, value in reader.constants.items()}
    reader.close()
    return identity


def main() -> int:
    """`python -m advisor.profiling.environment --json`: measure this machine and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m advisor.profiling.environment", description=main.__doc__)
    parser.add_argument("--json", action="store_true", required=True, help="print JSON (the only form)")
    parser.parse_args()
    print(json.dumps(storage.to_plain(measure())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
