"""What this machine offers advisor, and what to do about what it does not: the facts behind `advisor doctor`.

`gather` asks the machine; whatever could crash, hang or be slow runs in a process of its own. `judge` turns the answers
into checks and touches nothing.
"""

from __future__ import annotations

import platform
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from advisor.cli.machinefacts import Facts, gather
from advisor.core import architectures
from advisor.core.units import bytes_text, rate_text
from advisor.profiling.machine import nvml

OLDEST_PYTHON = (3, 10)
OLDEST_TORCH = (2, 8)
SLOW_CLOCK_FRAC = 0.5  # a GPU whose SM clock under no load is locked this far down will not reach its rates


class Health(str, Enum):
    """How a check went."""

    OK = "ok"
    WARN = "warn"  # works, with less
    MISSING = "missing"  # a part of advisor cannot work


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One line of `advisor doctor`."""

    name: str
    status: Health
    found: str
    fix: str = ""


def checks(*, measure: bool = False, say: Callable[[str], None] = lambda line: None) -> tuple[Examined, ...]:
    """All checks of this machine, in the order to read them. With `measure`, rates that were kept are taken anew."""
    return judge(gather(measure=measure, say=say))


def judge(facts: Facts) -> tuple[Examined, ...]:
    """The checks that these facts lead to. A machine without a GPU gets no complaint about GPU parts."""
    general = (_python(facts), _torch(facts), _modules(facts), _compiler(facts), _cache(facts), _rates(facts))
    if not (facts.gpu or (facts.environment and facts.environment.device == "cuda")):
        return (*general[:3], _no_gpu(facts), *general[3:])
    return (
        *general[:3],
        _driver(facts),
        _cupy(facts),
        _calls(facts),
        _nvml(facts),
        _gpm(facts),
        _counters(facts),
        _mig(facts),
        _neighbours(facts),
        _clocks(facts),
        *general[3:],
    )


def _python(facts: Facts) -> Examined:
    version = ".".join(map(str, facts.python))
    if facts.python[:2] < OLDEST_PYTHON:
        return Examined(name="Python", status=Health.MISSING, found=version, fix="Use Python 3.10 or newer.")
    if not facts.linux:
        fix = "Training is profiled on every system; GPU counters and process load on Linux only."
        return Examined(name="Python", status=Health.WARN, found=f"{version} on {platform.system()}", fix=fix)
    return Examined(name="Python", status=Health.OK, found=version)


def _torch(facts: Facts) -> Examined:
    if not facts.torch:
        fix = "Install torch 2.8 or newer in this environment."
        return Examined(name="PyTorch", status=Health.MISSING, found="not installed", fix=fix)
    if _pair(facts.torch) < OLDEST_TORCH:
        fix = "Use torch 2.8 or newer."
        return Examined(name="PyTorch", status=Health.MISSING, found=facts.torch, fix=fix)
    env = facts.environment
    if env is None:
        return Examined(
            name="PyTorch",
            status=Health.MISSING,
            found=f"{facts.torch}, but trying it failed: {facts.environment_error}",
            fix="Repair the installation.",
        )
    if env.device == "cuda":
        return Examined(name="PyTorch", status=Health.OK, found=f"{env.torch}, CUDA {env.cuda}, cuDNN {env.cudnn}")
    if facts.gpu and "+cpu" in env.torch:
        fix = "Install a CUDA build of torch."
        return Examined(
            name="PyTorch", status=Health.WARN, found=f"{env.torch}: a CPU build, and there is a GPU", fix=fix
        )
    if facts.gpu:
        fix = "Compare CUDA_VISIBLE_DEVICES, the driver and torch's CUDA version."
        return Examined(name="PyTorch", status=Health.WARN, found=f"{env.torch} does not see the GPU", fix=fix)
    return Examined(name="PyTorch", status=Health.OK, found=env.torch)


def _modules(facts: Facts) -> Examined:
    if not facts.compiled_error:
        return Examined(
            name="Compiled modules", status=Health.OK, found="Python keeps them" if facts.torch else "no torch"
        )
    return Examined(
        name="Compiled modules",
        status=Health.WARN,
        found=f"torch's Python modules are compiled again at each start, which takes seconds: {facts.compiled_error}",
        fix=f"Once, as who may write there: python -m compileall -q {sysconfig.get_path('purelib')}. A search keeps its own.",
    )


def _no_gpu(facts: Facts) -> Examined:
    why = facts.nvml_error or "none is visible"
    return Examined(
        name="GPU",
        status=Health.WARN,
        found=f"no NVIDIA GPU ({why})",
        fix="Nothing to do on a machine without one: CPU timings and modelled bytes are used.",
    )


def _driver(facts: Facts) -> Examined:
    name, driver = facts.gpu.get("name", "GPU"), facts.gpu.get("driver", "")
    text = f"{driver or 'version not known'}, {name}"
    wanted = facts.environment.cuda if facts.environment else ""
    if facts.driver_cuda and wanted and facts.driver_cuda[0] < _pair(wanted)[0]:
        runs = ".".join(map(str, facts.driver_cuda))
        fix = f"Update the driver, or install torch for CUDA {facts.driver_cuda[0]}."
        return Examined(
            name="Driver", status=Health.MISSING, found=f"{text}: runs CUDA {runs}, torch needs {wanted}", fix=fix
        )
    arch = facts.environment.sm_arch if facts.environment else 0
    if 0 < arch < architectures.BUNDLED_KERNELS:
        fix = "Profiling and PyTorch's own options work; bundled kernels need Ampere (sm_80) or newer."
        return Examined(name="Driver", status=Health.WARN, found=f"{text} (sm_{arch})", fix=fix)
    return Examined(name="Driver", status=Health.OK, found=text)


def _cupy(facts: Facts) -> Examined:
    cuda = _pair(facts.environment.cuda)[0] if facts.environment and facts.environment.cuda else 0
    extra = f'pip install "cnn-advisor[cuda{cuda}]"' if cuda in (12, 13) else "Install the CuPy of torch's CUDA major."
    if not facts.cupy:
        found = "not installed: bundled kernels stay off"
        return Examined(name="CuPy", status=Health.MISSING, found=found, fix=extra)
    text = ", ".join(facts.cupy)
    if len(facts.cupy) > 1:
        fix = "Keep only one; they overwrite each other's files."
        return Examined(name="CuPy", status=Health.WARN, found=f"{text} together", fix=fix)
    name = facts.cupy[0].split()[0]
    if cuda and name.startswith("cupy-cuda") and name != f"cupy-cuda{cuda}x":
        fix = f"pip uninstall {name}; {extra}"
        return Examined(name="CuPy", status=Health.MISSING, found=f"{text}, but torch uses CUDA {cuda}", fix=fix)
    if facts.cupy_error:
        return Examined(
            name="CuPy", status=Health.MISSING, found=f"{text}: {facts.cupy_error}", fix=f"Reinstall: {extra}"
        )
    return Examined(name="CuPy", status=Health.OK, found=text)


def _calls(facts: Facts) -> Examined:
    if not facts.cupy:
        return Examined(name="Kernels' calls", status=Health.OK, found="no CuPy, no kernels")
    if facts.calls_error:
        fix = "Install g++ and Python's headers: without them launching the kernels takes three times the CPU time, except in CUDA graphs."
        return Examined(name="Kernels' calls", status=Health.WARN, found=f"from Python: {facts.calls_error}", fix=fix)
    return Examined(name="Kernels' calls", status=Health.OK, found="replayed from C++")


def _nvml(facts: Facts) -> Examined:
    if facts.nvml_error:
        fix = "Power, clocks and utilisation stay unknown until NVML works."
        return Examined(name="NVML", status=Health.WARN, found=facts.nvml_error, fix=fix)
    if facts.old_pynvml:
        found = f"works; the deprecated package pynvml {facts.old_pynvml} is installed too"
        return Examined(
            name="NVML", status=Health.WARN, found=found, fix="pip uninstall pynvml; pip install nvidia-ml-py"
        )
    return Examined(name="NVML", status=Health.OK, found="power, clocks, temperature and memory can be read")


def _gpm(facts: Facts) -> Examined:
    if facts.gpm:
        return Examined(name="GPM", status=Health.OK, found="SM, tensor-core and DRAM activity can be read")
    fix = "Those three stay unknown, or come from the trace."
    return Examined(name="GPM", status=Health.WARN, found=facts.gpm_error or "not available", fix=fix)


def _counters(facts: Facts) -> Examined:
    name = "Hardware counters"
    if facts.counters:
        return Examined(name=name, status=Health.OK, found="DRAM bytes can be counted")
    found = facts.counters_error or "not tried, since torch sees no GPU"
    fix = "DRAM bytes are modelled from shapes instead."
    if facts.admin_only:
        found += "; the driver has RmProfilingAdminOnly: 1"
        fix = "Load the nvidia module with NVreg_RestrictProfilingToAdminUsers=0, or give the process CAP_SYS_ADMIN."
    return Examined(name=name, status=Health.WARN, found=found, fix=fix)


def _mig(facts: Facts) -> Examined:
    if facts.mig:
        fix = (
            "Hardware counters and NVML's utilisation do not exist for a slice; clocks and power are the whole board's."
        )
        return Examined(name="MIG", status=Health.WARN, found="the GPU is a MIG slice", fix=fix)
    return Examined(name="MIG", status=Health.OK, found="the GPU is not sliced")


def _neighbours(facts: Facts) -> Examined:
    name = "Other GPU processes"
    if facts.processes is None:
        return Examined(
            name=name, status=Health.WARN, found="cannot be told here", fix="Look with nvidia-smi on the host."
        )
    if facts.processes:
        found = f"{len(facts.processes)} on this GPU: {', '.join(map(str, facts.processes[:5]))}"
        fix = "Measure when the GPU is free, or choose another with CUDA_VISIBLE_DEVICES."
        return Examined(name=name, status=Health.WARN, found=found, fix=fix)
    return Examined(name=name, status=Health.OK, found="none")


def _clocks(facts: Facts) -> Examined:
    clock, top = facts.reading.get("sm_clock_mhz"), facts.constants.get("sm_clock_max_mhz")
    if clock is None:
        return Examined(name="Clocks", status=Health.WARN, found="cannot be read", fix="Throttling would go unseen.")
    text = f"SM {clock:.0f} of {top:.0f} MHz" if top else f"SM {clock:.0f} MHz"
    if "temperature_c" in facts.reading:
        text += f", {facts.reading['temperature_c']:.0f} °C"
    reasons = int(facts.reading.get("clock_reasons", 0))
    if reasons & nvml.THROTTLED:
        fix = "Let it cool, or see to its power and airflow; timings taken now are slow."
        return Examined(name="Clocks", status=Health.WARN, found=f"{text}, throttled", fix=fix)
    if reasons & nvml.LOCKED and top and clock < SLOW_CLOCK_FRAC * top:
        return Examined(
            name="Clocks", status=Health.WARN, found=f"{text}, locked low", fix="nvidia-smi --reset-gpu-clocks"
        )
    return Examined(name="Clocks", status=Health.OK, found=text)


def _compiler(facts: Facts) -> Examined:
    name = "torch.compile"
    on_gpu = facts.environment is not None and facts.environment.device == "cuda"
    if on_gpu and not facts.triton:
        fix = "pip install triton (it comes with CUDA builds of torch)"
        return Examined(name=name, status=Health.MISSING, found="no Triton: torch.compile will not be tried", fix=fix)
    compiler = facts.c_compiler if on_gpu else facts.compiler
    if not compiler:
        language = "C" if on_gpu else "C++"
        return Examined(
            name=name,
            status=Health.MISSING,
            found=f"no {language} compiler: torch.compile will not be tried",
            fix="Install gcc and g++.",
        )
    return Examined(name=name, status=Health.OK, found=f"Triton {facts.triton}, {compiler}" if on_gpu else compiler)


def _cache(facts: Facts) -> Examined:
    if facts.cache_error:
        fix = "Set XDG_CACHE_HOME to a folder you can write to; without it advisor measures rates and compiles kernels again in each run."
        return Examined(name="Cache folder", status=Health.WARN, found=f"{facts.cache}: {facts.cache_error}", fix=fix)
    return Examined(name="Cache folder", status=Health.OK, found=facts.cache)


def _rates(facts: Facts) -> Examined:
    env = facts.environment
    if env is None or env.copy_gbps <= 0:
        found = facts.environment_error or (env.notes[-1] if env and env.notes else "not measured")
        fix = "Without them no speed-of-light limits are shown."
        return Examined(name="Measured rates", status=Health.MISSING, found=found, fix=fix)
    products = ", ".join(f"{name} {rate:.3g}" for name, rate in env.matrix_tflops.items())
    memory = bytes_text(env.gpu_memory_bytes if env.device == "cuda" else env.host_memory_bytes)
    found = f"copy {rate_text(env.copy_gbps)}, matrix products in TFLOP/s: {products}; memory {memory}"
    if env.rates_doubt:
        found += f"; in doubt, as {env.rates_doubt}"
        fix = "They are measured again by the next command; no limits are shown from these."
        return Examined(name="Measured rates", status=Health.WARN, found=found, fix=fix)
    return Examined(name="Measured rates", status=Health.OK, found=found)


def _pair(version: str) -> tuple[int, int]:
    """Major and minor of "2.11.0+cu130" or "13.0"; zeros for what is no number."""
    parts = [*version.split("+")[0].split("."), "0"][:2]
    major, minor = (int(part) if part.isdecimal() else 0 for part in parts)
    return major, minor
