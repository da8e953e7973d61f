"""Speed of light: the least time a machine needs for given bytes and floating-point operations.

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. Ceilings are the ones measured on this machine.
"""

from __future__ import annotations

from advisor.core.environment import Environment

# What is at least as precise as each dtype class, and so may compute in its place.
_AS_PRECISE = {
    "fp16": ("fp16", "bf16", "tf32", "fp32"),
    "bf16": ("bf16", "fp16", "tf32", "fp32"),
    "tf32": ("tf32", "fp32"),
}


def matrix_tflops(environment: Environment, dtype: str) -> float:
    """The rate at which this machine can multiply what is in a dtype class: its own, or of a class as precise that is faster.

    A CPU may compute bf16 in software, tens of times slower than fp32: its limit is not that. 0.0 without a measured rate.
    """
    own = environment.matrix_tflops.get(dtype, 0.0)
    if own <= 0:
        return 0.0
    return max(environment.matrix_tflops.get(name, 0.0) for name in _AS_PRECISE.get(dtype, (dtype,)))


def limit_us(environment: Environment, *, nbytes: float, flops: float, dtype: str) -> float:
    """Microseconds that `nbytes` of device-memory traffic and `flops` operations in `dtype` need at least.

    The larger of bytes over measured copy bandwidth and flops over the matrix rate that serves the dtype class. A dtype without a
    measured rate contributes no flop bound.
    """
    byte_us = nbytes / (environment.copy_gbps * 1e3) if environment.copy_gbps > 0 else 0.0
    rate = matrix_tflops(environment, dtype)
    flop_us = flops / (rate * 1e6) if rate > 0 else 0.0
    return max(byte_us, flop_us)


def memory_bound(environment: Environment, *, nbytes: float, flops: float, dtype: str) -> bool:
    """True when bytes, not flops, set the limit."""
    rate = matrix_tflops(environment, dtype)
    if environment.copy_gbps <= 0 or rate <= 0:
        return True
    return nbytes / environment.copy_gbps / 1e3 >= flops / rate / 1e6
