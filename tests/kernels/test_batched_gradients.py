"""Gradients in batches (is_grads_batched=True, as Jacobians are made): such tensors have no memory that a kernel could read."""

from __future__ import annotations

import pytest
import torch

from advisor.ops import catalog, verify
from advisor.ops.family import Case, Family

# Of each family the smallest case of each set of backward kernels.
SMALLEST: dict[tuple[str, ...], tuple[Family, Case]] = {}
for _family in catalog.FAMILIES:
    for _case in sorted(_family.verification, key=lambda case: torch.Size(case.shape).numel(), reverse=True):
        if "backward" in _case.passes and _case.dtype == "float32":
            SMALLEST[(_family.id, *_case.passes["backward"].kernels)] = _family, _case
# Operations whose PyTorch's own backward takes no batch of channels_last gradients either.
NOT_IN_PYTORCH = "querying is_contiguous inside of vmap"


# Of each family the first in every run, the others with `make test-long`.
FIRST = {family.id: case for family, case in reversed(SMALLEST.values())}
CASES = [
    pytest.param(
        family, case, id=f"{family.id}-{case.label}", marks=[] if FIRST[family.id] is case else [pytest.mark.long]
    )
    for family, case in SMALLEST.values()
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_a_batch_of_gradients_gives_what_one_by_one_gives(emulated, family: Family, case: Case) -> None:
    arguments = case.inputs(verify.seeded("cpu", 0), case.shape[0])
    leaves = [a for a in arguments if isinstance(a, torch.Tensor) and a.requires_grad]
    outputs = [y for y in verify.tensors(case.ours(*arguments)) if y.requires_grad]
    batch = [torch.randn((2, *y.shape), generator=torch.Generator().manual_seed(1)) for y in outputs]
    batch = [dy.to(y.dtype) for dy, y in zip(batch, outputs, strict=True)]
    single = [
        torch.autograd.grad(outputs, leaves, [dy[i].contiguous() for dy in batch], retain_graph=True) for i in range(2)
    ]
    try:
        found = torch.autograd.grad(outputs, leaves, batch, is_grads_batched=True)
    except RuntimeError as error:
        if NOT_IN_PYTORCH not in str(error):
            raise
        pytest.skip("PyTorch's own backward takes none either")
    for mine, want in zip(found, map(torch.stack, zip(*single, strict=True)), strict=True):
        torch.testing.assert_close(mine, want, rtol=2e-3, atol=2e-3)
