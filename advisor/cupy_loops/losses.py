"""The losses of a CuPy loop, as far as it shows them: numbers without dimensions that a reduction gives at one line of the script.

There is no `backward()` that a loss is passed to. But a loss is a sum or a mean over all that a batch has, an array without dimensions of a
floating type. The line that gives most of them is taken for the loss's, and its numbers from the script's start on, in order: those of two
processes stand beside each other whenever their steps were found.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from advisor.cupy_loops.standing import Standing
from advisor.loop.patches import Patches
from advisor.profiling.inside.cupy_surface import Surface

REDUCTIONS = ("sum", "mean", "average", "nansum", "dot", "vdot", "inner", "linalg.norm")
MOST = 2000  # numbers kept of a line
WAITING = 4096  # numbers that may wait for the end of their step


class Losses:
    """Sees reductions; `settle` is called at each boundary.

    Args:
        line: tells the user's line of the call that is being made.
        standing: the changes that are on, which make calls of their own, and take others for the loop's.
    """

    def __init__(self, module: Any, patches: Patches, line: Callable[[], str], standing: Standing) -> None:
        self._array, self._line, self._standing = module.ndarray, line, standing
        self._kept: dict[str, list[Any]] = {}
        self._waiting: list[tuple[str, Any]] = []
        Surface(module, self._seen, patches).patch(REDUCTIONS)

    def settle(self) -> None:
        """Keep copies of what has waited: the script may change its arrays in place, and within a step only."""
        waiting, self._waiting = self._waiting, []
        with self._standing.unseen():  # CuPy's `copy` calls `astype` of the array's own class, which is wrapped
            for line, value in waiting:
                self._kept.setdefault(line, []).append(value.copy())

    def values(self, steps: int, seen: int) -> tuple[float, ...]:
        """Those of the first `steps` of the `seen` steps that the loop has made; waits for the device."""
        self.settle()
        found = max(self._kept.values(), key=len, default=[])
        each = max(1, round(len(found) / max(seen, 1)))
        with self._standing.unseen():
            return tuple(float(value) for value in found[: steps * each])

    def _seen(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = plain(*args, **kwargs)
        if self._standing.working:
            return result
        if isinstance(result, self._array) and result.ndim == 0 and result.dtype.kind == "f":
            line = self._line()
            if len(self._kept.get(line, ())) < MOST:
                self._waiting.append((line, result))
                if len(self._waiting) >= WAITING:
                    self.settle()
        return result
