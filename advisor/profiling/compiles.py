"""What Dynamo has compiled in this process, from its own counters. Never loads it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any


def compiled_graphs() -> int:
    """Graphs compiled so far, recompilations included; 0 when Dynamo was never loaded."""
    return int(_counters("stats").get("unique_graphs", 0))


def compiled_code_in_use() -> bool:
    """True when Dynamo has compiled something."""
    return bool(compiled_graphs()) or bool(_counters("frames").get("ok"))


def is_compiled(module: Any) -> bool:
    """Whether a call of this module runs compiled code: wrapped by torch.compile, or compiled in place."""
    return type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None


def graph_breaks() -> float | None:
    """Graph breaks per frame that Dynamo was given; None when it has compiled nothing.

    After a break the rest of the function is compiled as a frame of its own: those are not counted as frames.
    """
    frames = int(_counters("frames").get("ok", 0))
    if not frames:
        return None
    broken = sum(_counters("graph_break").values())
    # torch 2.8 does not count what is resumed: behind each break there is one.
    resumed = sum(_counters("resumes").values()) or broken
    return broken / max(frames - resumed, 1)


def _counters(group: str) -> Mapping[str, int]:
    # Dynamo keeps one Counter a group; a torch that keeps them otherwise is one of which nothing is known.
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", None)
    found = counters.get(group) if isinstance(counters, dict) else None
    return found if isinstance(found, Mapping) else {}
