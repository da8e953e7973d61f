"""The step of a CuPy loop recorded once and replayed: see advisor.cupy_loops.replay."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from advisor.core.units import counted
from advisor.cupy_loops.changes.base import Change
from advisor.cupy_loops.changes.kernels import KernelsOnce
from advisor.loop.patches import Patches
from advisor.profiling.inside.cupy_surface import Surface, attribute

if TYPE_CHECKING:
    from advisor.cupy_loops.replay.recorder import Recorder

# Attributes by which others reach an array's memory.
MEMORY = ("data", "__cuda_array_interface__", "cstruct", "flat", "mdspan")


class Graphs(Change):
    """Steps answered by CUDA graphs."""

    id = "cupy_graphs"

    def __init__(self, backend: Callable[[], Any] | None = None) -> None:
        self.backend = backend
        self.recorder: Recorder | None = None

    def apply(self, module: Any, patches: Patches) -> None:
        from advisor.cupy_loops.replay.recorder import Recorder  # which compiles a part of it, the first time

        KernelsOnce().apply(module, patches)  # a kernel made anew would be another one in each step

        def backend() -> Any:
            from advisor.cupy_loops.replay.cuda import Graphs as Backend

            return Backend(module)

        recorder = self.recorder = Recorder(module, patches, self.backend or backend)
        surface = Surface(module, recorder.handle, patches, recorder.wrap)
        surface.on_late.append(recorder.seen_too)
        surface.patch()
        recorder.seen()
        patches.undo(recorder.finish)
        for name in MEMORY:
            plain = getattr(module.ndarray, name, None)
            if plain is not None and hasattr(plain, "__get__"):
                patches.replace(module.ndarray, name, attribute(_looked_at(recorder, plain), plain))

    @contextlib.contextmanager
    def unseen(self) -> Iterator[None]:
        """Inside, no call is one of a step's."""
        found = self.recorder
        if found is None:
            yield
            return
        before, found.inside = found.inside, True
        try:
            yield
        finally:
            found.inside = before

    @property
    def working(self) -> bool:
        """Whether a step's call is being looked at, a graph made or judged."""
        return self.recorder is not None and bool(self.recorder.inside)

    @property
    def settling(self) -> bool:
        """Until steps are replayed and have been found to be faster, or the loop is left alone."""
        from advisor.cupy_loops.replay.recorder import FIND, REPLAY

        found = self.recorder
        if found is None or found.phase not in (FIND, REPLAY):
            return False
        return found.phase == FIND or (found.backend.timed and not found.worth.known)

    def effect(self) -> str:
        found = self.recorder
        if found is not None and found.phase == "off":
            return f"the loop is left alone: {found.why}"
        if found is None or not found.replayed:
            return ""
        told = [f"{found.replayed} of the last steps replayed"]
        if found.program is not None:
            kernels = [step.kernels for plan in found.program.plans.values() for step in plan if step.kernels]
            calls = sum(len(cluster.elements) for clusters in kernels for cluster in clusters)
            told += [f"{calls} elementwise calls as {counted(len(kernels), 'kernel')}"] if kernels else []
        return ", ".join(told + [f"{name} replaced" for name in found.naive])


def _looked_at(recorder: Recorder, plain: Any) -> Any:
    def read(array: Any) -> Any:
        if not recorder.inside:
            recorder.inside = True
            try:
                recorder.look()
            finally:
                recorder.inside = False
        return plain.__get__(array)

    return read
