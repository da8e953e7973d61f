"""`advisor kernels`: the bundled kernels, and whether they are right on this GPU."""

from __future__ import annotations

from advisor.pipeline.shared import Say


def kernels_list() -> list[dict[str, object]]:
    """Every bundled kernel source with its entries, hash and what it replaces. Needs no GPU."""
    from advisor.ops import catalog

    return catalog.listing()


def kernels_verify(say: Say, family: str = "") -> list[dict[str, object]]:
    """Compile each kernel (of one family, if named) for this GPU and hold it to its fp64 reference. One row a case.

    Raises:
        AdvisorError: for an unknown family; without a GPU or CuPy, with exit code 5.
    """
    from advisor.ops import catalog

    return catalog.verify(say, family)
