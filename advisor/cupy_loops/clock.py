"""Marks on the device's clock, as timing reads them: CuPy's events under the names of torch's."""

from __future__ import annotations

from typing import Any


class Mark:
    """An event on the current stream."""

    def __init__(self, module: Any) -> None:
        self._cuda = module.cuda
        self._event = module.cuda.Event()
        self._event.record()

    def elapsed_time(self, later: Mark) -> float:
        """Milliseconds from here to `later`; both must have been reached."""
        return float(self._cuda.get_elapsed_time(self._event, later._event))

    def synchronize(self) -> None:
        """Wait until the device is here."""
        self._event.synchronize()


def on_device(module: Any) -> bool:
    """Whether these arrays live on a GPU: CuPy's, and there is one."""
    return hasattr(module, "cuda") and bool(getattr(module.cuda, "is_available", lambda: False)())


def record(module: Any) -> Mark | None:
    """A mark here and now; None where there is no device."""
    return Mark(module) if hasattr(module, "cuda") else None


def synchronize(module: Any) -> None:
    """Wait until the current device has done all it was given."""
    if hasattr(module, "cuda"):
        module.cuda.runtime.deviceSynchronize()
