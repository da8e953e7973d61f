"""Shared memory by architecture: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

from __future__ import annotations

WITHOUT_ASKING = 48 * 1024  # bytes that a block gets; more is an attribute of the kernel
OF_THE_SYSTEM = 1024  # bytes that it takes of an SM for each block
# Of a block, in KiB, static and dynamic together, where it is not that of sm_86, sm_89 and sm_120.
_KIB = {80: 163, 87: 163, 90: 227, 100: 227, 101: 227, 103: 227, 110: 227}
_OTHER_KIB = 99


def of_a_block(arch: int) -> int:
    """Bytes that a block may have on this architecture (90 for sm_90)."""
    return _KIB.get(arch, _OTHER_KIB) * 1024
