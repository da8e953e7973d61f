"""What GPUs of each architecture have: the one table. A new architecture is a row, and a compile test (tests/kernels/test_sources.py) takes it up.

Sources: CUDA programming guide, "Compute Capabilities" (features, SMs, memory) and "Arithmetic Instructions"; what was measured says where.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

BUNDLED_KERNELS = 80  # the oldest that they run on: cvt.rn.bf16x2 and cp.async
FP16, BF16, TF32 = 70, 80, 80  # the first with such tensor cores
TRITON = 70  # the oldest that it compiles for (torch.utils._triton.has_triton)
HOPPER = 90  # the first whose tensor cores take products of warpgroups: older kernels run there, without them


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """One row.

    Attributes:
        sm: 90 for sm_90.
        shared_kib: of a block, at most, static and dynamic shared memory together.
        sms: of its largest GPU.
        threads: that an SM holds at most.
        blocks: likewise.
        fp32_lanes: of an SM.
        clusters: blocks of a cluster read each other's shared memory.
        bulk_copies: boxes of tensors are copied to shared memory by the hardware (TMA).
        early_launches: a kernel's blocks may be launched before the kernel ahead has ended (griddepcontrol).
        warpgroups: products of warpgroups (wgmma), which one architecture alone has.
        streams: reading some rows twice in one launch over the grid was measured to win (ops/batchnorm_act).
        roomy: ptxas uses more registers for the same code, so that fewer values fit without spills (ops/depthwise, ops/first_conv).
    """

    sm: int
    shared_kib: int = 99
    sms: int = 132
    threads: int = 2048
    blocks: int = 32
    fp32_lanes: int = 128
    clusters: bool = False
    bulk_copies: bool = False
    early_launches: bool = False
    warpgroups: bool = False
    streams: bool = False
    roomy: bool = False

    @property
    def shared_bytes(self) -> int:
        """`shared_kib` in bytes."""
        return self.shared_kib * 1024

    def lacks(self, feature: str) -> str:
        """Why what needs this cannot run; empty where it can. `feature`: a key of FEATURES."""
        if getattr(self, feature):
            return ""
        first = min(row.sm for row in ROWS if getattr(row, feature))
        return f"sm_{self.sm} lacks the {FEATURES[feature]} that sm_{first} has"


FEATURES = {
    "clusters": "clusters of blocks",
    "bulk_copies": "bulk copies of tensors",
    "warpgroups": "products of warpgroups",
}
_SINCE_HOPPER: dict[str, Any] = {"clusters": True, "bulk_copies": True, "early_launches": True}
_BLACKWELL: dict[str, Any] = {**_SINCE_HOPPER, "roomy": True}
_OF_DESKTOPS: dict[str, Any] = {"threads": 1536, "blocks": 24}
ROWS = (
    Architecture(sm=60, fp32_lanes=64, shared_kib=48, sms=56),
    Architecture(sm=61, shared_kib=48, sms=30),
    Architecture(sm=70, fp32_lanes=64, shared_kib=96, sms=80),
    Architecture(sm=72, fp32_lanes=64, shared_kib=96, sms=8),
    Architecture(sm=75, fp32_lanes=64, shared_kib=64, sms=72, threads=1024, blocks=16),
    Architecture(sm=80, fp32_lanes=64, shared_kib=163, sms=108),
    Architecture(sm=86, shared_kib=99, sms=84, threads=1536, blocks=16),
    Architecture(sm=87, shared_kib=163, sms=16, threads=1536, blocks=16),
    Architecture(sm=89, shared_kib=99, sms=142, **_OF_DESKTOPS),
    Architecture(sm=90, shared_kib=227, sms=132, **_SINCE_HOPPER, warpgroups=True, streams=True),
    Architecture(sm=100, shared_kib=227, sms=148, **_BLACKWELL),
    Architecture(sm=101, shared_kib=227, sms=20, **_BLACKWELL),
    Architecture(sm=103, shared_kib=227, sms=148, **_BLACKWELL),
    Architecture(sm=110, shared_kib=227, sms=20, **_BLACKWELL),
    Architecture(sm=120, shared_kib=99, sms=188, **_OF_DESKTOPS, **_BLACKWELL),
    Architecture(sm=121, shared_kib=99, sms=48, **_OF_DESKTOPS, **_BLACKWELL),
)


@cache
def of(sm: int) -> Architecture:
    """The row of this architecture; of one that has none the nearest older one's, with no more shared memory than all have had
    since sm_80, and nothing that was measured, or is one architecture's alone."""
    known = {row.sm: row for row in ROWS}
    if sm in known:
        return known[sm]
    nearest = known[max((older for older in known if older < sm), default=min(known))]
    least = min(row.shared_kib for row in ROWS if row.sm >= BUNDLED_KERNELS)
    return replace(nearest, sm=sm, shared_kib=min(nearest.shared_kib, least), warpgroups=False, streams=False)


MEASURED = of(90)  # whose GPUs docs/benchmarks are of, and launch geometries chosen on
