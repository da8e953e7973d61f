"""Where folders that are no modules are: kernels/ and rules/ beside `advisor/` in a checkout, inside it in a wheel; the bootstrap."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

_ENTRY = re.compile(r'extern "C" (?:CLUSTERED )?__global__ void\s+(?:__launch_bounds__\([^)]*\)\s+)?(\w+)\(')
_PACKAGE = Path(__file__).resolve().parent
# What Python loads first in the script: `sitecustomize`, by PYTHONPATH.
BOOTSTRAP = _PACKAGE / "profiling" / "bootstrap"


def _folder(name: str) -> Path:
    installed = _PACKAGE / f"_{name}"
    return installed if installed.is_dir() else _PACKAGE.parent / name


def kernels_dir() -> Path:
    """The folder with the CUDA sources."""
    return _folder("kernels")


@cache
def kernel_entries() -> frozenset[str]:
    """Names of the bundled kernels, as a trace of a step shows them."""
    texts = (path.read_text(encoding="utf-8") for path in kernels_dir().glob("*/*.cu"))
    return frozenset(name for text in texts for name in _ENTRY.findall(text))


def rules_dir() -> Path:
    """The folder with the YAML rules."""
    return _folder("rules")
