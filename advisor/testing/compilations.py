"""What Dynamo has compiled since a moment: graph breaks with their lines, and compilations with their reasons.

Reads the lists that Dynamo keeps and changes nothing; never loads it. Where a version keeps no such list, what it would
say is left out, never guessed.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from types import TracebackType
from typing import Any

from advisor.core.profile import Site
from advisor.profiling.compiles import compiled_graphs

_UTILS, _FRAMES = "torch._dynamo.utils", "torch._dynamo.eval_frame"
_SWITCH = "_maybe_set_eval_frame"  # called with a callback around each run of compiled code


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
        """Functions that were compiled, with the reason where they had been before."""
        old = {id(entry) for entry in self._metrics}
        sites: Counter[tuple[str, str]] = Counter()
        for entry in _metrics():
            if id(entry) in old or not getattr(entry, "co_filename", None):
                continue
            why = _first_line(getattr(entry, "recompile_reason", None))
            what = f"compilation of {entry.co_name}" + (f": {why}" if why else "")
            sites[f"{_shown(entry.co_filename)}:{entry.co_firstlineno}", what] += 1
        if not sites and self.any:
            sites["", "compilation"] = max(1, compiled_graphs() - self._graphs)
        return tuple(Site(source=s, what=w, calls=n, time_us=0) for (s, w), n in sites.items())

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


class CompiledRuns:
    """`with CompiledRuns() as runs:` afterwards `runs.seen` says whether compiled code ran inside."""

    def __init__(self) -> None:
        self.seen = False
        self._module: Any = None
        self._plain: Callable[[Any], Any] | None = None
        self._before = Compilations()

    def __enter__(self) -> CompiledRuns:
        self._module = sys.modules.get(_FRAMES)
        plain = self._plain = getattr(self._module, _SWITCH, None)
        if plain is not None:

            def switch(callback: Any) -> Any:
                self.seen |= callable(callback)
                return plain(callback)

            setattr(self._module, _SWITCH, switch)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._plain is not None:
            setattr(self._module, _SWITCH, self._plain)
        elif self._module is not None:
            # A version without that function: anything compiled in this process may be what runs here.
            self.seen = compiled_graphs() > 0
        self.seen |= self._before.any


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
