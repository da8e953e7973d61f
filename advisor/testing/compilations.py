"""Whether compiled code ran, seen from outside. Changes nothing for longer than it looks; never loads Dynamo."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import TracebackType
from typing import Any

from advisor.loop.compiles import Compilations, compiled_graphs

_FRAMES = "torch._dynamo.eval_frame"
_SWITCH = "_maybe_set_eval_frame"  # called with a callback around each run of compiled code


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
