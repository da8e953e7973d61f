"""What the operations' autograd functions share."""

from __future__ import annotations

import inspect

import pytest
import torch

from advisor.ops import catalog
from advisor.ops.family import Family
from advisor.ops.function import Function


class Doubled(Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        return dy * 2


def test_it_is_an_autograd_function_without_the_python_of_torchs_apply() -> None:
    x = torch.ones(3, requires_grad=True)
    y = Doubled.apply(x)
    assert y.grad_fn is not None
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, torch.full((3,), 2.0))
    assert "setup_context" not in inspect.getsource(Doubled.apply)


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_every_familys_functions_derive_from_it(family: Family) -> None:
    for member in vars(family.module("api")).values():
        if isinstance(member, type) and issubclass(member, torch.autograd.Function):
            assert issubclass(member, Function), member
            if member is not Function:  # what autograd has saved may lie as no kernel could read it
                assert "ctx.saved_tensors" not in inspect.getsource(member)
            assert member.setup_context is torch.autograd.Function.setup_context  # apply would not call it
