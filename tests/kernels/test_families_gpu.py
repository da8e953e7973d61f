"""Every family's kernels on a GPU: its verification cases, and that a capture of them replays."""

from __future__ import annotations

import pytest
import torch

from advisor.ops import catalog, verify
from advisor.ops.family import Case, Family

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
CASES = [(family, case) for family in catalog.FAMILIES for case in family.verification]


@pytest.mark.parametrize(("family", "case"), CASES, ids=lambda value: getattr(value, "label", getattr(value, "id", "")))
def test_verification_case(family: Family, case: Case) -> None:
    row = verify.check(family, case, "cuda")
    assert row["passed"], row["detail"]
