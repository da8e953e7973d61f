"""What the doctor looks at: plain facts of this machine, gathered without harm from what is there."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from advisor.core.cache import cache_dir
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.profiling.beside import bytecode
from advisor.profiling.machine import counters, environment, nvml

_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x", "cupy")


PARAMETERS = Path("/proc/driver/nvidia/params")


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was found on this machine. Empty texts and None mean: not there, or it could not be told."""

    python: tuple[int, int, int] = (0, 0, 0)
    linux: bool = True
    torch: str = ""  # installed version
    environment: Environment | None = None
    environment_error: str = ""
    gpu: dict[str, str] = field(default_factory=dict)  # name, uuid and driver as NVML tells them
    nvml_error: str = ""
    driver_cuda: tuple[int, int] | None = None  # newest CUDA that the driver runs
    constants: dict[str, float] = field(default_factory=dict)
    reading: dict[str, float] = field(default_factory=dict)
    gpm: bool = False
    gpm_error: str = ""
    mig: bool = False
    processes: tuple[int, ...] | None = None  # with compute work on the GPU
    admin_only: bool | None = None  # RmProfilingAdminOnly of the kernel module
    counters: bool = False
    counters_error: str = ""
    cupy: tuple[str, ...] = ()  # "name version" of each installed CuPy distribution
    cupy_error: str = ""  # why it does not import or compile; "" when it does or was not tried
    calls_error: str = ""  # why kernels' calls are not replayed from C++; likewise
    old_pynvml: str = ""  # version of the deprecated `pynvml` distribution
    triton: str = ""
    compiler: str = ""  # path of a C++ compiler
    c_compiler: str = ""
    cache: str = ""
    cache_error: str = ""
    compiled_error: str = ""  # why torch's Python modules are compiled anew at each start


def gather(*, measure: bool = False, say: Callable[[str], None] = lambda line: None) -> Facts:
    """Ask the machine. Takes some ten seconds when rates are measured, two when they were kept, half a minute at the first time of
    all on a GPU, which compiles; `say` is told what the wait is for. Never raises."""
    found: dict[str, object] = {}
    found.update(_nvml_facts())
    if measure or environment.kept() is None:
        say("Measuring this machine's rates; that takes some ten seconds, longer while it is busy…")
    try:
        found["environment"] = environment.probe(use_cache=not measure)
    except AdvisorError as error:
        found["environment_error"] = str(error)
    on_gpu = isinstance(env := found.get("environment"), Environment) and env.device == "cuda"
    if on_gpu:
        say("Trying the GPU's counters…")
        found["counters"], found["counters_error"] = counters.preflight()
    cupy = tuple(f"{name} {version}" for name in _CUPY if (version := _version(name)))
    if cupy and on_gpu:
        say("Compiling a kernel with CuPy and what replays its calls; half a minute the first time…")
        found["cupy_error"] = try_cupy()
        found["calls_error"] = _try_calls()
    cache, cache_error = _try_cache()
    return Facts(
        python=sys.version_info[:3],
        linux=sys.platform.startswith("linux"),
        torch=_version("torch"),
        admin_only=_admin_only(),
        cupy=cupy,
        old_pynvml=_version("pynvml"),
        triton=_version("triton"),
        compiler=_which(os.environ.get("CXX", ""), "g++", "clang++"),
        c_compiler=_which(os.environ.get("CC", ""), "gcc", "clang", "cc"),
        cache=cache,
        cache_error=cache_error,
        compiled_error=bytecode.hindrance(),
        **found,  # type: ignore[arg-type]  # each field has a type of its own
    )


def _nvml_facts() -> dict[str, object]:
    try:
        reader = nvml.GpuReader()
    except AdvisorError as error:
        return {"nvml_error": str(error)}
    try:
        processes = reader.processes()
        return {
            "gpu": reader.identity(),
            "driver_cuda": reader.driver_cuda(),
            "constants": dict(reader.constants),
            "reading": reader.read(),
            "gpm": reader.gpm,
            "gpm_error": reader.missing.get("gpm_sm", ""),
            "mig": reader.mig,
            "processes": None if processes is None else tuple(sorted(processes)),
        }
    finally:
        reader.close()


def _admin_only() -> bool | None:
    try:
        for line in PARAMETERS.read_text(errors="replace").splitlines():
            if line.startswith("RmProfilingAdminOnly:"):
                return line.rpartition(":")[2].strip() != "0"
    except OSError:
        pass
    return None


def try_cupy() -> str:
    """Import CuPy and compile a kernel in a process of its own; the reason when that fails."""
    code = (
        "import cupy; f = cupy.RawKernel('extern \"C\" __global__ void f(float* x) { x[0] = 1.f; }', 'f');"
        "x = cupy.zeros(1, 'f'); f((1,), (1,), (x,)); assert float(x[0]) == 1"
    )
    return _try(code)


def _try_calls() -> str:
    """Compile what replays calls (ops/sites), unless it lies in the cache; the reason when that fails."""
    return _try("import sys; from advisor.ops.sites import native; sys.exit(native.unavailable() or 0)")


def _try(code: str) -> str:
    """Run this in a process of its own; its last words when it fails."""
    try:
        child = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, timeout=environment.TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    if child.returncode == 0:
        return ""
    return (child.stderr.strip().splitlines() or [f"exit code {child.returncode}"])[-1]


def _try_cache() -> tuple[str, str]:
    folder = cache_dir()
    try:
        with tempfile.TemporaryFile(dir=folder):
            return str(folder), ""
    except OSError as error:
        return str(folder), error.strerror or str(error)


def _which(*names: str) -> str:
    return next((path for name in names if name and (path := shutil.which(name.split()[0]))), "")


def _version(name: str) -> str:
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        return importlib.metadata.version(name)
    return ""
