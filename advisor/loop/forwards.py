"""Scripts that train nothing: their model calls are observed until an optimizer or a backward pass shows otherwise.

Nothing is observed in a script that makes an optimizer before it turns gradients off or a model to evaluation, which is
what training scripts do. The others pay a thread-local look-up per module call, until the models they call are known.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from advisor.loop.compiles import is_compiled
from advisor.loop.patches import Patch, Patches

# Called by scripts that only infer, and by torch itself: for every layer's initial values, in optimizers, …
_HINTS = (
    (torch.no_grad, "__enter__"),
    (torch.inference_mode, "__enter__"),
    (torch.set_grad_enabled, "__init__"),
    (torch.nn.Module, "eval"),
)
_BETWEEN = ("torch.utils._contextlib", "torch.autograd.grad_mode", __name__)

Report = Callable[[Any, tuple[Any, ...], dict[str, Any], int], None]  # module, args, kwargs, perf_counter at its start


class ForwardWatch:
    """Reports each module call of the script's own, once it has returned, between a first hint and `end`."""

    def __init__(self, patches: Patches, report: Report) -> None:
        self._patches = patches
        self._report = patches.guard(report)
        self._hints: list[Patch] = []
        self._patch: Patch | None = None

    def wait(self) -> None:
        """Begin when the script itself, and not torch for it, gives a hint that it may only infer."""
        begin = self._patches.guard(self._begin)
        self._hints = [self._patches.replace(owner, name, _hinting(owner, name, begin)) for owner, name in _HINTS]

    def end(self) -> None:
        """Nothing is observed any more."""
        hints, self._hints = self._hints, []
        for hint in reversed(hints):
            self._patches.restore(hint)
        patch, self._patch = self._patch, None
        if patch is not None:
            self._patches.restore(patch)

    def _begin(self) -> None:
        if not self._hints:
            return
        self.end()
        # Dynamo keeps the nn.Module.__call__ that it finds when it is loaded as the true one: that must not be ours.
        with contextlib.suppress(Exception):
            import torch._dynamo
        self._patch = self._patches.replace(torch.nn.Module, "__call__", self._module_call())

    def _module_call(self) -> Any:
        plain = torch.nn.Module.__call__
        here = threading.local()

        @wraps(plain)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            patch = self._patch
            if (
                patch is None
                or not self._patches.active
                or torch.compiler.is_compiling()
                or getattr(here, "inside", False)
            ):
                return plain(module, *args, **kwargs)
            start = time.perf_counter_ns()
            here.inside = True
            compiled = is_compiled(module)
            try:
                if compiled:
                    patch.restore()  # Dynamo is about to trace what is inside: it must see torch's own code
                output = plain(module, *args, **kwargs)
            finally:
                here.inside = False
                if compiled and self._patch is patch and self._patches.active:
                    setattr(patch.owner, patch.name, patch.replacement)
            self._report(module, args, kwargs, start)
            return output

        return call


def _hinting(owner: Any, name: str, begin: Callable[[], None]) -> Any:
    plain = getattr(owner, name)

    @wraps(plain)
    def hinting(*args: Any, **kwargs: Any) -> Any:
        if _asked_by_script():
            begin()
        return plain(*args, **kwargs)

    return hinting


def _asked_by_script() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _BETWEEN:
        frame = frame.f_back  # type: ignore[assignment]  # ends with None
    return frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] not in ("torch", "advisor")
