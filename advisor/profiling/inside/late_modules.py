"""What runs right behind the own body of modules that are imported later, before whoever imports them takes a name from them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any


class LateModules:
    """A finder that finds nothing itself: `then` is called with a module's name, once, when it has been loaded.

    bootstrap/sitecustomize.py has one of its own, which may import nothing.
    """

    def __init__(self, names: Iterable[str], then: Callable[[str], None]) -> None:
        self._names, self._then = set(names), then

    def start(self) -> None:
        """Modules are waited for from here on."""
        sys.meta_path.insert(0, self)

    def stop(self) -> None:
        """No more."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the others find, its loader extended."""
        if name not in self._names:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            if finder is self or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                self._extend(spec.loader, name)
                return spec
        return None

    def _extend(self, loader: Any, name: str) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: Any) -> None:
            execute(module)
            vars(loader).pop("exec_module", None)
            if self in sys.meta_path and name in self._names:
                self._names.discard(name)
                self._then(name)

        try:
            loader.exec_module = exec_module  # on this object only
        except AttributeError:  # a loader that takes none: its module's calls stay unseen
            self._names.discard(name)
