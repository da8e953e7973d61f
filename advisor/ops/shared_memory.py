"""Shared memory of a block: CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"."""

from __future__ import annotations

from advisor.core import architectures

WITHOUT_ASKING = 48 * 1024  # bytes that a block gets; more is an attribute of the kernel
OF_THE_SYSTEM = 1024  # bytes that it takes of an SM for each block


def of_a_block(arch: int) -> int:
    """Bytes that a block may have on this architecture (90 for sm_90)."""
    return architectures.of(arch).shared_bytes


def of_an_sm(arch: int) -> int:
    """Bytes that an SM of this architecture has: of its largest block, and what the system takes."""
    return of_a_block(arch) + OF_THE_SYSTEM
