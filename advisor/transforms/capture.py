"""One Dynamo capture a root module, shared by the transforms that want one: kernel families, torch.compile, or both.

They sit in the same layer because Inductor must see the rewritten graph; switching either exchanges the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from advisor.ops import match
from advisor.profiling.attach import Attached
from advisor.transforms.base import Undo
from advisor.transforms.forward import CAPTURE, ForwardStack, KeptLayers
from advisor.transforms.patch import all_or_nothing

# Dynamo keeps at most this many versions of one code object before it silently runs eagerly. Trials switch layers below
# the capture, each combination a version of the same code, and torch's default of 8 is soon used up.
_RECOMPILE_LIMIT = 128


@dataclass(slots=True, eq=False)
class CaptureLayer:
    """A layer for ForwardStack: captured in training, the inner forward as it is in evaluation."""

    families: frozenset[str]  # kernel families whose operations are put in, and weight_casts.ID
    mode: str | None  # torch.compile's mode, None for eager
    reports: dict[str, match.MatchReport] = field(init=False)  # by family

    def __post_init__(self) -> None:
        self.reports = {family: match.MatchReport() for family in sorted(self.families)}

    @property
    def graphs(self) -> int:
        """Graphs captured so far, as far as a rewrite has seen them; 1 where none looks."""
        return max((report.graphs for report in self.reports.values()), default=1)

    def __call__(self, inner: Callable[..., Any], module: torch.nn.Module) -> Callable[..., Any]:
        backend = match.backend(self.reports, mode=self.mode)
        captured = torch.compile(inner, backend=backend, dynamic=False)

        def forward(*args: Any, **kwargs: Any) -> Any:
            if not (module.training and torch.is_grad_enabled()):
                return inner(*args, **kwargs)
            with _unobserved():
                return captured(*args, **kwargs)

        return forward


def _unobserved() -> contextlib.AbstractContextManager[None]:
    """Nothing of a close look at the first steps is in place, for Dynamo traces what it finds."""
    discovery = Attached.discovery
    return discovery.out_of_sight() if discovery is not None and discovery.looking else contextlib.nullcontext()


_layers = KeptLayers(CAPTURE, CaptureLayer)
current, release = _layers.current, _layers.release


def _install(module: torch.nn.Module, families: frozenset[str], mode: str | None) -> None:
    stack = ForwardStack.of(module)
    if families or mode is not None:
        stack.set(CAPTURE, _layers.of(module, families, mode))
    else:
        stack.clear(CAPTURE)


def set_family(modules: Iterable[torch.nn.Module], family: str) -> Undo:
    """Have this family's kernels put into these modules' graphs, whatever else captures them."""
    return _set(
        modules, lambda families, mode: (families | {family}, mode), lambda families, mode: (families - {family}, mode)
    )


def set_mode(modules: Iterable[torch.nn.Module], mode: str) -> Undo:
    """Have these modules compiled by Inductor in `mode`."""
    return _set(modules, lambda families, _: (families, mode), lambda families, _: (families, None))


_Settings = tuple[frozenset[str], "str | None"]
_Change = Callable[[frozenset[str], "str | None"], _Settings]


_limits: list[int] = []  # the script's own recompile limit, once for each change that is on, in whatever order they go


def _raise_limit() -> None:
    import torch._dynamo

    own = torch._dynamo.config.recompile_limit
    _limits.append(_limits[0] if _limits else own)
    torch._dynamo.config.recompile_limit = max(own, _RECOMPILE_LIMIT)


def _lower_limit() -> None:
    own = _limits.pop()
    if not _limits:
        torch._dynamo.config.recompile_limit = own


def _set(modules: Iterable[torch.nn.Module], on: _Change, off: _Change) -> Undo:
    def change(module: torch.nn.Module, how: _Change) -> None:
        layer = current(module)
        _install(module, *how(*((layer.families, layer.mode) if layer else (frozenset(), None))))

    with all_or_nothing() as undo:
        _raise_limit()
        undo.push(_lower_limit)
        for module in modules:
            change(module, on)
            undo.push(lambda module=module: change(module, off))
    return undo
