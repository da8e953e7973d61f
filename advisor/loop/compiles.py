"""What Dynamo has compiled in this process, from its own counters and lists. Never loads it, and changes nothing.

Where a version keeps no such list, what it would say is left out, never guessed.
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from advisor.core.profile import Site

_UTILS = "torch._dynamo.utils"
_WRAPPER = os.path.join("torch", "_dynamo", "external_utils.py")
_COMPILE_ID = re.compile(r"^\d+/\d+: ")  # of the code whose guard failed
_SWITCHES = os.path.join("torch", "_dynamo", "eval_frame.py")  # where calls of compiled functions pass


def compiled_graphs() -> int:
    """Graphs compiled so far, recompilations included; 0 when Dynamo was never loaded."""
    return int(_counters("stats").get("unique_graphs", 0))


def compiled_code_in_use() -> bool:
    """True when Dynamo has compiled something."""
    return bool(compiled_graphs()) or bool(_counters("frames").get("ok"))


def is_compiled(module: Any) -> bool:
    """Whether a call of this module runs compiled code: wrapped by torch.compile, compiled in place, or its `forward` is."""
    if type(module).__name__ == "OptimizedModule" or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    forward = getattr(module, "forward", None)
    return hasattr(forward, "_torchdynamo_orig_callable") and not getattr(forward, "_torchdynamo_disable", False)


def inside_compiled_call() -> bool:
    """Whether the caller runs within a call of something that torch.compile was given. Looks at the stack: microseconds."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_SWITCHES) and _is_optimizing(frame.f_locals.get("self")):
            return True
        frame = frame.f_back
    return False


def _is_optimizing(context: Any) -> bool:
    """`torch._dynamo.disable` wraps calls the same way, to the opposite end."""
    return type(context).__name__ == "OptimizeContext"


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
    counters = getattr(sys.modules.get(_UTILS), "counters", None)
    found = counters.get(group) if isinstance(counters, dict) else None
    return found if isinstance(found, Mapping) else {}


class Compilations:
    """The moment of construction; everything told is since then."""

    def __init__(self) -> None:
        self._graphs = compiled_graphs()
        self._reasons = _reasons()  # held, so that no other object takes one's identity
        self._metrics = _metrics()

    @property
    def any(self) -> bool:
        """Something was compiled. After a reset of Dynamo its counter begins anew, and is above zero only if so."""
        now = compiled_graphs()
        return now != self._graphs and now > 0

    def breaks(self) -> tuple[Site, ...]:
        """Graph breaks, one a source line and reason."""
        old = {id(reason) for reason in self._reasons}
        found: dict[tuple[str, str], None] = {}
        for reason in _reasons():
            if id(reason) in old:
                continue
            frames = getattr(reason, "user_stack", None) or []
            source = f"{_shown(frames[-1].filename)}:{frames[-1].lineno}" if frames else ""
            found[source, str(getattr(reason, "reason", "")).strip().partition("\n")[0]] = None
        return tuple(Site(source=source, what=f"graph break: {what}", calls=1, time_us=0) for source, what in found)

    def compiled(self) -> tuple[Site, ...]:
        """Functions that were compiled, with the reason where they had been before, how often and how long it took in all."""
        old = {id(entry) for entry in self._metrics}
        sites: Counter[tuple[str, str]] = Counter()
        spent: Counter[tuple[str, str]] = Counter()
        for entry in _metrics():
            if id(entry) in old or not getattr(entry, "co_filename", None):
                continue
            why = _COMPILE_ID.sub("", _first_line(getattr(entry, "recompile_reason", None)))
            name, source = entry.co_name, f"{_shown(entry.co_filename)}:{entry.co_firstlineno}"
            if _WRAPPER in entry.co_filename:  # around a module of torch's own
                name, source = "a module", ""
            place = source, f"compilation of {name}" + (f": {why}" if why else "")
            sites[place] += 1
            spent[place] += round((getattr(entry, "entire_frame_compile_time_s", None) or 0.0) * 1e6)
        if not sites and self.any:
            sites["", "compilation"] = max(1, compiled_graphs() - self._graphs)
        return tuple(Site(source=s, what=w, calls=n, time_us=spent[s, w]) for (s, w), n in sites.items())

    def given_up(self) -> tuple[Site, ...]:
        """Functions that Dynamo has compiled as often as it will, with the last reason: they run uncompiled from then on.

        The entry of the attempt that ends it names no function; those of its frame before it do.
        """
        old = {id(entry) for entry in self._metrics}
        functions: dict[str, Any] = {}
        sites = []
        for entry in _metrics():
            frame, _, attempt = str(getattr(entry, "compile_id", None)).partition("/")
            if getattr(entry, "co_filename", None):
                functions[frame] = entry
            elif id(entry) not in old and "limit exceeded" in _first_line(getattr(entry, "fail_reason", None)):
                name, source = "a function", ""
                if (known := functions.get(frame)) is not None:
                    name, source = known.co_name, f"{_shown(known.co_filename)}:{known.co_firstlineno}"
                what = f"{name} compiled {attempt} times, then given up"
                why = _first_line(getattr(entry, "recompile_reason", None))
                sites.append(Site(source=source, what=f"{what}: {why}" if why else what, calls=1, time_us=0))
        return tuple(sites)


def together(sites: Sequence[Site], steps: int) -> tuple[Site, ...]:
    """Each place once, calls and time as of one of `steps`; none without steps."""
    found: dict[tuple[str, str], Site] = {}
    for site in sites if steps else ():
        known = found.get((site.source, site.what))
        calls, time_us = (known.calls, known.time_us) if known else (0.0, 0.0)
        found[site.source, site.what] = replace(
            site, calls=calls + site.calls / steps, time_us=time_us + site.time_us / steps
        )
    return tuple(found.values())


def _reasons() -> list[Any]:
    return list(getattr(sys.modules.get(_UTILS), "graph_break_reasons", None) or [])


def _metrics() -> list[Any]:
    read = getattr(sys.modules.get(_UTILS), "get_compilation_metrics", None)
    return list(read()) if read is not None else []


def _first_line(text: Any) -> str:
    return str(text or "").strip().partition("\n")[0]


def _shown(path: str) -> str:
    relative = os.path.relpath(path)
    return path if relative.startswith("..") else relative
