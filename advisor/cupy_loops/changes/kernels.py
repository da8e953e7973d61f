"""Kernel objects that a loop makes anew in each step, with the same source, are made once.

`cupy.ElementwiseKernel(...)` inside a function reads its parameter lists and looks for its compiled code at each call; DeZero's and Chainer's
im2col do so. Such objects have no state, so one may stand for all that are made of equal arguments. A RawKernel has (its attributes may be
set), and is left alone.
"""

from __future__ import annotations

from typing import Any

from advisor.cupy_loops.changes.base import Change, Unfit
from advisor.loop.patches import Patches
from advisor.profiling.inside.cupy_surface import SEES

STATELESS = ("ElementwiseKernel", "ReductionKernel")
MOST = 4096  # kernels kept


class KernelsOnce(Change):
    """One object for each set of arguments."""

    id = "cupy_kernels_once"

    def __init__(self) -> None:
        self.made = self.again = 0

    def apply(self, module: Any, patches: Patches) -> None:
        found = [name for name in STATELESS if isinstance(getattr(module, name, None), type)]
        if not found:
            raise Unfit("this CuPy has none of " + ", ".join(STATELESS))
        for name in found:
            patches.replace(module, name, self._remembering(getattr(module, name)))

    def effect(self) -> str:
        return f"{self.made} kernels made once, {self.again} times asked for again" if self.again else ""

    def _remembering(self, kind: Any) -> type:
        kept: dict[Any, Any] = {}
        change = self

        class Once(type(kind)):  # type: ignore[misc]  # a class known at run time
            """Stands for `kind`: its instances are those of `kind`, and it makes them."""

            def __call__(cls, *args: Any, **kwargs: Any) -> Any:
                # A subclass is the user's own, unless it is what stands around CuPy's to see its calls.
                make = kind if cls is made else super().__call__
                if cls is not made and not getattr(cls, SEES, False):
                    return make(*args, **kwargs)
                try:
                    key = (cls, args, tuple(sorted(kwargs.items())))
                    known = kept.get(key)
                except TypeError:  # arguments that cannot be told apart
                    return make(*args, **kwargs)
                if known is None:
                    known = make(*args, **kwargs)
                    if len(kept) < MOST:
                        kept[key] = known
                        change.made += 1
                else:
                    change.again += 1
                return known

            def __instancecheck__(cls, instance: Any) -> bool:
                return isinstance(instance, kind) if cls is made else super().__instancecheck__(instance)

        made = Once(kind.__name__, (kind,), {"__module__": kind.__module__, "__doc__": kind.__doc__})
        return made
