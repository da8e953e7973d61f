"""How many warps an SM's registers hold. Plain arithmetic."""

from __future__ import annotations

SCHEDULERS, SCHEDULER_REGISTERS = 4, 16384  # of an SM; a warp's registers are one scheduler's
MAX_REGISTERS = 255  # of a thread; what it is given comes in eights


def warps_at_once(registers: int) -> int:
    """Warps of an SM, for threads of so many registers."""
    return SCHEDULERS * (SCHEDULER_REGISTERS // (32 * min(MAX_REGISTERS, -(-registers // 8) * 8)))
