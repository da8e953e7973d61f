"""Other libraries that compute on CuPy's arrays: whose functions a script has taken from them, nobody sees called."""

from __future__ import annotations

import sys

UNSEEN = ("cupyx.", "cuml", "cudf", "cuquantum", "numba.cuda")


def loaded_beside() -> set[str]:
    """Those modules that are imported by now."""
    return {name for name in sys.modules if name.startswith(UNSEEN)}
