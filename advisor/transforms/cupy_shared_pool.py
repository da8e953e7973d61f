"""CuPy's arrays come from PyTorch's pool: what one of the two frees the other may use, and neither has to ask the driver.

Wins where both pools are large and ask the driver in the loop: cudaMalloc waits for the device. Loses a few microseconds of host time for each
array of CuPy's, as PyTorch's allocator is asked through Python. Arrays that are there already keep their memory.

Source: https://docs.cupy.dev/en/stable/reference/generated/cupy.cuda.PythonFunctionAllocator.html
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from typing import Any

import torch

from advisor.core.profile import StepProfile
from advisor.core.units import counted
from advisor.core.verdict import Check
from advisor.loop.training import Training
from advisor.transforms.base import Match, Transform, Undo
from advisor.transforms.patch import all_or_nothing

given = {"arrays": 0}


class CupySharedPool(Transform):
    """Gives CuPy PyTorch's allocator."""

    id = "cupy_shared_pool"
    traced = False

    def match(self, training: Training, parameters: Mapping[str, str]) -> Match:
        cuda: Any = getattr(sys.modules.get("cupy"), "cuda", None)
        if not hasattr(cuda, "PythonFunctionAllocator"):
            return Match(applies=False, reason="the script has not imported CuPy")
        owner = type(getattr(cuda.get_allocator(), "__self__", None)).__name__
        if owner not in ("MemoryPool", "MemoryAsyncPool"):
            return Match(applies=False, reason=f"CuPy's arrays come from an allocator of the script's own ({owner})")
        return Match(applies=True, sites=("cupy.cuda.set_allocator",))

    def apply(self, training: Training, parameters: Mapping[str, str]) -> Undo:
        cupy: Any = sys.modules["cupy"]
        given["arrays"] = 0

        def malloc(size: int, device: int) -> int:
            given["arrays"] += 1
            stream = int(cupy.cuda.get_current_stream().ptr)
            return int(torch.cuda.caching_allocator_alloc(size, device, stream))

        def free(pointer: int, device: int) -> None:
            torch.cuda.caching_allocator_delete(pointer)

        with all_or_nothing() as undo:
            undo.push(functools.partial(cupy.cuda.set_allocator, cupy.cuda.get_allocator()))
            cupy.cuda.set_allocator(cupy.cuda.PythonFunctionAllocator(malloc, free).malloc)
        return undo

    def effect(self, training: Training, before: StepProfile | None, after: StepProfile | None) -> Check:
        number = given["arrays"]
        return Check(passed=number > 0, detail=f"PyTorch's pool gave CuPy {counted(number, 'array')}")
