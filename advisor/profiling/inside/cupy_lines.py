"""CuPy's calls beside torch's, told by their lines in torch's own trace: what goes from one to the other is found there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from advisor.loop.patches import Patches
from advisor.loop.sources import Lines
from advisor.profiling.inside.cupy_surface import Surface


class CupyLines:
    """Between `start` and `stop` each outermost call of CuPy's is inside a range that `opened` opens for its line."""

    def __init__(self, opened: Callable[[str], Any]) -> None:
        self._opened, self._lines = opened, Lines()
        self._patches = Patches()

    def start(self) -> None:
        """Wrap CuPy's calls, if the script has imported it."""
        cupy = sys.modules.get("cupy")
        if cupy is not None and hasattr(cupy, "ndarray"):
            Surface(cupy, self._call, self._patches).patch()

    def stop(self) -> None:
        """Everything is as before `start`."""
        self._patches.restore_all()

    def _call(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            scope = self._opened(self._lines.of(sys._getframe(2)))
        except Exception as error:
            self._patches.switch_off(error)
            return plain(*args, **kwargs)
        try:
            return plain(*args, **kwargs)
        finally:
            scope.__exit__(None, None, None)
