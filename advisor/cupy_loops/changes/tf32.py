"""TF32 for fp32 matrix products: cuBLAS rounds what it multiplies to 10 mantissa bits and sums in fp32, on tensor cores.

CuPy's own switch for it, CUPY_TF32, is read at its import; `set_compute_type` is what that sets.
Source: https://docs.cupy.dev/en/stable/reference/environment.html
"""

from __future__ import annotations

from typing import Any

from advisor.core import architectures
from advisor.cupy_loops.changes.base import Change, Unfit
from advisor.cupy_loops.facts import fewer_bits
from advisor.loop.patches import Patches

TF32 = 7  # cupy._core's COMPUTE_TYPE_TF32


class Tf32(Change):
    """fp32 products as TF32."""

    id = "cupy_tf32"

    def apply(self, module: Any, patches: Patches) -> None:
        core: Any = getattr(module, "_core", None)
        if not hasattr(core, "set_compute_type"):
            raise Unfit("this CuPy has no set_compute_type")
        if fewer_bits(module):
            raise Unfit("TF32 or less is in use already")
        if int(module.cuda.Device().compute_capability) < architectures.TF32:
            raise Unfit("this GPU has no TF32 tensor cores (compute capability below 8.0)")
        before = core.get_compute_type("float32")
        patches.undo(lambda: core.set_compute_type("float32", before))
        core.set_compute_type("float32", TF32)
