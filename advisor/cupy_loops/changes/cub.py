"""CUB for CuPy's reductions and scans, where CUPY_ACCELERATORS has taken it away: CuPy's own default since its version 11.

CuPy reads the variable at its import; `set_reduction_accelerators` and its sisters are what that sets.
Source: https://docs.cupy.dev/en/stable/reference/environment.html
"""

from __future__ import annotations

import functools
from typing import Any

from advisor.cupy_loops.changes.base import Change, Unfit
from advisor.cupy_loops.facts import CUB, reductions_by_cub
from advisor.loop.patches import Patches

KINDS = ("reduction", "routine")


class Cub(Change):
    """Reductions by CUB."""

    id = "cupy_cub"

    def apply(self, module: Any, patches: Patches) -> None:
        if reductions_by_cub(module):
            raise Unfit("CUB is in use already, or this CuPy cannot tell")
        core = module._core
        for kind in KINDS:
            put = getattr(core, f"set_{kind}_accelerators")
            before = list(getattr(core, f"get_{kind}_accelerators")())
            patches.undo(functools.partial(put, before))
            put([CUB, *before])
