"""What the objects of a CuPy loop say of it: memory pool, settings, versions."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from advisor.core.profile import MemoryStats, ModelFacts

VARIABLES = (
    "CUPY_ACCELERATORS",
    "CUPY_TF32",
    "CUPY_GPU_MEMORY_LIMIT",
    "CUPY_CACHE_DIR",
    "CUDA_LAUNCH_BLOCKING",
    "CUPY_CACHE_SAVE_CUDA_SOURCE",
)
_FEWER_BITS = {3: "fp16", 6: "bf16", 7: "tf32"}  # cupy._core's COMPUTE_TYPE_FP16, _BF16, _TF32
# What products' terms are off by then, in parts of their magnitude; TF32 may be on in one of two that are compared.
CUB = 1  # of cupy._core's accelerators
ROUNDED_BY = {"": 2e-3, "tf32": 2e-3, "bf16": 1.2e-2, "fp16": 4e-3}
_ASKED = os.environ.get("CUPY_TF32", "0") not in ("", "0")  # CuPy reads it at its import


@dataclass(slots=True)
class PoolReadings:
    """The memory pool's state at boundaries: used bytes and what the pool has taken from the driver."""

    module: Any
    used: list[int] = field(default_factory=list)
    held: list[int] = field(default_factory=list)

    def read(self) -> None:
        """One reading. Waits for nothing."""
        pool = _pool(self.module)
        if pool is not None:
            self.used.append(int(pool.used_bytes()))
            self.held.append(int(pool.total_bytes()))

    def stats(self) -> MemoryStats:
        """Of the readings; growth where it is the same all through."""
        total = _total_bytes(self.module)
        if not self.used:
            return MemoryStats(total_bytes=total)
        steps = len(self.used) - 1
        growth = (self.used[-1] - self.used[0]) / steps if steps > 0 else None
        rising = all(b > a for a, b in zip(self.used, self.used[1:], strict=False))
        return MemoryStats(
            peak_allocated_bytes=max(self.used),
            peak_reserved_bytes=max(self.held),
            total_bytes=total,
            growth_bytes=growth,
            growth_steady=steps > 3 and rising,
        )


def _pool(module: Any) -> Any:
    """The pool that arrays come from, if it can tell; the asynchronous pool tells the same two numbers."""
    get = getattr(module, "get_default_memory_pool", None)
    return get() if get is not None else None


def _total_bytes(module: Any) -> int:
    if not hasattr(module, "cuda"):
        return 0
    return int(module.cuda.runtime.memGetInfo()[1])


def pooled(module: Any) -> bool:
    """Whether arrays come from CuPy's pool: a script may have switched it off."""
    if not hasattr(module, "cuda"):
        return True
    allocator = module.cuda.get_allocator()
    return "malloc" in getattr(allocator, "__name__", "") and getattr(allocator, "__self__", None) is not None


def fewer_bits(module: Any) -> str:
    """What fp32 products may be rounded to: "tf32", "bf16", "fp16", or "" for nothing."""
    core = getattr(module, "_core", None)
    get = getattr(core, "get_compute_type", None)
    found = _FEWER_BITS.get(int(get("float32")), "") if get is not None else ""
    return found or ("tf32" if _ASKED else "")


def reductions_by_cub(module: Any) -> bool:
    """Whether CuPy's reductions may use CUB, as they do unless CUPY_ACCELERATORS says otherwise; true where that cannot be told."""
    get = getattr(getattr(module, "_core", None), "get_reduction_accelerators", None)
    return get is None or CUB in get()


def requests(module: Any) -> Any:
    """Counts what is asked of CuPy's memory pool, and what that asks of the driver, inside a `with` and in this thread; None where CuPy has
    no such hooks.

    Returns:
        a hook with `asked` and `from_driver`.
    """
    base = getattr(getattr(module, "cuda", None), "MemoryHook", None)
    if base is None:
        return None

    class Requests(base):  # type: ignore[misc,valid-type]  # a class known at run time
        """Sees the requests of a thread."""

        name = "advisor"

        def __init__(self) -> None:
            self.asked = self.from_driver = 0

        def malloc_postprocess(self, **kwargs: Any) -> None:
            """The pool has given memory."""
            self.asked += 1

        def alloc_postprocess(self, **kwargs: Any) -> None:
            """The driver has."""
            self.from_driver += 1

    return Requests()


def model_facts(module: Any, dtypes: Counter[str]) -> ModelFacts:
    """Facts for the rules.

    Args:
        dtypes: of the floating-point results of a step, by how often they were seen.
    """
    short = {"float64": "fp64", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
    common = next((short[name] for name, _ in dtypes.most_common() if name in short), "fp32")
    return ModelFacts(
        parameter_dtype=common,
        flags={
            "uses_cupy": True,
            "tf32_matmul": bool(fewer_bits(module)),
            "cupy_alone": True,
            "cupy_pool": pooled(module),
            "cupy_cub": reductions_by_cub(module),
        },
        env={name: os.environ[name] for name in VARIABLES if name in os.environ},
    )
