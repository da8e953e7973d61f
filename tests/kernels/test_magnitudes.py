"""Inputs, and gradients from above, far larger and far smaller than usual: errors against fp64 no worse than PyTorch's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Case, Family

# Powers of two: fp16 ends at 65504, and loses digits below 6e-5.
POWERS = {"bfloat16": 20, "float32": 20, "float16": 5}


def _inconvenient(case: Case) -> tuple[bool, int]:
    return case.dtype != "float16", torch.Size(case.shape).numel()


# Of each family a small case of each set of kernels, in fp16 where there is one: sums and squares leave its range first.
CASES: dict[tuple[Any, ...], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in sorted(_family.verification, key=_inconvenient, reverse=True):
        if _family.captured:  # the images' are bytes
            CASES[(_family.id, *(work.kernels for work in _case.passes.values()))] = _family, _case
FIRST = {family.id: (family, case) for family, case in reversed(CASES.values())}


def scaled(inputs: Callable[..., Any], factor: float) -> Callable[..., Any]:
    """These inputs, the first floating tensor of them times `factor`."""

    def made(generator: torch.Generator, n: int) -> tuple[Any, ...]:
        found = list(inputs(generator, n))
        place = next(i for i, a in enumerate(found) if isinstance(a, torch.Tensor) and a.is_floating_point())
        wanted = found[place].requires_grad
        found[place] = (found[place].detach() * factor).requires_grad_(wanted)
        return tuple(found)

    return made


EACH = [
    pytest.param(
        family,
        case,
        id=f"{family.id}-{case.label}",
        marks=[] if (family, case) == FIRST[family.id] else [pytest.mark.long],
    )
    for family, case in CASES.values()
]


@pytest.mark.parametrize("sign", [pytest.param(1, id="large"), pytest.param(-1, id="small", marks=pytest.mark.long)])
@pytest.mark.parametrize(("family", "case"), EACH)
def test_errors_are_no_worse_than_pytorchs_own(emulated, family: Family, case: Case, sign: int) -> None:
    case = replace(case, inputs=scaled(case.inputs, 2.0 ** (sign * POWERS[case.dtype])))
    batch = case.shape[0]
    mine, theirs = verify.errors(case, (case.ours, case.eager), "cpu", batch=batch, seed=3)
    assert sum(family.engaged.values()), dispatch.told(family.id)
    assert verify.accepted(case.dtype, mine, theirs) == ""


@pytest.mark.parametrize("sign", [pytest.param(1, id="large"), pytest.param(-1, id="small")])
@pytest.mark.parametrize(("family", "case"), EACH)
def test_nor_of_gradients_from_above(emulated, monkeypatch, family: Family, case: Case, sign: int) -> None:
    """As a loss scale makes them, and a mean over many pixels."""
    usual, factor = verify.upstream, 2.0 ** (sign * POWERS[case.dtype])
    monkeypatch.setattr(verify, "upstream", lambda *given: [dy * factor for dy in usual(*given)])
    batch = case.shape[0]
    mine, theirs = verify.errors(case, (case.ours, case.eager), "cpu", batch=batch, seed=3)
    assert sum(family.engaged.values()), dispatch.told(family.id)
    assert verify.accepted(case.dtype, mine, theirs) == ""
