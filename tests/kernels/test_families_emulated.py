"""Every family's verification cases with its kernels emulated: the checks that `advisor kernels verify` runs on a GPU."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from test_sites import FEW, smallest
from thinned import covering

from advisor.bench.placed import placed
from advisor.ops import catalog, dispatch, verify
from advisor.ops.family import Case, Family

# Names tell cases apart by channels, taps and strides, which tests of their own vary too.
BY_NUMBERS = {
    "pointwise",
    "first_conv",
    "depthwise",
    "grouped",
    "conv3x3",
    "strided_pointwise",
    "large_depthwise",
    "exact_conv",
}


def _features(family: Family, case: Case) -> dict[str, int]:
    """What a case has that another may not: its dtype, its kernels, the words of its name."""
    kernels = {name for found in case.passes.values() for name in found.kernels}
    name = re.sub(r"\d+", "", case.name) if family.id in BY_NUMBERS else case.name
    return dict.fromkeys((case.dtype, *sorted(kernels), *re.split(r"[ +]", name)), 1)


def _cases(family: Family) -> Iterator[object]:
    """All of a family's, of which as few run always as have each dtype, kernel and word of a name; the others are long."""
    kept = covering([_features(family, case) for case in family.verification])
    for number, case in enumerate(family.verification):
        marks = [] if number in kept else [pytest.mark.long]
        yield pytest.param(family, case, id=f"{family.id} {case.label}", marks=marks)


CASES = [case for family in catalog.FAMILIES for case in _cases(family)]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_kernels_pass_the_checks_of_verify(emulated, family: Family, case: Case) -> None:
    found = verify.check(family, case, "cpu")
    assert found["passed"], found["detail"]
    assert emulated.launches


@pytest.mark.long
@pytest.mark.parametrize(("family", "case"), CASES)
def test_every_access_of_the_kernels_is_one_that_a_gpu_makes(emulated, family: Family, case: Case) -> None:
    """Sliced inputs and tensors that begin between two vectors among them."""
    emulated.use(checked=True)
    test_kernels_pass_the_checks_of_verify(emulated, family, case)


def _contiguous(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor)


def _between_vectors(tensor: torch.Tensor) -> torch.Tensor:
    place = torch.empty(tensor.untyped_storage().nbytes() // tensor.itemsize + 1, dtype=tensor.dtype)
    return place.as_strided(tensor.shape, tensor.stride(), 1).copy_(tensor)


def _gradients(case: Case, function: Callable[..., Any], unpack: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    given = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor.detach(), unpack):
        outputs = verify.tensors(function(*given))
        leaves = [a for a in given if isinstance(a, torch.Tensor) and a.requires_grad]
        return torch.autograd.grad(outputs, leaves, [torch.ones_like(y).cumsum(-1) for y in outputs])


@pytest.mark.each_value
@pytest.mark.parametrize("unpack", [_contiguous, _between_vectors])
@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_tensors_that_a_hook_has_laid_out_anew(
    emulated, family: Family, unpack: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """As torch.autograd.graph.save_on_cpu(pin_memory=True) gives saved tensors back, or parts of one buffer would come."""
    for case in smallest(family)[:FEW]:
        with dispatch.everything(), placed(case.ours) as first, placed(case.ours) as second:
            expected = _gradients(case, case.ours, lambda tensor: tensor)
            runs = [(case.ours, unpack), (first, None), (first, unpack), (second, unpack), (second, unpack)]
            for function, hook in runs:
                found = _gradients(case, function, hook or (lambda tensor: tensor))
                for a, b in zip(found, expected, strict=True):
                    assert torch.equal(a.nan_to_num(), b.nan_to_num()), case.label


def _under_autocast(case: Case, *, enabled: bool) -> list[torch.Tensor]:
    """Results of a bf16 case and its gradients, in fp32: the forward inside autocast or outside."""
    given = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
        outputs = verify.tensors(case.ours(*given))
    leaves = [a for a in given if isinstance(a, torch.Tensor) and a.requires_grad]
    wanted = [y for y in outputs if y.requires_grad]
    found = torch.autograd.grad(wanted, leaves, [torch.ones_like(y) for y in wanted]) if wanted else ()
    return [tensor.detach().float() for tensor in (*outputs, *found) if tensor.is_floating_point()]


@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_autocast_reaches_nothing_between_the_kernels(emulated, family: Family) -> None:
    """What a family multiplies or adds with PyTorch's own between its kernels keeps its dtype where the step runs under autocast."""
    for case in [case for case in smallest(family) if case.dtype == "bfloat16"][:FEW]:
        with dispatch.everything():
            plain, found = (_under_autocast(case, enabled=enabled) for enabled in (False, True))
        for a, b in zip(found, plain, strict=True):
            assert (a - b).norm() <= 0.02 * b.norm() + 1e-6, case.label


@pytest.mark.long
@pytest.mark.parametrize("arch", [80, 86, 100, 120])
@pytest.mark.parametrize("family", catalog.FAMILIES, ids=lambda family: family.id)
def test_other_architectures_take_a_family_or_leave_it(emulated, family: Family, arch: int) -> None:
    """With what shared memory and registers they have: each case passes, or is left to PyTorch for the architecture."""
    emulated.use(sm_count=2, arch=arch)
    for case in family.verification:
        found = verify.check(family, case, "cpu")
        assert found["passed"] is not False, (case.label, found["detail"])
