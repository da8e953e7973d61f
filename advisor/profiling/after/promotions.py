"""Where fp64 enters a step by itself: an operator that is given tensors in fp64 and in fewer bits computes all in fp64.

Nobody asks for that: NumPy's arrays are float64, and so are tensors made of them, and of Python's numbers by a loader's collate function. A
step that converts to fp64 itself, by `double()` or `to(torch.float64)`, wants it: of such a step nothing is told.
"""

from __future__ import annotations

import json
from collections import defaultdict

from advisor.core.profile import Site
from advisor.core.trace import Trace
from advisor.profiling.trace import shapes
from advisor.profiling.trace.hosttree import FORWARD, OTHER, HostTree

_COPIES = frozenset({"aten::copy_", "aten::to", "aten::_to_copy", "aten::clone"})
_FLOAT64 = 7  # c10::ScalarType


def sites(trace: Trace, tree: HostTree, start: int, end: int, steps: int) -> tuple[Site, ...]:
    """Each line with the operator that promotes there, calls and host time per step, in the order of the step."""
    ops = trace.ops
    found: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for i in tree.order:
        if not start <= ops.start_ns[i] < end or "double" not in (ops.dtypes[i] if ops.dtypes else ""):
            if _converts(trace, tree, i):
                return ()
            continue
        if not tree.is_operator(i) or tree.loading[i] or tree.phase(i) not in (FORWARD, OTHER) or tree.top[i] != i:
            continue
        if ops.name[i] not in _COPIES and shapes.promotes(ops.shapes[i], ops.dtypes[i]):
            entry = found[(tree.line[i] or tree.module[i].partition("|")[0], ops.name[i])]
            entry[0] += 1 / steps
            entry[1] += (ops.end_ns[i] - ops.start_ns[i]) / 1e3 / steps
    return tuple(
        Site(source=line, what=f"{name} of fp64 with fewer bits", calls=calls, time_us=us)
        for (line, name), (calls, us) in found.items()
    )


def _converts(trace: Trace, tree: HostTree, i: int) -> bool:
    """The script converts a tensor to fp64 here."""
    ops = trace.ops
    if ops.name[i] != "aten::_to_copy" or not ops.arguments or not ops.arguments[i] or not tree.is_operator(i):
        return False
    if ops.name[tree.top[i]] not in (*_COPIES, "aten::double", "aten::type_as"):
        return False  # inside an operator that promotes
    given = json.loads(ops.arguments[i])
    small = not any(size for size in json.loads(ops.shapes[i])[:1])
    return len(given) > 1 and given[1] == _FLOAT64 and not small and tree.phase(i) in (FORWARD, OTHER)
