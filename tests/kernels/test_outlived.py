"""Tensors that a function under torch.func has left behind are taken as PyTorch's own operations take them, whichever argument they are."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Family


def outlived(tensor: torch.Tensor) -> torch.Tensor:
    left: list[torch.Tensor] = []
    torch.func.grad(lambda inside: (left.append(inside), inside.sum())[1])(tensor.detach())
    return left[0]


def tensors(found: Any) -> list[torch.Tensor]:
    return [t.detach() for t in (found if isinstance(found, tuple | list) else (found,)) if isinstance(t, torch.Tensor)]


# Not of the input's: its table is made by us, and its pixels come from a loader.
@pytest.mark.parametrize("family", [f for f in catalog.FAMILIES if f.id != "input"], ids=lambda family: family.id)
def test_whichever_argument_has_outlived_a_transform(emulated, family: Family) -> None:
    case = min(family.verification, key=lambda c: (c.dtype != "float32", torch.Size(c.shape).numel()))
    near = 1e-4 if case.dtype == "float32" else 3e-2
    given = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    floating = [i for i, a in enumerate(given) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    with dispatch.everything():
        expected = tensors(case.ours(*copy.deepcopy(given)))
        for place in floating:
            arguments = list(copy.deepcopy(given))
            arguments[place] = outlived(arguments[place])
            assert torch._C._functorch.is_functorch_wrapped_tensor(arguments[place])
            for mine, wanted in zip(tensors(case.ours(*arguments)), expected, strict=True):
                torch.testing.assert_close(mine, wanted, rtol=near, atol=near, msg=f"argument {place}")
    assert emulated.launches
