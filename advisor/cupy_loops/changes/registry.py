"""Changes by the id of their row."""

from __future__ import annotations

from advisor.cupy_loops.changes.base import Change
from advisor.cupy_loops.changes.cub import Cub
from advisor.cupy_loops.changes.graphs import Graphs
from advisor.cupy_loops.changes.kernels import KernelsOnce
from advisor.cupy_loops.changes.single import Single
from advisor.cupy_loops.changes.tf32 import Tf32

# In the order in which they go on: what sees every call last, and so first of all when a call is made.
CHANGES: dict[str, type[Change]] = {change.id: change for change in (KernelsOnce, Cub, Tf32, Single, Graphs)}
