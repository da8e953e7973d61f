"""Every family's verification cases with its kernels emulated: the checks that `advisor kernels verify` runs on a GPU."""

from __future__ import annotations

import pytest

from advisor.ops import catalog, verify
from advisor.ops.family import Case, Family


def _is_a_twin(family: Family, case: Case) -> bool:
    """Whether the case runs in bf16, of whatever shape: two conversions are all that differs. A family's first in fp16 is none."""
    alike = [c for c in family.verification if (c.name, c.dtype) == (case.name, "bfloat16")]
    first = next((c for c in family.verification if c.dtype == "float16"), None)
    return case.dtype == "float16" and case is not first and bool(alike)


CASES = [
    pytest.param(
        family,
        case,
        id=f"{family.id} {case.label}",
        marks=[pytest.mark.long] if _is_a_twin(family, case) else [],
    )
    for family in catalog.FAMILIES
    for case in family.verification
]


@pytest.mark.parametrize(("family", "case"), CASES)
def test_kernels_pass_the_checks_of_verify(emulated, family: Family, case: Case) -> None:
    found = verify.check(family, case, "cpu")
    assert found["passed"], found["detail"]
    assert emulated.launches
