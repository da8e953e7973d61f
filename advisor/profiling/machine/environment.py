"""Facts and measured rates of this machine, as the script will see it.

Measured in a process of its own, before the script starts, so that neither disturbs the other; the result is kept per
machine, GPU, driver and library versions, since rates do not change between two runs.

Rates that something disturbed while they were measured (rates.py) are in doubt: no limit is told from them, and they are not kept.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

from advisor.core import architectures, storage
from advisor.core.cache import cache_dir
from advisor.core.environment import Environment
from advisor.core.errors import AdvisorError
from advisor.profiling.machine import hostload, nvml, rates
from advisor.profiling.machine.ownprocess import last_words, run_module

TIMEOUT_S = (
    300.0  # importing torch on a cold network disk is the slow part; two cores at a load of 18 took more than 120
)
MEASURED = "measured"
_VARIABLES = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


def probe(*, python: str = sys.executable, use_cache: bool = True, timeout_s: float = TIMEOUT_S) -> Environment:
    """The environment as a script started with `python` and these environment variables sees it.

    Takes a few seconds the first time on a machine and milliseconds after that. Rates in doubt are not kept, so that they are
    measured again the next time.

    Raises:
        AdvisorError: torch cannot be imported there, or the probe did not end in time.
    """
    cacheable = python == sys.executable  # the library versions of another interpreter are not known here
    if use_cache and cacheable and (known := kept()) is not None:
        return known
    try:
        child = run_module("advisor.profiling.machine.environment", "--json", timeout_s=timeout_s, python=python)
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
    if cacheable and not found.rates_doubt and found.rates_provenance == MEASURED:
        with contextlib.suppress(AdvisorError):
            keep(found)
    return found


def keep(found: Environment) -> None:
    """For the next `probe` of this machine, with these libraries and variables."""
    storage.save(_kept_at(), found)


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
        torch_compile=can_compile(),
    )


def _measure_gpu(facts: Environment) -> Environment:
    import torch

    properties = torch.cuda.get_device_properties(0)
    uuid = str(getattr(properties, "uuid", ""))
    notes: list[str] = []
    driver, max_clock_mhz, shared = "", float(getattr(properties, "clock_rate", 0)) / 1e3, False
    reader = None
    try:
        reader = nvml.GpuReader(uuid or None)
        others = (reader.processes() or set()) - {os.getpid()}
        # Ids that /proc does not know come from another namespace; one of them is this process.
        shared = any((hostload.PROC / str(pid)).exists() for pid in others)
        identity = reader.identity()
        uuid, driver = identity.get("uuid", uuid), identity.get("driver", "")
        max_clock_mhz = reader.constants.get("sm_clock_max_mhz", max_clock_mhz)
    except AdvisorError as error:
        notes.append(f"NVML: {error}")
    arch = properties.major * 10 + properties.minor
    lanes = architectures.of(arch).fp32_lanes
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
        found = rates.of_gpu(torch.device("cuda", 0), arch, reader, shared=shared)
    except RuntimeError as error:  # out of memory on a GPU in use, or a device that has failed
        return replace(facts, notes=(*notes, f"rates not measured: {str(error).splitlines()[0]}"))
    finally:
        if reader is not None:
            reader.close()
    return _with(replace(facts, notes=tuple(notes)), found)


def _with(facts: Environment, found: rates.Rates) -> Environment:
    return replace(
        facts,
        copy_gbps=found.copy_gbps,
        matrix_tflops=found.matrix_tflops,
        rates_provenance=MEASURED,
        rates_doubt=found.doubt,
    )


def _measure_cpu(facts: Environment) -> Environment:
    import torch

    notes = []
    if torch.version.cuda is not None:
        notes.append("torch is a CUDA build, but no GPU is usable here")
    return _with(replace(facts, device="cpu", notes=tuple(notes)), rates.of_cpu())


def can_compile() -> bool:
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
    oldest = divmod(architectures.TRITON, 10)
    return importlib.util.find_spec("triton") is not None and torch.cuda.get_device_capability() >= oldest


def _compilers() -> tuple[str, ...]:
    named = os.environ.get("CXX", "").split()[:1]
    return (*named, "c++", "g++", "clang++", "cl")


def _cudnn() -> str:
    import torch

    version = torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None
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
    """`python -m advisor.profiling.machine.environment --json`: measure this machine and print one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m advisor.profiling.machine.environment", description=main.__doc__)
    parser.add_argument("--json", action="store_true", required=True, help="print JSON (the only form)")
    parser.parse_args()
    print(json.dumps(storage.to_plain(measure())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
