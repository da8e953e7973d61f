"""Speed of light: the least time a machine needs for given bytes and floating-point operations.

Source: Williams, Waterman, Patterson, "Roofline", CACM 52(4), 2009. Ceilings are the ones measured on this machine.
"""

from __future__ import annotations

from advisor.core.environment import Environment


def limit_us(environment: Environment, *, nbytes: float, flops: float, dtype: str) -> float:
    """Microseconds that `nbytes` of device-memory traffic and `flops` operations in `dtype` need at least.

    The larger of bytes over measured copy bandwidth and flops over the measured matrix rate of the dtype class. A dtype
    without a measured rate contributes no flop bound.
    """
    byte_us = nbytes / (environment.copy_gbps * 1e3) if environment.copy_gbps > 0 else 0.0
    rate = environment.matrix_tflops.get(dtype, 0.0)
    flop_us = flops / (rate * 1e6) if rate > 0 else 0.0
    return max(byte_us, flop_us)


def memory_bound(environment: Environment, *, nbytes: float, flops: float, dtype: str) -> bool:
    """True when bytes, not flops, set the limit."""
    rate = environment.matrix_tflops.get(dtype, 0.0)
    if environment.copy_gbps <= 0 or rate <= 0:
        return True
    return nbytes / environment.copy_gbps / 1e3 >= flops / rate / 1e6
