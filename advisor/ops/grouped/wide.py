"""Groups so wide that they fill the products of Hopper's warpgroups: the kernels of ops/conv3x3 make them, each block those of one group."""

from __future__ import annotations

from functools import cache, lru_cache
from itertools import product as pairs
from typing import TYPE_CHECKING

from advisor.ops import nvrtc, tensor_map
from advisor.ops.conv3x3 import spec as conv3x3

if TYPE_CHECKING:
    from advisor.ops.grouped.spec import Call

FORWARD, BACKWARD_WEIGHT = conv3x3.CONV, conv3x3.BACKWARD_WEIGHT
# (channels a group, stride) whose products are made so.
TAKEN = frozenset(pairs((40, 48, 56, 64), (1, 2)))
WIDE_GROUPS = 1  # 0: the kernels of warps for these too


def taken(group: int, stride: int) -> bool:
    """Whether Hopper's products make this convolution, where they are to be had."""
    return bool(WIDE_GROUPS) and (group, stride) in TAKEN


@cache
def unavailable(device: int) -> str:
    """Why this device makes no such products; empty when it does."""
    arch = nvrtc.arch(device)
    if arch != conv3x3.ARCH:
        return f"sm_{arch} lacks the products of warpgroups that sm_{conv3x3.ARCH} has"
    return tensor_map.unavailable() or nvrtc.refused(FORWARD)


@lru_cache(maxsize=4096)
def convolution(call: Call) -> conv3x3.Call:
    """As conv3x3 has it."""
    return conv3x3.Call(
        call.batch,
        call.group,
        call.group,
        call.height,
        call.width,
        groups=call.channels // call.group,
        stride=call.stride,
    )
