"""Profile CNN training, say what would make it faster, apply it and prove it.

Importing this package is cheap on purpose: neither torch nor cupy is loaded until a function needs it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__all__ = ["__version__", "disable", "enable", "step"]
__version__ = "0.1.0"

if TYPE_CHECKING:
    from advisor.pipeline import disable, enable, step


def __getattr__(name: str) -> object:
    if name in {"enable", "disable", "step"}:
        from advisor import pipeline

        return getattr(pipeline, name)
    if name == "load_ipython_extension":  # asked for by `%load_ext advisor`
        from advisor.profiling.beside.jupyter import load_ipython_extension

        return load_ipython_extension
    raise AttributeError(f"module 'advisor' has no attribute {name!r}")


def __dir__() -> list[str]:
    """What the package offers, whether or not it has been loaded yet."""
    return sorted(__all__)
