"""TF32, or bf16, for fp32 matrix products: cuBLAS rounds what it multiplies to 10 mantissa bits and sums in fp32, on tensor cores.

CuPy's own switch for it, CUPY_TF32, is read at its import; `set_compute_type` is what that sets.
Source: https://docs.cupy.dev/en/stable/reference/environment.html
"""

from __future__ import annotations

from typing import Any, ClassVar

from advisor.core import architectures
from advisor.cupy_loops.changes.base import Change, Unfit
from advisor.cupy_loops.facts import fewer_bits
from advisor.loop.patches import Patches

TF32, BF16 = 7, 6  # cupy._core's COMPUTE_TYPE_TF32 and _BF16


class _FewerBits(Change):
    """fp32 products with fewer bits."""

    kind: ClassVar[int]
    told: ClassVar[str]

    def apply(self, module: Any, patches: Patches) -> None:
        core: Any = getattr(module, "_core", None)
        if not hasattr(core, "set_compute_type"):
            raise Unfit("this CuPy has no set_compute_type")
        if int(module.cuda.Device().compute_capability) < architectures.TF32:
            raise Unfit(f"this GPU has no {self.told} tensor cores (compute capability below 8.0)")
        before = core.get_compute_type("float32")
        self.check(module)
        patches.undo(lambda: core.set_compute_type("float32", before))
        core.set_compute_type("float32", self.kind)

    def check(self, module: Any) -> None:
        """Whether the script has not chosen yet.

        Raises:
            Unfit: it has.
        """


class Tf32(_FewerBits):
    """fp32 products as TF32."""

    id = "cupy_tf32"
    kind, told = TF32, "TF32"

    def check(self, module: Any) -> None:
        """TF32 is not on yet."""
        if fewer_bits(module):
            raise Unfit("TF32 or less is in use already")


class Bf16(_FewerBits):
    """fp32 products of numbers rounded to bf16, summed in fp32. A recorded step reads and writes the copies of its operands as bf16."""

    id = "cupy_bf16"
    kind, told = BF16, "bf16"

    def check(self, module: Any) -> None:
        """bf16 or less is not on yet; TF32 may be."""
        if fewer_bits(module) not in ("", "tf32"):
            raise Unfit("bf16 or fp16 is in use already")
