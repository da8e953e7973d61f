"""torch.func's transforms and forward-mode differentiation: no kernel runs, and PyTorch's own results come out.

Inside them tensors have no memory of their own, or carry a tangent that no kernel would pass on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from advisor.bench.placed import placed
from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Case, Family


def _public(function: Any) -> str:
    """A function of the family's api, however a case wraps it."""
    if not isinstance(function, partial):
        return str(function.__qualname__)
    inner = [a for a in (*function.args, *function.keywords.values()) if callable(a) and not isinstance(a, torch.dtype)]
    return " ".join(map(_public, (function.func, *inner)))


# Of each public function the smallest case, in fp32 where there is one: there PyTorch's own, written in two ways, rounds alike.
CASES: dict[tuple[str, str], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in sorted(
        _family.verification, key=lambda case: (case.dtype != "float32", torch.Size(case.shape).numel())
    ):
        CASES.setdefault((_family.id, _public(_case.ours)), (_family, _case))


class Pure:
    """A function of a case as torch.func wants it: of tensors alone, of which it changes none. In fp32: where no kernel runs the
    dtype says nothing, and not all of PyTorch's own take half precision there on a CPU.

    Attributes:
        tensors: of each of three draws of the inputs.
        leaves: places of those among them that want a gradient.
    """

    def __init__(self, case: Case, function: Callable[..., Any], layout: torch.memory_format) -> None:
        draws = [case.inputs(verify.seeded("cpu", seed), case.shape[0]) for seed in range(3)]
        places = [i for i, a in enumerate(draws[0]) if isinstance(a, torch.Tensor)]
        self._function, self._arguments, self._places = function, draws[0], places
        self.leaves = tuple(k for k, i in enumerate(places) if draws[0][i].requires_grad)
        self.tensors = [[self._plain(draw[i], layout) for i in places] for draw in draws]

    @staticmethod
    def _plain(tensor: torch.Tensor, layout: torch.memory_format) -> torch.Tensor:
        tensor = tensor.detach().float() if tensor.is_floating_point() else tensor
        return tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor

    def __call__(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What it returns, then what it would have made of running statistics."""
        given = list(self._arguments)
        for k, (i, tensor) in enumerate(zip(self._places, tensors, strict=True)):
            given[i] = tensor if k in self.leaves else tensor.clone()
        others = [given[i] for k, i in enumerate(self._places) if k not in self.leaves]
        return (*verify.tensors(self._function(*given)), *others)

    def of_leaves(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(self.tensors[0])
        for k, leaf in zip(self.leaves, leaves, strict=True):
            given[k] = leaf
        return self(*given)

    def loss(self, *tensors: torch.Tensor) -> torch.Tensor:
        """A number with another share of each element."""
        return torch.stack([y.flatten().float() @ torch.linspace(-1, 2, y.numel()) for y in self(*tensors)]).sum()

    def stacked(self) -> list[torch.Tensor]:
        return [torch.stack(draws) for draws in zip(*self.tensors, strict=True)]

    def points(self) -> tuple[tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]]:
        """The leaves, and directions."""
        generator = torch.Generator().manual_seed(1)
        values = tuple(self.tensors[0][k] for k in self.leaves)
        # As PyTorch's own tangents lie: like their tensors.
        return values, tuple(torch.empty_like(v).copy_(torch.randn(v.shape, generator=generator)) for v in values)


def grad(pure: Pure) -> Any:
    return torch.func.grad(pure.loss, argnums=pure.leaves)(*pure.tensors[0])


def vmap(pure: Pure) -> Any:
    return torch.func.vmap(pure)(*pure.stacked())


def gradients_of_samples(pure: Pure) -> Any:
    return torch.func.vmap(torch.func.grad(pure.loss, argnums=pure.leaves))(*pure.stacked())


def jvp(pure: Pure) -> Any:
    values, tangents = torch.func.jvp(pure.of_leaves, *pure.points())
    return *values, *tangents


def dual_numbers(pure: Pure) -> Any:
    with forward_ad.dual_level():
        found = pure.of_leaves(*map(forward_ad.make_dual, *pure.points()))
        pairs = [*map(forward_ad.unpack_dual, found)]
        return *(p.primal for p in pairs), *(p.tangent for p in pairs if p.tangent is not None)


TRANSFORMS = (grad, vmap, gradients_of_samples, jvp, dual_numbers)
# PyTorch's own group norm takes channels_last in none but the plain reverse mode, on a CPU.
LAYOUTS = (torch.channels_last, torch.contiguous_format)


def _in_pytorch(case: Case, transform: Callable[[Pure], Any]) -> tuple[Any, torch.memory_format]:
    """What PyTorch's own operation gives, in the first layout in which it can."""
    for layout in LAYOUTS:
        try:
            return transform(Pure(case, case.eager, layout)), layout
        except RuntimeError as error:
            refused = error
    raise refused


@pytest.mark.parametrize(
    ("family", "case", "transform"),
    [
        pytest.param(family, case, transform, id=f"{family.id}-{name}-{transform.__name__}")
        for (_, name), (family, case) in CASES.items()
        for transform in TRANSFORMS
        if "backward" in case.passes or transform is vmap
    ],
)
def test_pytorchs_own_operation_runs_inside_a_transform(
    emulated: Any, family: Family, case: Case, transform: Callable[[Pure], Any]
) -> None:
    theirs, layout = _in_pytorch(case, transform)
    dispatch.clear()
    mine = transform(Pure(case, case.ours, layout))
    assert not emulated.launches
    assert not family.engaged
    reason = "forward-mode differentiation" if transform is dual_numbers else "inside a torch.func transform"
    assert set(family.fell_back) == {reason}
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def outlived(tensor: torch.Tensor) -> torch.Tensor:
    """What a function under torch.func leaves behind of this tensor."""
    left: list[torch.Tensor] = []

    def keeping(inside: torch.Tensor) -> torch.Tensor:
        left.append(inside)
        return inside.sum()

    torch.func.grad(keeping)(tensor)
    return left[0]


@pytest.mark.parametrize(
    ("family", "case"), [pytest.param(*found, id=f"{found[0].id}-{name}") for (_, name), found in CASES.items()]
)
def test_an_input_kept_from_inside_a_transform_is_pytorchs_too(emulated: Any, family: Family, case: Case) -> None:
    """The transform has ended, but such a tensor still has no memory of its own."""
    mine, theirs = (Pure(case, function, torch.channels_last) for function in (case.ours, case.eager))
    x, *others = mine.tensors[0]
    if not x.is_floating_point():
        pytest.skip("no transform keeps bytes")
    kept = outlived(x)
    dispatch.clear()
    with placed(case.ours) as site:
        found = [mine(kept, *others), Pure(case, site, torch.channels_last)(kept, *others)]
    assert family.fell_back
    assert not family.engaged
    for results in found:
        for a, b in zip(results, theirs(*theirs.tensors[0]), strict=True):
            torch.testing.assert_close(a.detach(), b)


# Not of the input's: its table is made by us, and its pixels come from a loader.
@pytest.mark.parametrize("family", [f for f in catalog.FAMILIES if f.id != "input"], ids=lambda family: family.id)
def test_whichever_argument_has_outlived_a_transform(emulated, family: Family) -> None:
    case = min(family.verification, key=lambda c: (c.dtype != "float32", torch.Size(c.shape).numel()))
    near = 1e-4 if case.dtype == "float32" else 3e-2
    given = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    floating = [i for i, a in enumerate(given) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    with dispatch.everything():
        expected = verify.tensors(case.ours(*copy.deepcopy(given)))
        for place in floating:
            arguments = list(copy.deepcopy(given))
            arguments[place] = outlived(arguments[place].detach())
            assert torch._C._functorch.is_functorch_wrapped_tensor(arguments[place])
            for mine, wanted in zip(verify.tensors(case.ours(*arguments)), expected, strict=True):
                torch.testing.assert_close(
                    mine.detach(), wanted.detach(), rtol=near, atol=near, msg=f"argument {place}"
                )
    assert emulated.launches
