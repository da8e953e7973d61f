"""The steady state: of all module calls only those of the roots are observed, one a root and step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import torch

from advisor.loop.patches import Patch
from advisor.loop.steps import StepWatcher
from advisor.loop.training import RootModule


class RootCalls:
    """Puts a call of its own in the place of that of each root's class.

    Args:
        observe: is told of each call of a root: the root, arguments, keywords, output.
    """

    def __init__(self, watcher: StepWatcher, observe: Callable[[RootModule, Any, Any, Any], None]) -> None:
        self._watcher, self._patches, self._observe = watcher, watcher.patches, observe
        self._watching: list[Patch] = []
        self._roots: dict[int, RootModule] = {}

    @property
    def any(self) -> bool:
        """Whether there are roots that are watched."""
        return bool(self._roots)

    def let_go(self) -> None:
        """Hold none of the roots: a hook has the table too."""
        self._roots.clear()

    def watch(self, roots: Sequence[RootModule]) -> None:
        """Calls of these are observed from now on."""
        self._roots.clear()
        self._roots.update((id(root.module), root) for root in roots)
        for kind in {type(root.module) for root in roots}:
            if any(patch.owner in kind.__mro__ for patch in self._watching):
                continue
            self._watching.append(self._patches.replace(kind, "__call__", self._root_call(kind)))

    def end(self) -> None:
        """No calls are observed any more."""
        for patch in reversed(self._watching):
            self._patches.restore(patch)
        self._watching = []
        self._roots.clear()

    def _root_call(self, kind: type[torch.nn.Module]) -> Any:
        observe = self._patches.guard(self._observe)
        watcher, patches, roots = self._watcher, self._patches, self._roots
        own = kind.__call__ if kind.__call__ is not torch.nn.Module.__call__ else None

        @wraps(kind.__call__)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            # Looked up at each call: the annotations of the traced window are put on nn.Module after this.
            plain = own or torch.nn.Module.__call__
            if torch.compiler.is_compiling() or not patches.active:
                return plain(module, *args, **kwargs)
            root = roots.get(id(module))
            if root is None or watcher.in_backward:
                return plain(module, *args, **kwargs)
            output = plain(module, *args, **kwargs)
            observe(root, args, kwargs, output)
            return output

        return call
