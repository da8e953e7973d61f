import sys,time
import pytest
from advisor.ops import catalog, verify
FAM=sys.argv_family if hasattr(sys,'argv_family') else None
import os
fam=catalog.get(os.environ['FAM'])
@pytest.mark.parametrize("case", fam.verification, ids=lambda c: c.label)
def test_case(emulated, case):
    row=verify.check(fam, case, "cpu")
    assert row["passed"], row
