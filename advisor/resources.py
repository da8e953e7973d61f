"""The one place that knows where kernels/ and rules/ are: beside `advisor/` in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent


def _folder(name: str) -> Path:
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name


def kernels_dir() -> Path:
    """The folder with the CUDA sources."""
    return _folder("kernels")


def rules_dir() -> Path:
    """The folder with the YAML rules."""
    return _folder("rules")
