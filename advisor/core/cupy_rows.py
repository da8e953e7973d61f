"""Rows of a CuPy loop by what the script wrote: read by metrics and by the places that a finding names."""

from __future__ import annotations

import re

from advisor.core.profile import KernelRow

_COLUMNS = re.compile(r"im2col|col2im", re.IGNORECASE)
_SCATTER = re.compile(r"scatter_(add|max|min)|add\.at")


def columns(row: KernelRow) -> bool:
    """Images turned into columns for a product, or back."""
    return bool(_COLUMNS.search(row.op) or _COLUMNS.search(row.name))


def scatters(row: KernelRow) -> bool:
    """Additions at indices, by atomics."""
    return bool(_SCATTER.search(row.op) or _SCATTER.search(row.name))


def sums(row: KernelRow) -> bool:
    """Sums over axes, and what is made of them."""
    return row.op in ("cupy::sum", "cupy::mean", "cupy::var", "cupy::std", "cupy::average")


def raw(row: KernelRow) -> bool:
    """A RawKernel of the script's own."""
    return row.op.startswith("cupy::RawKernel:")


def short_elementwise(row: KernelRow) -> bool:
    """A ufunc, a comparison, a cast: a pass of its own over its arrays."""
    return row.op.startswith("cupy::") and row.kind in ("elementwise", "copy", "memset", "reduce", "activation")
