"""Every family's verification cases with its kernels emulated: the checks that `advisor kernels verify` runs on a GPU."""

from __future__ import annotations

import pytest

from advisor.ops import catalog, verify
from advisor.ops.family import Case, Family

CASES = [
    pytest.param(family, case, id=f"{family.id} {case.label}")
    for family in catalog.FAMILIES
    for case in family.verification
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_kernels_pass_the_checks_of_verify(emulated, family: Family, case: Case) -> None:
    found = verify.check(family, case, "cpu")
    assert found["passed"], found["detail"]
    assert emulated.launches
