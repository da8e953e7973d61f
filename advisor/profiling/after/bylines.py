"""Host time of what the script's own lines do to its weights, outside any `Optimizer.step`: see profiling/inside/weights.py."""

from __future__ import annotations

from advisor.core.trace import Trace
from advisor.profiling.trace.hosttree import HostTree
from advisor.profiling.trace.intervals import Interval
from advisor.profiling.trace.kinds import VIEWS

_LINE = "line:"


def spans(trace: Trace, tree: HostTree, phase: str, thread: int) -> tuple[list[Interval], list[Interval]]:
    """Where `thread` works at lines whose role is this phase, with the Python between their calls; and the calls alone.

    A span ends where an operator of another phase, a module or an optimizer begins. Views made just before it (`state_dict()`,
    `parameters()`, `detach()`) are its own.
    """
    if phase not in trace.roles.values():
        return [], []
    ops = trace.ops
    found: list[Interval] = []
    calls: list[Interval] = []
    views: int | None = None  # the first of the views that were made since anything else
    running = False
    for i in tree.order:
        if ops.thread[i] != thread:
            continue
        text = ops.annotation[i]
        if text.startswith(_LINE) and trace.roles.get(text[len(_LINE) :]) == phase == tree.phase(i):
            begin = ops.start_ns[i] if views is None else views
            if running:
                found[-1] = (found[-1][0], max(found[-1][1], ops.end_ns[i]))
            else:
                found.append((begin, ops.end_ns[i]))
            calls.append((ops.start_ns[i], ops.end_ns[i]))
            running, views = True, None
        elif text.startswith(_LINE) or tree.phase(i) == phase:
            continue
        elif not text and ops.name[i] in VIEWS:
            views = ops.start_ns[i] if views is None and not running else views
        else:
            running, views = False, None
    return found, calls
