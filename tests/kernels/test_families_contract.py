"""What every family's operations owe PyTorch, asked once for all: second derivatives, and operations of torch.library that pass its checks.

What is peculiar to a family is asked in its own file.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from launches import operation_of
from test_sites import smallest

from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Case, Family

# Of the norm of what the definition gives, by the dtype that is stored.
FAR = {"float32": 2e-3, "float16": 0.05, "bfloat16": 0.05}
# Words of cases that the definition is none for: hardsigmoid has no second derivative in PyTorch; a result that is rounded.
LEFT = ("hardsigmoid", " to bfloat16", " to float16")
TRAINED = [family for family in catalog.FAMILIES if any("backward" in case.passes for case in family.verification)]


def leaves_of(arguments: Sequence[Any]) -> list[torch.Tensor]:
    return [one for one in arguments if isinstance(one, torch.Tensor) and one.requires_grad]


def is_listed(case: Case) -> bool:
    """Whether a graph for Inductor has the operation for it: as it is dispatched, a norm of whole vectors, with gradients."""
    plain = "way" not in getattr(case.ours, "keywords", {}) and not (case.kind.startswith("bn") and case.shape[1] % 8)
    return plain and "backward" in case.passes and operation_of(case) is not None


LISTED = [family for family in catalog.FAMILIES if any(map(is_listed, family.verification))]


def penalty(case: Case, function: Callable[..., Any], *, wide: bool) -> list[torch.Tensor]:
    """The gradient of a gradient's square, as a penalty on gradients has it; in fp64 where it is `wide`."""
    given = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    if wide:
        given = tuple(
            one.detach().double().requires_grad_(one.requires_grad)
            if isinstance(one, torch.Tensor) and one.is_floating_point()
            else one
            for one in given
        )
    leaves = leaves_of(given)
    outputs = [y for y in verify.tensors(function(*given)) if y.requires_grad]
    loss = sum((y if wide else y.float()).square().sum() for y in outputs)
    first = torch.autograd.grad(loss, leaves[:1], create_graph=True)
    second = sum((g if wide else g.float()).square().sum() for g in first)
    found = torch.autograd.grad(second, leaves, allow_unused=True, materialize_grads=True)
    return [one.double() for one in found]


@pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.id)
def test_second_derivatives_are_those_of_the_definition(emulated, family: Family) -> None:
    cases = [case for case in smallest(family) if not any(word in case.name for word in LEFT)]
    case = min(cases, key=lambda case: case.dtype != "float32")  # the smallest in fp32, where there is one
    with dispatch.everything():
        ours = penalty(case, case.ours, wide=False)
    assert sum(family.engaged.values())
    for mine, right in zip(ours, penalty(case, case.reference, wide=True), strict=True):
        assert float((mine - right).norm()) <= FAR[case.dtype] * float(right.norm()) + 1e-6, case.label


@pytest.mark.parametrize("family", LISTED, ids=lambda family: family.id)
def test_the_operation_of_the_library_is_the_function(emulated, family: Family) -> None:
    case = min(filter(is_listed, family.verification), key=lambda case: torch.Size(case.shape).numel())
    operation, listed = operation_of(case)
    given = [case.inputs(verify.seeded("cpu", 0), case.shape[0]) for _ in range(2)]
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operation.default, listed(*given[0]), test_utils=tests)
    with dispatch.everything():
        results = [verify.tensors(operation(*listed(*given[0]))), verify.tensors(case.ours(*given[1]))]
    library, function = (found[0] for found in results)
    assert torch.equal(library, function), case.label
    found = [
        torch.autograd.grad(y.float().square().sum(), leaves_of(of), materialize_grads=True, allow_unused=True)
        for y, of in zip((library, function), given, strict=True)
    ]
    assert all(map(torch.equal, *found)), case.label


@pytest.mark.parametrize("family", TRAINED, ids=lambda family: family.id)
def test_a_result_may_be_changed_in_place(emulated, family: Family) -> None:
    """As by the activation behind it; autograd forbids it for a view that an operation made inside."""
    for case in smallest(family):
        with dispatch.everything():
            for result in verify.tensors(case.ours(*case.inputs(verify.seeded("cpu", 0), case.shape[0]))):
                result.mul_(2.0)


def test_an_argument_of_a_convolution_has_no_default() -> None:
    """PyTorch would leave it out where it is that, and the family's functions would lack it."""
    with pytest.raises(ValueError, match="SymInt padding=1 has a default; expected none"):
        dataclasses.replace(catalog.get("fft_conv").module("api").CONVOLUTION, numbers="SymInt padding=1")
