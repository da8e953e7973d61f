"""What machine ran the step, and in what state."""

from __future__ import annotations

from advisor.analysis.time import no_limit
from advisor.analysis.view import View
from advisor.core import architectures
from advisor.core.metrics import MetricTable
from advisor.core.profile import StepProfile
from advisor.core.provenance import Provenance

# A matrix rate is repeatable to a few per cent: below a tenth, two rates do not differ.
FASTER = 1.1


def fill(view: View, table: MetricTable) -> None:
    """Set device, rates and installed parts. Clocks, power and temperature come with the samples."""
    machine = view.profile.environment
    table.set("on_gpu", view.on_gpu)
    if view.on_gpu:
        if machine.sm_arch:
            table.set("arch", machine.sm_arch)
        table.set("gpu_shared", machine.shared_gpu)
    table.set("gpu_count", machine.gpu_count)
    if machine.cpu_count:
        table.set("cpu_count", machine.cpu_count)
    free = cores_free(view.profile)
    if free is not None:
        table.set("cores_free_frac", free)
    else:
        table.miss("cores_free_frac", "the cores' use was not sampled")
    table.set("cupy_available", bool(machine.cupy))
    rates = machine.matrix_tflops
    provenance = Provenance(machine.rates_provenance) if machine.rates_provenance in _KNOWN else Provenance.MEASURED
    if provenance is Provenance.UNAVAILABLE:
        provenance = Provenance.MODELLED  # a rate without a stated origin is not passed on as measured
    if machine.rates_doubt:
        table.miss("copy_gbps", no_limit(view.profile))
    elif machine.copy_gbps > 0:
        table.set("copy_gbps", machine.copy_gbps, provenance)
    else:
        table.miss("copy_gbps", "the machine's rates were not measured")
    if rates.get("bf16", 0.0) > 0 and rates.get("fp32", 0.0) > 0:
        table.set("bf16_supported", rates["bf16"] > FASTER * rates["fp32"], provenance)
    elif view.on_gpu and 0 < machine.sm_arch < architectures.BF16:
        table.set("bf16_supported", False, Provenance.MODELLED, f"sm_{machine.sm_arch} has no bf16 tensor cores")
    else:
        table.miss("bf16_supported", "needs measured bf16 and fp32 matrix rates")
    if machine.torch_compile is not None:
        table.set("torch_compile_available", machine.torch_compile)
    else:
        table.miss("torch_compile_available", "whether a backend compiler is present was not asked")


def cores_free(profile: StepProfile) -> float | None:
    """The share of the cores' time that nobody used, the script or others; None where it was not sampled."""
    used = core_use(profile, "cpu_util_frac")
    return None if used is None else max(0.0, 1.0 - used - (core_use(profile, "cpu_others_frac") or 0.0))


def core_use(profile: StepProfile, name: str) -> float | None:
    """A share of the cores' time as it was sampled; None where it was not."""
    quantity = profile.utilization.get(name)
    return quantity.value if quantity is not None else None


_KNOWN = {kind.value for kind in Provenance}
