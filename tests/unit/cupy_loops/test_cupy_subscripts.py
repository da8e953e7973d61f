"""`einsum` of two arrays as the product that it is, beside NumPy's."""

from __future__ import annotations

import numpy as np
import pytest

from advisor.cupy_loops.replay.subscripts import contraction

SIZES = {"n": 2, "c": 3, "h": 4, "w": 5, "o": 6, "k": 7}


def shape(names: str) -> tuple[int, ...]:
    return tuple(SIZES[name] for name in names)


@pytest.mark.parametrize(
    "text", ["ck,ko->co", "nchw,oc->nohw", "nchw, nohw -> oc", "ck,ok", "nck,nko->nco", "nkc,hnko->hcno", "chk,kh->c"]
)
def test_a_contraction_is_a_product(text: str) -> None:
    first, second = text.replace(" ", "").partition("->")[0].split(",")
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=shape(first)), rng.normal(size=shape(second))
    found = contraction(text, a.shape, b.shape)
    assert found is not None
    left, right = a.transpose(found.orders[0]), b.transpose(found.orders[1])
    batch = left.shape[: found.batch]
    kept = (*left.shape[: found.batch + found.rows], *right.shape[found.batch + found.summed :])
    made = np.matmul(left.reshape(*batch, -1, found.depth), right.reshape(*batch, found.depth, -1)).reshape(kept)
    np.testing.assert_allclose(made.transpose(found.into), np.einsum(text, a, b))
    if not found.batch:
        np.testing.assert_allclose(np.tensordot(a, b, found.axes).transpose(found.into), np.einsum(text, a, b))


@pytest.mark.parametrize(
    "text", ["ii,io->o", "c,o->co", "ck,ko->c", "...k,ko->...o", "ck->kc", "ck,ko,oc->", "nc,nc->nc", "ck,ko->cox"]
)
def test_what_is_no_product_is_left_alone(text: str) -> None:
    names = text.partition("->")[0].split(",")
    shapes = [(4,) * len(part) for part in (*names, "", "")][:2]
    assert contraction(text, *shapes) is None


def test_sizes_that_are_broadcast_are_left_alone() -> None:
    assert contraction("ck,ko->co", (3, 1), (7, 6)) is None
